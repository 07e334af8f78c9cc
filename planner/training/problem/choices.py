"""The choices of a training plan: one row each, from which every other list of them is made.

Made from this table: ``fixed`` of a spec and its JSON Schema, columns of a batch of candidates, what framework rules
see, the conversions between candidates and configurations, the order among equals, plain defaults, the probes of the
support matrix, the keys of ``explain --instead`` with their abbreviations, and ``meshplan catalog choices``.
:class:`~meshplan.planner.training.problem.problem.TrainingConfig` and
:class:`~meshplan.planner.training.estimator.candidates.Candidates` are written out, so that their fields have types; a
test holds them against the table. A new choice is a row here, a field there, and the code that prices it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from meshplan.planner.core.spec_fields import MAX_DEVICES
from meshplan.planner.training.pipeline.schedules import NO_PIPELINE, SCHEDULES
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.switches import ALL_TO_ALL, FUSED_DISPATCHERS


class Recompute(IntEnum):
    """Which activations the backward pass computes again; codes of :data:`RECOMPUTE_MODES`, simplest first."""

    NONE = 0
    SELECTIVE = 1  # the attention core (Korthikanti et al., arXiv:2205.05198)
    BLOCK = 2  # the first layers of each chunk from their inputs, the others not
    FULL = 3  # every layer from its input


class ContextStyle(IntEnum):
    """How the ranks of a context-parallel group exchange; codes of :data:`CONTEXT_PARALLEL_STYLES`, simplest first."""

    RING = 0  # keys and values travel round a ring, causal work split evenly (the framework's way)
    RING_PLAIN = 1  # the same without evening out
    ALL_GATHER = 2  # keys and values gathered on every rank
    ALL_TO_ALL = 3  # heads for tokens in an all-to-all (DeepSpeed Ulysses, arXiv:2309.14509)
    ALL_TO_ALL_AND_RING = 4  # all-to-alls of some ranks inside a ring of the others (USP, arXiv:2405.07719)


RECOMPUTE_MODES = ("none", "selective", "block", "full")
CONTEXT_PARALLEL_STYLES = ("ring", "ring-plain", "all-gather", "all-to-all", "all-to-all+ring")
# Replicas of the probes of the support matrix.
PROBE_REPLICAS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of a training plan.

    Args:
        name: field of :class:`~meshplan.planner.training.problem.problem.TrainingConfig`; key of the spec.
        about: what it means, one sentence.
        section: section of a spec that gives it; empty where nothing in a spec gives it under this name.
        kind: ``int``, ``float``, ``bool``, ``str`` (one of ``values``) or ``tuple`` (of counts).
        values: the names that it may take, the code of each its position.
        least, most: bounds of a number, both allowed.
        default: the plain value where nobody pins it; None where it follows from other choices.
        follows: from what it follows.
        is_optional: plans leave it out at its default, so that a new choice changes no old plan.
        column: array of :class:`~meshplan.planner.training.estimator.candidates.Candidates` that holds it.
        split: attribute of :class:`~meshplan.planner.training.estimator.candidates.PipelineSplit` that holds it. A
            choice with neither is the same for all candidates of a question.
        simplicity: position in the order among equally good candidates; 0: not compared.
        larger_is_simpler: the order among equals prefers the larger number.
        is_on_request: the search varies it only where ``constraints.search_over`` names it: no measured run has it.
        about_experts: makes sense in a model with experts only.
        abbreviations: usual short names.
        probes: values that the support matrix tries; by default all of ``values``, or both of a switch.
        probe_with: other choices that a probe needs to mean something.
    """

    name: str
    about: str
    section: str = "fixed"
    kind: type[Any] = int
    values: tuple[str, ...] = ()
    least: int = 1
    most: int | None = MAX_DEVICES
    default: Any = None
    follows: str = ""
    is_optional: bool = False
    column: str = ""
    split: str = ""
    simplicity: int = 0
    larger_is_simpler: bool = False
    is_on_request: bool = False
    about_experts: bool = False
    abbreviations: tuple[str, ...] = ()
    probes: tuple[Any, ...] = ()
    probe_with: Mapping[str, int] = field(default_factory=dict)

    @property
    def tried(self) -> tuple[Any, ...]:
        """Values that the support matrix tries."""
        if self.probes or not self.section:
            return self.probes
        return (False, True) if self.kind is bool else self.values

    @property
    def dtype(self) -> type[np.generic]:
        """Type of its column: switches, or numbers and codes."""
        return np.bool_ if self.kind is bool or self.column == "on_nvme" else np.int64

    def encode(self, value: Any) -> int:
        """A value as it stands in a column: names by their code."""
        return self.values.index(value) if self.values else value

    def decode(self, value: Any) -> Any:
        """One number of a column as the value that it stands for."""
        return self.values[int(value)] if self.values else self.kind(value)

    def decoded(self, column: Any) -> Any:
        """A column with names in place of codes, [n]."""
        return np.array(self.values)[column.astype(np.int64)] if self.values else column

    def rank(self, value: Any) -> int:
        """How far a value is from plain; less is simpler."""
        code = int(self.encode(value))
        return -code if self.larger_is_simpler else code

    @property
    def type_text(self) -> str:
        """The type for a reader, such as ``whole number from 1``."""
        if self.values:
            return " | ".join(self.values)
        if self.kind is int:
            return f"{self.least} to {self.most}" if self.most not in (None, MAX_DEVICES) else f"from {self.least}"
        return {bool: "true | false", tuple: "list of counts"}.get(self.kind, "number")


CHOICES: tuple[Choice, ...] = (
    Choice(
        name="tensor_parallel",
        about="devices that split each matrix product",
        default=1,
        column="tensor_parallel",
        simplicity=10,
        abbreviations=("tp",),
        probes=(1, 4),
    ),
    Choice(
        name="pipeline_parallel",
        about="pipeline stages",
        default=1,
        split="pipeline_parallel",
        simplicity=8,
        abbreviations=("pp",),
        probes=(1, 4),
    ),
    Choice(
        name="virtual_pipeline_stages",
        about="model chunks on each stage, 1 without interleaving",
        default=1,
        follows="chunks of layers_per_chunk / stages",
        split="virtual_pipeline_stages",
        simplicity=9,
        abbreviations=("vpp", "vp"),
        probes=(1, 2),
        probe_with={"pipeline_parallel": 4},
    ),
    Choice(
        name="context_parallel",
        about="devices that split each sequence",
        default=1,
        column="context_parallel",
        simplicity=11,
        abbreviations=("cp",),
        probes=(1, 2),
    ),
    Choice(
        name="data_parallel",
        about="replicas of the model",
        follows="devices / (tensor × pipeline × context)",
        column="data_parallel",
        abbreviations=("dp",),
        probes=(1, 4),
    ),
    Choice(
        name="data_parallel_shard",
        about="replicas that share one copy of the sharded states, fewer than data_parallel in HSDP; 1 at zero_stage 0",
        follows="all replicas",
        column="data_parallel_shard",
        simplicity=16,
        larger_is_simpler=True,
        abbreviations=("dp_shard", "fsdp"),
        probes=(PROBE_REPLICAS, 2),
    ),
    Choice(
        name="expert_parallel",
        about="devices over which the experts of a layer are spread",
        default=1,
        column="expert_parallel",
        simplicity=12,
        about_experts=True,
        abbreviations=("ep",),
        probes=(1, 4),
    ),
    Choice(
        name="expert_tensor_parallel",
        about="devices that split each matrix product of an expert",
        default=1,
        column="expert_tensor_parallel",
        simplicity=13,
        about_experts=True,
        abbreviations=("etp",),
        probes=(1, 2),
        probe_with={"tensor_parallel": 2},
    ),
    Choice(
        name="micro_batch_size",
        about="sequences of one forward pass on one replica",
        default=1,
        column="micro_batch_size",
        simplicity=17,
        abbreviations=("mbs",),
        probes=(1, 2),
    ),
    Choice(
        name="zero_stage",
        about="what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too",
        least=0,
        most=3,
        default=1,
        column="zero_stage",
        simplicity=7,
        abbreviations=("zero",),
        probes=(0, 1, 2, 3),
    ),
    Choice(
        name="sequence_parallel",
        about="norms and dropout are split over the tensor-parallel devices, as usual where there are several",
        kind=bool,
        column="sequence_parallel",
        abbreviations=("sp",),
        probes=(True, False),
        probe_with={"tensor_parallel": 2},
    ),
    Choice(
        name="activation_recompute",
        about="activations computed again: none, the attention core (selective), some layers (block) or all (full)",
        kind=str,
        values=RECOMPUTE_MODES,
        default="none",
        column="recompute",
        simplicity=14,
        abbreviations=("recompute",),
    ),
    Choice(
        name="recompute_num_layers",
        about="layers of each model chunk that activation_recompute 'block' recomputes",
        default=0,
        is_optional=True,
        column="recompute_num_layers",
        simplicity=15,
    ),
    # With the optimizer states off the device, the optimizer's step runs on the host.
    Choice(
        name="optimizer_offload",
        about="optimizer states lie in host memory, where the optimizer's step runs",
        kind=bool,
        default=False,
        is_optional=True,
        column="optimizer_offload",
        simplicity=1,
    ),
    # Where the optimizer states are offloaded too, so are the gradients.
    Choice(
        name="parameter_offload",
        about="parameters lie in host memory, and are fetched before each use",
        kind=bool,
        default=False,
        is_optional=True,
        column="parameter_offload",
    ),
    Choice(
        name="activation_offload",
        about="the kept inputs of recomputed layers lie in host memory",
        kind=bool,
        default=False,
        is_optional=True,
        column="activation_offload",
    ),
    Choice(
        name="context_parallel_style",
        about="how the ranks of a split sequence exchange; counts where context_parallel > 1",
        kind=str,
        values=CONTEXT_PARALLEL_STYLES,
        default="ring",
        is_optional=True,
        column="context_parallel_style",
        simplicity=2,
        is_on_request=True,
        probe_with={"context_parallel": 4},
    ),
    # The ring has context_parallel / context_parallel_heads positions; 1 in every other style.
    Choice(
        name="context_parallel_heads",
        about="of all-to-all+ring: neighbours that exchange heads inside the ring",
        least=2,
        most=None,
        default=1,
        is_optional=True,
        column="context_parallel_heads",
        simplicity=3,
    ),
    # hpZ of ZeRO++ (arXiv:2306.10209, §3.2) under DeepSpeed's name: a 16-bit copy that the backward pass gathers from.
    Choice(
        name="zero_hpz_partition_size",
        about="zero_stage 3: neighbours that hold a second copy of the parameters; 1: none",
        default=1,
        is_optional=True,
        column="zero_hpz_partition_size",
        simplicity=4,
        is_on_request=True,
        abbreviations=("hpz",),
        probes=(1, 2),
    ),
    # Megatron-FSDP's --outer-dp-sharding-strategy optim: the groups' copies of parameters and gradients are brought
    # together once a step. 0 keeps a copy of the optimizer states in each group.
    Choice(
        name="outer_zero_stage",
        about="zero_stage 3 in groups of data_parallel_shard: 1 shards the optimizer over them too",
        least=0,
        most=1,
        default=0,
        is_optional=True,
        column="outer_zero_stage",
        simplicity=5,
        is_on_request=True,
        probes=(0, 1),
    ),
    # FSDP2's reshard_after_forward=False on the first layers of each chunk.
    Choice(
        name="gathered_num_layers",
        about="zero_stage 3: layers of each model chunk that stay gathered between the passes",
        least=0,
        most=None,
        default=0,
        is_optional=True,
        column="gathered_num_layers",
        simplicity=6,
        is_on_request=True,
        probes=(0, 1),
    ),
    Choice(
        name="expert_dispatcher",
        about="who carries tokens to experts; alltoall (NCCL) unless said",
        kind=str,
        values=(ALL_TO_ALL, *FUSED_DISPATCHERS),
        default=ALL_TO_ALL,
        is_optional=True,
        about_experts=True,
        probe_with={"expert_parallel": 4},
    ),
    Choice(
        name="expert_parallel_overlap",
        about="tokens of one micro-batch travel while another computes; false unless said",
        kind=bool,
        default=False,
        is_optional=True,
        about_experts=True,
        probe_with={"expert_parallel": 4},
    ),
    Choice(
        name="pipeline_schedule",
        about="order in which pipeline stages work; none with one stage",
        kind=str,
        values=tuple(SCHEDULES),
        follows="follows from stages and chunks",
        split="schedule",
        abbreviations=("schedule",),
        probes=tuple(name for name in SCHEDULES if name != NO_PIPELINE),
        probe_with={"pipeline_parallel": 4},
    ),
    # arXiv:2411.05288
    Choice(
        name="vocabulary_parallel",
        about="embedding and LM head split over all pipeline stages (not validated)",
        kind=bool,
        default=False,
        is_optional=True,
        split="vocabulary_parallel",
        probe_with={"pipeline_parallel": 4},
    ),
    # Chunk c lies on stage c mod pipeline_parallel, or there and back in zigzag schedules; sums to the model's layers.
    Choice(
        name="layers_per_chunk",
        about="layers of each model chunk in the order of a token, such as [9, 10, 10, 7]",
        kind=tuple,
        follows="as even as possible",
        split="layers_per_chunk",
        probes=("even", "uneven"),
        probe_with={"pipeline_parallel": 4},
    ),
    Choice(
        name="offload_to",
        about="where offloaded optimizer states and parameters go; activations go to the host",
        section="constraints",
        kind=str,
        values=("host", "nvme"),
        default="host",
        is_optional=True,
        column="on_nvme",
    ),
    Choice(
        name="precision",
        about="number format of matrix products",
        section="workload",
        kind=str,
        values=PRECISIONS,
        default="bf16",
    ),
    Choice(
        name="global_batch_size",
        about="sequences in one optimizer step",
        section="workload",
        probes=(64,),
    ),
    Choice(name="sequence_length", about="tokens in one sequence", section="workload", probes=(4096,)),
    Choice(
        name="expert_capacity_factor",
        about="rows that every expert gets over the mean, tokens beyond them are dropped; 0: no token is dropped",
        section="workload",
        kind=float,
        default=0.0,
        is_optional=True,
        about_experts=True,
    ),
    Choice(
        name="num_microbatches",
        about="forward passes of one replica in one step",
        section="",
        follows="global_batch_size / (micro_batch_size × data_parallel)",
        column="num_microbatches",
    ),
    # arXiv:2305.14314
    Choice(
        name="quantised_weights",
        about="the frozen weights of the blocks lie in four bits (workload.phase qlora)",
        section="",
        kind=bool,
        default=False,
        is_optional=True,
    ),
)
BY_NAME: Mapping[str, Choice] = {choice.name: choice for choice in CHOICES}
# Choices that a spec may pin, in the order of its section ``fixed``.
PINNABLE = tuple(choice for choice in CHOICES if choice.section == "fixed")
# Choices that are arrays of a batch of candidates, and those that all of a batch share through its pipeline split.
COLUMNS = tuple(choice for choice in CHOICES if choice.column)
SPLIT = tuple(choice for choice in CHOICES if choice.split)
# Choices that the search leaves at their defaults unless it is asked to vary them.
SEARCHABLE = tuple(choice.name for choice in CHOICES if choice.is_on_request)
# Choices in the order in which equally good candidates are compared.
BY_SIMPLICITY = tuple(sorted((one for one in CHOICES if one.simplicity), key=lambda one: one.simplicity))
_FULL_NAMES = {short: choice.name for choice in PINNABLE for short in choice.abbreviations}


def plain_defaults() -> dict[str, Any]:
    """Choice → its plain value, of those that have one."""
    return {choice.name: choice.default for choice in CHOICES if choice.default is not None}


def full_name(name: str, known: Iterable[str]) -> str | None:
    """The choice that a name or a usual abbreviation means among the ``known`` ones; None where it means none.

    >>> full_name("TP", ["tensor_parallel"])
    'tensor_parallel'
    """
    lowered = name.lower()
    meant = _FULL_NAMES.get(lowered, lowered)
    return meant if meant in known else None


def abbreviations_of(known: Iterable[str]) -> dict[str, str]:
    """Usual abbreviation → name, of the ``known`` choices."""
    return {short: name for short, name in _FULL_NAMES.items() if name in known}
