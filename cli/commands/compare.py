"""``meshplan compare``: plans side by side, and a plan against what was measured for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption
from meshplan.cli.render import Column, Format, Row

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# Columns of the flat forms (CSV, Markdown): one line per difference.
_FLAT_COLUMNS = tuple(Column(key=key, title=key) for key in ("section", "field", "values"))


@app.command()
def compare(
    plans: Annotated[
        list[str],
        typer.Argument(metavar="PLAN...", help="Tags, ids, 'latest' or plan files; the first is the reference."),
    ],
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show what differs between plans, what that changes, and why; and the prediction against what was measured.

    One PLAN alone is compared with what 'plans record' attached to it.
    """
    from meshplan.catalogs.errors import StoreError
    from meshplan.cli.render import show_document, show_rows, show_text, terminal_width
    from meshplan.cli.reports.comparison import comparison_report, measured_rows
    from meshplan.cli.stored import load_plan
    from meshplan.planner.compare import compare_plans

    catalog = open_catalog(db, or_shipped=True)
    loaded = [load_plan(handle, catalog) for handle in plans]
    recorded = {plan.plan_id: _recorded(plan, catalog) for plan in loaded}
    if len(loaded) == 1 and not recorded[loaded[0].plan_id]:
        raise StoreError(
            f"nothing was measured for plan {loaded[0].plan_id} yet: meshplan plans record {loaded[0].plan_id} "
            "measured.json; or name two plans"
        )
    comparison = compare_plans(loaded) if len(loaded) > 1 else None
    document: dict[str, Any] = {} if comparison is None else comparison.to_document()
    document["measured"] = [
        {"plan_id": plan.plan_id, "recorded_at": run["recorded_at"], "metrics": measured_rows(plan, run["measured"])}
        for plan in loaded
        for run in recorded[plan.plan_id]
    ]
    if form in (Format.JSON, Format.YAML):
        show_document(document, form)
    elif form is Format.TABLE:
        text = "" if comparison is None else comparison_report(comparison, width=terminal_width())
        show_text(text + _measured_text(document["measured"], terminal_width()))
    else:
        show_rows(_flat_rows(document), _FLAT_COLUMNS, form)


def _recorded(plan: Plan, catalog: Catalog) -> list[dict[str, Any]]:
    """What was measured for a plan; nothing for one that only lies in a file."""
    from meshplan.cli.stored import plan_rows

    rows = plan_rows(catalog)
    if plan.plan_id not in {row.plan_id for row in rows.list()}:
        return []
    return [{"recorded_at": run.recorded_at, "measured": run.document} for run in rows.runs(plan.plan_id)]


def _measured_text(measured: list[dict[str, Any]], width: int) -> str:
    from meshplan.cli.render import rendered_rows
    from meshplan.cli.reports.comparison import measured_columns

    return "".join(
        rendered_rows(
            run["metrics"],
            measured_columns(),
            Format.TABLE,
            title=f"\nPlan {run['plan_id']}, measured {run['recorded_at']}",
            width=width,
        )
        for run in measured
    )


def _flat_rows(document: dict[str, Any]) -> list[Row]:
    rows: list[Row] = [
        {"section": section, "field": item["field"], "values": item["values"]}
        for section in ("question", "choices")
        for item in document.get(section, ())
    ]
    rows += [
        {"section": "predicted", "field": item["metric"], "values": [one and one["value"] for one in item["predicted"]]}
        for item in document.get("metrics", ())
    ]
    rows += [
        {
            "section": f"measured {run['plan_id']}",
            "field": item["metric"],
            "values": [item["predicted"]["value"], item["measured"]],
        }
        for run in document["measured"]
        for item in run["metrics"]
    ]
    return rows
