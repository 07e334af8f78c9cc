"""What a plan rests on that no measured run has confirmed, and how much of its step that is.

Each entry is a sentence for the plan's provenance and the share of the step's time that it may double: nobody measured
that part, so the interval grows by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshplan.catalogs.models.layers.naming import describe_blocks
from meshplan.catalogs.units import format_bandwidth
from meshplan.planner.training.estimator.assembly import (
    ACTIVATION_OFFLOAD,
    ATTENTION,
    DATA_COMMUNICATION,
    EXPERT_COMMUNICATION,
    EXPERTS,
    OPTIMIZER,
    PRODUCTS,
    WAITING,
)
from meshplan.planner.training.estimator.exchange.offload import nvme_bytes_per_s
from meshplan.planner.training.estimator.priced import Priced
from meshplan.planner.training.problem.choices import ALL_STATES
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.problem.schedules import SCHEDULES

# Share of a step, for each way to shard that no measured run has. Assumed: the exchange that it changes, some per cent
# of a step, may take twice as long.
UNMEASURED_SHARDING = 0.1
# The same for a vocabulary that all stages share: as for a schedule that no run has.
UNMEASURED_VOCABULARY = 0.15
# The same for copies of activations that should hide behind compute. Assumed: streams and pinned memory cost as much.
UNMEASURED_COPIES = 0.15
UNMASKED = (
    "waiting for longer documents: no measured run has documents of known lengths; the loader must pack them and mask "
    "attention by document, which launcher files do not set"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unconfirmed:
    """One assumption.

    Args:
        what: a sentence.
        share: of the step's time that it may double, 0 to 1.
    """

    what: str
    share: float = 0.0


def unconfirmed(problem: TrainingProblem, priced: Priced) -> tuple[Unconfirmed, ...]:
    """Everything in a plan that no measured run has confirmed; empty where there is nothing."""
    return tuple(_found(problem, priced))


def unmeasured_share(problem: TrainingProblem, priced: Priced) -> float:
    """Share of the step that may take twice as long; a pipeline schedule is counted separately."""
    return sum(entry.share for entry in unconfirmed(problem, priced))


def _share(priced: Priced, *parts: str) -> float:
    return sum(priced.breakdown_s.get(part, 0.0) for part in parts) / priced.step_s


def _found(problem: TrainingProblem, priced: Priced) -> Iterator[Unconfirmed]:
    config = priced.config
    schedule = SCHEDULES[config.pipeline_schedule]
    if waits := _share(priced, WAITING):
        yield Unconfirmed(what=UNMASKED, share=waits)
    if not schedule.validated:
        yield Unconfirmed(what=f"pipeline schedule {config.pipeline_schedule}: no measured run; {schedule.source}")
    if config.vocabulary_parallel:
        yield Unconfirmed(
            what="vocabulary parallelism: no measured run; Yeung et al., arXiv:2411.05288, Algorithm 2",
            share=UNMEASURED_VOCABULARY,
        )
    if config.activation_recompute == "block":
        yield Unconfirmed(
            what="recompute of the first layers of each chunk: no measured run; between none and full, which have"
        )
    yield from _offloads(problem, priced)
    for what in unmeasured_sharding(config):
        yield Unconfirmed(what=what, share=UNMEASURED_SHARDING)
    if config.quantised_weights:
        yield Unconfirmed(
            what="QLoRA: no measured run; time and memory of four-bit weights follow the paper's arithmetic",
            share=_share(priced, *PRODUCTS),
        )
    imbalance = problem.workload.expert_imbalance
    if imbalance > 1 and not problem.workload.drops_tokens:
        yield Unconfirmed(
            what=f"experts {imbalance:g} times the mean on the busiest rank, in every layer: no run states it",
            share=_share(priced, EXPERTS, EXPERT_COMMUNICATION) * (1.0 - 1.0 / imbalance),
        )
    if config.precision in {"mxfp8", "nvfp4"}:
        yield _block_scaled(problem, priced)
    if problem.shape.blocks is not None:
        yield Unconfirmed(
            what=f"{describe_blocks(problem.shape)}: time and memory follow the papers' arithmetic, recurrences timed "
            "forward kernels; few measured runs of such models are in the fit",
            share=_share(priced, ATTENTION),
        )

    if problem.shape.encoder is not None:
        yield Unconfirmed(
            what="an encoder–decoder: no measured run; its layers are priced as those of language models, attention "
            "with learned biases of positions at the rate of fused kernels",
            share=_share(priced, ATTENTION),
        )


def _offloads(problem: TrainingProblem, priced: Priced) -> Iterator[Unconfirmed]:
    config = priced.config
    place = "host memory"
    if config.offload_to == "nvme":
        given = problem.machine.nvme_bytes_per_s
        place = (
            f"NVMe at {format_bandwidth(nvme_bytes_per_s(problem.machine))} a host ({'yours' if given else 'assumed'})"
        )
    if config.optimizer_offload:
        percent = config.optimizer_offload_percent
        part = "" if percent == ALL_STATES else f"{percent} % of the "
        yield Unconfirmed(
            what=f"{part}optimizer states in {place}: no measured run; rates of host and link are assumed",
            share=_share(priced, OPTIMIZER),
        )
    if config.parameter_offload:
        yield Unconfirmed(
            what=f"parameters in {place}: no measured run; what hides behind compute is assumed",
            share=_share(priced, DATA_COMMUNICATION),
        )
    if config.activation_offload:
        hides = problem.calibration.recipe.overlaps_activation_offload
        how = "compute hides it, as in torchtune's two published runs" if hides else "nothing hides it"
        yield Unconfirmed(
            what=f"kept activations in host memory: no measured run of the plan; the link's rate is assumed, {how}",
            share=_share(priced, ACTIVATION_OFFLOAD),
        )
    if layers := config.activation_offload_num_layers:
        yield Unconfirmed(
            what=f"activations of {layers} layers in {place}: no measured run; the rate is assumed, compute hides the "
            "copies of all but two layers",
            share=max(_share(priced, ACTIVATION_OFFLOAD), UNMEASURED_COPIES),
        )


def unmeasured_sharding(config: TrainingConfig) -> Iterator[str]:
    """Ways to shard sequences and states in a plan that no measured run has."""
    if config.context_parallel_style != "ring":
        yield f"context parallelism as {config.context_parallel_style}: no measured run; its exchange is a model"
    if config.zero_hpz_partition_size > 1:
        yield f"second copy of parameters on {config.zero_hpz_partition_size} neighbours (hpZ): no measured run"
    if config.outer_zero_stage:
        yield "optimizer states sharded over groups of full sharding: no measured run"
    if config.gathered_num_layers:
        yield f"{config.gathered_num_layers} layers of each chunk stay gathered: no measured run"


def _block_scaled(problem: TrainingProblem, priced: Priced) -> Unconfirmed:
    """Runs of 2026-11-20: 18 in mxfp8, one in nvfp4, all of Megatron on Blackwell, none with its memory."""
    precision, curves = priced.config.precision, problem.machine.device.gemm_curves
    fitted = precision in curves or (precision == "mxfp8" and "fp8" in curves)
    kernels = "fp8 kernels" if precision == "mxfp8" else "its kernels"
    rate = f"product rates fitted to {kernels}" if fitted else "product rates assumed from the datasheet"
    memory = "cached copies of the weights are counted, not measured"
    if precision == "nvfp4":
        what = f"nvfp4: one measured run; {rate}, quantisation taken as fp8's; {memory}"
        return Unconfirmed(what=what, share=_share(priced, *PRODUCTS))
    efficiency = "fitted on runs" if problem.calibration.num_runs else "assumed"
    return Unconfirmed(what=f"mxfp8: {rate}, their efficiency {efficiency} in fp8 and mxfp8 together; {memory}")
