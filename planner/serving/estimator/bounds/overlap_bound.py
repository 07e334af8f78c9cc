"""What the devices of a worker could serve at most if compute, memory and network overlapped wholly (NanoFlow).

A request takes each resource of a device for some seconds at its peak rate; they add up over requests, however
operations are ordered. With n requests running at once::

    rate(n) ≤ 1 / max(multiplying(n), device memory(n), links(n), host(n))

Weights are read once an iteration, so that more running requests share them: as many as the cache holds give the bound
of the worker. What a plan reaches of it falls apart into three factors: the smaller batch (rate(n)/rate(most)),
resources that are used one after the other (max/sum), and the rest (kernels below peak rates, host, waiting).

Source: NanoFlow, arXiv:2408.12757, §3, which takes compute alone; here every resource counts, at datasheet rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.power.work import iteration_work, request_work
from meshplan.planner.serving.problem.config import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapBound:
    """The bound of one worker, and what a plan reaches of it.

    Args:
        requests_per_s: no order of its operations finishes more.
        resource: that binds there.
        seconds: resource → of one request at the plan's batch, one device, at peak rates.
        share: what the plan reaches.
        batch_share: the bound at the plan's batch over that at the largest.
        order_share: what one resource after the other leaves of that.
        rest_share: what kernels, host and waiting leave of that.
    """

    requests_per_s: float
    resource: str
    seconds: Mapping[str, float]
    share: float
    batch_share: float
    order_share: float
    rest_share: float


def overlap_bound(
    worker: Worker, *, most_running: float, num_running: float, requests_per_s: float, cached: float = 0.0
) -> OverlapBound:
    """The bound of a worker beside what it does.

    Args:
        worker: whose devices they are.
        most_running: requests that its cache and scheduler hold.
        num_running: requests that run at once, mean.
        requests_per_s: that it finishes.
        cached: prompt tokens that the prefix cache holds.
    """
    running = np.array([max(most_running, num_running, 1.0), max(num_running, 1.0)], dtype=np.float64)
    seconds = resource_seconds(worker, running, cached=cached)
    longest = np.max(list(seconds.values()), axis=0)
    total = np.sum(list(seconds.values()), axis=0)
    best = float(1.0 / longest.min())
    return OverlapBound(
        requests_per_s=best,
        resource=max(seconds, key=lambda name: float(seconds[name][np.argmin(longest)])),
        seconds={name: float(each[1]) for name, each in seconds.items() if each[1] > 0.0},
        share=requests_per_s / best,
        batch_share=float(1.0 / longest[1]) / best,
        order_share=float(longest[1] / total[1]),
        rest_share=float(requests_per_s * total[1]),
    )


def resource_seconds(worker: Worker, running: FloatArray, *, cached: float = 0.0) -> dict[str, FloatArray]:
    """Resource → [N] seconds that one request takes it on one device, at peak rates, by requests running at once.

    Of weights only what decode iterations read is counted where there are any: a prompt may be prefilled beside them,
    and experts that it hits may be hit by others.
    """
    own = worker.own_resources(running)
    if own is not None:
        return own
    contexts, role = worker.contexts, worker.role
    steps = 0.0 if role is Role.PREFILL else contexts.most - contexts.least - 1.0
    prompt = 0.0 if role is Role.DECODE else max(contexts.prompt - cached, 1.0)
    speed = 1.0 if worker.speculation is None else worker.speculation.tokens_per_step
    verified = 1 if worker.speculation is None else worker.speculation.verified_tokens
    whole = request_work(worker, running, cached=cached)
    read, host = whole, np.zeros_like(running)
    if steps > 0.0:
        iterations, held = steps / speed / running, running * (contexts.least + contexts.most) / 2.0
        alone = iteration_work(worker, decodes=running, cached_tokens=held, prompt_tokens=np.zeros_like(running))
        read, host = alone.times(iterations), worker.host_s(running * verified) * iterations
    sent = (prompt + steps / speed * verified) * _sent_s(worker)
    return {
        "compute": whole.compute_s,
        "device memory": read.wide_s + read.narrow_s,
        "links": np.full_like(running, sent),
        "host": host,
    }


def _sent_s(worker: Worker) -> float:
    """Seconds of a device's links for one token: all-reduces of tensor parallelism at the peak of the scale-up link.

    Exchanges of experts and between stages are left out: the bound stays one.
    """
    tensor, layout = worker.layout.tensor_parallel, worker.layout
    if tensor == 1 or worker.exchange.machine.scale_up_bytes_per_s <= 0.0:
        return 0.0
    # Switches may add up on the way (NVLink SHARP), which halves what a device sends: each byte goes out once.
    sent = worker.shape.num_blocks * worker.shape.hidden_size * BYTES_16_BIT * (tensor - 1) / tensor
    return float(sent / worker.machine.scale_up_bytes_per_s / layout.attention_data_parallel / layout.pipeline_parallel)
