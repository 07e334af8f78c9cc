"""Which choices each target takes: found by emitting probe plans, not by a list that somebody keeps.

A probe changes one choice of a plan that the target takes otherwise. What comes back as files is taken; what raises
:class:`~meshplan.catalogs.errors.CannotExpressError` is refused, with the emitter's own reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, cast

from meshplan.catalogs.database.seeds import seed_model_shape
from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch.registry import TARGETS, Target, emit, features_of, verified_of
from meshplan.planner.training.pipeline.layers import split_layers_evenly
from meshplan.planner.training.problem.choices import CONTEXT_PARALLEL_STYLES
from meshplan.planner.training.problem.megatron import ANY_FRAMEWORK
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.problem import TrainingConfig

_DEVICES_PER_HOST = 8
_NUM_REPLICAS = 4
# What a probe may change to be taken at all: stages of sharding that a target has, and norms split or not.
_COMPANIONS = tuple(product((1, 3, 0), (True, False)))
# Choice → the values that are tried; those of the framework's model with experts are marked below.
_PROBES: Mapping[str, Sequence[Any]] = {
    "tensor_parallel": (1, 4),
    "sequence_parallel": (True, False),
    "pipeline_parallel": (1, 4),
    "virtual_pipeline_stages": (1, 2),
    "layers_per_chunk": ("even", "uneven"),
    "pipeline_schedule": tuple(name for name in ANY_FRAMEWORK.pipeline_schedules if name != "none"),
    "context_parallel": (1, 2),
    "context_parallel_style": CONTEXT_PARALLEL_STYLES,
    "data_parallel": (1, 4),
    "data_parallel_shard": (_NUM_REPLICAS, 2),
    "zero_stage": (0, 1, 2, 3),
    "expert_parallel": (1, 4),
    "expert_tensor_parallel": (1, 2),
    "activation_recompute": ("none", "selective", "block", "full"),
    "zero_hpz_partition_size": (1, 2),
    "outer_zero_stage": (0, 1),
    "gathered_num_layers": (0, 1),
    "optimizer_offload": (False, True),
    "parameter_offload": (False, True),
    "activation_offload": (False, True),
    "offload_to": ("host", "nvme"),
    "expert_dispatcher": ("alltoall", "deepep", "hybridep"),
    "expert_parallel_overlap": (False, True),
    "vocabulary_parallel": (False, True),
    "precision": PRECISIONS,
    "micro_batch_size": (1, 2),
    "global_batch_size": (64,),
    "sequence_length": (4096,),
    "rank_table": ("in order", "devices reversed", "unequal hosts", "any order"),
}
_WITH_EXPERTS = ("expert_parallel", "expert_tensor_parallel", "expert_dispatcher", "expert_parallel_overlap")
_CHUNKS = {"interleaved": 2, **dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v", "hanayo"), 2)}
# Choices that say something only beside others.
_NEEDS: Mapping[str, Mapping[str, int]] = {
    **{key: {"tensor_parallel": 2} for key in ("sequence_parallel", "expert_tensor_parallel")},
    **{key: {"expert_parallel": 4} for key in ("expert_dispatcher", "expert_parallel_overlap")},
    **{
        key: {"pipeline_parallel": 4}
        for key in ("layers_per_chunk", "vocabulary_parallel", "virtual_pipeline_stages", "pipeline_schedule")
    },
    "context_parallel_style": {"context_parallel": 4},
    "rank_table": {"data_parallel": 2 * _DEVICES_PER_HOST},
}
_NOTHING_TO_VERIFY = "refused before anything is written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One choice that is tried.

    Args:
        choice: field of ``TrainingConfig``, or ``rank_table``.
        value: what it is set to.
    """

    choice: str
    value: Any


def support_matrix() -> tuple[Mapping[str, Any], ...]:
    """Which choices each emit target takes, found by emitting probes of two models that ship with meshplan."""
    # TorchTitan trains registered models only: the probes are two of them.
    return support_rows(seed_model_shape("llama-3.1-8b"), seed_model_shape("qwen3-30b-a3b"))


def support_rows(dense: ModelShape, experts: ModelShape) -> tuple[Mapping[str, Any], ...]:
    """Rows of target, feature, takes, refuses, expressed_by, verified_by, parser_verified.

    Args:
        dense: a model that every framework knows, for most probes.
        experts: one with experts.
    """
    return tuple(row for target in TARGETS for row in _target_rows(target, dense, experts))


def _target_rows(target: Target, dense: ModelShape, experts: ModelShape) -> Iterator[Mapping[str, Any]]:
    said = {feature.name: feature for feature in features_of(target)}
    # An engine's plan has pools and roles of its own: its rows are what its table says.
    choices = () if target.serves else ("rank_table",) if target.wraps else tuple(_PROBES)
    for choice in (*choices, *(name for name in said if name not in choices)):
        shape = experts if choice in _WITH_EXPERTS else dense
        takes: list[str] = []
        refuses: list[str] = []
        verified = verified_of(target)
        for value in _PROBES.get(choice, ()) if choice in choices else ():
            emitted, reason = _tried(target, shape, Probe(choice=choice, value=value))
            if emitted is None:
                refuses.append(f"{value}: {reason}")
            else:
                takes.append(str(value))
                verified = emitted.parser_verified or verified
        feature = said.get(choice) or (_DERIVED.get(choice) if takes else None)
        yield {
            "target": target.name,
            "feature": choice,
            "takes": ", ".join(takes),
            "refuses": "; ".join(refuses),
            "expressed_by": "" if feature is None else feature.expressed_by,
            "verified_by": _NOTHING_TO_VERIFY if feature is None else feature.verified_by,
            "parser_verified": {} if verified is None else asdict(verified),
        }


def _derived(name: str, words: str) -> Feature:
    return Feature(name=name, expressed_by=words, verified_by="as the choices that it follows from")


# Choices that no target has a word of its own for, because others decide them.
_DERIVED = {
    feature.name: feature
    for feature in (
        _derived("data_parallel", "devices / (tensor × pipeline × context)"),
        _derived("virtual_pipeline_stages", "chunks of layers_per_chunk / stages"),
        _derived("pipeline_schedule", "follows from stages and chunks"),
        _derived("sequence_parallel", "off: no word needed"),
        _derived("pipeline_parallel", "1: no word needed"),
        _derived("context_parallel", "1: no word needed"),
        _derived("expert_parallel", "1: no word needed"),
        _derived("context_parallel_style", "ring: no word needed"),
        _derived("zero_hpz_partition_size", "1: no word needed"),
        _derived("outer_zero_stage", "0: no word needed"),
        _derived("gathered_num_layers", "0: no word needed"),
        _derived("optimizer_offload", "false: no word needed"),
        _derived("parameter_offload", "false: no word needed"),
        _derived("activation_offload", "false: no word needed"),
        _derived("offload_to", "host: no word needed"),
        _derived("expert_parallel_overlap", "false: no word needed"),
        _derived("expert_dispatcher", "alltoall: no word needed"),
        _derived("vocabulary_parallel", "false: no word needed"),
        _derived("expert_tensor_parallel", "1: no word needed"),
        _derived("layers_per_chunk", "one chunk: no word needed"),
        _derived("data_parallel_shard", "all replicas: no word needed"),
    )
}


def _tried(target: Target, shape: ModelShape, probe: Probe) -> tuple[EmittedPlan | None, str]:
    """The files of some plan with this choice; else the reason for the plan that is nearest to being taken."""
    framework = "megatron" if target.wraps else None
    reasons = []
    for zero_stage, is_split in _COMPANIONS:
        config = _config(shape, probe, zero_stage, is_split)
        if config is None:
            continue
        request = TrainingRequest(
            plan=_plan(config, probe),
            shape=shape,
            script="train.py" if target.needs_script else "",
            devices_per_host=_DEVICES_PER_HOST,
        )
        try:
            return emit(target.name, request, framework=framework), ""
        except CannotExpressError as error:
            reasons.append(error.what)
    return None, min(reasons, key=len).removeprefix("this configuration: ")


def _config(shape: ModelShape, probe: Probe, zero_stage: int, is_split: bool) -> TrainingConfig | None:
    """A configuration with the probed choice; None where the companions say otherwise."""
    chosen: dict[str, Any] = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "virtual_pipeline_stages": 1,
        "context_parallel": 1,
        "data_parallel": _NUM_REPLICAS,
        "expert_parallel": 1,
        "expert_tensor_parallel": 1,
        "zero_stage": zero_stage,
        "activation_recompute": "none",
        "optimizer_offload": False,
        "parameter_offload": False,
        "activation_offload": False,
        "offload_to": "host",
        "expert_dispatcher": "alltoall",
        "expert_parallel_overlap": False,
        "context_parallel_style": "ring",
        "zero_hpz_partition_size": 1,
        "outer_zero_stage": 0,
        "gathered_num_layers": 0,
        "vocabulary_parallel": False,
        "micro_batch_size": 1,
        "num_microbatches": 16,
        "sequence_length": 4096,
        "precision": "bf16",
    }
    if probe.choice in chosen:
        chosen[probe.choice] = probe.value
    chosen |= _NEEDS.get(probe.choice, {})
    if probe.choice in {"parameter_offload", "offload_to"} and probe.value not in {False, "host"}:
        chosen["optimizer_offload"] = True  # some have one word for both, and NVMe holds nothing by itself
    if probe.choice == "activation_offload" and probe.value:
        chosen["activation_recompute"] = "full"
    if probe.value == "all-to-all+ring":
        chosen["context_parallel_heads"] = 2
    if probe.choice == "pipeline_schedule":
        chosen["virtual_pipeline_stages"] = _CHUNKS.get(probe.value, 1)
    if probe.choice == "zero_stage" and zero_stage not in {probe.value, 1}:
        return None
    stages, virtual = chosen["pipeline_parallel"], chosen["virtual_pipeline_stages"]
    layers = list(split_layers_evenly(shape.num_hidden_layers, stages * virtual))
    if probe.value == "uneven":
        layers[0], layers[-1] = layers[0] - 1, layers[-1] + 1
    shards = chosen["data_parallel"] if chosen["zero_stage"] else 1
    if probe.choice == "data_parallel_shard":
        if not chosen["zero_stage"]:
            return None
        shards = probe.value
    if probe.choice == "outer_zero_stage" and probe.value and chosen["zero_stage"]:
        shards = _NUM_REPLICAS // 2
    usual = "none" if stages == 1 else "1f1b" if virtual == 1 else "interleaved"
    return TrainingConfig(
        **chosen,
        data_parallel_shard=shards,
        sequence_parallel=probe.value
        if probe.choice == "sequence_parallel"
        else is_split and chosen["tensor_parallel"] > 1,
        pipeline_schedule=probe.value if probe.choice == "pipeline_schedule" else usual,
        layers_per_chunk=tuple(layers),
        recompute_num_layers=1 if chosen["activation_recompute"] == "block" else 0,
        global_batch_size=chosen["micro_batch_size"] * chosen["num_microbatches"] * chosen["data_parallel"],
    )


def _plan(config: TrainingConfig, probe: Probe) -> Plan:
    """A plan with nothing but choices and places."""
    table = [divmod(rank, _DEVICES_PER_HOST) for rank in range(config.world_size)]
    if probe.value == "devices reversed":
        table = [(host, _DEVICES_PER_HOST - 1 - device) for host, device in table]
    elif probe.value == "unequal hosts":
        few = _DEVICES_PER_HOST // 2
        table = [
            (0, rank) if rank < few else divmod(rank - few + _DEVICES_PER_HOST, _DEVICES_PER_HOST)
            for rank in range(len(table))
        ]
    elif probe.value == "any order":
        table = [(rank % 2, rank // 2) for rank in range(len(table))]
    return Plan(
        kind="training",
        spec={"kind": "training"},
        spec_digest="",
        catalog_digest="",
        config=cast("Mapping[str, Any]", config.choices),
        predicted={},
        solution={"status": "feasible"},
        rank_table=tuple(table),
    )
