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
from typing import Any

from meshplan.planner.training.pipeline.schedules import NO_PIPELINE, SCHEDULES
from meshplan.planner.training.problem.choice import CONTEXT_PARALLEL_STYLES, RECOMPUTE_MODES, Choice
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.switches import ALL_TO_ALL, FUSED_DISPATCHERS

# Replicas of the probes of the support matrix.
PROBE_REPLICAS = 4

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
