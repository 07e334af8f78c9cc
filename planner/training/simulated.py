"""Step of one configuration with its pipeline schedule simulated operation by operation instead of in closed form.

For the best candidates of a search. It takes a Python step per operation, p·m·v of each kind: one second for some
hundred thousand.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.training.estimator.candidates import chunk_classes
from meshplan.planner.training.estimator.priced import candidates_of, training_model
from meshplan.planner.training.pipeline.lookup import UNFLUSHED, nominal_times, pipeline_order, weight_gradient_share
from meshplan.planner.training.pipeline.simulation import ChunkTimes, Simulated, simulate
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem


def simulated_pipeline(problem: TrainingProblem, config: TrainingConfig) -> Simulated:
    """The simulated schedule of a configuration, from the estimator's chunk times, without messages between stages."""
    model = training_model(problem, candidates_of(problem, config))
    p, v = config.pipeline_parallel, config.virtual_pipeline_stages
    seconds, shares = [], []
    for chunk in chunk_classes(problem.shape, model.candidates.split):
        whole, share = model.chunk_s(chunk)
        seconds.append(float(whole[0]))
        shares.append(float(share[0]))
    forward = tuple(share * whole for share, whole in zip(shares, seconds, strict=True))
    schedule = config.pipeline_schedule
    weights = tuple(
        weight_gradient_share(schedule, share) * whole for share, whole in zip(shares, seconds, strict=True)
    )
    inputs = tuple(whole - f - w for whole, f, w in zip(seconds, forward, weights, strict=True))
    nominal = nominal_times(schedule, float(np.mean(shares)))
    order = pipeline_order(schedule, p, v, config.num_microbatches, nominal=nominal)
    return simulate(order, ChunkTimes(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights))


def simulated_step_s(problem: TrainingProblem, config: TrainingConfig) -> float:
    """Step time with the pipeline's part from the simulation and everything else from the estimator, s."""
    estimate = training_model(problem, candidates_of(problem, config)).estimate()
    run = simulated_pipeline(problem, config)
    pipeline = run.unflushed_s if config.pipeline_schedule in UNFLUSHED else run.flushed_s
    return float(estimate.step_s[0] - estimate.pipeline_s[0]) + pipeline
