"""How sure a serving plan's numbers are, in words: what was sampled, what the intervals rest on, what limits add."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import metric_text, percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted


def sampling_text(plan: Plan, width: int) -> str:
    """Confidence intervals of the simulated latencies that an SLO limits."""
    sampling = (plan.answer or {}).get("sampling")
    if not sampling:
        return ""
    intervals = ", ".join(
        f"{key} {metric_text(key, ends['low'])} … {metric_text(key, ends['high'])}"
        for key, ends in sampling["intervals"].items()
    )
    text = f"Sampled with {counted(sampling['num_requests'], 'request')}; 95 % confidence: {intervals}"
    if "attainment" in sampling:
        text += f"; {percent(sampling['attainment'])} of them meet every SLO"
        text += f" (at least {percent(sampling['attainment_at_least'])})"
    if "highest_rate" in sampling:
        low, high = (f"{sampling['highest_rate'][end]:.3g}" for end in ("low", "high"))
        text += f"; the highest rate is shown to lie between {low} and {high} requests/s (99 %)"
    return paragraph(f"{text}. {kept_text(plan)}".rstrip(), width) if intervals else ""


def kept_text(plan: Plan) -> str:
    """The runs by which the SLOs were confirmed, beside the plan's own; empty where the question gives their length."""
    longer = ((plan.answer or {}).get("sampling") or {}).get("kept_by_runs_of")
    if longer is None:
        return ""
    if not longer:
        return "The SLOs were not held against longer runs."
    return f"Other runs of {longer:,} requests keep every SLO too (99 % confidence)."


def calibration_text(plan: Plan, width: int) -> str:
    """What the intervals rest on, and what the question states without use."""
    lines = []
    used = {pool["node_type"] for pool in plan.config["pools"]}
    for node_type, calibration in plan.provenance.get("calibration", {}).items():
        if node_type not in used:
            continue
        errors = calibration["error_p90"]
        shown = _widths_text(errors, calibration.get("basis", {}))
        before = calibration.get("start_error_p90")
        if before:
            runs = counted(calibration["num_runs"], "own run")
            own = f"{runs} ({calibration['engine']}, {calibration['architecture']})"
            wider = ", ".join(f"{name} ×/÷ {factor:.2f}" for name, factor in _factors(before))
            gained = "too few to judge intervals by" if before == errors else f"without them {wider}"
            lines.append(f"Intervals on {node_type}: {shown}; constants adapted to {own}, {gained}.")
        elif calibration["num_runs"]:
            runs = counted(calibration["num_runs"], "published run")
            fitted = f"{runs} ({calibration['engine']}, {calibration['architecture']})"
            held = "within them are 90 % of the runs of a source that was left out"
            lines.append(f"Intervals on {node_type}: {shown}; {held}. Constants fitted to {fitted}.")
        else:
            engine, generation = calibration["engine"], calibration["architecture"]
            lines.append(
                f"Intervals on {node_type}: {shown}; no published run is of {engine} on {generation}: constants are "
                f"what runs of {engine} on other devices and of other engines on {generation} let expect."
            )
    lines += [f"Not validated: {what}." for what in plan.provenance.get("not_validated", ())]
    lines += [f"Without use: {what}." for what in plan.provenance.get("without_use", ())]
    return "".join(paragraph(line, width) for line in lines)


def power_text(plan: Plan, width: int) -> str:
    """What the interval of the watts rests on, and what a power limit adds to those of times."""
    power = plan.provenance.get("power", {})
    error, slowed = power.get("error_p90", {}).get("power"), power.get("slowdown_error_p90")
    if "power_w" not in plan.predicted or error is None:
        return ""
    text = (
        f"Watts ×/÷ {math.exp(error):.2f}, 90 % of runs of sources held out, up to the boards' limit; "
        f"fitted to {counted(power['num_runs'], 'published run')}."
    )
    if slowed and any("power_cap_w" in pool for pool in plan.config["pools"]):
        text += f" Under a power limit times err by ×/÷ {math.exp(slowed):.2f} besides, 90 % of published epochs."
    return paragraph(text, width)


def _widths_text(errors: Mapping[str, float], basis: Mapping[str, str]) -> str:
    """Factors of intervals, and in brackets what they rest on, once for neighbours that rest on the same."""
    items = list(_factors(errors))
    texts = []
    for number, (name, factor) in enumerate(items):
        after = basis.get(items[number + 1][0]) if number + 1 < len(items) else None
        rests_on = "" if name not in basis or basis[name] == after else f" ({basis[name]})"
        texts.append(f"{name} ×/÷ {factor:.2f}{rests_on}")
    return ", ".join(texts)


def _factors(errors: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    return [(name, math.exp(error)) for name, error in errors.items()]
