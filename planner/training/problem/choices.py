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

from meshplan.planner.training.problem.choice import CONTEXT_PARALLEL_STYLES, RECOMPUTE_MODES, Choice
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.schedules import NO_PIPELINE, SCHEDULES
from meshplan.planner.training.problem.switches import (
    ALL_TO_ALL,
    CUDA_GRAPHS,
    FRAMEWORKS_OWN,
    FUSED_DISPATCHERS,
    GRADIENT_BYTES,
    LOSSES,
    OPTIMIZERS,
    RECOMPUTE_MODULES,
    USUAL_MODULES,
)

# Per cent of the optimizer states: all of them.
ALL_STATES = 100
# Replicas of the probes of the support matrix.
PROBE_REPLICAS = 4

CHOICES: tuple[Choice, ...] = (
    Choice(
        "tensor_parallel", "devices that split each matrix product", default=1, simplicity=10, short="tp", probes=(1, 4)
    ),
    Choice("pipeline_parallel", "pipeline stages", default=1, per="split", simplicity=8, short="pp", probes=(1, 4)),
    Choice(
        "virtual_pipeline_stages",
        "model chunks on each stage, 1 without interleaving",
        default=1,
        follows="chunks of layers_per_chunk / stages",
        per="split",
        simplicity=9,
        short="vpp vp",
        probes=(1, 2),
        probe_with={"pipeline_parallel": 4},
    ),
    Choice("context_parallel", "devices that split each sequence", default=1, simplicity=11, short="cp", probes=(1, 2)),
    Choice(
        "data_parallel",
        "replicas of the model",
        follows="devices / (tensor × pipeline × context)",
        short="dp",
        probes=(1, 4),
    ),
    Choice(
        "data_parallel_shard",
        "replicas that share one copy of the sharded states, fewer than data_parallel in HSDP; 1 at zero_stage 0",
        follows="all replicas",
        simplicity=16,
        larger_is_simpler=True,
        short="dp_shard fsdp",
        probes=(PROBE_REPLICAS, 2),
    ),
    Choice(
        "expert_parallel",
        "devices over which the experts of a layer are spread",
        default=1,
        simplicity=12,
        about_experts=True,
        short="ep",
        probes=(1, 4),
    ),
    Choice(
        "expert_tensor_parallel",
        "devices that split each matrix product of an expert",
        default=1,
        simplicity=13,
        about_experts=True,
        short="etp",
        probes=(1, 2),
        probe_with={"tensor_parallel": 2},
    ),
    Choice(
        "micro_batch_size",
        "sequences of one forward pass on one replica",
        default=1,
        simplicity=17,
        short="mbs",
        probes=(1, 2),
    ),
    Choice(
        "zero_stage",
        "what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too",
        least=0,
        most=3,
        default=1,
        simplicity=7,
        short="zero",
        probes=(0, 1, 2, 3),
    ),
    Choice(
        "sequence_parallel",
        "norms and dropout are split over the tensor-parallel devices, as usual where there are several",
        kind=bool,
        short="sp",
        probes=(True, False),
        probe_with={"tensor_parallel": 2},
    ),
    Choice(
        "activation_recompute",
        "activations computed again: none, the attention core (selective), some layers (block) or all (full)",
        values=RECOMPUTE_MODES,
        default="none",
        stored_as="recompute",
        simplicity=14,
        short="recompute",
    ),
    Choice(
        "recompute_num_layers",
        "layers of each model chunk that activation_recompute 'block' recomputes",
        default=0,
        is_optional=True,
        simplicity=15,
    ),
    Choice(
        "recompute_modules",
        "what activation_recompute 'selective' computes again, such as [moe_act, layernorm]",
        kind=tuple,
        values=RECOMPUTE_MODULES,
        default=USUAL_MODULES,
        is_optional=True,
        probes=(USUAL_MODULES, ("layernorm", "mlp"), ("moe_act", "layernorm")),
        probe_with={"expert_parallel": 4},
        per="question",
    ),
    Choice(
        "gradient_precision",
        "format in which gradients are kept and summed; default: as the framework does",
        values=(FRAMEWORKS_OWN, *GRADIENT_BYTES),
        default=FRAMEWORKS_OWN,
        is_optional=True,
        per="question",
    ),
    Choice(
        "cuda_graphs",
        "kernels launched from CUDA graphs: none, those of attention, router or dense MLPs (partial), the step (full)",
        values=tuple(CUDA_GRAPHS),
        default="none",
        is_optional=True,
        short="graphs",
        per="question",
    ),
    Choice(
        "loss",
        "how the loss reads the logits: all in fp32 (whole), some tokens at once (chunked); default: the framework's",
        values=LOSSES,
        default=FRAMEWORKS_OWN,
        is_optional=True,
        per="question",
    ),
    Choice(
        "optimizer",
        "how AdamW keeps its states, or another optimizer; default: fp32 states as the framework lays them out",
        values=OPTIMIZERS,
        default=FRAMEWORKS_OWN,
        is_optional=True,
        per="question",
    ),
    # LOMO (arXiv:2306.09782): no gradient outlives its layer's backward pass.
    Choice(
        "optimizer_in_backward",
        "each gradient is used and freed as soon as the backward pass has it; needs one micro-batch a step",
        kind=bool,
        default=False,
        is_optional=True,
        per="question",
    ),
    # With the optimizer states off the device, the optimizer's step runs on the host.
    Choice(
        "optimizer_offload",
        "optimizer states lie in host memory, where the optimizer's step runs",
        kind=bool,
        default=False,
        is_optional=True,
        simplicity=1,
    ),
    # ZeRO-Offload++ (Twin-Flow) of DeepSpeed, HybridDeviceOptimizer of Megatron-LM.
    Choice(
        "optimizer_offload_percent",
        "share of the optimizer states that optimizer_offload moves, %; the rest steps on the device (not validated)",
        most=ALL_STATES,
        default=ALL_STATES,
        is_optional=True,
        probes=(50, ALL_STATES),
        probe_with={"optimizer_offload": True, "data_parallel": PROBE_REPLICAS},
    ),
    # Where the optimizer states are offloaded too, so are the gradients.
    Choice(
        "parameter_offload",
        "parameters lie in host memory, and are fetched before each use",
        kind=bool,
        default=False,
        is_optional=True,
    ),
    Choice(
        "activation_offload",
        "the kept inputs of recomputed layers lie in host memory",
        kind=bool,
        default=False,
        is_optional=True,
    ),
    # Transformer Engine's get_cpu_offload_context; TRL's OffloadActivations.
    Choice(
        "activation_offload_num_layers",
        "first layers whose activations wait off the device for the backward pass, without recompute (not validated)",
        least=0,
        most=None,
        default=0,
        is_optional=True,
        simplicity=18,
        probes=(0, 1),
    ),
    Choice(
        "context_parallel_style",
        "how the ranks of a split sequence exchange; counts where context_parallel > 1",
        values=CONTEXT_PARALLEL_STYLES,
        default="ring",
        is_optional=True,
        simplicity=2,
        is_on_request=True,
        probe_with={"context_parallel": 4},
    ),
    # The ring has context_parallel / context_parallel_heads positions; 1 in every other style.
    Choice(
        "context_parallel_heads",
        "of all-to-all+ring: neighbours that exchange heads inside the ring",
        least=2,
        most=None,
        default=1,
        is_optional=True,
        simplicity=3,
    ),
    # hpZ of ZeRO++ (arXiv:2306.10209, §3.2) under DeepSpeed's name: a 16-bit copy that the backward pass gathers from.
    Choice(
        "zero_hpz_partition_size",
        "zero_stage 3: neighbours that hold a second copy of the parameters; 1: none",
        default=1,
        is_optional=True,
        simplicity=4,
        is_on_request=True,
        short="hpz",
        probes=(1, 2),
    ),
    # Megatron-FSDP's --outer-dp-sharding-strategy optim: the groups' copies of parameters and gradients are brought
    # together once a step. 0 keeps a copy of the optimizer states in each group.
    Choice(
        "outer_zero_stage",
        "zero_stage 3 in groups of data_parallel_shard: 1 shards the optimizer over them too",
        least=0,
        most=1,
        default=0,
        is_optional=True,
        simplicity=5,
        is_on_request=True,
        probes=(0, 1),
    ),
    # FSDP2's reshard_after_forward=False on the first layers of each chunk.
    Choice(
        "gathered_num_layers",
        "zero_stage 3: layers of each model chunk that stay gathered between the passes",
        least=0,
        most=None,
        default=0,
        is_optional=True,
        simplicity=6,
        is_on_request=True,
        probes=(0, 1),
    ),
    Choice(
        "expert_dispatcher",
        "who carries tokens to experts; alltoall (NCCL) unless said",
        values=(ALL_TO_ALL, *FUSED_DISPATCHERS),
        default=ALL_TO_ALL,
        is_optional=True,
        about_experts=True,
        probe_with={"expert_parallel": 4},
        per="question",
    ),
    Choice(
        "expert_parallel_overlap",
        "tokens of one micro-batch travel while another computes; false unless said",
        kind=bool,
        default=False,
        is_optional=True,
        about_experts=True,
        probe_with={"expert_parallel": 4},
        per="question",
    ),
    Choice(
        "pipeline_schedule",
        "order in which pipeline stages work; none with one stage",
        values=tuple(SCHEDULES),
        follows="follows from stages and chunks",
        per="split",
        stored_as="schedule",
        short="schedule",
        probes=tuple(name for name in SCHEDULES if name != NO_PIPELINE),
        probe_with={"pipeline_parallel": 4},
    ),
    # arXiv:2411.05288
    Choice(
        "vocabulary_parallel",
        "embedding and LM head split over all pipeline stages (not validated)",
        kind=bool,
        default=False,
        is_optional=True,
        per="split",
        probe_with={"pipeline_parallel": 4},
    ),
    # Chunk c lies on stage c mod pipeline_parallel, or there and back in zigzag schedules; sums to the model's layers.
    Choice(
        "layers_per_chunk",
        "layers of each model chunk in the order of a token, such as [9, 10, 10, 7]",
        kind=tuple,
        follows="as even as possible",
        per="split",
        probes=("even", "uneven"),
        probe_with={"pipeline_parallel": 4},
    ),
    Choice(
        "offload_to",
        "where offloaded states and layers' activations go; inputs of recomputed layers go to the host",
        section="constraints",
        values=("host", "nvme"),
        default="host",
        is_optional=True,
        stored_as="on_nvme",
    ),
    Choice(
        "precision",
        "number format of matrix products",
        section="workload",
        values=PRECISIONS,
        default="bf16",
        per="question",
    ),
    Choice("global_batch_size", "sequences in one optimizer step", section="workload", probes=(64,), per="question"),
    Choice("sequence_length", "tokens in one sequence", section="workload", probes=(4096,), per="question"),
    Choice(
        "decoder_sequence_length",
        "tokens of one target, of an encoder–decoder; 0: other models",
        section="workload",
        default=0,
        is_optional=True,
        per="question",
    ),
    Choice(
        "expert_capacity_factor",
        "rows that every expert gets over the mean, tokens beyond them are dropped; 0: no token is dropped",
        section="workload",
        kind=float,
        default=0.0,
        is_optional=True,
        about_experts=True,
        per="question",
    ),
    Choice(
        "num_microbatches",
        "forward passes of one replica in one step",
        section="",
        follows="global_batch_size / (micro_batch_size × data_parallel)",
    ),
    # arXiv:2305.14314
    Choice(
        "quantised_weights",
        "the frozen weights of the blocks lie in four bits (workload.phase qlora)",
        section="",
        kind=bool,
        default=False,
        is_optional=True,
        per="question",
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
