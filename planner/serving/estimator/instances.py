"""A worker that has a part of a device: an instance of MIG, or one of several replicas under MPS.

*Instances*: rooflines, held to what kernels attain on the whole device. No kernel was timed in an instance, so that its
times are rooflines at its share of the device (:mod:`~.operators`, :mod:`meshplan.planner.cluster.shares`). Where
kernels were timed on the whole device they take longer than its roofline says; an instance is held to the largest such
ratio over the loads, so that none looks faster than the whole only because it was not measured::

    device time in an instance = roofline(instance) · max over n of measured(whole, n) / roofline(whole, n), at least 1

*To doubt.* An instance has its part of the L2 cache, and its memory has fewer channels to hide latency with; neither is
counted. No run in an instance was compared.

*Replicas*: the kernels of the whole device, while all n replicas work. Each has 1/n of the threads and of the memory's
bandwidth, so that a device's time is n times as long, and the host's as long as ever::

    time of an iteration = host + n · device, or about the longer of both where the host prepares the next one meanwhile

What replicas gain by that is the device's idle time during each other's host time; of engines that prepare ahead, only
where the host takes longer than the device. *To doubt.* A replica is faster
while others pause, or while they are short of what it has plenty of (threads or bandwidth); that is not counted. The
runs that were compared set no percentage of threads; plans do, so that a busy replica does not starve the others.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from meshplan.catalogs.constants.machines.device_shares import DeviceShare, MpsShare
from meshplan.planner.cluster.shares import CutMachine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.host.front_end import NO_FRONT_END
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.step_cost import Slowdown

# Log factor by which times in an instance lie within in nine of ten cases, beyond what devices err by: rooflines were
# up to 1.27 times faster than measured kernels for a whole device (decode iterations of four models on A100, H100 and
# H200, 1 to 256 requests, 2026-11-25).
INSTANCE_ERROR_P90 = math.log(1.27)
# The same of replicas: what two and four gain over one was 1.08 to 1.14 times what is predicted (six published runs of
# OPT, none fitted: ``tests/benchmarks/mps.py``, 2026-11-26).
MPS_ERROR_P90 = math.log(1.14)
MPS_DOUBT = (
    "replicas of a device under MPS: all are taken to work all the time, each with its part of threads and bandwidth; "
    "nothing keeps them apart but the memory that each is told to take, and a fault of one may end all"
)
INSTANCE_DOUBT = (
    "workers in MIG instances: no kernel was timed in one and no run was compared; rooflines at the instance's share "
    "of the device, held to what kernels attain on the whole"
)
# Requests in flight at which measured kernels and rooflines are compared.
LOADS = (1, 4, 16, 64, 256)


def share_error_p90(share: DeviceShare) -> float:
    """Log factor by which times of a part of a device lie within in nine of ten cases, beyond what devices err by."""
    return MPS_ERROR_P90 if isinstance(share, MpsShare) else INSTANCE_ERROR_P90


def share_doubt(share: DeviceShare) -> str:
    """What plans say of workers that have parts of devices."""
    return MPS_DOUBT if isinstance(share, MpsShare) else INSTANCE_DOUBT


def in_share(worker: Worker) -> Worker:
    """The worker of a part of a device.

    Raises:
        TypeError: the worker has whole devices.
    """
    machine = worker.machine
    if not isinstance(machine, CutMachine):
        raise TypeError(f"{machine.device.slug} is not shared")
    if isinstance(machine.profile, MpsShare):
        whole = replace(machine, device=machine.whole_device)
        return replace(worker, machine=whole, slowdown=_by(machine.profile.instances))
    return _in_instance(worker, machine)


def _in_instance(worker: Worker, machine: CutMachine) -> Worker:
    """The worker of an instance, held to the kernels that were timed on its whole device."""
    whole = machine.whole_device
    unmeasured = replace(whole, slug=machine.device.slug, gemm_curves={}, operator_scales={})
    timed = _decode_s(replace(worker, machine=replace(machine, device=whole)))
    roofline = replace(worker, machine=replace(machine, device=unmeasured))
    return replace(worker, slowdown=_by(max(float((timed / _decode_s(roofline)).max()), 1.0)))


def _by(factor: float) -> Slowdown:
    return Slowdown(tokens=np.array([1.0]), factor=np.array([factor]))


def _decode_s(worker: Worker) -> FloatArray:
    """[N] What a decode iteration takes of the device at each of the loads that the worker runs, with requests half-way
    through, s: the host's time stays as it is on a slower device.
    """
    alone = replace(worker.constants, host_step_s=0.0, host_s_per_seq=0.0)
    cost, contexts = (
        replace(worker, host_s_per_cache_group=0.0, front_end=NO_FRONT_END).step_cost(alone),
        worker.contexts,
    )
    loads = [load for load in LOADS if load <= worker.limits.max_num_seqs] or [worker.limits.max_num_seqs]
    held = (contexts.least + contexts.most) / 2.0
    return np.array([cost.decode_s(load) + cost.decode_context_s[load] * load * held for load in loads])
