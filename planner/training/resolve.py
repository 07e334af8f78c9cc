"""From a training spec to a problem with everything looked up, every invalid value reported at once.

Names become catalog objects, units are already numbers, prices are chosen, the framework's rules and the calibration
are attached. What is impossible in itself (a degree that does not divide the heads, a precision that the device lacks)
is a :class:`~meshplan.catalogs.errors.SpecError`; what merely does not fit is left to the solver, which answers with
the nearest miss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.constants.framework_recipes import Recipe, recipe_named
from meshplan.catalogs.constants.own import own_name
from meshplan.catalogs.constants.training import Calibration, FrameworkRecipe
from meshplan.catalogs.errors import UnknownEntryError, closest_names, did_you_mean
from meshplan.catalogs.hardware import Cluster, NodeGroup, Price
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.identity import cluster_identity
from meshplan.planner.cluster.lookup import (
    ANY,
    IN_PLACE,
    look_up_language_model,
    node_in_place,
    node_of,
    node_price,
)
from meshplan.planner.cluster.machine import Machine, machine_of
from meshplan.planner.cluster.measured_links import (
    host_names,
    measured_network,
    profile_problems,
    slowest_link,
    with_network,
)
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.spec import ClusterSpec
from meshplan.planner.cluster.topologies import described_network, usable_nodes
from meshplan.planner.cluster.unused import check_price_filter, check_serving_only, check_several_types
from meshplan.planner.core.problems import Problems
from meshplan.planner.goodput.resolve import assumed, run_setting
from meshplan.planner.goodput.run import Stretches
from meshplan.planner.training.checks import check_choices, check_framework, check_layers, check_mapping, check_offload
from meshplan.planner.training.estimator.states import checkpoint_bytes
from meshplan.planner.training.problem.encoder_decoder import check_stacks, target_length, whole_stacks
from meshplan.planner.training.problem.frameworks.rules import (
    FrameworkRules,
    keeping_to_documents,
    training_every_weight,
    without_layer_recompute,
)
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import OFFLOADS, TrainingLimits, TrainingProblem, TrainingWorkload
from meshplan.planner.training.problem.spec import TrainingSpec

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.measurements.types import ClusterProfile
    from meshplan.planner.lengths.packing import PackedDocuments


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A problem and what it was made of.

    Args:
        problem: for the solver.
        cluster: the hardware, hosts in order.
        price: what the money rests on; None where no price is known.
        sources: what → citation, for the plan's provenance.
        mapping: ``best``, ``identity``, or the nodes in the order of the ranks.
        hosts: names of the hosts by number, where a profile gives them.
        identity: which cluster it is, for own runs.
        assumed: conditions of the run that the spec leaves out.
    """

    problem: TrainingProblem
    cluster: Cluster
    price: Price | None
    sources: Mapping[str, str]
    mapping: str | tuple[int, ...] = "best"
    hosts: tuple[str, ...] = ()
    identity: str = ""
    assumed: tuple[str, ...] = ()


def resolve_training(spec: TrainingSpec, catalog: Catalog, base: Path, *, shape: ModelShape | None = None) -> Resolved:
    """Look everything up.

    Args:
        spec: the question.
        catalog: where the names are looked up.
        base: folder against which a model path is resolved.
        shape: the model where it is known already.

    Raises:
        SpecError: unknown names and impossible choices, all of them.
    """
    problems = Problems()
    if shape is None:
        shape = look_up_language_model(spec.model, catalog, base, problems)
        _check_checkpoint(spec.model, catalog, problems)
    cluster = _cluster(spec.cluster, catalog, problems)
    rules = _rules(spec, problems)
    problems.check()
    if shape is None or cluster is None or rules is None:
        raise AssertionError("a missing part is a problem, and problems were checked")
    node = cluster.groups[0].node
    price = node_price(node, spec.cluster, spec.constraints.price)
    check_serving_only(
        spec.cluster, "say constraints.offload_to and nvme_bandwidth of drives, or leave it out", problems
    )
    check_several_types(spec.cluster, problems)
    check_price_filter(spec.cluster, spec.constraints.price, [node], problems)
    machine, profile = _machine(spec, cluster, price, catalog, problems)
    workload = _workload(spec, shape, rules, base)
    rules = _of_what_is_trained(rules, shape, workload)
    _check(spec, shape, machine, rules, problems)
    limits = _limits(spec, machine, workload, price, problems)
    identity = cluster_identity(spec.cluster, cluster.groups[0].node.slug)
    calibration = calibration_for(catalog, rules.name, machine.device.architecture, cluster=identity)
    run = _run(spec, shape, machine, workload, calibration.recipe, problems)
    problems.check()
    problem = TrainingProblem(
        shape=shape,
        machine=machine,
        workload=workload,
        rules=rules,
        limits=limits,
        objective=spec.objective,
        calibration=calibration,
        num_training_tokens=spec.workload.num_training_tokens,
        search_over=frozenset(spec.constraints.search_over),
        run=run,
    )
    problem = problem.with_calibration(calibration).with_fixed(spec.fixed.pinned())
    sources = _sources(problem, cluster, price, profile)
    return Resolved(
        problem=problem,
        cluster=cluster,
        price=price,
        sources=sources,
        mapping=spec.mapping if isinstance(spec.mapping, str) else tuple(spec.mapping),
        hosts=() if profile is None else host_names(profile),
        identity=identity,
        assumed=() if spec.run is None else tuple(assumed(spec.run)),
    )


def _check(spec: TrainingSpec, shape: ModelShape, machine: Machine, rules: FrameworkRules, problems: Problems) -> None:
    """What of the question cannot be met, whatever is searched."""
    check_stacks(spec, shape, problems)
    check_mapping(spec, machine.network, problems)
    check_choices(spec, shape, machine, problems)
    check_framework(spec, shape, rules, problems)
    check_layers(spec, shape, rules, problems)
    check_offload(spec, machine, problems)


def _run(
    spec: TrainingSpec,
    shape: ModelShape,
    machine: Machine,
    workload: TrainingWorkload,
    recipe: FrameworkRecipe,
    problems: Problems,
) -> Stretches | None:
    """What interruptions make of the run; None where the spec says nothing of them."""
    if spec.run is None:
        return None
    return Stretches(
        run_setting(
            spec.run,
            state_bytes=checkpoint_bytes(shape, workload, recipe),
            devices_per_node=machine.devices_per_host,
            spares=spec.cluster.spare_nodes * machine.domain_size // machine.devices_per_host,
            problems=problems,
        )
    )


def _check_checkpoint(model: str, catalog: Catalog, problems: Problems) -> None:
    """A quantised checkpoint is served, not trained."""
    name = catalog.model_name(model)
    if name is not None and name.scheme:
        problems.say("model", f"{model} holds {name.scheme} weights, which are not trained: give {name.slug}")


def _rules(spec: TrainingSpec, problems: Problems) -> FrameworkRules | None:
    """Rules of the target framework."""
    rules = FRAMEWORKS.get(spec.constraints.target)
    if rules is None:
        hint = did_you_mean(closest_names(spec.constraints.target, FRAMEWORKS))
        problems.say("constraints.target", f"no rules are known for {spec.constraints.target!r}{hint}")
        return None
    return without_layer_recompute(rules) if spec.fixed.expert_parallel_overlap else rules


def _of_what_is_trained(rules: FrameworkRules, shape: ModelShape, workload: TrainingWorkload) -> FrameworkRules:
    """The framework's rules for every weight or adapters, documents that share a sequence, an encoder in front."""
    documents = workload.documents
    if not workload.phase.has_adapters:
        rules = training_every_weight(rules)
    if documents is not None and documents.share_sequences and not documents.attends_across:
        rules = keeping_to_documents(rules)
    return rules if shape.encoder is None else whole_stacks(rules)


def _machine(
    spec: TrainingSpec, cluster: Cluster, price: Price | None, catalog: Catalog, problems: Problems
) -> tuple[Machine, ClusterProfile | None]:
    """The cluster as the estimator sees it, with its network where links differ, and the profile that it comes from."""
    per_device = None if price is None else price.usd_per_hour / cluster.groups[0].node.num_devices
    machine = machine_of(cluster, usd_per_hour_per_device=per_device)
    machine = replace(machine, nvme_bytes_per_s=spec.constraints.nvme_bandwidth)
    profile = _profile(spec.cluster, machine, catalog, problems)
    network = _network(spec.cluster, machine, profile, problems)
    if network is not None:
        machine = with_network(machine, network, spare_nodes=spec.cluster.spare_nodes, measured=profile is not None)
    return machine, profile


def _workload(spec: TrainingSpec, shape: ModelShape, rules: FrameworkRules, base: Path) -> TrainingWorkload:
    """What one step must do."""
    target = spec.workload.decoder_sequence_length or target_length(spec.workload.sequence_length)
    return TrainingWorkload(
        documents=_documents(spec, base),
        sequence_length=spec.workload.sequence_length,
        decoder_sequence_length=None if shape.encoder is None else target,
        global_batch_size=spec.workload.num_sequences,
        precision=spec.workload.precision,
        scales_rows=rules.scales_rows and spec.workload.precision == "fp8",
        phase=spec.workload.phase,
        lora_rank=spec.workload.lora_rank or 0,
        adapts_mlp=spec.workload.adapts_mlp,
        trains_vocabulary=spec.workload.trains_vocabulary,
        frozen_weights=spec.workload.frozen_weights,
        drops_tokens=spec.workload.has_capacity,
        expert_capacity_factor=spec.workload.expert_capacity_factor or 1.0,
        expert_imbalance=spec.workload.expert_imbalance,
        is_eager=rules.is_eager,
    )


def _documents(spec: TrainingSpec, base: Path) -> PackedDocuments | None:
    """What lies in a sequence; None where it is one document each."""
    lengths = spec.workload.sequence_lengths
    if lengths is None:
        return None
    # start-up: most questions have one length
    from meshplan.planner.lengths.reading import packed_documents

    return packed_documents(lengths, spec.workload.sequence_length, base)


def named_profile(spec: ClusterSpec, catalog: Catalog, problems: Problems) -> ClusterProfile | None:
    """The measured links that the spec names; None where it names none, or none that the catalog has."""
    if spec.profile is None:
        return None
    # start-up: only a spec that names a profile reads measurements
    from meshplan.catalogs.measurements.rows import Measurements

    try:
        return Measurements(catalog.engine).cluster(spec.profile)
    except UnknownEntryError as error:
        problems.say("cluster.profile", f"{error} (meshplan profile links --name {spec.profile})")
        return None


def _profile(spec: ClusterSpec, machine: Machine, catalog: Catalog, problems: Problems) -> ClusterProfile | None:
    """The measured links that the spec names, where they fit the cluster."""
    profile = named_profile(spec, catalog, problems)
    if profile is None:
        return None
    found = profile_problems(machine, profile)
    problems.extend(found)
    return None if found else profile


def _network(spec: ClusterSpec, machine: Machine, profile: ClusterProfile | None, problems: Problems) -> Network | None:
    """The links between nodes where they were measured or differ, or where not all nodes may be used."""
    if profile is None:
        return described_network(spec, machine, problems)
    if machine.num_devices == machine.domain_size:
        return None
    usable = usable_nodes(spec, machine, machine.num_devices // machine.domain_size, problems)
    return measured_network(machine, profile, usable)


def calibration_for(catalog: Catalog, framework: str, architecture: str, *, cluster: str = "") -> Calibration:
    """The constants for a framework on a hardware generation, under the framework's own layout.

    On a cluster with own runs of the framework: the set that was adapted to them. Times elsewhere: fitted for both,
    else for a relative of the framework on the generation, else the global set, else the literature's. Memory: fitted
    for the framework, on whatever generation, else as with the times.

    Args:
        catalog: where sets are stored.
        framework: our name.
        architecture: hardware generation.
        cluster: which one (:func:`meshplan.planner.cluster.identity.cluster_identity`); empty: any.
    """
    recipe = recipe_named(framework)
    own = catalog.calibration(recipe.calibrated_as, own_name(architecture, cluster)) if cluster else None
    if own is not None:
        return replace(Calibration.from_document(own), recipe=recipe.recipe)
    found = replace(_timed(catalog, recipe, architecture), recipe=recipe.recipe)
    held = catalog.calibration(recipe.calibrated_as, ANY)
    if held is None:
        return found
    if found.framework != recipe.calibrated_as:
        memory = Calibration.from_document(held)
        found = replace(found, memory=memory.memory, memory_basis=memory.memory_basis)
    if recipe.calibrated_as == recipe.framework:
        return found
    return replace(found, memory_basis=f"{found.memory_basis}, the constants of {recipe.calibrated_as}")


def _timed(catalog: Catalog, recipe: Recipe, architecture: str) -> Calibration:
    """The set whose constants of time a framework takes on a hardware generation."""
    own = catalog.calibration(recipe.calibrated_as, architecture)
    if own is not None:
        return Calibration.from_document(own)
    stored = catalog.calibration(ANY, ANY)
    shared = None if stored is None else Calibration.from_document(stored)
    for relative in recipe.relatives:
        document = catalog.calibration(relative, architecture)
        if document is not None:
            return Calibration.from_document(document).for_a_relative(shared)
    if shared is not None:
        return shared.for_generation(architecture)
    return Calibration(framework=ANY, architecture=ANY, source="literature")


def _cluster(spec: ClusterSpec, catalog: Catalog, problems: Problems) -> Cluster | None:
    groups = []
    if spec.nodes is not None:
        for index, item in enumerate(spec.nodes):
            stated = node_of(index, spec, catalog, problems)
            groups += [] if stated is None else [NodeGroup(node=stated, count=item.count)]
    elif spec.devices is not None:
        node = node_in_place(spec, catalog, problems)
        groups = [] if node is None else [NodeGroup(node=node, count=spec.devices.nodes)]
    types = {group.node.slug for group in groups}
    if len(types) > 1:
        problems.say("cluster.nodes", f"this is answered for jobs on one node type, not on {', '.join(sorted(types))}")
    if spec.host_memory is not None:
        groups = [replace(g, node=replace(g.node, host_memory_bytes=int(spec.host_memory))) for g in groups]
    if not groups or len(types) > 1:
        return None
    return Cluster(name=" + ".join(f"{group.count} × {group.node.slug}" for group in groups), groups=tuple(groups))


def _limits(
    spec: TrainingSpec, machine: Machine, workload: TrainingWorkload, price: Price | None, problems: Problems
) -> TrainingLimits:
    """The limits in the estimator's terms; those that nothing can meet, or that need a price or power, are problems.

    A limit on the run's time is one on the step's, where all tokens of the run are known; the tighter of both holds.
    """
    wanted = spec.constraints
    most = min(machine.num_devices, wanted.max_devices or machine.num_devices)
    if wanted.min_devices is not None and wanted.min_devices > min(most, machine.joined_devices):
        why = "" if wanted.min_devices > most else f": {machine.no_network}"
        most_used = min(most, machine.joined_devices)
        problems.say("constraints.min_devices", f"{wanted.min_devices} wanted, at most {most_used} may be used{why}")
    usable = machine.device.usable_memory_bytes * (1.0 - wanted.memory_headroom_fraction)
    usable -= wanted.memory_headroom or 0.0
    if usable <= 0:
        problems.say("constraints.memory_headroom", "leaves no device memory at all")
    if price is None and (wanted.max_usd_per_hour or wanted.max_usd_per_run or spec.objective.value == "usd_per_run"):
        problems.say(
            "cluster",
            "no price is known for this node type with these price filters; give cluster.usd_per_hour_per_node",
        )
    if spec.objective.value == "energy" and machine.device.tdp_w is None:
        problems.say("objective", f"the catalog has no power limit for {machine.device.name}")
    longest_s, run_s = wanted.max_step_time or None, None
    if wanted.max_run_time and spec.workload.num_training_tokens:
        of_run_s = wanted.max_run_time / (spec.workload.num_training_tokens / workload.trained_tokens_per_step)
        if longest_s is None or of_run_s < longest_s:
            longest_s, run_s = of_run_s, wanted.max_run_time
    return TrainingLimits(
        memory_bytes=usable,
        max_devices=most,
        min_devices=wanted.min_devices or 1,
        host_memory_bytes=wanted.host_memory,
        max_usd_per_hour=wanted.max_usd_per_hour,
        max_usd_per_run=wanted.max_usd_per_run,
        max_step_s=longest_s,
        max_run_s=run_s,
        offload=tuple(name for name in OFFLOADS if name in wanted.offload),
        offload_to=wanted.offload_to,
        unvalidated_schedules=wanted.unvalidated_schedules,
    )


def _sources(
    problem: TrainingProblem, cluster: Cluster, price: Price | None, profile: ClusterProfile | None
) -> dict[str, Any]:
    node, device = cluster.groups[0].node, problem.machine.device
    sources = {
        f"model {problem.shape.slug}": problem.shape.source,
        f"rules {problem.rules.name}": f"version {problem.rules.version}",
        "calibration": problem.calibration.source,
    }
    for what, item in ((f"device {device.slug}", device), (f"link {node.scale_up_link.slug}", node.scale_up_link)):
        sources[what] = "; ".join(sorted({evidence.source for evidence in item.evidence.values()})) or IN_PLACE
    if node.scale_out_link is not None:
        link = node.scale_out_link
        sources[f"link {link.slug}"] = "; ".join(sorted({e.source for e in link.evidence.values()})) or IN_PLACE
    if price is not None:
        sources["price"] = f"{price.provider} {price.region} {price.terms} {price.date}: {price.source}"
    if profile is not None:
        sources[f"profile {profile.name}"] = f"{slowest_link(profile)} ({profile.measured_at})"
    return sources
