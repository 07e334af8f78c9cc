"""Which choices each target takes: found by emitting probe plans, not by a list that somebody keeps.

A probe changes one choice of a plan that the target takes otherwise. A probe that comes back as files is taken; one
that raises :class:`~meshplan.catalogs.errors.CannotExpressError` is refused, with the emitter's own reason. Which
values are tried is part of the table of choices (:mod:`meshplan.planner.training.problem.choices`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, cast

from meshplan.catalogs.database.seeds import seed_model_shape
from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.releases import since_text
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch.registry import TARGETS, Target, emit, features_of, verified_of
from meshplan.planner.training.problem.choice import Choice
from meshplan.planner.training.problem.choices import BY_NAME, CHOICES, PROBE_REPLICAS, plain_defaults
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.layers import split_layers_evenly
from meshplan.planner.training.problem.problem import Phase, TrainingConfig
from meshplan.planner.training.problem.schedules import SCHEDULES, schedules_of

_DEVICES_PER_HOST = 8
# What a probe may change to be taken at all: stages of sharding that a target has, and norms split or not.
_COMPANIONS = tuple(product((1, 3, 0), (True, False)))
# The rank mapping is no choice of the configuration, but targets differ in which they take.
RANK_TABLE = "rank_table"
_PROBES: Mapping[str, Sequence[Any]] = {
    **{choice.name: choice.tried for choice in CHOICES if choice.tried},
    RANK_TABLE: ("in order", "devices reversed", "unequal hosts", "any order"),
}
_NOTHING_TO_VERIFY = "refused before anything is written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One choice that is tried.

    Args:
        choice: name of a choice, or :data:`RANK_TABLE`.
        value: what it is set to.
    """

    choice: str
    value: Any


def support_matrix() -> tuple[Mapping[str, Any], ...]:
    """Which choices each emit target takes, found by emitting probes of two models that ship with meshplan."""
    # TorchTitan trains registered models only: the probes are two of them.
    return support_rows(seed_model_shape("llama-3.1-8b"), seed_model_shape("qwen3-30b-a3b"))


def support_rows(dense: ModelShape, experts: ModelShape) -> tuple[Mapping[str, Any], ...]:
    """Rows of target, feature, takes, refuses, expressed_by, since, verified_by, parser_verified.

    ``since`` names flags that older releases lack (:mod:`meshplan.planner.emit.releases`).

    Args:
        dense: a model that every framework knows, for most probes.
        experts: one with experts.
    """
    return tuple(row for target in TARGETS for row in _target_rows(target, dense, experts))


def _target_rows(target: Target, dense: ModelShape, experts: ModelShape) -> Iterator[Mapping[str, Any]]:
    said = {feature.name: feature for feature in features_of(target)}
    # An engine's plan has pools and roles of its own: its rows are what its table says.
    choices = () if target.serves else (RANK_TABLE,) if target.wraps else tuple(_PROBES)
    for choice in (*choices, *(name for name in said if name not in choices)):
        row = BY_NAME.get(choice)
        shape = experts if row is not None and row.about_experts else dense
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
        feature = said.get(choice) or _without_a_flag(row, takes)
        yield {
            "target": target.name,
            "feature": choice,
            "takes": ", ".join(takes),
            "refuses": "; ".join(refuses),
            "expressed_by": "" if feature is None else feature.expressed_by,
            "since": "" if feature is None else since_text(target.name, feature.expressed_by),
            "verified_by": _NOTHING_TO_VERIFY if feature is None else feature.verified_by,
            "parser_verified": {} if verified is None else asdict(verified),
        }


def _without_a_flag(choice: Choice | None, takes: Sequence[str]) -> Feature | None:
    """How a target expresses a choice that it has no flag of its own for, because others decide it."""
    if choice is None or not takes:
        return None
    return Feature(
        name=choice.name,
        expressed_by=choice.follows or f"{', '.join(takes).lower()}: no flag needed",
        verified_by="as the choices that it follows from",
    )


def choice_rows() -> tuple[Mapping[str, Any], ...]:
    """Every choice of a training plan: name, abbreviations, type, default, meaning, which frameworks take it, and
    from which of their releases on where that is known.
    """
    taken: dict[str, list[str]] = {choice.name: [] for choice in CHOICES}
    since: dict[str, list[str]] = {choice.name: [] for choice in CHOICES}
    for row in support_matrix():
        rules = FRAMEWORKS.get(row["target"])
        if rules is not None and row["feature"] in taken and _is_free(row):
            taken[row["feature"]].append(f"{rules.name} {rules.version}")
            since[row["feature"]] += [f"{rules.name}: {row['since']}"] if row["since"] else []
    return tuple(
        {
            "name": choice.name,
            "spec": f"{choice.section}.{choice.name}" if choice.section else "",
            "abbreviations": ", ".join(choice.abbreviations),
            "type": choice.type_text,
            "default": choice.follows if choice.default is None else str(choice.default).lower(),
            "about": choice.about,
            "frameworks": ", ".join(taken[choice.name]),
            "since": ", ".join(since[choice.name]),
        }
        for choice in CHOICES
    )


def _is_free(row: Mapping[str, Any]) -> bool:
    """Whether a row of the matrix leaves a choice: several values are taken, or all that were tried."""
    return ", " in row["takes"] or not row["refuses"]


def _tried(target: Target, shape: ModelShape, probe: Probe) -> tuple[EmittedPlan | None, str]:
    """The files of some plan with this choice; else the reason for the plan that is nearest to being taken."""
    framework = "megatron" if target.wraps else None
    reasons = []
    for zero_stage, is_split in _COMPANIONS:
        config = _config(shape, probe, zero_stage, is_split)
        if config is None:
            continue
        if probe.choice == "context_parallel" and probe.value > 1 and target.name in FRAMEWORKS:
            config = replace(config, context_parallel_style=FRAMEWORKS[target.name].context_parallel_style)
        request = TrainingRequest(
            plan=_plan(config, probe),
            shape=shape,
            script="train.py" if target.takes_script else "",
            devices_per_host=_DEVICES_PER_HOST,
        )
        try:
            return emit(target.name, request, framework=framework), ""
        except CannotExpressError as error:
            reasons.append(error.what)
    return None, min(reasons, key=len).removeprefix("this configuration: ")


def _config(shape: ModelShape, probe: Probe, zero_stage: int, is_split: bool) -> TrainingConfig | None:
    """A configuration with the probed choice; None where the companions contradict it."""
    choice, value = probe.choice, probe.value
    if choice == "zero_stage" and zero_stage not in {value, 1}:
        return None
    chosen: dict[str, Any] = {
        **plain_defaults(),
        "data_parallel": PROBE_REPLICAS,
        "zero_stage": zero_stage,
        "num_microbatches": 16,
        "sequence_length": 4096,
    }
    if choice in BY_NAME:
        chosen |= {choice: value, **BY_NAME[choice].probe_with}
    if choice in {"parameter_offload", "offload_to"} and value not in {False, "host"}:
        chosen["optimizer_offload"] = True  # some have one flag for both, and NVMe holds nothing by itself
    if choice == "activation_offload" and value:
        chosen["activation_recompute"] = "full"
    if value == "all-to-all+ring":
        chosen["context_parallel_heads"] = 2
    if choice == "pipeline_schedule":
        chosen["virtual_pipeline_stages"] = SCHEDULES[value].chunks
    if choice == RANK_TABLE:
        chosen["data_parallel"] = 2 * _DEVICES_PER_HOST
    if choice == "data_parallel_shard" and not zero_stage:
        return None
    if choice == "outer_zero_stage" and value and zero_stage:
        chosen["data_parallel_shard"] = PROBE_REPLICAS // 2
    stages, chunks = chosen["pipeline_parallel"], chosen["virtual_pipeline_stages"]
    layers = list(split_layers_evenly(shape.num_hidden_layers, stages * chunks))
    if value == "uneven":
        layers[0], layers[-1] = layers[0] - 1, layers[-1] + 1
    chosen["layers_per_chunk"] = tuple(layers)
    chosen.setdefault("data_parallel_shard", chosen["data_parallel"] if chosen["zero_stage"] else 1)
    chosen.setdefault("sequence_parallel", is_split and chosen["tensor_parallel"] > 1)
    chosen.setdefault("pipeline_schedule", schedules_of(stages, chunks, allowed=MEGATRON.pipeline_schedules)[0])
    chosen["recompute_num_layers"] = 1 if chosen["activation_recompute"] == "block" else 0
    batch = chosen["micro_batch_size"] * chosen["num_microbatches"] * chosen["data_parallel"]
    return TrainingConfig(**{**chosen, "global_batch_size": batch})


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
        # From a checkpoint: some targets only fine-tune, none only pre-trains.
        spec={"kind": "training", "workload": {"phase": Phase.FINE_TUNING.value}},
        spec_digest="",
        catalog_digest="",
        config=cast("Mapping[str, Any]", config.choices),
        predicted={},
        solution={"status": "feasible"},
        rank_table=tuple(table),
    )
