"""What an iteration would take in two nano-batches whose kernels overlap inside the device (NanoFlow).

No engine that plans are written for runs so: the figure stands beside the bound of whole overlap, as what interference
leaves of it. An iteration is cut into two halves, so that weights are read twice. The kernels of both fall into three
kinds: products of matrices and attention of prompts (compute); attention of decodes, norms and activations (device
memory); and collectives (network). With s_i the seconds of a kind alone and T those of the overlapped iteration, kind i
has to run at the speed P_i = s_i/T all the time, which takes the share R_i(P_i) of the device from matrix products. T
is where

    Σ_i R_i(s_i/T) = 1,

between the longest kind and the sum of all. The host prepares batches beside it. Left out: dependencies between the
halves, and kernels that do not run from one end to the other of the time that there is for them.

Sources: NanoFlow, arXiv:2408.12757 (OSDI 2025), section 4.1 and Table 3 (A100, standard deviation below 5 % over all
its shapes; values between R = 0.2 and 0.8, which it leaves out, are interpolated).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.operators import Operators
from meshplan.planner.serving.problem.config import Role

COMPUTE, MEMORY, NETWORK = "compute", "device memory", "links"
NUM_NANO_BATCHES = 2.0
# Kind of kernels → (R, P): performance beside products of matrices that are left with 1 − R of theirs.
INTERFERENCE: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    COMPUTE: ((0.0, 1.0), (0.0, 1.0)),
    MEMORY: ((0.0, 0.1, 0.2, 0.8, 0.9, 1.0), (0.0, 0.2, 0.3, 0.85, 0.95, 1.0)),
    NETWORK: ((0.0, 0.1, 0.2, 0.8, 0.9), (0.0, 0.3, 0.5, 0.9, 1.0)),
}
STEPS = 60  # of a bisection: far below what a double resolves


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoBatches:
    """One iteration, as it is and in overlapped nano-batches; without the host.

    Args:
        sequential_s: all tokens in one batch, one kernel after the other.
        overlapped_s: in nano-batches that overlap.
        seconds: kind of kernels → of all nano-batches, one after the other.
    """

    sequential_s: float
    overlapped_s: float
    seconds: Mapping[str, float]

    @property
    def speedup(self) -> float:
        """Sequential over overlapped; 1 where nano-batches do not pay."""
        return max(self.sequential_s / self.overlapped_s, 1.0)


def overlapped_s(seconds: Mapping[str, float]) -> float:
    """T of the module's text.

    Args:
        seconds: kind of kernels → seconds alone.

    >>> round(overlapped_s({COMPUTE: 10.0}), 6)
    10.0
    >>> round(overlapped_s({COMPUTE: 0.7, MEMORY: 0.3, NETWORK: 0.0}), 6)
    0.91129
    """
    low, high = max(seconds.values()), sum(seconds.values())
    for _ in range(STEPS):
        middle = (low + high) / 2.0
        taken = sum(float(np.interp(alone / middle, *INTERFERENCE[kind][::-1])) for kind, alone in seconds.items())
        low, high = (middle, high) if taken > 1.0 else (low, middle)
    return high


def nano_batches(worker: Worker, *, decodes: float, context: float, prompt_tokens: float) -> NanoBatches:
    """One iteration of a worker without speculation.

    Args:
        worker: whose kernels they are.
        decodes: requests that decode.
        context: cached tokens of each.
        prompt_tokens: tokens of prompts in it.
    """
    whole = _seconds(worker, decodes=decodes, context=context, prompt_tokens=prompt_tokens)
    part = _seconds(
        worker,
        decodes=decodes / NUM_NANO_BATCHES,
        context=context,
        prompt_tokens=prompt_tokens / NUM_NANO_BATCHES,
    )
    seconds = {kind: NUM_NANO_BATCHES * each for kind, each in part.items()}
    return NanoBatches(sequential_s=sum(whole.values()), overlapped_s=overlapped_s(seconds), seconds=seconds)


class _FreePasses(Operators):
    """Operators whose norms, activations and other passes over memory take no time."""

    def memory_op_s(self, moved_bytes: FloatArray, *, kernels: float) -> FloatArray:
        del kernels
        return np.zeros_like(moved_bytes)


class _ProductsAlone(Worker):
    """A worker that takes time for products of matrices alone."""

    @cached_property
    def operators(self) -> Operators:
        return _FreePasses(**self.kernels)


def steady_nano_batches(worker: Worker, *, num_running: float) -> NanoBatches | None:
    """The iteration that a worker runs most: its decodes with the prompts of those that follow them, or one prompt.

    Args:
        worker: whose kernels they are.
        num_running: requests that decode in it.

    Returns:
        None for workers with drafts, with several stages, and with parts of the model on other devices or the host.
    """
    if type(worker) is not Worker or worker.speculation is not None or worker.layout.pipeline_parallel > 1:
        return None
    contexts = worker.contexts
    if worker.role is Role.PREFILL:
        return nano_batches(worker, decodes=0.0, context=contexts.prompt, prompt_tokens=contexts.prompt)
    decodes = max(num_running / worker.concurrent_batches, 1.0)
    steps = contexts.most - contexts.least
    prompts = decodes * contexts.prompt / steps if worker.role is Role.MIXED and steps > 0.0 else 0.0
    return nano_batches(
        worker,
        decodes=decodes,
        context=(contexts.least + contexts.most) / 2.0,
        prompt_tokens=min(prompts, max(worker.limits.max_batched_tokens - decodes, 0.0)),
    )


def _layers_s(worker: Worker, tokens: FloatArray) -> FloatArray:
    """All layers without attention and exchanges, before calibration."""
    dense = worker.dense_parts_s(tokens)
    routed = worker.routed_s(tokens * worker.layout.attention_data_parallel)
    return dense["attention projections"] + dense["mlp"] + worker.shape.num_moe_layers * routed


def _seconds(worker: Worker, *, decodes: float, context: float, prompt_tokens: float) -> dict[str, float]:
    """Kind of kernels → seconds of one batch of all layers, one kernel after the other."""
    tokens, sequences = np.array([decodes + prompt_tokens]), np.array([max(decodes, 1.0)])
    factor, moe_layers = worker.scale(tokens), worker.shape.num_moe_layers
    stage_tokens = tokens * worker.layout.attention_data_parallel
    exchange = worker.dense_parts_s(tokens)["tensor-parallel exchange"] + moe_layers * worker.expert_exchange_s(
        stage_tokens
    )
    alone = _ProductsAlone(**{field.name: getattr(worker, field.name) for field in fields(worker)})
    compute, whole = (
        factor * _layers_s(each, tokens) + worker.slower(sequences) * each.head_s(sequences) for each in (alone, worker)
    )
    memory = whole - compute
    if prompt_tokens > 0.0:
        prompt = np.array([worker.contexts.prompt])
        each = worker.constants.prefill_factor * worker.slower(prompt) * worker.prefill_attention_s(prompt)
        compute = compute + each * prompt_tokens / prompt
    if decodes > 0.0:
        cached = worker.decode_attention_s(np.array([decodes]), np.array([context]))
        memory = memory + worker.constants.decode_factor * worker.slower(tokens) * cached
    return {COMPUTE: float(compute[0]), MEMORY: float(memory[0]), NETWORK: float((factor * exchange)[0])}
