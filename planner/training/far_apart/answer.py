"""The straight line for sites far apart: spec → sites → plans of each → ways → one table, and what is chosen.

The synchronous plan over all sites is searched as if nobody had asked about ways; every way takes each site's best
plan for its share of the batch. *Space and proof*: all ways that were asked about, with H as pinned or as little as
hides it, are priced and compared. A site's plan is as good as its own search proves. Where a way lacks memory beside
it, the sites are planned once more and leave the memory: whole GiB for a way that may be chosen, for others powers of
two, so that they share plans. The bound (:mod:`.bounds`) is of every way that may be chosen, with or without room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshplan.catalogs.errors import SolverError
from meshplan.planner.cluster.lookup import unknown_names
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan, canonical_json, plan_identity
from meshplan.planner.core.problems import Problems
from meshplan.planner.core.reading.spec_reader import read_with_names
from meshplan.planner.training.far_apart.plan import Compared, chosen_plan, with_table
from meshplan.planner.training.far_apart.shares import share_batch
from meshplan.planner.training.far_apart.sites import Site, find_sites, ring_of, site_document
from meshplan.planner.training.far_apart.ways import PricedWay, Setting, Worker, priced_again, priced_ways
from meshplan.planner.training.plan import catalog_content, config_from_document
from meshplan.planner.training.problem.spec import TrainingSpec, read_training_spec
from meshplan.planner.training.resolve import resolve_training

GIB = 2.0**30
# A plan that leaves memory may hold more parameters on a device than the one before, and its way lack memory again.
MOST_PLANNED_AGAIN = 3


def answer(question: Question, plan: Callable[[Question], Plan]) -> Plan:
    """Compare ways to train over sites.

    Args:
        question: a spec with ``far_apart``.
        plan: answers a question without.

    Raises:
        SpecError: malformed, no sites, or what is not compared over sites.
    """
    started = time.perf_counter(), time.process_time()
    document, catalog = question.document, question.catalog
    spec = read_with_names(read_training_spec, document, lambda: unknown_names(document, catalog))
    if spec.far_apart is None:
        raise AssertionError("far_apart was there before the spec was read")
    problems = Problems()
    _only_what_is_modelled(spec, problems)
    problems.check()
    whole = resolve_training(spec, catalog, question.base)
    sites = find_sites(spec, whole.problem.machine.network, problems)
    problems.check()
    network = whole.problem.machine.network
    if network is None:
        raise AssertionError("sites are parts of a network")
    plain = {key: value for key, value in document.items() if key != "far_apart"}
    solver = _Sites(question=question, plan=plan, document=document, sites=sites)
    batch = whole.problem.workload.global_batch_size
    alone = tuple(solver.solved(place, batch) for place in range(len(sites)))
    setting = Setting(
        asked=spec.far_apart,
        problem=whole.problem,
        workers=solver.workers(solver.shares(alone, batch)),
        ring=ring_of(sites, network, whole.problem.machine.domain_size),
    )
    ways = solver.with_room(priced_ways(setting)) if setting.workers else ()
    together = plan(replace(question, document=plain))  # last: over slow links its search takes what time there is
    compared = Compared(setting=setting, sites=sites, together=together, alone=alone, ways=ways)
    identity = plan_identity(document, catalog_content(whole))
    clocks = {"wall_s": time.perf_counter() - started[0], "cpu_s": time.process_time() - started[1]}
    if compared.chosen is None:
        return with_table(compared, identity, clocks)
    return chosen_plan(compared, compared.chosen, identity, clocks)


@dataclass
class _Sites:
    """Best plans of sites, each question answered once."""

    question: Question
    plan: Callable[[Question], Plan]
    document: Mapping[str, Any]
    sites: tuple[Site, ...]
    _found: dict[str, Plan] = field(default_factory=dict)

    def solved(self, place: int, sequences: int, headroom_bytes: float | None = None) -> Plan:
        """A site's best plan for some sequences; equal sites share it."""
        asked = site_document(self.document, self.sites[place], sequences, headroom_bytes)
        key = canonical_json(asked)
        if key not in self._found:
            self._found[key] = self.plan(replace(self.question, document=asked, beyond=False, on_progress=None))
        return self._found[key]

    def step_s(self, place: int, sequences: int) -> float:
        """Its step; infinite where nothing fits."""
        step = self.solved(place, sequences).predicted.get("iteration_s")
        return float("inf") if step is None else step.value

    def shares(self, alone: tuple[Plan, ...], batch: int) -> tuple[int, ...]:
        """Sequences of every site; none where one cannot hold the model or the batch is smaller than they are."""
        if batch < len(self.sites) or not all(one.config for one in alone):
            return ()
        alike = len({canonical_json(site_document(self.document, site, batch)) for site in self.sites}) == 1
        steps = [one.predicted["iteration_s"].value for one in alone]
        replicas = [int(one.config["data_parallel"]) for one in alone]
        return tuple(share_batch(batch, steps, replicas, self.step_s, alike=alike))

    def workers(self, shares: Sequence[int], room_bytes: float = 0.0) -> tuple[Worker, ...]:
        """Every site with its share, and memory that its plan leaves to a way; none where one has no such plan."""
        headroom = None
        if room_bytes:
            said = read_training_spec(self.document).constraints.memory_headroom or 0.0
            headroom = said + room_bytes
        plans = [self.solved(place, share, headroom) for place, share in enumerate(shares)]
        if not all(one.config for one in plans):
            return ()
        return tuple(
            self._worker(place, share, one, room_bytes)
            for place, (share, one) in enumerate(zip(shares, plans, strict=True))
        )

    def with_room(self, ways: Sequence[PricedWay]) -> tuple[PricedWay, ...]:
        """The ways, those that lack memory with plans of the sites that leave it; those that may be chosen first."""
        urgent = sorted(ways, key=lambda one: not one.setting.asked.may_choose(one.way))
        found = {one.name: self._with_room(one) for one in urgent}
        return tuple(found[one.name] for one in ways)

    def _with_room(self, way: PricedWay) -> PricedWay:
        """One way; as it is where no plans of the sites leave what it lacks."""
        for _ in range(MOST_PLANNED_AGAIN):
            if not way.lacks_bytes:
                return way
            room = math.ceil(way.lacks_bytes / GIB)
            if not way.setting.asked.may_choose(way.way):
                room = 2 ** (room - 1).bit_length()
            shares = [one.sequences for one in way.setting.workers]
            try:
                workers = self.workers(shares, room * GIB)
            except SolverError:  # the budget ended before a plan was found
                return way
            if not workers:
                return way
            way = priced_again(way, replace(way.setting, workers=workers))
        return way

    def _worker(self, place: int, sequences: int, made: Plan, room_bytes: float) -> Worker:
        asked = read_training_spec(site_document(self.document, self.sites[place], sequences))
        resolved = resolve_training(asked, self.question.catalog, self.question.base)
        return Worker(
            site=self.sites[place],
            sequences=sequences,
            plan=made,
            problem=resolved.problem,
            config=config_from_document(made.config),
            room_bytes=room_bytes,
        )


def _only_what_is_modelled(spec: TrainingSpec, problems: Problems) -> None:
    """What is not compared over sites yet, in words."""
    here = "is not planned with far_apart"
    if spec.workload.has_open_batch:
        problems.say("workload.global_batch_size", f"auto {here}: state the batch")
    if spec.run is not None:
        problems.say("run", f"{here}: a site that fails does not stop the others, which no model here counts")
    if spec.cluster.profile is not None:
        problems.say("cluster.profile", f"{here}: describe the links between islands")
    if spec.cluster.spare_nodes:
        problems.say("cluster.spare_nodes", f"{here}: leave nodes out of the islands")
    if spec.cluster.links is not None and spec.cluster.links.degraded is not None:
        problems.say("cluster.links.degraded", f"{here}: links inside an island are alike")
    if len({node.type for node in spec.cluster.nodes or ()}) > 1:
        problems.say("cluster.nodes", f"several types: {here}; islands of one type are (cluster.links.islands)")
    for name in ("max_usd_per_run", "max_run_time"):
        if getattr(spec.constraints, name) is not None:
            problems.say(f"constraints.{name}", f"{here}: the tokens that a run takes differ between ways")
