"""Plans of the other kinds on their page: fleets with what to rent, and answers of stand-alone problems as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshplan.catalogs.units import format_duration, format_usd
from meshplan.cli.render import Column
from meshplan.cli.reports import gpu_allocation
from meshplan.cli.reports.plan import report_of
from meshplan.cli.reports.quantities import metric_title, percent, signed_percent
from meshplan.cli.web.pages.views import diffusion
from meshplan.cli.web.pages.views.tables import table
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

_UNITS = (
    Column(key="offer", title="rent"),
    Column(key="count", title="units", right=True),
    Column(key="num_devices", title="GPUs each", right=True),
    Column(key="usd_per_hour_each", title="USD/h each", right=True, text=format_usd),
    Column(key="usd_per_hour", title="USD/h", right=True, text=format_usd),
    Column(key="at_its_cap", title="cap", text=lambda at: "reached" if at else " ", optional=True),
)
_REPLICAS = (
    Column(key="kind", title="replicas"),
    Column(key="count", title="count", right=True),
    Column(key="num_devices", title="GPUs", right=True),
    Column(key="full", title="filled to", right=True, derive=lambda row: percent(max(row["utilization"], default=0.0))),
)
_PROMISES = (
    Column(key="promise", title="limit on", text=metric_title),
    Column(key="limit_s", title="limit", right=True, text=format_duration),
    Column(key="attained", title="kept by", right=True, text=percent),
    Column(
        key="is_kept",
        title="kept",
        derive=lambda row: "yes" if row["is_kept"] else _unproven(row["lower_limit"]),
    ),
)

_OTHERWISE = (
    Column(key="what", title="What if …"),
    Column(key="cost", title="cheapest", right=True),
    Column(key="change", title="against it", right=True),
)
_CAPTION = "Other fleets and other loads, estimated and not replayed; none: no such fleet keeps the limits"
_TITLES = {
    "gpu-allocation": "A fleet for {}",
    "rank-mapping": "Which rank on which node: {}",
    "expert-placement": "Which expert on which device: {}",
}


def _unproven(lower_limit: float) -> str:
    """Of a limit that the replayed requests do not show to be kept: what share they do show."""
    return f"not shown: at least {percent(lower_limit)}" if lower_limit else "not shown"


def question(plan: Plan) -> str:
    """What was asked."""
    if plan.kind == "diffusion":
        return diffusion.question(plan)
    name = str(plan.spec.get("name", ""))
    what = plan.kind.replace("-", " ")
    return f"{what}: {name}" if name else what


def sections(plan: Plan) -> dict[str, Any]:
    """A fleet's own parts, or the answer as the table that the command line prints."""
    if plan.kind == "diffusion":
        return diffusion.sections(plan)
    title = _TITLES.get(plan.kind, "{}").format(plan.spec.get("name") or "").strip()
    if plan.kind == "gpu-allocation" and gpu_allocation.is_market_plan(plan) and plan.answer:
        return {"title": title, **_fleet(plan, plan.answer)}
    report = report_of(plan.kind)
    rows = table(report.top_rows(plan), tuple(report.top_columns(plan)), caption="The answer")
    pictures = []
    if plan.kind == "rank-mapping":
        pictures = [
            {"name": "mapping", "title": "Which node does what", "words": "Columns are stages; red links decide."},
            {"name": "links", "title": "The links", "words": "Rows send, columns receive; dark is fast."},
        ]
    objective = plan.solution.get("objective")
    sentences = [] if objective is None else [f"The objective is {objective:.6g}."]
    return {"title": title, "sentences": sentences, "tables": [rows], "pictures": pictures}


def _fleet(plan: Plan, answer: Any) -> dict[str, Any]:
    fleet = answer["fleets"][0]
    terms = [f"{unit['count']} × {unit['offer']}" for unit in fleet["units"] if unit["count"]]
    count = sum(unit["count"] * unit["num_devices"] for unit in fleet["units"])
    return {
        "equation": f"{counted(count, 'GPU')} = {' + '.join(terms)}",
        "sentences": list(_told(plan, answer, fleet)),
        "tables": [
            table(fleet["units"], _UNITS, caption="What to rent"),
            table(fleet["replicas"], _REPLICAS, caption="What runs on it"),
            *(
                table(replay["promises"], _PROMISES, caption=f"Replayed: {counted(replay['num_requests'], 'request')}")
                for replay in answer["replays"]
                if replay["promises"]
            ),
            *_otherwise(answer),
        ],
        "notes": [str(note) for note in answer.get("notes", ())],
    }


def _otherwise(answer: Any) -> Iterator[dict[str, Any]]:
    """What other fleets and other loads would cost; none of these is replayed."""
    if answer.get("objective") != "cost":  # devices, watts: the report has them
        return
    found, base = answer.get("alternatives") or {}, answer["fleets"][0]["usd_per_hour"]
    rows = [(f"only {name}", cost) for name, cost in (found.get("single_type") or {}).items()]
    rows += [(f"without {name}", cost) for name, cost in (found.get("without") or {}).items()]
    rows += [(f"{one['rate_factor']:g} times the requests", one["objective"]) for one in found.get("growth") or ()]
    if rows:
        shown = [
            {
                "what": what,
                "cost": "none" if cost is None else f"{format_usd(cost)}/h",
                "change": "" if cost is None else signed_percent(cost / base - 1.0),
            }
            for what, cost in rows
        ]
        yield table(shown, _OTHERWISE, caption=_CAPTION)


def _told(plan: Plan, answer: Any, fleet: Any) -> Iterator[str]:
    yield f"Rent this fleet for {format_usd(fleet['usd_per_hour'])} an hour."
    replays = answer.get("replays", ())
    if replays:
        kept = all(replay["is_kept"] for replay in replays)
        runs = counted(sum(replay["num_requests"] for replay in replays), "replayed request")
        yield f"Over {runs} it {'keeps every limit' if kept else 'does not keep every limit'}."
    if plan.solution.get("gap") == 0:
        yield "No cheaper fleet keeps them, by the model."
