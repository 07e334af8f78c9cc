"""A stored allocation as files: those of :mod:`meshplan.planner.emit.gpu_allocation`, and a folder of launchers for
each pool.

A pool is launched as a serving plan of its own: the same choices, emitted by the same targets. Pools that share nodes
get devices and ports that no other of them has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import EmitError, SolverError
from meshplan.planner.core.plan import digest, shape_from_document
from meshplan.planner.emit import gpu_allocation as fleet
from meshplan.planner.emit.artifact import Artifact, EmitOptions, EmittedPlan
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.serving.script import WORKERS_FILE
from meshplan.planner.gpu_allocation.nodes.packing import places, whole_units
from meshplan.planner.launch.checkpoint import checkpoint_of
from meshplan.planner.launch.registry import emit_serving
from meshplan.planner.launch.serving import host_type
from meshplan.planner.serving.problem.config import Role

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan

POOLS = PurePosixPath("pools")


def target(plan: Plan) -> str | None:
    """The engine that the fleet was made for; None where capacities were given by hand."""
    return str(plan.config["services"][0]["engine"]) if plan.config else None


def files(plan: Plan, target_name: str, catalog: Catalog, options: EmitOptions) -> EmittedPlan:
    """Files of an allocation from models and workloads; see :func:`meshplan.planner.service.emit_plan`.

    Args:
        plan: a plan of the kind ``gpu-allocation`` that was asked with a market.
        target_name: of the serving plans: an engine, or an orchestrator around it.
        catalog: where hosts are looked up.
        options: image, and the checkpoint where the plan has one service.

    Raises:
        EmitError: capacities were given by hand (nothing is known of what would run), or a target refuses a pool.
    """
    if plan.answer is None or "services" not in plan.config:
        raise EmitError(f"plan {plan.plan_id} has no pools to launch: its answer is plans show --format json")
    services = plan.config["services"]
    if options.model_path and len(services) > 1:
        raise EmitError(f"--model-path is of one model, this plan serves {len(services)}; leave it out")
    artifacts: list[Artifact] = []
    folders: dict[str, str] = {}
    notes: list[str] = []
    shared, names = _shared_nodes(plan), fleet.pool_names(plan)
    systems, workers = 0, 0  # of those on shared nodes, so far
    for service in services:
        for pools in _systems(service):
            request = _request(plan, service, pools, catalog, options)
            folder = POOLS / names[pools[0]["kind"]]
            if any(pool["kind"] in shared.on_shared for pool in pools):
                table = tuple(rank for pool in pools for rank in shared.ranks[pool["kind"]])
                part = replace(request.plan, rank_table=table)
                request = replace(request, plan=part, port=request.port + systems, workers_beside=workers)
                systems, workers = systems + 1, workers + sum(pool["num_workers"] for pool in pools)
            emitted = emit_serving(target_name, request)
            if request.plan.rank_table and any(one.path == WORKERS_FILE for one in emitted.artifacts):
                notes.append(shared.note(pools, f"{folder}/"))  # elsewhere an orchestrator places the workers
            artifacts += [replace(one, path=folder / one.path) for one in emitted.artifacts]
            notes += [note for note in emitted.notes if note not in notes]
            folders.update({pool["kind"]: f"{folder}/" for pool in pools})
    if len(plan.answer["fleets"]) > 1:
        notes.insert(0, "These are the files of the first scenario's fleet; plan.json has those of the others.")
    above = [fleet.overview(plan, folders, notes), fleet.router_weights(plan), fleet.picture(plan)]
    nodes = fleet.node_pools(plan)
    return EmittedPlan(
        target=target_name,
        artifacts=(*above, *(() if nodes is None else (nodes,)), *fleet.skypilot_resources(plan), *artifacts),
        parser_verified=None,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedNodes:
    """Where replicas lie where several pools lie on nodes of one offer.

    Args:
        ranks: kind → (node, device) of each rank, replica after replica; nodes are numbered over all offers.
        nodes: kind → node numbers within its offer.
        offers: kind → its offer.
        on_shared: kinds on nodes of an offer that others lie on, too.
    """

    ranks: Mapping[str, tuple[tuple[int, int], ...]]
    nodes: Mapping[str, tuple[int, ...]]
    offers: Mapping[str, str]
    on_shared: frozenset[str]

    def note(self, pools: list[Mapping[str, Any]], folder: str) -> str:
        """Which nodes a system's hosts are."""
        places: dict[str, set[int]] = {}
        for pool in pools:
            places.setdefault(self.offers[pool["kind"]], set()).update(self.nodes[pool["kind"]])
        words = " and ".join(
            f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, sorted(nodes)))} of {offer}"
            for offer, nodes in sorted(places.items())
        )
        return f"{folder} runs on {words}, which other pools share: its MESHPLAN_HOSTS are these, in this order."


def _shared_nodes(plan: Plan) -> _SharedNodes:
    """Places of all replicas of the first fleet, on as few nodes of each offer as are rented.

    Raises:
        EmitError: they do not suffice, as in plans from before replicas were packed on nodes.
    """
    found = (plan.answer or {})["fleets"][0]
    ranks: dict[str, tuple[tuple[int, int], ...]] = {}
    nodes: dict[str, tuple[int, ...]] = {}
    shared: set[str] = set()
    first = 0
    for unit in sorted(found["units"], key=lambda unit: str(unit["offer"])):
        devices = int(unit["num_devices"])
        rows = [row for row in found["replicas"] if row["offer"] == unit["offer"]]
        sizes = [int(row["num_devices"]) for row in rows for _ in range(row["count"])]
        try:
            laid = iter(zip(sizes, places(sizes, devices, int(unit["count"])), strict=True))
        except SolverError as error:
            raise EmitError(f"{unit['offer']}: {error}; plan {plan.plan_id} again") from error
        for row in rows:
            mine: list[tuple[int, int]] = []
            for size, place in islice(laid, int(row["count"])):
                hosts = max(whole_units(size, devices), 1)
                mine += [
                    (place.unit + host, place.device + device)
                    for host in range(hosts)
                    for device in range(size // hosts)
                ]
            ranks[row["kind"]] = tuple((first + node, device) for node, device in mine)
            nodes[row["kind"]] = tuple(sorted({node for node, _ in mine}))
            shared |= {row["kind"]} if len(rows) > 1 and devices > 1 else set()
        first += int(unit["count"])
    offers = {row["kind"]: str(row["offer"]) for row in found["replicas"]}
    return _SharedNodes(ranks=ranks, nodes=nodes, offers=offers, on_shared=frozenset(shared))


def _systems(service: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Pools that are launched together: each mixed one alone, prefill and decode as a pair."""
    mixed = [[pool] for pool in service["pools"] if pool["role"] == Role.MIXED.value]
    disaggregated = [pool for pool in service["pools"] if pool["role"] != Role.MIXED.value]
    disaggregated.sort(key=lambda pool: pool["role"] != Role.PREFILL.value)
    if len(disaggregated) > 2:  # noqa: PLR2004 - one of each role
        kinds = ", ".join(pool["kind"] for pool in disaggregated)
        raise EmitError(f"engines pair one prefill with one decode pool, this plan has {kinds}; plan again with fewer")
    return [*mixed, *([disaggregated] if disaggregated else [])]


def _request(
    plan: Plan,
    service: Mapping[str, Any],
    pools: list[Mapping[str, Any]],
    catalog: Catalog,
    options: EmitOptions,
) -> ServingRequest:
    config = {**service, "pools": [{k: v for k, v in pool.items() if k not in ("kind", "offer")} for pool in pools]}
    config["num_devices"] = sum(pool["num_devices"] for pool in pools)
    for extra in ("name", "model"):
        del config[extra]
    spec = {"kind": "serving", "model": service["model"], "allocation": plan.plan_id}
    part = replace(plan, kind="serving", spec=spec, spec_digest=digest(spec), config=config, answer=None)
    shape = shape_from_document(plan.provenance["models"][service["name"]])
    checkpoint = checkpoint_of(_model_asked(plan, str(service["name"])), shape, pools, options.model_path)
    return ServingRequest(
        plan=part,
        shape=shape,
        host_types={str(pool["node_type"]): host_type(str(pool["node_type"]), catalog) for pool in pools},
        model_path=checkpoint.path,
        quantized_checkpoint=checkpoint.is_quantized,
        max_sequence_length=_longest_request(plan, str(service["name"])),
        image=options.image,
        framework_version=options.framework_version,
    )


def _model_asked(plan: Plan, service: str) -> str:
    """The model as the question names it: of one service, or of several by their names."""
    asked = {str(one.get("name") or one["model"]): str(one["model"]) for one in plan.spec.get("services") or ()}
    return asked.get(service, "") or str(plan.spec.get("model") or "")


def _longest_request(plan: Plan, service: str) -> int:
    """Prompt and answer together, tokens."""
    buckets = next(one["buckets"] for one in (plan.answer or {})["services"] if one["name"] == service)
    return max(bucket["input_tokens"][1] + bucket["output_tokens"][1] for bucket in buckets)
