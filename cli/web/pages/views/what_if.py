"""A plan's figures under another load, price, share of use or price of power: what the sliders move.

The load goes through the plan's own estimator with its configuration pinned; money is arithmetic on top:
cost of work = price per device-hour × devices × hours of the work ÷ share of the hours that are used. Power is shown
apart, since the price of a rented device holds it already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.catalogs.units import SECONDS_PER_HOUR, format_duration, format_usd
from meshplan.cli.reports.quantities import metric_text, metric_title, signed_percent
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.plan import Interval, Plan

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

_JOULES_PER_KWH, _MILLION, _BILLION = 3.6e6, 1e6, 1e9
# Where the sliders of what a plan does not know begin: a round number to start from, no price of anybody.
START_USD_PER_KWH, START_USD_PER_DEVICE_HOUR = 0.10, 2.0
# Sliders that need a new estimate.
_LOADS: tuple[str, ...] = ("rate", "in_flight", "batch")
_STEPS = 40  # of a slider from its least to its most


@dataclass(frozen=True, slots=True, kw_only=True)
class Slider:
    """One thing that can be moved.

    Args:
        name: in the address.
        label: for people.
        unit: of the value.
        least: left end.
        most: right end.
        step: between two places.
        value: where the plan stands.
    """

    name: str
    label: str
    unit: str
    least: float
    most: float
    step: float
    value: float


def sliders(plan: Plan) -> list[Slider]:
    """What can be moved of a plan."""
    hourly = plan.predicted.get("usd_per_hour")
    price = START_USD_PER_DEVICE_HOUR if hourly is None else hourly.value / _num_devices(plan)
    price = round(price, 4)
    return [
        *_load(plan),
        Slider(
            name="price", label="Price of a GPU", unit="USD/h", least=0.0, most=round(4 * price, 4), step=0.01,
            value=price,
        ),
        Slider(name="utilisation", label="Share of the hours used", unit="%", least=5, most=100, step=1, value=100),
        Slider(
            name="power_price", label="Price of power", unit="USD/kWh", least=0.0, most=0.6, step=0.01,
            value=START_USD_PER_KWH,
        ),
    ]  # fmt: skip


def _load(plan: Plan) -> list[Slider]:
    """The load that the plan was made for: a rate, requests in flight, or the batch of a step."""
    workload = plan.spec.get("workload", {})
    if KINDS[plan.kind].offers("predict") is None or not _can_predict(plan):
        return []
    if plan.kind == "training":
        batch = int(plan.config["global_batch_size"])
        unit = int(plan.config["data_parallel"]) * int(plan.config["micro_batch_size"])
        unit *= int(plan.config["pipeline_parallel"]) if plan.config["virtual_pipeline_stages"] > 1 else 1
        most = max(4 * batch // unit, 1) * unit
        return [
            Slider(name="batch", label="Sequences in a step", unit="", least=unit, most=most, step=unit, value=batch)
        ]
    rate, in_flight = workload.get("request_rate_per_s"), workload.get("concurrency")
    if rate:
        step = float(f"{rate / _STEPS * 4:.1g}")
        return [
            Slider(
                name="rate",
                label="Requests",
                unit="a second",
                least=step,
                most=round(4 * rate, 6),
                step=step,
                value=rate,
            )
        ]
    if in_flight:
        return [
            Slider(
                name="in_flight", label="Requests in flight", unit="", least=1, most=4 * in_flight, step=1,
                value=in_flight,
            )
        ]  # fmt: skip
    return []


def _can_predict(plan: Plan) -> bool:
    """A deployment of several kinds of mixed workers cannot be pinned in a spec, nor can FFN devices."""
    if plan.kind == "training":
        return "stages" not in plan.config
    if any("ffn" in pool for pool in plan.config["pools"]):
        return False
    return len({pool["role"] for pool in plan.config["pools"]}) == len(plan.config["pools"])


def what_if_view(plan: Plan, values: Mapping[str, float], catalog: Catalog) -> dict[str, Any]:
    """What the page shows: the sliders where they stand, and every figure before and after.

    Args:
        plan: of a kind with a configuration.
        values: slider → value; what is left out stands where the plan stands.
        catalog: for the estimate under another load.

    Raises:
        SpecError: the plan has none, or a value is out of reach.
    """
    if not plan.config or plan.kind not in ("training", "serving"):
        message = f"plan {plan.plan_id} ({plan.kind}) has no single configuration to move"
        raise SpecError.at("", message, of="the question")
    known = sliders(plan)
    now = {slider.name: values.get(slider.name, slider.value) for slider in known}
    wrong = [slider for slider in known if not slider.least <= now[slider.name] <= slider.most]
    if wrong:
        problems = [Problem(path=one.name, message=f"must lie between {one.least:g} and {one.most:g}") for one in wrong]
        raise SpecError(problems, of="the question")
    start = {slider.name: slider.value for slider in known}
    changed = {name: now[name] for name in _LOADS if name in now and now[name] != start[name]}
    after = _predicted(plan, changed, catalog) if changed else plan.predicted
    return {
        "plan_id": plan.plan_id,
        "sliders": [
            {
                "name": one.name, "label": one.label, "unit": one.unit, "least": one.least, "most": one.most,
                "step": one.step, "value": now[one.name], "start": one.value,
            }
            for one in known
        ],
        "figures": _figures(plan, (plan.predicted, start), (after, now)),
    }  # fmt: skip


def _predicted(plan: Plan, changed: Mapping[str, float], catalog: Catalog) -> Mapping[str, Interval]:
    keys = {"rate": "request_rate_per_s", "in_flight": "concurrency", "batch": "global_batch_size"}
    whole = ("in_flight", "batch")
    workload = {keys[name]: int(value) if name in whole else value for name, value in changed.items()}
    found: Mapping[str, Interval] = KINDS[plan.kind].offers("predict")(plan, workload, catalog)
    return found


State = tuple[Mapping[str, Interval], Mapping[str, float]]


def _figures(plan: Plan, before: State, after: State) -> list[dict[str, Any]]:
    """Every figure at both places; of those with a limit whether it is kept."""
    slo: Mapping[str, float] = plan.spec.get("slo") or {}
    shown = ["iteration_s", "tokens_per_s", "mfu", *slo, "output_tokens_per_s", "power_w"]
    rows = []
    for name in dict.fromkeys(shown):
        if name in before[0] and name in after[0]:
            one, other = before[0][name].value, after[0][name].value
            limit = slo.get(name)
            kept = "" if limit is None else ("kept" if other <= limit else "broken")
            limit_text = "" if limit is None else f"limit {metric_text(name, limit)}"
            rows.append(_row(metric_title(name), metric_text(name, one), metric_text(name, other), one, other) | {
                "verdict": kept, "limit": limit_text})  # fmt: skip
    first, second = (_money(plan, *state) for state in (before, after))
    for title, value in first.items():
        show = format_duration if title == "time of the run" else format_usd
        rows.append(_row(title, show(value), show(second[title]), value, second[title]) | {"verdict": "", "limit": ""})
    return rows


def _row(title: str, before: str, after: str, one: float, other: float) -> dict[str, Any]:
    change = "" if not one or other == one else signed_percent(other / one - 1.0)
    return {"title": title, "before": before, "after": after, "change": change}


def _money(plan: Plan, predicted: Mapping[str, Interval], values: Mapping[str, float]) -> dict[str, float]:
    """What the work takes and costs."""
    used, devices = values["utilisation"] / 100.0, _num_devices(plan)
    hourly = values["price"] * devices
    if plan.kind == "serving":
        rate = predicted["output_tokens_per_s"].value
        found = {"cost of an hour": hourly}
        if rate > 0:
            found["cost of a million output tokens"] = hourly / SECONDS_PER_HOUR / rate * _MILLION / used
        if "energy_j_per_token" in predicted:
            joules = predicted["energy_j_per_token"].value * _MILLION
            found["power for a million output tokens"] = joules / _JOULES_PER_KWH * values["power_price"]
        return found
    rate = predicted["tokens_per_s"].value
    found = {"cost of an hour": hourly, "cost of a billion tokens": hourly / SECONDS_PER_HOUR / rate * _BILLION / used}
    if "run_time_s" in predicted:
        run_s = predicted["run_time_s"].value / used
        found |= {"time of the run": run_s, "cost of the run": hourly / SECONDS_PER_HOUR * run_s}
    if "energy_j_per_step" in predicted:
        steps = _BILLION / rate / predicted["iteration_s"].value
        joules = predicted["energy_j_per_step"].value * steps
        found["power for a billion tokens"] = joules / _JOULES_PER_KWH * values["power_price"]
    return found


def _num_devices(plan: Plan) -> int:
    return int(plan.config["world_size"] if plan.kind == "training" else plan.config["num_devices"])
