"""No deployment meets every SLO: which constraint binds, what comes nearest, and the smallest changes that suffice.

Every change that is named was found by a simulation that meets everything else: an SLO is relaxed to the latency that a
deployment reached, devices and limits to what the deployment of a search took, the rate to one that all devices carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.text import rounded_up
from meshplan.planner.serving.advice import what_if_rows
from meshplan.planner.serving.estimator.host.front_end import AT_ONCE, MORE_API_SERVERS
from meshplan.planner.serving.no_plan.binding import (
    ALONE,
    CAPACITY,
    DEVICES,
    LIMIT,
    LOAD,
    MEMORY,
    OVERLOAD,
    Binding,
    binding_constraint,
    nearest_row,
)
from meshplan.planner.serving.no_plan.fastest import MOST_KINDS, reached
from meshplan.planner.serving.problem.config import Role, pins_text
from meshplan.planner.serving.problem.problem import Pinned, ServingObjective, ServingProblem
from meshplan.planner.serving.problem.quantization import SCHEMES, checkpoint_formats
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.branch import Simulated
from meshplan.planner.serving.search.candidates import config_label
from meshplan.planner.serving.search.search import ServingReport, search_serving
from meshplan.planner.serving.search.slo_judgement import Judged

# The devices are multiplied by these until a plan is found, beginning with what the closed form asks for.
MORE_DEVICES = (1, 1.25, 2, 4, 8, 16)
MOST_SEARCHES = 4
# The same, over as many copies as carry the rate: the second for what sampling leaves short.
MORE_COPIES = (1.0, 1.25)
# Shares of the requests/s that are finished at most which are asked for instead where that is too little.
LESS_THAN_FINISHED = (0.95, 0.9, 0.8, 0.6)
# Bytes of a weight in 16 bits: of these an engine makes narrower ones itself.
WIDE_BYTES = 2.0
# Formats of weights that are searched where memory is not what binds: each takes a search of its own.
MOST_FORMATS = 2
# Relative distance between the requests in flight that are advised and a number for which no plan was found.
NEAR_ENOUGH = 0.25
# Requests in flight that are tried first.
FEW_IN_FLIGHT = 8
# Arrivals that no rate serves are made more even by these factors until one does; the last is Poisson's.
LESS_BURSTY = (2.0, 4.0, math.inf)
# Limits on latencies of such arrivals that are tried, over the latency of one run.
MORE_WAITING = (1.0, 1.5, 2.0)


def explain_infeasible(
    problem: ServingProblem, report: ServingReport, *, seed: int = 0, budget: Budget | None = None
) -> dict[str, Any]:
    """The part of an infeasible plan's ``solution`` that says what to change, as far as the budget lets it be found.

    Returns:
        ``binding_constraint``, ``nearest_miss`` (with its configuration), ``least_change`` (changes, each of which
        alone makes the question feasible), ``tried`` (the changes that were looked for) and ``what_if`` (deployments
        that no supported engine runs).
    """
    binding = binding_constraint(problem, report)
    changes = _Changes(problem=problem, binding=binding, seed=seed, budget=budget or Budget(memory_limit_bytes=None))
    found = list(changes.all())
    if changes.budget.stopped:
        changes.tried.append(f"no more within the {changes.budget.stopped}")
    text = binding.text
    if changes.comes_in_bursts:
        uneven = problem.workload.burstiness
        text = f"workload.burstiness: {uneven:g}, whose bursts arrive together at every rate that was tried; {text}"
    if binding.kind in (ALONE, LOAD) and found and not found[0]["constraint"].startswith("devices"):
        text = f"{found[0]['constraint']}; {text}" if found[0]["constraint"] not in text else text
    return {
        "binding_constraint": text if report.is_complete else f"{text} (not every deployment was simulated)",
        "nearest_miss": nearest_row(report),
        "least_change": found,
        "tried": changes.tried,
        "what_if": what_if_rows(problem),
    }


@dataclass(kw_only=True)
class _Changes:
    """What is tried, and what helps.

    Args:
        problem: the question.
        binding: the constraint that binds.
        seed: for drawing the requests.
        budget: that of the question; once it is spent, nothing more is tried.
        tried: in words; grows.
        carried: the share of the asked load that the devices of the question carry within the SLOs, once a lighter
            load was found; else 0.
    """

    problem: ServingProblem
    binding: Binding
    seed: int
    budget: Budget
    tried: list[str] = field(default_factory=list)
    carried: float = 0.0

    def all(self) -> Iterator[dict[str, Any]]:
        """Changes that help, those of the constraint that binds first."""
        kind = self.binding.kind
        if self.comes_in_bursts:
            yield from self._steadier()
        if kind in (ALONE, LOAD) and self.problem.slos:
            yield from self._slos()
        if kind == CAPACITY or self.binding.finished_per_s:
            yield from self._lower_rate()
        if self.binding.is_passed_on:
            yield from self._relieved_api_servers()
        if kind == OVERLOAD:
            yield from self._fewer_in_flight()
            if not self.carried and self.problem.slos:  # however few: what is asked of each is too much
                yield from self._slos()
        if kind in (MEMORY, ALONE, CAPACITY, LOAD):
            yield from self._formats()
        yield from self._pins()
        # So many in flight take long to simulate on whatever would be enough for them.
        if kind in (MEMORY, DEVICES, CAPACITY, LOAD):
            yield from self._more_devices()
        if kind in (LIMIT, LOAD):
            yield from self._lifted_limits()

    @property
    def comes_in_bursts(self) -> bool:
        """The rate is free and none keeps the SLOs: gaps are uneven, and requests of a burst come at once at any."""
        return self.binding.kind == LOAD and self.problem.has_free_rate and self.problem.workload.burstiness > 1.0

    def _steadier(self) -> Iterator[dict[str, Any]]:
        """The least even of some arrivals for which there is a rate."""
        workload = self.problem.workload
        milder = dict.fromkeys(max(workload.burstiness / factor, 1.0) for factor in LESS_BURSTY)
        self.tried.append(f"burstiness {', '.join(f'{one:g}' for one in milder)}")
        for one in milder:
            found = self._best(replace(self.problem, workload=replace(workload, burstiness=one)))
            if found is not None:
                yield _change(f"workload.burstiness: {workload.burstiness:g}", f"workload.burstiness: {one:g}", found)
                return

    # --- SLOs ---------------------------------------------------------------------------------------------------------

    def _slos(self) -> Iterator[dict[str, Any]]:
        """Each SLO alone, then all together, relaxed to the least latency that deployments on all devices reach."""
        slos = self.problem.slos
        self.tried.append(f"each SLO relaxed alone, on all devices with the {MOST_KINDS} fastest kinds of workers")
        is_any = False
        for slo in slos:
            reached = self._reached([one for one in slos if one is not slo])
            values = [(run.shown_s(slo), label) for run, label in reached if not run.metrics.num_rejected]
            if values and min(values)[0] > slo.limit_s:
                value, label = min(values)
                if self.comes_in_bursts:  # other bursts are longer than those that were drawn here
                    found = self._kept_in_bursts(slo, value)
                    if found is None:
                        continue
                    value, label = found
                is_any = True
                yield {
                    "constraint": slo.limit_text,
                    "change": f"{slo.key}: {rounded_up(value):g}",
                    "reached": value,
                    "label": label,
                }
        if is_any or len(slos) < 2:  # noqa: PLR2004 - several together
            return
        self.tried.append("all SLOs relaxed together")
        together = [one for one in self._reached([]) if not one[0].metrics.num_rejected]
        if together:
            run, label = min(together, key=lambda one: max(one[0].shown_s(s) / s.limit_s for s in slos))
            late = [slo for slo in slos if not slo.is_met(run.shown_s(slo))]
            if not late:  # by this run alone: longer ones decide
                return
            yield {
                "constraint": " and ".join(slo.limit_text for slo in late),
                "change": " and ".join(f"{slo.key}: {rounded_up(run.shown_s(slo)):g}" for slo in late),
                "label": label,
            }

    def _kept_in_bursts(self, slo: Slo, reached_s: float) -> tuple[float, str] | None:
        """The least of some limits with which the question has an answer, and that."""
        for factor in MORE_WAITING:
            eased = replace(slo, limit_s=factor * reached_s)
            slos = tuple(eased if one is slo else one for one in self.problem.slos)
            found = self._best(replace(self.problem, slos=slos))
            if found is not None:
                return eased.limit_s, config_label(found.candidate.config)
        return None

    def _reached(self, kept: list[Slo]) -> Iterator[tuple[Judged, str]]:
        """Simulated deployments on all devices that meet the SLOs ``kept``, with their labels."""
        eased = replace(self.problem, slos=tuple(kept))
        return reached(eased, comes_in_bursts=self.comes_in_bursts, seed=self.seed, budget=self.budget)

    # --- the load, devices, pins and limits ---------------------------------------------------------------------------

    def _lower_rate(self) -> Iterator[dict[str, Any]]:
        """The highest rate within the SLOs."""
        self.tried.append("a lower rate")
        workload = self.problem.workload
        if workload.trace is not None:
            return
        if self.problem.limit_s("ttft", "e2e") == math.inf:
            yield from self._kept_rate()
            return
        free = replace(workload, request_rate_per_s=None, arrival=Arrival.CLOSED_LOOP)
        asked = replace(self.problem, workload=free, objective=ServingObjective.MAX_REQUEST_RATE)
        found = self._best(asked)
        if found is not None and found.judged.requests_per_s < (workload.request_rate_per_s or math.inf):
            rate = found.judged.requests_per_s
            self.carried = rate / (workload.request_rate_per_s or rate)
            least = f"request_rate_per_s: {float(f'{0.995 * rate:.3g}'):g}"
            yield _change(f"request_rate_per_s: {workload.request_rate_per_s:g}", least, found)

    def _relieved_api_servers(self) -> Iterator[dict[str, Any]]:
        """More API servers, or several tokens sent to a client at once where no SLO is on each of them."""
        rules, pinned = self.problem.rules, self.problem.pinned.of(Role.MIXED)
        if rules.scales_api_servers and "api_servers" not in pinned:
            self.tried.append(f"{MORE_API_SERVERS} API servers a worker")
            yield from self._with_pin(
                "each worker has the API servers that the engine starts", api_servers=MORE_API_SERVERS
            )
        each_matters = any(slo.metric == "itl" for slo in self.problem.slos)
        if rules.streams_in_intervals and "stream_interval" not in pinned and not each_matters:
            self.tried.append(f"{AT_ONCE} tokens sent at once")
            yield from self._with_pin("every token is sent by itself", stream_interval=AT_ONCE)

    def _with_pin(self, before: str, **pin: int) -> Iterator[dict[str, Any]]:
        """The change to one more pin of mixed workers, where it leaves a plan."""
        pinned = self.problem.pinned
        common = {**pinned.by_role.get(Role.MIXED, {}), **pin}
        more = replace(pinned, by_role={**pinned.by_role, Role.MIXED: common})
        found = self._best(replace(self.problem, pinned=more))
        if found is not None:
            ((name, value),) = pin.items()
            yield _change(before, f"fixed.{name}: {value}", found)

    def _fewer_in_flight(self) -> Iterator[dict[str, Any]]:
        """The most requests in flight within the SLOs: doubled while there is a plan, then between that and its double,
        within :data:`NEAR_ENOUGH`. Few requests in flight are soon simulated.
        """
        self.tried.append("fewer requests in flight")
        workload = self.problem.workload
        asked = high = workload.concurrency or 1
        low, best = 0, None
        while high - low > max(NEAR_ENOUGH * low, 1.0):
            middle = min(2 * low or FEW_IN_FLIGHT, (low + high) // 2)
            found = self._best(replace(self.problem, workload=replace(workload, concurrency=middle)))
            low, high, best = (low, middle, best) if found is None else (middle, high, found)
        if best is not None:
            self.carried = low / asked
            yield _change(f"concurrency: {asked}", f"concurrency: {low}", best)

    def _kept_rate(self) -> Iterator[dict[str, Any]]:
        """The largest of some shares of what is finished at most with which the queue does not grow."""
        workload = self.problem.workload
        most = self.binding.finished_per_s or self.binding.capacity_per_s
        for share in LESS_THAN_FINISHED:
            rate = float(f"{share * most:.3g}")
            found = self._best(replace(self.problem, workload=replace(workload, request_rate_per_s=rate)))
            if found is not None:
                self.carried = rate / (workload.request_rate_per_s or rate)
                asked = f"request_rate_per_s: {workload.request_rate_per_s:g}"
                yield _change(asked, f"request_rate_per_s: {rate:g}", found)
                return

    def _more_devices(self) -> Iterator[dict[str, Any]]:
        """The fewest devices of a deployment that is found among several times as many."""
        have = self.problem.num_devices
        sizes = list(dict.fromkeys(have * factor for factor in self._factors()))
        self.tried.append(f"up to {', '.join(map(str, sizes))} devices")
        for size in sizes:
            found = self._best(self._of_size(size))
            if found is not None:
                need = found.candidate.config.num_devices
                more = f"{need} devices instead of {have}"
                # The search of the question itself ended before it.
                yield _change(f"devices: {have}", more if need > have else pins_text(found.candidate.config), found)
                return

    def _factors(self) -> list[int]:
        """Multiples of the devices to look at, the smallest first.

        As many copies of what was found under a lighter load carry the load that is asked for: one search among so many
        devices finds whatever needs fewer. Where no lighter load was found, from what the closed form asks for on.
        """
        asked = self.problem.workload.request_rate_per_s or 0.0
        if self.carried:
            return [math.ceil(more / self.carried) for more in MORE_COPIES]
        least = max(2.0, self.binding.shortage)
        if self.binding.capacity_per_s:
            least = max(asked / self.binding.capacity_per_s, 1.0)
        return [math.ceil(least * more) for more in MORE_DEVICES][:MOST_SEARCHES]

    def _of_size(self, num_devices: int) -> ServingProblem:
        """The question with so many devices: whole nodes, as many of each type, of which ``num_devices`` may be used.

        Where devices lack for the rate, one worker stays on those that there are, or on one node: the others make more
        workers of it.
        """
        problem = self.problem
        there = sum(machine.num_devices for machine in problem.machines.values())
        times = -(-num_devices // there)
        machines = {
            name: replace(machine, num_devices=times * machine.num_devices)
            for name, machine in problem.machines.items()
        }
        most_of_one = None
        if self.binding.kind == CAPACITY:
            hosts = (machine.devices_per_host for machine in problem.machines.values())
            most_of_one = max(problem.num_devices, *hosts)
        limits = replace(problem.limits, max_devices=num_devices, max_worker_devices=most_of_one)
        return replace(problem, machines=machines, limits=limits)

    def _formats(self) -> Iterator[dict[str, Any]]:
        """The weight format with which a plan is found: first those that the engine makes itself of the checkpoint at
        hand, then those that need another one; the widest of them, scales aside, in the order of the engine's rules.

        Where memory suffices, only what the engine makes itself of weights in 16 bits: less is read for each token, and
        more requests fit beside it.
        """
        problem, asked = self.problem, {one.label for one in self.problem.quantizations}
        cache = problem.quantizations[0].kv_cache
        schemes: Sequence[str] = problem.rules.schemes
        if self.binding.kind != MEMORY:
            is_wide = all(
                SCHEMES[one].weight_bytes >= WIDE_BYTES for found in problem.quantizations for one in found.schemes
            )
            schemes = problem.rules.online if is_wide else ()
        named = {scheme: checkpoint_formats(problem.shape, scheme, cache) for scheme in schemes}
        devices = [machine.device for machine in problem.machines.values()]
        others = {
            scheme: one
            for scheme, one in named.items()
            if one.label not in asked and not all(one.missing_on(device) for device in devices)
        }
        if self.binding.kind != MEMORY:
            others = dict(list(others.items())[:MOST_FORMATS])
        if not others:
            return
        online = problem.rules.online
        nearest = sorted(others, key=lambda name: (name not in online, -round(SCHEMES[name].weight_bytes, 1)))
        self.tried.append(f"weights in {', '.join(nearest)}")
        for scheme, one in ((name, others[name]) for name in nearest):
            found = self._best(replace(problem, quantizations=(one,)))
            if found is not None:
                yield _change("weights in " + ", ".join(sorted(asked)), f"quantization: [{scheme}]", found)
                return

    def _pins(self) -> Iterator[dict[str, Any]]:
        """Each pinned choice dropped alone, and power limits that leave out the boards' own."""
        problem, pinned = self.problem, self.problem.pinned
        for role, choices in pinned.by_role.items():
            for name, value in choices.items():
                where = f"fixed.{name}" if role is Role.MIXED else f"fixed.{role.value}.{name}"
                self.tried.append(f"{where} dropped")
                rest = {key: other for key, other in choices.items() if key != name}
                fewer = replace(pinned, by_role={**pinned.by_role, role: rest})
                yield from self._without(replace(problem, pinned=fewer), f"{where}: {value}")
        for role, share in pinned.memory_fractions.items():
            where = "fixed.memory_fraction" if role is Role.MIXED else f"fixed.{role.value}.memory_fraction"
            self.tried.append(f"{where} dropped")
            others = {key: other for key, other in pinned.memory_fractions.items() if key is not role}
            fewer = replace(pinned, memory_fractions=others)
            yield from self._without(replace(problem, pinned=fewer), f"{where}: {share:g}")
        if pinned.mode_pins:
            names = " and ".join(pinned.mode_pins)
            self.tried.append(f"{names} dropped")
            mode = "disaggregated" if pinned.is_disaggregated else "aggregated"
            common = pinned.memory_fractions.get(Role.MIXED)
            shares: dict[Role, float] = {} if common is None else {Role.MIXED: common}
            free = Pinned(by_role={Role.MIXED: pinned.by_role.get(Role.MIXED, {})}, memory_fractions=shares)
            text = f"{names}: {mode}" if pinned.mode_pins == ("fixed.mode",) else names
            yield from self._without(replace(problem, pinned=free), text)
        if any(None not in problem.caps_of(machine.device) for machine in problem.machines.values()):
            self.tried.append("power_caps_w dropped")
            listed = ", ".join(f"{cap:g}" for cap in problem.power_caps_w)
            yield from self._without(replace(problem, power_caps_w=()), f"power_caps_w: {listed}")

    def _without(self, problem: ServingProblem, text: str) -> Iterator[dict[str, Any]]:
        found = self._best(problem)
        if found is not None:
            yield _change(text, f"without {text}", found)

    def _lifted_limits(self) -> Iterator[dict[str, Any]]:
        limits = self.problem.limits
        money, power = replace(limits, max_usd_per_hour=None), replace(limits, max_power_w=None)
        for name, limit, unit, lifted in (
            ("max_usd_per_hour", limits.max_usd_per_hour, "USD/h", money),
            ("max_power_w", limits.max_power_w, "W", power),
        ):
            if limit is None:
                continue
            self.tried.append(f"{name} lifted")
            found = self._best(replace(self.problem, limits=lifted))
            if found is not None:
                used = found.candidate.usd_per_hour if lifted is money else found.candidate.power_w
                yield _change(f"{name}: {limit:g} {unit}", f"{name}: {rounded_up(used or 0.0):g}", found)

    def _best(self, problem: ServingProblem) -> Simulated | None:
        """The best deployment of another question; None where there is none, or no time for it."""
        found: Simulated | None = None
        if not self.budget.stopped:
            with self.budget.keeping(), suppress(SolverError):
                found = search_serving(problem, seed=self.seed, budget=self.budget)[0].assignment
        return found


def _change(constraint: str, change: str, found: Simulated) -> dict[str, Any]:
    """What stands in the way, what would do in its place, and the deployment that a search then found."""
    return {"constraint": constraint, "change": change, "label": config_label(found.candidate.config)}
