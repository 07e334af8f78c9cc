"""Measured training runs that are excluded from errors and fits, for what their own row shows."""

from __future__ import annotations

from meshplan.planner.training.estimator.compute import peak_flops_per_s
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.observations import ObservedRun


def exclusion(run: ObservedRun) -> str | None:
    """The reason to exclude a run; None where there is none.

    A step with F FLOPs of model and recompute on n devices takes at least F/(n · peak). A row with a shorter one does
    not state the run that was measured: another recompute, another device, tokens counted in another way. No prediction
    is used: FLOPs are counted.
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
