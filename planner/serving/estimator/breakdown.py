"""Where the time of an iteration goes, by part, with the level of evidence that each part rests on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Pool, Role, Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of an iteration.

    Args:
        name: what is done.
        seconds: of one iteration.
        level: how well its rate is known.
    """

    name: str
    seconds: float
    level: EvidenceLevel


def iteration_parts(
    problem: ServingProblem, pool: Pool, *, num_running: float, speculation: Speculation | None
) -> list[Part]:
    """Parts of one iteration of a pool's worker.

    Args:
        problem: the question.
        pool: prefill pools show the prefill of one prompt, the others a decode iteration.
        num_running: requests that decode in one worker.
        speculation: None without a draft.
    """
    calibration = problem.calibrations[pool.node_type]
    worker = pool_worker(
        problem.shape,
        problem.machines[pool.node_type],
        pool,
        recipe=problem.recipe,
        constants=calibration.constants,
        workload=problem.workload,
        speculation=speculation,
    )
    fitted = EvidenceLevel.FITTED if calibration.num_runs else EvidenceLevel.ASSUMED
    is_prefill = pool.role is Role.PREFILL
    sequences = np.array([1.0 if is_prefill else max(num_running / worker.lanes, 1.0)])
    tokens = np.array([worker.contexts.prompt]) if is_prefill else sequences
    factor = worker.scale(tokens)
    levels = {
        "attention projections": worker.operators.gemm_level(pool.quantization.attention),
        "mlp": worker.operators.gemm_level(pool.quantization.mlp),
        "tensor-parallel exchange": worker.exchange.level(pool.layout.tensor_parallel),
    }
    parts = [
        Part(name=name, seconds=float((factor * seconds)[0]), level=levels[name])
        for name, seconds in worker.dense_parts_s(tokens).items()
    ]
    together = tokens * pool.layout.attention_data_parallel
    routed = problem.shape.num_moe_layers * factor
    parts.append(
        Part(
            name="routed experts",
            seconds=float((routed * worker.routed_s(together))[0]),
            level=worker.operators.gemm_level(pool.quantization.experts),
        )
    )
    parts.append(
        Part(
            name="expert exchange",
            seconds=float((routed * worker.expert_exchange_s(together))[0]),
            level=worker.machine.link_level,
        )
    )
    if is_prefill:
        attention = calibration.constants.prefill_factor * worker.prefill_attention_s(tokens)
    else:
        context = np.array([(worker.contexts.least + worker.contexts.most) / 2.0])
        attention = calibration.constants.decode_factor * worker.decode_attention_s(sequences, context)
    parts.append(Part(name="attention", seconds=float(attention[0]), level=worker.operators.attention_level(pool.role)))
    parts.append(
        Part(
            name="LM head and sampling",
            seconds=float(worker.head_s(sequences)[0]),
            level=worker.operators.gemm_level("bf16"),
        )
    )
    host = calibration.constants.host_step_s + calibration.constants.host_s_per_seq * float(sequences[0])
    parts.append(Part(name="host and scheduler", seconds=host, level=fitted))
    return parts
