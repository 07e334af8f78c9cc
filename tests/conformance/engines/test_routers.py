"""The routers' own parsers over the arguments of ``router.sh``, and Ray's arguments against vLLM's. On demand."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import random
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL
from serving_cases import aggregated, layout, random_config, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.orchestrators import ray_serve
from meshplan.planner.emit.serving import sglang, vllm
from meshplan.planner.emit.serving.job import Template
from meshplan.planner.emit.serving.script import launch_of, router_of
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.engines.table import ENGINES

sys.path.insert(0, str(Path(__file__).parent))
from commands import command_of

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 200
ROUTERS = {"vllm": ("vllm_router.router_args", vllm, 1), "sglang": ("sglang_router.router_args", sglang, 3)}


def parser_of(engine: str) -> tuple[Any, argparse.ArgumentParser]:
    arguments = importlib.import_module(ROUTERS[engine][0]).RouterArgs
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_cli_args(parser, use_router_prefix=False)
    return arguments, parser


@pytest.mark.parametrize("engine", ROUTERS)
def test_version_is_the_one_that_the_files_name(engine: str) -> None:
    verified = ROUTERS[engine][1].ROUTER_VERIFIED
    assert importlib.metadata.version(verified.framework) == verified.version


@pytest.mark.parametrize("engine", ROUTERS)
def test_random_routers_know_every_worker(engine: str) -> None:
    arguments, parser = parser_of(engine)
    draw = random.Random(4)
    read = 0
    while read < NUM_RANDOM_PLANS:
        shape = draw.choice((LLAMA_70B, MIXTRAL, DEEPSEEK_V3))
        config = random_config(draw, ENGINES[engine], shape)
        try:
            launch = launch_of(ROUTERS[engine][1].job(serving_request(shape, config, quantized_checkpoint=True)))
        except CannotExpressError:
            continue
        router = router_of(launch)
        if router is None:
            assert config.pools[0].num_workers == 1
            continue
        read += 1
        values = {f"address_{host}": f"10.0.0.{host}" for host in range(launch.num_hosts)}
        values |= {f"bootstrap_port_{number}": str(20390 + number) for number in range(8)}
        words = [word.filled(values) if isinstance(word, Template) else word for word in router.command]
        said = arguments.from_cli_args(parser.parse_args(words[ROUTERS[engine][2] :]), use_router_prefix=False)
        if config.is_disaggregated:
            assert len(said.prefill_urls) == config.pool(Role.PREFILL).num_workers
            assert len(set(said.decode_urls)) == config.pool(Role.DECODE).num_workers
        else:
            assert len(set(said.worker_urls)) == config.pools[0].num_workers


@pytest.mark.parametrize("engine", ROUTERS)
def test_wrong_arguments_are_refused(engine: str) -> None:
    _, parser = parser_of(engine)
    for words in (["--policy", "nearest"], ["--worker-url", "x"], ["--port", "http"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)


def test_ray_s_arguments_are_fields_of_vllm(vllm, checkpoints) -> None:
    from meshplan.planner.emit.serving import vllm as emitter

    known = {field.name for field in fields(vllm.arguments)}
    request = serving_request(
        LLAMA_70B, aggregated("vllm", layout(8)), model_path=checkpoints[LLAMA_70B.slug], max_sequence_length=8192
    )
    (program,) = emitter.job(request).programs
    said = ray_serve.engine_kwargs(program)
    assert set(said) <= known
    parsed = vllm.arguments.from_cli_args(vllm.parsed(command_of(program)[2:]))
    assert {name: getattr(parsed, name) for name in said} == said
