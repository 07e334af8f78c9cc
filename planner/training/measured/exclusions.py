"""Measured training runs that are excluded from errors and fits, for what their own row shows.

No prediction is used: FLOPs are counted.
"""

from __future__ import annotations

from meshplan.planner.training.estimator.compute import peak_flops_per_s
from meshplan.planner.training.estimator.flops import TRAINING_PASSES, forward_flops_per_token
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.observations import ObservedRun

# Passes over the layers' matrices that a publisher counts at least where all weights are trained: all three are counted
# whatever else is left out, and half a pass is left for what this count does not know of the model. Two passes are
# adapters on frozen weights, whose weight gradients nobody computes.
LEAST_PASSES = TRAINING_PASSES - 0.5


def exclusion(run: ObservedRun) -> str | None:
    """The reason to exclude a run; None where there is none."""
    return _beyond_the_peak(run) or _counted_as_adapters(run)


def _beyond_the_peak(run: ObservedRun) -> str | None:
    """A step with F FLOPs of model and recompute on n devices takes at least F/(n · peak). A row with a shorter one
    does not state the run that was measured: another recompute, another device, tokens counted in another way.
    """
    step_s = run.measured.get("iteration_s")
    if not step_s:
        return None
    problem, priced = run.problem, price(run.problem, run.config)
    flops = priced.model_flops * (1.0 + priced.recompute_flops_share) / problem.machine.num_devices
    share = flops / step_s / peak_flops_per_s(problem.machine.device, problem.workload.precision)
    if share <= 1.0:
        return None
    return (
        f"the row states {share:.0%} of the devices' peak rate, recompute included: it is not the run that was measured"
    )


def _counted_as_adapters(run: ObservedRun) -> str | None:
    """A row that says that all weights were trained, and whose FLOPs per token, its rate of model FLOPs over its rate
    of tokens, are fewer than the layers' matrices alone take: weight gradients were not counted.
    """
    rate, tokens_per_s = (
        run.measured.get(name) for name in ("model_flops_per_s_per_device", "tokens_per_s_per_device")
    )
    workload = run.problem.workload
    if not rate or not tokens_per_s or workload.phase.has_adapters:
        return None
    matrix = forward_flops_per_token(run.problem.shape, workload.sequence_length).matrix
    passes = rate / tokens_per_s / matrix
    if passes >= LEAST_PASSES:
        return None
    return (
        f"the row states {rate / tokens_per_s / 1e9:.0f} GFLOP per token, {passes:.1f} passes over the matrices of its "
        f"layers where training all weights takes {TRAINING_PASSES:.0f}: it is a run with adapters"
    )
