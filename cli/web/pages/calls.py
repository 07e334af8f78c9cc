"""What pages ask of the processes that read plans: views as JSON, pictures, reports.

Each function is a call of :mod:`meshplan.cli.web.calls`: of a catalog and of plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.state import steady
from meshplan.catalogs.errors import StoreError
from meshplan.cli.answers.plans import compared as compare
from meshplan.cli.answers.plans import instead_of, read_choices
from meshplan.cli.reports.plan import report_of
from meshplan.cli.web.calls import Answer, document_answer, stored_plan
from meshplan.cli.web.pages.views.answer import answer_view
from meshplan.cli.web.pages.views.ask import form_view, text_view
from meshplan.cli.web.pages.views.compare import comparison_view, instead_view
from meshplan.cli.web.pages.views.runs import runs_view
from meshplan.cli.web.pages.views.what_if import what_if_view
from meshplan.planner.core.kinds import offered
from meshplan.planner.core.plan import Plan
from meshplan.planner.rank_mapping.pictures import graph_svg, links_svg
from meshplan.planner.training.timeline import timeline_svg

SVG, TEXT = "image/svg+xml", "text/plain; charset=utf-8"
_REPORT_WIDTH = 100


def answer(catalog: Catalog, handle: str) -> Answer:
    """A stored plan's page."""
    made = stored_plan(catalog, handle)
    return document_answer(answer_view(made, PlanRows(catalog.engine).runs(made.plan_id), catalog=catalog))


def answer_without_plan(_: Catalog, document: Mapping[str, object]) -> Answer:
    """The page of a question that no plan answers: its document stays with the job."""
    return document_answer(answer_view(Plan.from_document(document)))


def form(catalog: Catalog, fields: Mapping[str, str]) -> Answer:
    """What a form means: its spec, its command, its problems."""
    return document_answer(form_view(fields, catalog))


def text(catalog: Catalog, spec: str) -> Answer:
    """What is wrong with a spec that somebody writes."""
    return document_answer(text_view(spec, catalog))


def report(catalog: Catalog, handle: str) -> Answer:
    """The whole report, as ``meshplan plans show`` prints it."""
    made = stored_plan(catalog, handle)
    report = report_of(made.kind).report(made, width=_REPORT_WIDTH)
    return Answer(status=200, media_type=TEXT, body=report.encode())


def picture(catalog: Catalog, handle: str, name: str) -> Answer:
    """A picture of a plan: its pipeline in time, its mapping, its links.

    Raises:
        SpecError: the plan has no such picture.
        StoreError: there is no picture of that name.
    """
    made = stored_plan(catalog, handle)
    if name == "timeline":
        run, title = offered(made, "timeline", "pipeline to draw")(made, catalog)
        drawn = timeline_svg(run, title=title)
    elif name in ("mapping", "links"):
        view = offered(made, "mapping_view", "mapping to draw")(made, catalog, Path())
        drawn = graph_svg(view) if name == "mapping" else links_svg(view)
    else:
        raise StoreError(f"no picture {name!r}; there are timeline, mapping, links")
    return Answer(status=200, media_type=SVG, body=drawn.encode())


def compared(catalog: Catalog, handles: Sequence[str]) -> Answer:
    """Plans side by side; one alone against what was measured for it."""
    plans = [stored_plan(catalog, handle) for handle in handles]
    return document_answer(comparison_view(plans, compare(plans, PlanRows(catalog.engine))))


def instead(catalog: Catalog, handle: str, choices: Sequence[str]) -> Answer:
    """A plan beside the best one that makes other choices."""
    made = stored_plan(catalog, handle)
    return document_answer(instead_view(made, instead_of(made, read_choices(choices, made), catalog)))


def what_if(catalog: Catalog, state: str, handle: str, values: Mapping[str, float]) -> Answer:
    """A plan's figures under other prices, rates and shares of use, of a catalog in that state."""
    return document_answer(what_if_view(stored_plan(catalog, handle), values, steady(catalog, state)))


def runs(catalog: Catalog) -> Answer:
    """Everything that was recorded, beside what was predicted."""
    rows = PlanRows(catalog.engine)
    recorded = [(row, rows.runs(row.plan_id)) for row in rows.list()]
    return document_answer(runs_view([(row, found) for row, found in recorded if found]))
