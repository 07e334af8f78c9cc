"""A worker in one instance of a device that is cut by MIG: rooflines, held to what kernels attain on the whole device.

No kernel was timed in an instance, so that its times are rooflines at its share of the device (:mod:`~.operators`,
:mod:`meshplan.planner.cluster.mig`). Where kernels were timed on the whole device they take longer than its roofline
says; an instance is held to the largest such ratio over the loads, so that none looks faster than the whole only
because it was not measured::

    device time in an instance = roofline(instance) · max over n of measured(whole, n) / roofline(whole, n), at least 1

*To doubt.* An instance has its part of the L2 cache, and its memory has fewer channels to hide latency with; neither is
counted. No run in an instance was compared.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from meshplan.planner.cluster.mig import CutMachine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.step_cost import Slowdown

# Log factor by which times in an instance lie within in nine of ten cases, beyond what devices err by: rooflines were
# up to 1.27 times faster than measured kernels for a whole device (decode iterations of four models on A100, H100 and
# H200, 1 to 256 requests, 2026-11-25).
INSTANCE_ERROR_P90 = math.log(1.27)
INSTANCE_DOUBT = (
    "workers in MIG instances: no kernel was timed in one and no run was compared; rooflines at the instance's share "
    "of the device, held to what kernels attain on the whole"
)
# Requests in flight at which measured kernels and rooflines are compared.
LOADS = (1, 4, 16, 64, 256)


def in_instance(worker: Worker) -> Worker:
    """The worker of an instance, held to the kernels that were timed on its whole device."""
    machine = worker.machine
    if not isinstance(machine, CutMachine):
        raise TypeError(f"{machine.device.slug} is not cut")
    whole = machine.whole_device
    unmeasured = replace(whole, slug=machine.device.slug, gemm_curves={}, operator_scales={})
    timed = _decode_s(replace(worker, machine=replace(machine, device=whole)))
    roofline = replace(worker, machine=replace(machine, device=unmeasured))
    once, twice = _decode_s(roofline), _decode_s(replace(roofline, slowdown=_by(2.0)))
    device_s = twice - once  # the rest is the host's, which a slower device leaves as it is
    return replace(worker, slowdown=_by(max(float(((timed - once) / device_s).max()) + 1.0, 1.0)))


def _by(factor: float) -> Slowdown:
    return Slowdown(tokens=np.array([1.0]), factor=np.array([factor]))


def _decode_s(worker: Worker) -> FloatArray:
    """[N] A decode iteration at each of the loads that the worker runs, with requests half-way through, s."""
    cost, contexts = worker.step_cost(), worker.contexts
    loads = [load for load in LOADS if load <= worker.limits.max_num_seqs] or [worker.limits.max_num_seqs]
    held = (contexts.least + contexts.most) / 2.0
    return np.array([cost.decode_s(load) + cost.decode_context_s[load] * load * held for load in loads])
