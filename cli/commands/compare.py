"""``meshplan compare``: plans side by side, and a plan against what was measured for it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption
from meshplan.cli.render import Column, Format, Row

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
    from meshplan.cli.answers.plans import compared
    from meshplan.cli.render import show_document, show_rows, show_text, terminal_width
    from meshplan.cli.reports.comparison import comparison_report
    from meshplan.cli.stored import load_plan, plan_rows

    catalog = open_catalog(db, or_shipped=True)
    found = compared([load_plan(handle, catalog) for handle in plans], plan_rows(catalog))
    document = found.to_document()
    if form in (Format.JSON, Format.YAML):
        show_document(document, form)
    elif form is Format.TABLE:
        text = "" if found.comparison is None else comparison_report(found.comparison, width=terminal_width())
        show_text(text + _measured_text(document["measured"], terminal_width()))
    else:
        show_rows(_flat_rows(document), _FLAT_COLUMNS, form)


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
    from meshplan.planner.compare import SECTIONS  # start-up: --help loads no planner

    rows: list[Row] = [
        {"section": section, "field": item["field"], "values": item["values"]}
        for section in SECTIONS
        for item in document.get(section, ())
    ]
    rows += [
        {"section": section, "field": item["metric"], "values": [one and one[end] for one in item["predicted"]]}
        for item in document.get("metrics", ())
        for section, end in (("predicted", "value"), ("predicted, low", "low"), ("predicted, high", "high"))
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
