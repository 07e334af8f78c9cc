"""Where the time of an iteration goes, by part, with the level of evidence that each part rests on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.estimator.step_cost import longer
from meshplan.planner.serving.problem.config import Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem

# The part in which iterations wait for clients' tokens; reports call it so, too.
API_SERVER = "API server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of an iteration.

    Args:
        name: what is done.
        seconds: its time in one iteration.
        level: how well its rate is known.
    """

    name: str
    seconds: float
    level: EvidenceLevel


def iteration_parts(problem: ServingProblem, pool: Pool, *, num_running: float) -> list[Part]:
    """Parts of one iteration of a pool's worker.

    Args:
        problem: the question.
        pool: for prefill pools the prefill of one prompt is shown, for the others a decode iteration.
        num_running: requests that decode in one worker.
    """
    worker = pool_worker(problem.site, pool, problem.workload, problem.speculation)
    if pool.ffn is not None and problem.separation is not None:
        return problem.separation.parts(worker, num_running)
    gemm_level = worker.operators.gemm_level
    is_prefill = pool.role is Role.PREFILL
    sequences = np.array([1.0 if is_prefill else max(num_running / worker.concurrent_batches, 1.0)])
    tokens = np.array([worker.contexts.prompt]) if is_prefill else sequences
    factor = worker.scale(tokens)
    stage_tokens = tokens * pool.layout.attention_data_parallel
    routed = problem.shape.num_moe_layers * factor
    longest = worker.contexts.most
    context = (worker.contexts.least + longest) / 2.0
    if is_prefill:
        attention = worker.constants.prefill_factor * worker.slower(tokens) * worker.prefill_attention_s(tokens)
        at_most = attention
    else:
        attention, at_most = (_decode_attention_s(worker, sequences, held) for held in (context, longest))
    dense = {name: factor * seconds for name, seconds in worker.dense_parts_s(tokens).items()}
    levels = {
        "attention projections": gemm_level(pool.quantization.attention),
        "mlp": gemm_level(pool.quantization.mlp),
        "tensor-parallel exchange": worker.exchange.level(pool.layout.tensor_parallel),
    }
    experts_level = gemm_level(pool.quantization.experts)
    if pool.weight_tiers is not None:  # what a host or its link takes is no rate of the device
        experts_level = levels["mlp"] = EvidenceLevel.ASSUMED
    experts, sent = routed * worker.routed_s(stage_tokens), routed * worker.expert_exchange_s(stage_tokens)
    waits = np.zeros(1)
    if not is_prefill:  # as in Worker.step_cost
        layers = np.asarray(sum(dense.values())) + experts + sent + at_most
        waits = np.maximum(worker.copy_s(sequences) - layers, 0.0) * context / longest
    parts: list[tuple[str, FloatArray, EvidenceLevel]] = [
        *((name, seconds, levels[name]) for name, seconds in dense.items()),
        ("routed experts", experts, experts_level),
        ("expert exchange", sent, worker.machine.link_level),
        ("attention", attention, worker.operators.attention_level(pool.role)),
        (
            "LM head and sampling",
            worker.slower(sequences) * worker.head_s(sequences),
            gemm_level(pool.quantization.ends),
        ),
    ]
    is_fitted = problem.calibrations[pool.node_type].num_runs > 0
    device_s = np.asarray(sum(seconds for _, seconds, _ in parts)) + waits
    host, copied, streamed = _beside_s(worker, sequences, None if is_prefill else context, device_s)
    parts += [
        ("copy of answers for penalties", waits + copied, EvidenceLevel.ASSUMED),
        ("host and scheduler", host, EvidenceLevel.FITTED if is_fitted else EvidenceLevel.ASSUMED),
        (API_SERVER, streamed, EvidenceLevel.ASSUMED),
    ]
    return [Part(name=name, seconds=float(seconds[0]), level=level) for name, seconds, level in parts]


def _decode_attention_s(worker: Worker, batch: FloatArray, context: float) -> FloatArray:
    """Attention of a batch's decodes over so many tokens each."""
    return worker.constants.decode_factor * worker.slower(batch) * worker.decode_attention_s(batch, np.array([context]))


def _beside_s(
    worker: Worker, batch: FloatArray, context: float | None, device_s: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """What an iteration takes longer than the devices: for the host, for its copy of answers, for API servers.

    Args:
        worker: the worker.
        batch: requests of one batch.
        context: tokens that each decoding request has in the cache; None for a prompt, whose answer has none yet.
        device_s: time of the devices.
    """
    first = worker.contexts.ends[0]
    host = _host_s(worker, batch, first, device_s)
    copied = np.zeros_like(host)
    if context is not None:
        copied = _host_s(worker, batch, max(context, first), device_s) - host
    inside = device_s + host + copied
    return host, copied, longer(inside, worker.front_end_s * worker.concurrent_batches * batch) - inside


def _host_s(worker: Worker, batch: FloatArray, context: float, device_s: FloatArray) -> FloatArray:
    """What the host adds to the time of the devices: all of it, or what it takes longer where both work at once.

    Args:
        worker: the worker.
        batch: requests of one batch.
        context: tokens that each decoding request has in the cache.
        device_s: time of the devices.
    """
    step_s, per_seq = worker.host_times(worker.constants)
    alone = np.zeros_like(device_s) if worker.hides_host else step_s + per_seq * batch
    return longer(device_s + alone, worker.beside_s(worker.constants, batch, context)) - device_s
