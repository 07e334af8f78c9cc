"""From a serving spec to a problem with every name looked up; all mismatches are reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.constants.own import own_name
from meshplan.catalogs.constants.serving import OwnLoad, ServingCalibration
from meshplan.catalogs.errors import Problem
from meshplan.catalogs.hardware import Cluster, NodeGroup, NodeType, Price
from meshplan.catalogs.models.config import read_formats
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.identity import cluster_identity
from meshplan.planner.cluster.lookup import (
    config_path,
    drives_bytes_per_s,
    look_up_shape,
    node_in_place,
    node_of,
    node_price,
)
from meshplan.planner.cluster.machine import Machine, machine_of
from meshplan.planner.cluster.unused import check_price_filter, check_several_types, check_training_only
from meshplan.planner.core.problems import Problems
from meshplan.planner.serving.checks import check_choices, check_formats, served_shape, share_options
from meshplan.planner.serving.estimator.encoders.sound import frames
from meshplan.planner.serving.problem.config import KvConnector, Role, Speculation
from meshplan.planner.serving.problem.engines.table import ENGINES
from meshplan.planner.serving.problem.expert_routing import ExpertRouting, expert_routing
from meshplan.planner.serving.problem.problem import Pinned, ServingLimits, ServingProblem
from meshplan.planner.serving.problem.quantization import Quantization, checkpoint_formats, named_formats
from meshplan.planner.serving.problem.requests import ServingWorkload
from meshplan.planner.serving.problem.spec import ServingSpec
from meshplan.planner.serving.problem.speculation import computed_cost, speculation_options
from meshplan.planner.serving.problem.weight_tiers import Separation, Tiering
from meshplan.planner.serving.problem.workload.asked import asked_workload

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.models.stored_formats import StoredFormats

ANY = "any"
CHECKPOINT_FORMATS = "formats of the checkpoint"  # source of a plan whose model's own files state its formats


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedServing:
    """A serving problem and its sources.

    Args:
        problem: for the solver.
        prices: node type → its price; only those that are known.
        sources: item → citation, for the plan's provenance.
    """

    problem: ServingProblem
    prices: Mapping[str, Price]
    sources: Mapping[str, str]


def resolve_serving(
    spec: ServingSpec, catalog: Catalog, base: Path, *, shape: ModelShape | None = None
) -> ResolvedServing:
    """Look up every name of a spec.

    Args:
        spec: the question.
        catalog: where the names are looked up.
        base: folder against which model and trace paths are resolved.
        shape: the model, if it is known already.

    Raises:
        SpecError: unknown names and impossible choices, all at once.
    """
    problems = Problems()
    shape = shape or look_up_shape(spec.model, catalog, base, problems)
    nodes = _node_types(spec, catalog, problems)
    shape, workload = _what_is_served(spec, shape, base, problems)
    prices, machines = _priced_machines(spec, nodes, problems)
    stored = _stored(spec, shape, catalog, base, problems)
    problems.check()
    formats = _formats(spec, shape, catalog, stored)
    spec = _with_engine(spec, shape, machines, formats)
    rules = ENGINES[spec.constraints.target]
    check_formats(spec, formats, machines, problems)
    check_choices(spec, shape, machines, prices, problems, finds_what_is_held=workload.finds_what_is_held)
    experts = expert_routing(spec.experts, shape, base, problems)
    tiering = _tiering(spec, shape, machines, experts, problems)
    problems.check()
    recipe = engine_recipes()[rules.name]
    own = workload.own_load(shape.slug)
    calibrations = _calibrations(spec, catalog, recipe.constants_name, machines, own)
    draft = _draft_shape(spec, catalog)
    problem = ServingProblem(
        shape=shape,
        machines=machines,
        workload=workload,
        slos=spec.slos,
        objective=spec.objective,
        limits=_limits(spec),
        rules=rules,
        recipe=recipe,
        calibrations=calibrations,
        quantizations=formats,
        speculation=_stated_drafts(spec, shape, draft),
        speculation_options=_speculation_options(spec, shape, draft, problems),
        draft_shape=draft,
        kv_tier=None if spec.kv_tier is None else spec.kv_tier.value,
        kv_stores=() if spec.kv_tier is None else tuple(spec.kv_tier.choose or ()),
        kv_connector=spec.kv_connector or KvConnector.NIXL,
        pinned=_pinned(spec),
        experts=experts,
        power_caps_w=tuple(spec.power_caps_w or ()),
        share_options=share_options(spec, machines, problems),
        tiering=tiering,
        separation=_separation(spec, machines, calibrations),
    )
    sources = _sources(problem, prices) | ({} if stored is None else {CHECKPOINT_FORMATS: stored.description})
    return ResolvedServing(problem=problem, prices=prices, sources=sources)


def _what_is_served(
    spec: ServingSpec, shape: ModelShape | None, base: Path, problems: Problems
) -> tuple[ModelShape, ServingWorkload]:
    """The model as it is served, and its requests.

    Raises:
        SpecError: what was looked up is missing, or does not fit together.
    """
    problems.check()
    if shape is None:
        raise AssertionError("a missing shape is a problem, and problems were checked")
    shape = served_shape(spec, shape, problems)
    workload = asked_workload(spec.workload, shape, base, problems, sound_frames=frames(shape))
    problems.check()
    return shape, workload


def _priced_machines(
    spec: ServingSpec, nodes: Mapping[str, tuple[NodeType, int]], problems: Problems
) -> tuple[dict[str, Price], dict[str, Machine]]:
    """Node type → its price, where one is known, and node type → its devices and links."""
    prices: dict[str, Price] = {}
    machines: dict[str, Machine] = {}
    for node, count in nodes.values():
        price = node_price(node, spec.cluster, spec.constraints.price)
        if price is not None:
            prices[node.slug] = price
        machine = _machine(node, count, price, spec.cluster.host_memory)
        machines[node.slug] = replace(machine, nvme_bytes_per_s=drives_bytes_per_s(spec.cluster, problems))
    check_price_filter(spec.cluster, spec.constraints.price, [node for node, _ in nodes.values()], problems)
    return prices, machines


def _limits(spec: ServingSpec) -> ServingLimits:
    return ServingLimits(
        max_devices=spec.constraints.max_devices,
        rents_devices=spec.constraints.rent == "device",
        max_usd_per_hour=spec.constraints.max_usd_per_hour,
        max_power_w=spec.constraints.max_power_w,
    )


def _draft_shape(spec: ServingSpec, catalog: Catalog) -> ModelShape | None:
    """The draft model, where one is named that the catalog has; heads of EAGLE are none."""
    asked = spec.speculation
    methods = () if asked is None else (asked.method, *(asked.choose or ()))
    if asked is None or asked.draft_model is None or (methods != (None,) and "draft_model" not in methods):
        return None
    name = catalog.model_name(asked.draft_model)
    return None if name is None else catalog.model_shape(name.slug)


def _stated_drafts(spec: ServingSpec, shape: ModelShape, draft: ModelShape | None) -> Speculation | None:
    """Drafts as the spec states them; a draft model of the catalog brings its cost."""
    asked = spec.speculation
    stated = None if asked is None else asked.value
    if asked is None or stated is None or draft is None or asked.draft_cost is not None:
        return stated
    return replace(stated, draft_cost=computed_cost(shape, "draft_model", stated.num_draft_tokens, draft))


def _speculation_options(
    spec: ServingSpec, shape: ModelShape, draft: ModelShape | None, problems: Problems
) -> tuple[Speculation, ...]:
    """Methods and depths of drafts to choose from; those are left out that the model or the spec has no drafts for."""
    asked = spec.speculation
    if asked is None or asked.choose is None:
        return ()
    methods = tuple(asked.choose)
    if "mtp" in methods and not shape.num_nextn_predict_layers:
        problems.say("speculation.choose", f"mtp: {shape.name} has no prediction layers")
    if {"eagle3", "draft_model"} <= set(methods):
        problems.say("speculation.choose", "eagle3 and draft_model need a checkpoint each: ask one at a time")
    if "draft_model" in methods and asked.draft_cost is None and draft is None:
        missing = f"{asked.draft_model} is not in the catalog: say what one step of it takes over one of the model"
        problems.say("speculation.draft_cost", missing)
    problems.check()
    return speculation_options(shape, asked.acceptance_profile, methods, asked.draft_cost, draft)


def _calibrations(
    spec: ServingSpec, catalog: Catalog, engine: str, machines: Mapping[str, Machine], own: OwnLoad
) -> dict[str, ServingCalibration]:
    """The constants of an engine on each node type of the cluster, nearest to what own runs are of."""
    return {
        name: serving_calibration(
            catalog, engine, machine.device.architecture, cluster=cluster_identity(spec.cluster, name)
        ).for_load(own)
        for name, machine in machines.items()
    }


def serving_calibration(catalog: Catalog, engine: str, architecture: str, *, cluster: str = "") -> ServingCalibration:
    """Calibrated constants: adapted to own runs of the engine on this cluster, else of the engine release on the
    hardware generation, else of the engine on any generation, else the global set, else the defaults.

    Args:
        catalog: where sets are stored.
        engine: name of the constants of an engine release.
        architecture: hardware generation.
        cluster: which one (:func:`meshplan.planner.cluster.identity.cluster_identity`); empty: any.
    """
    own = ((engine, own_name(architecture, cluster)),) if cluster else ()
    for name, generation in (*own, (engine, architecture), (engine, ANY), (ANY_ENGINE, ANY)):
        document = catalog.calibration(name, generation)
        if document is not None:
            return ServingCalibration.from_document(document)
    return ServingCalibration(engine=ANY_ENGINE, architecture=ANY, source="defaults: nothing was fitted")


# Name under which constants over all engines are stored; training's own global set is "any".
ANY_ENGINE = "any-engine"


def _stored(
    spec: ServingSpec, shape: ModelShape, catalog: Catalog, base: Path, problems: Problems
) -> StoredFormats | None:
    """The formats that the model's own files state, where the spec names none and there are such files."""
    path = config_path(spec.model, catalog, base)
    if spec.fixed.quantization is not None or spec.quantization or path is None:
        return None
    found: list[Problem] = []
    stored = read_formats(path, shape, found)
    for problem in found:
        problems.say("model", f"{spec.model}: {problem}; or state quantization")
    return stored


def _formats(
    spec: ServingSpec, shape: ModelShape, catalog: Catalog, stored: StoredFormats | None
) -> tuple[Quantization, ...]:
    """Formats that the plan may choose from: as asked, else those of the checkpoint, else as it is published."""
    if stored is not None:
        parts = {"attention": stored.attention, "mlp": stored.mlp, "experts": stored.experts}
        return (Quantization(**parts, kv_cache=spec.kv_cache),)
    if spec.fixed.quantization is not None:
        schemes: Sequence[str] = (str(spec.fixed.quantization),)
    elif spec.quantization:
        schemes = spec.quantization
    else:
        name = catalog.model_name(spec.model)
        return (named_formats(spec.model, name.scheme if name is not None else "", shape, spec.kv_cache),)
    return tuple(checkpoint_formats(shape, scheme, spec.kv_cache) for scheme in schemes)


def _node_types(spec: ServingSpec, catalog: Catalog, problems: Problems) -> dict[str, tuple[NodeType, int]]:
    """Node types of the cluster and how many nodes of each."""
    found: dict[str, tuple[NodeType, int]] = {}
    check_training_only(spec.cluster, problems)
    check_several_types(spec.cluster, problems)
    if spec.cluster.drive is not None and spec.cluster.host_memory is None and spec.workload.num_prefixes is None:
        problems.say(
            "cluster.drive",
            "holds weights beyond cluster.host_memory, or prefixes beyond the devices: give host_memory or "
            "workload.num_prefixes, or leave it out",
        )
    if spec.cluster.nodes is not None:
        for index, item in enumerate(spec.cluster.nodes):
            if item.devices is not None and spec.constraints.rent == "device":
                problems.say(
                    f"cluster.nodes[{index}].devices",
                    "with constraints.rent: device no whole node is paid: "
                    "ask for one node type at a time, with constraints.max_devices",
                )
            node = node_of(index, spec.cluster, catalog, problems)
            if node is not None:
                found[node.slug] = (node, item.count + (found[node.slug][1] if node.slug in found else 0))
    elif spec.cluster.devices is not None:
        described = node_in_place(spec.cluster, catalog, problems)
        if described is not None:
            found[described.slug] = (described, spec.cluster.devices.nodes)
    return found


def _with_engine(
    spec: ServingSpec, shape: ModelShape, machines: Mapping[str, Machine], formats: Sequence[Quantization]
) -> ServingSpec:
    """The spec with the engine that serves it where it names none and states host memory."""
    if spec.cluster.host_memory is None or not machines:
        return spec
    from meshplan.planner.serving.tiers.question import engine_for  # start-up: most questions have no tiers

    engine = engine_for(spec, shape, machines, formats)
    return spec.model_copy(update={"constraints": spec.constraints.model_copy(update={"target": engine})})


def _tiering(
    spec: ServingSpec,
    shape: ModelShape,
    machines: Mapping[str, Machine],
    experts: ExpertRouting | None,
    problems: Problems,
) -> Tiering | None:
    """What may lie in host memory; None where the spec neither states nor pins any."""
    if spec.cluster.host_memory is None and spec.fixed.device_experts is None:
        return None
    from meshplan.planner.serving.tiers.question import host_tiering  # start-up: most questions have no tiers

    return host_tiering(spec, shape, machines, experts, problems)


def _separation(
    spec: ServingSpec, machines: Mapping[str, Machine], calibrations: Mapping[str, ServingCalibration]
) -> Separation | None:
    """What may be split between attention and FFN devices; None where the spec does not ask."""
    if spec.attention_ffn is None:
        return None
    from meshplan.planner.serving.attention_ffn.placement import AttentionFfn  # start-up: most questions have none

    constants = {name: calibration.constants for name, calibration in calibrations.items()}
    return AttentionFfn(machines=machines, constants=constants, is_asked=spec.attention_ffn == "disaggregated")


def _machine(node: NodeType, count: int, price: Price | None, host_memory_bytes: float | None = None) -> Machine:
    if host_memory_bytes is not None:
        node = replace(node, host_memory_bytes=int(host_memory_bytes))
    cluster = Cluster(name=node.slug, groups=(NodeGroup(node=node, count=count),))
    each = None if price is None else price.usd_per_hour / node.num_devices
    return machine_of(cluster, usd_per_hour_per_device=each)


def _pinned(spec: ServingSpec) -> Pinned:
    fixed = spec.fixed
    mode = fixed.is_disaggregated
    by = {"fixed.mode": fixed.mode, "fixed.prefill": fixed.prefill.pins_something}
    by["fixed.decode"] = fixed.decode.pins_something
    mode_pins = tuple(name for name, stated in by.items() if stated)
    if spec.attention_ffn == "disaggregated":
        mode, mode_pins = True, ()  # prefill has workers of its own
    if spec.workload.task != "generate" or spec.workload.audio is not None:
        mode, mode_pins = False, ()  # prefill is all there is, or what was encoded is not moved
    return Pinned(
        is_disaggregated=mode,
        mode_pins=mode_pins,
        by_role={
            Role.MIXED: fixed.pinned(),
            Role.PREFILL: fixed.prefill.pinned(),
            Role.DECODE: fixed.decode.pinned(),
        },
        memory_fractions={
            role: part.memory_fraction
            for role, part in ((Role.MIXED, fixed), (Role.PREFILL, fixed.prefill), (Role.DECODE, fixed.decode))
            if part.memory_fraction is not None
        },
    )


def _sources(problem: ServingProblem, prices: Mapping[str, Price]) -> dict[str, str]:
    sources = {
        f"model {problem.shape.slug}": problem.shape.source,
        f"engine {problem.rules.name} {problem.rules.version}": problem.rules.limits_source,
    }
    if problem.experts is not None:
        sources["routing of experts"] = problem.experts.source
    for name, calibration in problem.calibrations.items():
        sources[f"constants on {name}"] = (
            f"{calibration.engine} on {calibration.architecture}, {calibration.num_runs} runs: {calibration.source}"
        )
    for name, price in prices.items():
        sources[f"price of {name}"] = f"{price.provider} {price.terms} {price.date}: {price.source}"
    return {key: value for key, value in sources.items() if value}
