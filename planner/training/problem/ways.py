"""In which way a training plan works, beside its model and its sizes: what its runs share with runs of other plans.

What a prediction is off by is partly that of a part of the step which some plans have and others do not: gathers of
sharded parameters, a second forward pass, collectives of a tensor-parallel group, copies to the host. Own runs say more
of plans that have the same parts (:mod:`meshplan.planner.training.measured.own_widths`).
"""

from __future__ import annotations

from meshplan.planner.training.problem.problem import Phase, TrainingConfig, TrainingWorkload


def way_of(workload: TrainingWorkload, config: TrainingConfig) -> str:
    """The way that a plan works in, in words: what is trained, in which formats, how states and activations are kept,
    and over which kinds of groups the work is split.

    Args:
        workload: phase, precision, and whether operators run one by one.
        config: the choices of the plan.
    """
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    frozen = f" on {workload.frozen_weights}" if workload.phase is Phase.QLORA else ""
    parts = [
        f"{workload.phase.value}{frozen}",
        workload.precision,
        *(("operator by operator",) if workload.is_eager else ()),
        f"ZeRO-{config.zero_stage}",
        f"recompute {config.activation_recompute}",
        *(name.replace("_", " ") for name in degrees if getattr(config, name) > 1),
        *(f"{name} on the {config.offload_to}" for name in config.offloaded),
    ]
    return ", ".join(parts)
