"""From a diffusion spec to a problem with every name looked up; all mismatches are reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshplan.catalogs.constants.diffusion import diffusion_calibration
from meshplan.catalogs.errors import UnknownEntryError
from meshplan.catalogs.hardware import Cluster, NodeGroup, NodeType, Price
from meshplan.catalogs.models.diffusion import DiffusionModel, diffusion_model, diffusion_models
from meshplan.planner.cluster.lookup import node_in_place, node_of, node_price
from meshplan.planner.cluster.machine import Machine, machine_of
from meshplan.planner.cluster.unused import (
    check_price_filter,
    check_serving_only,
    check_several_types,
    check_training_only,
)
from meshplan.planner.core.problems import Problems
from meshplan.planner.diffusion.estimator.demand import DTYPE
from meshplan.planner.diffusion.problem.degrees import DiffusionConfig
from meshplan.planner.diffusion.problem.job import Job
from meshplan.planner.diffusion.problem.legality import broken_rules
from meshplan.planner.diffusion.problem.problem import DiffusionProblem
from meshplan.planner.diffusion.problem.spec import DiffusionObjective, DiffusionSpec

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A diffusion problem and its sources.

    Args:
        problem: for the search.
        price: of a node; None where none is known.
        sources: item → citation.
    """

    problem: DiffusionProblem
    price: Price | None
    sources: Mapping[str, str]


def resolve(spec: DiffusionSpec, catalog: Catalog) -> Resolved:
    """Look up every name of a spec.

    Raises:
        SpecError: unknown names and impossible choices, all at once.
    """
    problems = Problems()
    model = _model(spec, problems)
    node, count = _node(spec, catalog, problems)
    if model is None or node is None:
        problems.check()
        raise AssertionError("a missing name is a problem, and problems were checked")
    price = node_price(node, spec.cluster, spec.constraints.price)
    check_price_filter(spec.cluster, spec.constraints.price, [node], problems)
    each = None if price is None else price.usd_per_hour / node.num_devices
    machine = machine_of(
        Cluster(name=node.slug, groups=(NodeGroup(node=node, count=count),)), usd_per_hour_per_device=each
    )
    job = _job(spec, model, problems)
    pinned = spec.fixed.pinned()
    if spec.workload.batch_size is not None:
        pinned["batch_size"] = spec.workload.batch_size
    limits = spec.constraints
    problem = DiffusionProblem(
        job=job,
        machine=machine,
        node_type=node.slug,
        calibration=diffusion_calibration(node.device.architecture, node.device.slug),
        objective=spec.objective,
        request_rate_per_s=spec.workload.request_rate_per_s,
        max_latency_s=spec.slo.latency_s,
        max_usd_per_item=spec.slo.usd_per_item,
        max_usd_per_hour=limits.max_usd_per_hour,
        max_power_w=limits.max_power_w,
        max_devices=min(machine.num_devices, limits.max_devices or machine.num_devices),
        stale_activations=limits.stale_activations,
        pinned=pinned,
        is_batch_asked=spec.workload.batch_size is not None,
    )
    _check(problem, machine, price, problems)
    problems.check()
    return Resolved(problem=problem, price=price, sources=_sources(problem, price))


def _model(spec: DiffusionSpec, problems: Problems) -> DiffusionModel | None:
    try:
        return diffusion_model(spec.model)
    except UnknownEntryError as error:
        problems.say("model", f"{error}; diffusion models: {', '.join(diffusion_models())}")
        return None


def _node(spec: DiffusionSpec, catalog: Catalog, problems: Problems) -> tuple[NodeType | None, int]:
    cluster = spec.cluster
    check_training_only(cluster, problems)
    check_several_types(cluster, problems)
    check_serving_only(cluster, "leave it out", problems)
    if cluster.host_memory is not None:
        problems.say("cluster.host_memory", "nothing of a diffusion model is kept on hosts here: leave it out")
    if cluster.nodes is None:
        described = node_in_place(cluster, catalog, problems)
        return described, 1 if cluster.devices is None else cluster.devices.nodes
    if len({node.type for node in cluster.nodes}) > 1:
        problems.say("cluster.nodes", "one type of node at a time: ask once for each, then compare the plans")
    return node_of(0, cluster, catalog, problems), sum(node.count for node in cluster.nodes)


def _job(spec: DiffusionSpec, model: DiffusionModel, problems: Problems) -> Job:
    asked, usual, vae = spec.workload, model.defaults, model.vae
    job = Job(
        model=model,
        height=asked.height or usual.height,
        width=asked.width or usual.width,
        frames=asked.frames or usual.frames,
        steps=asked.steps or usual.steps,
    )
    side = vae.spatial_factor * model.patch_size
    for name in ("height", "width"):
        size = getattr(job, name)
        if size % side:
            lower = max(size // side, 1) * side
            problems.say(
                f"workload.{name}",
                f"{size} pixels are no multiple of {side} (VAE {vae.spatial_factor} × patches of {model.patch_size}); "
                f"the nearest are {lower} and {lower + side}",
            )
    if job.frames > 1 and not model.is_video:
        problems.say("workload.frames", f"{job.frames}: {model.name} makes images; leave it out")
    elif (job.frames - 1) % vae.temporal_factor:
        lower = (job.frames - 1) // vae.temporal_factor * vae.temporal_factor + 1
        problems.say(
            "workload.frames",
            f"{job.frames}: the VAE of {model.name} takes 1 + {vae.temporal_factor}·k frames; the nearest are {lower} "
            f"and {lower + vae.temporal_factor}",
        )
    return job


def _check(problem: DiffusionProblem, machine: Machine, price: Price | None, problems: Problems) -> None:
    """Report choices that no search can make legal."""
    known = {name: value for name, value in problem.pinned.items() if name != "replicas"}
    for reason in broken_rules(problem.job, DiffusionConfig(**known)):
        problems.say("fixed", reason)
    if DTYPE not in machine.device.peak_flops_per_s:
        problems.say("cluster", f"no source gives the {DTYPE} peak of {machine.device.slug}")
    objective = problem.objective
    if objective is DiffusionObjective.NUM_DEVICES and problem.request_rate_per_s is None:
        problems.say("objective", "num_devices needs workload.request_rate_per_s")
    if price is None and (
        objective is DiffusionObjective.USD_PER_ITEM
        or problem.max_usd_per_item is not None
        or problem.max_usd_per_hour is not None
    ):
        problems.say("cluster", f"no price is known for {problem.node_type}; give cluster.usd_per_hour_per_node")
    if machine.device.tdp_w is None and (objective is DiffusionObjective.ENERGY or problem.max_power_w is not None):
        problems.say("cluster", f"no source gives the board power of {machine.device.slug}, which energy depends on")


def _sources(problem: DiffusionProblem, price: Price | None) -> dict[str, str]:
    calibration, model = problem.calibration, problem.job.model
    known = f"{calibration.num_runs} runs" if calibration.num_runs else "no runs of this generation: mean of others"
    sources = {
        f"model {model.slug}": f"{model.source} ({model.date})",
        f"constants on {calibration.architecture}": f"{known}; {calibration.source}",
        "rules of xDiT 0.4.5": "https://github.com/xdit-project/xDiT (2026-11-24)",
    }
    if price is not None:
        sources[f"price of {problem.node_type}"] = f"{price.provider} {price.terms} {price.date}: {price.source}"
    return sources
