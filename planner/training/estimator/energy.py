"""Energy of a training step, without its hosts: what its devices draw, from the work that they do.

    E = n · T · limit · P(w / T)

n devices, a step of T seconds; P is the curve of :mod:`meshplan.planner.cluster.power`, a share of the board's limit; w
is the work of the mean device, each part in seconds at its peak rate: FLOPs of the model and of whole layers that are
recomputed; bytes of memory-bound operators and of the optimizer on the device. What matrix products move is part of
their power. The mean over unlike stages is from above, as P is concave.

*What bounds it.* w depends on the choices of a plan, not on its links: a mapping changes T alone, and E never falls
with T (:func:`~meshplan.planner.cluster.power.energy_over_limit_s`). No plan does less than the FLOPs of the model, so
that the curve with these alone (:func:`least_work`) and a lower bound of n·T is one of E.

Assumes: the constants of serving devices, as no training was in their fit: nine of ten on an H100 are met within 3 %,
one within 31 % (``tests/benchmarks/on_a_gpu.py``).
"""

from __future__ import annotations

import math

import numpy as np

from meshplan.catalogs.constants.power import PowerConstants, power_calibration
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.power import DeviceWork, energy_over_limit_s, peak_bytes_per_j
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.assembly import MEMORY_BOUND
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.flops import TRAINING_PASSES, model_flops_per_step
from meshplan.planner.training.estimator.operators.products import peak_flops_per_s
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem


def model_flops(problem: TrainingProblem) -> float:
    """FLOPs of the model in a step, of the whole job, recompute not counted."""
    workload = problem.workload
    return model_flops_per_step(
        problem.shape,
        workload.sequence_length,
        workload.global_batch_size,
        frozen_weights=workload.phase.has_adapters,
        documents=workload.documents,
        decoder_length=workload.decoder_sequence_length,
    )


def recompute_flops_share(batch: Candidates) -> FloatArray:
    """Forward FLOPs of layers that are recomputed whole, over those of the model, [n]."""
    chunks = np.array(batch.split.layers_per_chunk)[:, None]
    again = np.where(batch.recompute == Recompute.FULL, chunks, np.minimum(chunks, batch.recompute_num_layers))
    return np.asarray(again.sum(axis=0) / chunks.sum() / TRAINING_PASSES)


def step_work(problem: TrainingProblem, model: TrainingModel) -> DeviceWork:
    """Work of the mean device in a step of each candidate of a model, s at its peak rates [n]."""
    batch, constants, machine = model.candidates, problem.calibration.time, problem.machine
    stages, p = model.stage_figures, batch.split.pipeline_parallel
    shares = [stage.count / p for stage in batch.split.classes]
    operators = sum(share * one.parts[MEMORY_BOUND] for share, one in zip(shares, stages, strict=True))
    optimizer = sum(share * one.optimizer_s for share, one in zip(shares, stages, strict=True))
    on_device = np.where(batch.optimizer_offload, 0.0, optimizer * constants.optimizer_efficiency)
    flops = model_flops(problem) * (1.0 + recompute_flops_share(batch))
    multiplied = flops / batch.world_size / peak_flops_per_s(machine.device, problem.workload.precision)
    return DeviceWork(
        wide_s=batch.num_microbatches * operators * constants.memory_op_efficiency + on_device,
        narrow_s=np.zeros(len(batch)),
        compute_s=multiplied,
        bulk_s=multiplied,
    )


def least_work(problem: TrainingProblem) -> DeviceWork:
    """What no plan can do without, over all of its devices together, device-seconds at their peak rates."""
    peak = peak_flops_per_s(problem.machine.device, problem.workload.precision)
    multiplied = np.asarray(model_flops(problem) / peak)
    return DeviceWork(wide_s=np.zeros(()), narrow_s=np.zeros(()), compute_s=multiplied, bulk_s=multiplied)


def energy_j(
    machine: Machine,
    work: DeviceWork,
    step_s: FloatArray | float,
    devices: FloatArray | float,
    constants: PowerConstants | None = None,
) -> FloatArray:
    """E of the module docstring, J [n]; NaN where the board's limit is unknown.

    Args:
        machine: whose devices they are.
        work: of the mean device, s [n].
        step_s: T, [n].
        devices: n, [n].
        constants: of the power curve; None for those that ship.
    """
    known, bytes_per_j = constants or power_calibration().constants, peak_bytes_per_j(machine.device)
    return np.asarray(devices * board_limit_w(machine) * energy_over_limit_s(known, work, step_s, bytes_per_j))


def board_limit_w(machine: Machine) -> float:
    """Power limit of one of a machine's devices, W; NaN where it is unknown."""
    return math.nan if machine.device.tdp_w is None else machine.device.tdp_w
