"""The referee's verdict on one configuration: its schedule run operation by operation instead of by a closed form.

For the finalists of a search. Costs p·m·v operations in Python: a second for some hundred thousand.
"""

from __future__ import annotations

import math

import numpy as np

from meshplan.planner.estimators.candidates import StageClass, first_layers, layer_kinds
from meshplan.planner.estimators.list_schedules import (
    EQUAL,
    Nominal,
    both_ends,
    life_limit,
    v_shaped,
    waves,
    zero_bubble,
)
from meshplan.planner.estimators.pipeline import WEIGHT_GRADIENT_SHARE
from meshplan.planner.estimators.priced import candidates_of
from meshplan.planner.estimators.schedules import (
    PipelineOrder,
    gpipe,
    interleaved,
    one_forward_one_backward,
    stage_of_chunk,
    zb_h1,
)
from meshplan.planner.estimators.simulation import ChunkTimes, Simulated, simulate
from meshplan.planner.estimators.training import TrainingModel
from meshplan.planner.problems.training import TrainingConfig, TrainingProblem

# Schedules whose stages follow each other into the next step without a flush (arXiv:2401.10241, §4).
UNFLUSHED = frozenset({"zb-1p", "zb-2p", "zb-v", "v-half", "v-min"})
# Units between neighbouring stages down and up the V, forward and backward together (arXiv:2405.15362, §3): they make
# the peak a half and a third of 1F1B's.
V_UNITS = {"v-half": (4, 2), "v-min": (2, 2)}


def pipeline_order(schedule: str, p: int, v: int, m: int, *, nominal: Nominal = EQUAL) -> PipelineOrder:
    """The order of every operation under a schedule.

    Args:
        schedule: a key of ``pipeline.SCHEDULES``, or one that only the referee knows: ``v-half``, ``v-min``,
            ``hanayo`` (v even) and ``dualpipe``.
        p: stages.
        v: chunks a stage.
        m: micro-batches.
        nominal: seconds of F, B and W by which searched schedules are chosen.

    Raises:
        ValueError: no such schedule, or one that cannot run m micro-batches on p stages.
    """
    if schedule in V_UNITS:
        return v_shaped(p, m, life_limit(p, *V_UNITS[schedule]), math.inf, nominal)
    makers = {
        "none": lambda: gpipe(p, m),
        "gpipe": lambda: gpipe(p, m),
        "1f1b": lambda: one_forward_one_backward(p, m),
        "interleaved": lambda: interleaved(p, m, v),
        "zb-h1": lambda: zb_h1(p, m),
        "zb-1p": lambda: zero_bubble(p, m, p, nominal),
        "zb-2p": lambda: zero_bubble(p, m, 2 * p - 1, nominal),
        "zb-v": lambda: v_shaped(p, m, lambda stage, turn: 2 * p, 2 * p, nominal),
        "hanayo": lambda: waves(p, m, v, nominal),
        "dualpipe": lambda: both_ends(p, m, nominal),
    }
    if schedule not in makers:
        known = ", ".join(sorted({*makers, *V_UNITS}))
        raise ValueError(f"no pipeline schedule {schedule!r}; there are {known}")
    return makers[schedule]()


def _model(problem: TrainingProblem, config: TrainingConfig) -> TrainingModel:
    return TrainingModel(
        shape=problem.shape,
        machine=problem.machine,
        workload=problem.workload,
        candidates=candidates_of(problem, config),
        calibration=problem.calibration,
    )


def simulated_pipeline(problem: TrainingProblem, config: TrainingConfig) -> Simulated:
    """The configuration's schedule in time, from the estimator's own chunk times; messages between stages apart."""
    model = _model(problem, config)
    p, v = config.pipeline_parallel, config.virtual_pipeline_stages
    kinds, kind_of = layer_kinds(problem.shape)
    seconds, shares, layer = [], [], 0
    for chunk, count in enumerate(config.layers_per_chunk):
        inside = kind_of[layer : layer + count]
        layer += count
        part = StageClass(
            layers=tuple(inside.count(index) for index in range(len(kinds))),
            has_embedding=chunk == 0,
            has_head=chunk == len(config.layers_per_chunk) - 1,
            first_index=stage_of_chunk(config.pipeline_schedule, p, v)[chunk],
            count=1,
            first_layers=first_layers([inside], len(kinds)),
        )
        whole, share = model.chunk_s(part)
        seconds.append(float(whole[0]))
        shares.append(float(share[0]))
    forward = tuple(share * whole for share, whole in zip(shares, seconds, strict=True))
    weights = tuple(WEIGHT_GRADIENT_SHARE * whole for whole in seconds)
    inputs = tuple(whole - f - w for whole, f, w in zip(seconds, forward, weights, strict=True))
    nominal = (float(np.mean(forward)), float(np.mean(inputs)), float(np.mean(weights)))
    order = pipeline_order(config.pipeline_schedule, p, v, config.num_microbatches, nominal=nominal)
    return simulate(order, ChunkTimes(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights))


def refereed_step_s(problem: TrainingProblem, config: TrainingConfig) -> float:
    """Seconds of a step with the pipeline's time from the simulation and everything else from the estimator."""
    estimate = _model(problem, config).estimate()
    run = simulated_pipeline(problem, config)
    pipeline = run.unflushed_s if config.pipeline_schedule in UNFLUSHED else run.flushed_s
    return float(estimate.step_s[0] - estimate.pipeline_s[0]) + pipeline
