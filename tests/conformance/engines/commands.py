"""Random plans of an engine, and the command that a launcher would start one node of a worker with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from serving_cases import random_config, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.serving.job import PoolProgram, ServingJob, Template
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.serving.problem.engines.rules import EngineRules

VALUES = {"port": "8100", "head": "10.0.0.1", "own": "10.0.0.1", "files": "/files", "mpi_hosts": "a:8,b:8"} | {
    f"{name}_port": str(20000 + offset) for offset, name in enumerate(("internal", "rpc", "side", "bootstrap"))
}


def command_of(program: PoolProgram, node_rank: int = 0) -> list[str]:
    """The whole command of node ``node_rank`` with addresses and ports filled in."""
    values = {**VALUES, "node_rank": str(node_rank)}
    arguments = program.command(head=node_rank == 0)
    return [argument.filled(values) if isinstance(argument, Template) else argument for argument in arguments]


def random_jobs(
    rules: EngineRules,
    job_of: Callable[[ServingRequest], ServingJob],
    shapes: Sequence[ModelShape],
    checkpoints: Mapping[str, str],
    *,
    seed: int = 9,
) -> Iterator[tuple[ServingRequest, ServingJob]]:
    """Requests of random models, layouts and lengths that the emitter can express, without an end.

    Args:
        checkpoints: folder with a ``config.json`` by a shape's slug.
    """
    draw = random.Random(seed)
    while True:
        shape = draw.choice(shapes)
        config = random_config(draw, rules, shape)
        request = serving_request(
            shape,
            config,
            model_path=checkpoints[shape.slug],
            max_sequence_length=draw.choice((None, 8192, 32768)),
            quantized_checkpoint=False,
        )
        try:
            job = job_of(request)
        except CannotExpressError:
            continue
        yield request, job
