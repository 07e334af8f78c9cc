"""Which constraint leaves no deployment: in the order in which a plan has to meet them, with what is missing.

Devices for one worker, the engine's rules, memory, the SLOs of one request alone, capacity for the rate or for the
requests in flight, limits on money and power, the SLOs under load. The first that nothing passes binds; everything is
closed form except the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.core.text import counted
from meshplan.planner.serving.estimator.draft_memory import draft_memory
from meshplan.planner.serving.estimator.memory import worker_memory
from meshplan.planner.serving.problem.config import Layout, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.branch import Simulated
from meshplan.planner.serving.search.candidates import candidate_of, config_label, full_counts, layout_label
from meshplan.planner.serving.search.families import Family
from meshplan.planner.serving.search.layouts import default_limits, layouts, refusal, tokens_held
from meshplan.planner.serving.search.overload import overload
from meshplan.planner.serving.search.search import ServingReport, families
from meshplan.planner.serving.search.trials import DECISIVE
from meshplan.planner.serving.search.workers import PricedWorker, priced_workers

DEVICES, RULE, MEMORY, ALONE = "devices", "rule", "memory", "alone"
CAPACITY, OVERLOAD, LIMIT, LOAD = "capacity", "overload", "limit", "load"
PASSED_ON = 0.99  # of the rate that API servers let pass, from which on they bind


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The constraint that binds.

    Args:
        kind: one of the constants above.
        text: in words, with the numbers.
        capacity_per_s: most requests/s of all devices in closed form, where that is short.
        shortage: memory that is needed over memory that there is, where that is short.
        finished_per_s: most requests/s that a simulated deployment finishes within the SLOs while its queue grows; 0
            where none does.
        is_passed_on: ``capacity_per_s`` is what API servers let pass.
    """

    kind: str
    text: str
    capacity_per_s: float = 0.0
    shortage: float = 1.0
    finished_per_s: float = 0.0
    is_passed_on: bool = False


def binding_constraint(problem: ServingProblem, report: ServingReport) -> Binding:
    """The first constraint that no deployment passes; see the module's text."""
    role = Role.DECODE if problem.pinned.is_disaggregated else Role.MIXED
    considered = list(_layouts(problem, role))
    if not considered:
        return Binding(kind=DEVICES, text=_too_few_devices(problem, role))
    legal = [one for one in considered if not any(True for _ in _violated(problem, *one[1:]))]
    if not legal:
        return Binding(kind=RULE, text=_binding_rule(problem, considered))
    misfits = [None if problem.experts is None else problem.experts.misfit(layout) for _, layout, _ in legal]
    if all(misfits):
        return Binding(kind=RULE, text=f"experts: {misfits[0]}")
    legal = [one for one, misfit in zip(legal, misfits, strict=True) if misfit is None]
    refusals = [refusal(problem, problem.machines[one[0]], *one[1:]) for one in legal]
    if all(refusals):  # no network, several hosts, drafts
        return Binding(kind=RULE, text=_with_pins(problem, str(refusals[0])))
    legal = [one for one, reason in zip(legal, refusals, strict=True) if reason is None]
    missing = [_missing(problem, role, *one) for one in legal]
    if min(missing)[0] > 0.0:
        _, text, shortage = min(missing)
        beside = next((f"; of other layouts: {reason}" for reason in refusals if reason), "")
        return Binding(kind=MEMORY, text=text + _on_host(report) + beside, shortage=shortage)
    kinds = _kinds(problem, role)
    if not kinds:
        return Binding(kind=ALONE, text=_alone(problem, role))
    rate = problem.workload.request_rate_per_s
    most = _capacity(problem, kinds)
    if rate is not None and most < rate:
        verb = "finishes" if problem.num_devices == 1 else "finish"
        text = (
            f"capacity: {counted(problem.num_devices, 'device')} {verb} at most {most:.3g} requests/s"
            f"{' within the SLOs' if problem.slos else ''}, asked are {rate:g}"
        )
        fastest = max(kinds, key=lambda kind: kind.best_rate_per_s)
        is_passed_on = fastest.best_rate_per_s * fastest.cost.request_s > PASSED_ON
        text += "; no more pass their API servers" if is_passed_on else ""
        return Binding(kind=CAPACITY, text=text, capacity_per_s=most, is_passed_on=is_passed_on)
    return _of_loads(problem, report, kinds)


def _of_loads(problem: ServingProblem, report: ServingReport, kinds: list[PricedWorker]) -> Binding:
    """What binds where one request alone is served, and the rate is not too high by the bounds."""
    overloaded = None if report.simulated else _overloaded(problem, kinds)
    if overloaded is not None:
        return Binding(kind=OVERLOAD, text=overloaded)
    refused = [reason for reason in report.rejected if "is above max_" in reason]
    if refused and not report.simulated:
        return Binding(kind=LIMIT, text=refused[0])
    nearest = nearest_miss(report)
    in_flight = problem.workload.concurrency if problem.workload.arrival is Arrival.CLOSED_LOOP else None
    if in_flight and nearest is not None and nearest.judged.worst_miss.ratio > DECISIVE:
        return Binding(kind=OVERLOAD, text=f"concurrency: {in_flight:,} in flight; {_under_load(problem, report)}")
    return Binding(kind=LOAD, text=_under_load(problem, report), finished_per_s=_finished(report))


def _on_host(report: ServingReport) -> str:
    """Why host memory does not help, where it was looked at: the most frequent reason that names it."""
    reasons = [reason for reason, _ in report.rejected.most_common() if "usable memory" in reason]
    return f"; {reasons[0]}: state more cluster.host_memory, or narrower weights" if reasons else ""


def _layouts(problem: ServingProblem, role: Role) -> Iterator[tuple[str, Layout, Quantization]]:
    for node_type, machine in problem.machines.items():
        for quantization in problem.quantizations:
            if not quantization.missing_on(machine.device):
                for layout in layouts(problem, machine, role):
                    if layout.num_devices <= (problem.limits.max_devices or layout.num_devices):
                        yield node_type, layout, quantization


def _kinds(problem: ServingProblem, role: Role) -> list[PricedWorker]:
    """Kinds of workers of which the devices that may be used hold one."""
    priced = priced_workers(problem, role, Counter())
    return [kind for kind in priced if Family(problem=problem, kinds=(kind,)).most(0)]


def _violated(problem: ServingProblem, layout: Layout, quantization: Quantization) -> Iterator[LegalityRule]:
    for rule in problem.rules.layout_rules(quantization):
        if not rule.holds(problem.shape, layout):
            yield rule


def _pins_text(problem: ServingProblem, role: Role) -> str:
    pins = problem.pinned.of(role)
    return ", ".join(f"{name} {value}" for name, value in pins.items())


def _too_few_devices(problem: ServingProblem, role: Role) -> str:
    have, most = max(machine.num_devices for machine in problem.machines.values()), problem.limits.max_devices
    pins = _pins_text(problem, role)
    where = "of a node type" if most is None or most >= have else "that max_devices allows"
    return f"devices: one worker with {pins} needs more than the {counted(min(have, most or have), 'device')} {where}"


def _binding_rule(problem: ServingProblem, considered: list[tuple[str, Layout, Quantization]]) -> str:
    """The rule that every layout breaks; where none is, the one that the layout with the fewest broken rules breaks."""
    broken = [list(_violated(problem, layout, quantization)) for _, layout, quantization in considered]
    everywhere = [rule for rule in broken[0] if all(rule in others for others in broken[1:])]
    binding = everywhere[0] if everywhere else min(broken, key=len)[0]
    return _with_pins(problem, f"{problem.rules.name}: {binding.message}")


def _with_pins(problem: ServingProblem, text: str) -> str:
    pins = _pins_text(problem, Role.MIXED)
    return text + (f" (pinned: {pins})" if pins else "")


def _missing(
    problem: ServingProblem, role: Role, node_type: str, layout: Layout, quantization: Quantization
) -> tuple[float, str, float]:
    """Bytes that the fullest device of a worker lacks for one request of each rank, at most 0 where it fits; in words;
    and what is needed over what there is.
    """
    device = problem.machines[node_type].device
    held = tokens_held(problem, role)
    limits = default_limits(problem, role, device, layout)
    memory = worker_memory(
        problem.shape,
        device,
        layout,
        limits,
        quantization,
        context=held,
        experts=problem.experts,
        padding=problem.rules.expert_padding(quantization, device),
        drafts=draft_memory(problem.drafter, problem.shape, quantization, layout),
    )
    cache = held * memory.kv_bytes_per_token
    needed = memory.weights_bytes + memory.workspace_bytes + cache
    text = (
        f"memory: {layout_label(layout)} on {node_type} needs {format_bytes(needed)} on a device (weights "
        f"{format_bytes(memory.weights_bytes)}, workspace {format_bytes(memory.workspace_bytes)}, the KV cache of "
        f"one request {format_bytes(cache)}), the engine may use {format_bytes(memory.budget_bytes)}: "
        f"{format_bytes(max(needed - memory.budget_bytes, 0.0))} are missing"
    )
    fits = memory.kv_capacity_tokens >= held * layout.attention_data_parallel
    return (0.0 if fits else max(needed - memory.budget_bytes, 1.0)), text, needed / memory.budget_bytes


def _alone(problem: ServingProblem, role: Role) -> str:
    """The SLO that even one request alone violates on every worker, with the least latency that there is."""
    kinds = _kinds(replace(problem, slos=()), role)
    least = {slo.key: min(_least_alone_s(kind, slo) for kind in kinds) for slo in problem.slos}
    late = [slo for slo in problem.slos if least[slo.key] > slo.limit_s]
    texts = [f"{slo.limit_text}, one request alone takes at least {format_duration(least[slo.key])}" for slo in late]
    together = " and ".join(slo.limit_text for slo in problem.slos)
    return "; ".join(texts) or f"{together}: no worker meets them together with one request running"


def _least_alone_s(kind: PricedWorker, slo: Slo) -> float:
    """The least that an SLO's percentile is where every request is alone on its worker."""
    token_s = float(kind.steady.tpot_s[0])
    if slo.metric in ("tpot", "itl"):
        return token_s
    return kind.alone.after_s(slo, 0.0 if slo.metric == "ttft" else token_s)


def _capacity(problem: ServingProblem, kinds: list[PricedWorker]) -> float:
    """Most requests/s that all devices finish in closed form."""
    pairs: list[list[PricedWorker]] = [[], []]
    mixed = kinds
    if problem.pinned.is_disaggregated is not False:
        pairs = [priced_workers(problem, role, Counter()) for role in (Role.PREFILL, Role.DECODE)]
        mixed = [] if problem.pinned.is_disaggregated else kinds
    best: dict[str, float] = {}
    for kind in mixed:
        most = Family(problem=problem, kinds=(kind,)).most(0) * kind.best_rate_per_s
        best[kind.placed.node_type] = max(best.get(kind.placed.node_type, 0.0), most)
    apart = max((family.most_rate for family in families(problem, [], *pairs)), default=0.0)
    return max(sum(best.values()), apart)


def _overloaded(problem: ServingProblem, kinds: list[PricedWorker]) -> str | None:
    """The wait that is certain where even all devices are far too few for a closed loop; None where they are not."""
    pairs: list[list[PricedWorker]] = [[], []]
    if problem.pinned.is_disaggregated is not False:
        pairs = [priced_workers(problem, role, Counter()) for role in (Role.PREFILL, Role.DECODE)]
    mixed = [] if problem.pinned.is_disaggregated else kinds
    candidates = [
        candidate_of(family, counts)
        for family in families(problem, mixed, *pairs)
        for counts in [full_counts(family)]
        if family.fits(counts)
    ]
    found = [overload(candidate) for candidate in candidates]
    certain = [one for one in found if one is not None]
    if not certain or len(certain) < len(found):
        return None
    least = min(certain, key=lambda one: one.least_s / one.limit_s)
    return (
        f"concurrency: with {problem.workload.concurrency:,} requests in flight {least.text} at least "
        f"{format_duration(least.least_s)} on {counted(problem.num_devices, 'device')}, "
        f"{'SLO' if '_s with ' not in least.key else 'SLOs'} {format_duration(least.limit_s)}"
    )


def _under_load(problem: ServingProblem, report: ServingReport) -> str:
    """The SLO that is missed by the smallest factor in simulation."""
    nearest = nearest_miss(report)
    if nearest is None:
        reasons = report.rejected.most_common(1)
        return reasons[0][0] if reasons else "nothing was simulated"
    miss = nearest.judged.worst_miss
    if nearest.judged.violated:
        return f"{miss.key}: {miss.text} under load with the nearest deployment"
    return f"{miss.key}: {problem.workload.request_rate_per_s:g}; of the nearest deployment: {miss.text}"


def _finished(report: ServingReport) -> float:
    """Most requests/s of a deployment that meets the SLOs and does not keep pace."""
    judged = (simulated.judged for simulated in report.simulated)
    return max((one.requests_per_s for one in judged if not one.violated and not one.is_met), default=0.0)


def nearest_miss(report: ServingReport) -> Simulated | None:
    """The simulated deployment whose worst miss exceeds what was asked by the smallest factor."""
    missed = [simulated for simulated in report.simulated if not simulated.judged.is_met]
    return min(missed, key=lambda simulated: simulated.judged.worst_miss.ratio, default=None)


def nearest_row(report: ServingReport) -> Mapping[str, Any] | None:
    """The simulated deployment whose worst violation exceeds its SLO by the smallest factor."""
    nearest = nearest_miss(report)
    if nearest is None:
        return None
    miss = nearest.judged.worst_miss
    return {"label": config_label(nearest.candidate.config), "limit": miss.key, "excess_text": miss.text}
