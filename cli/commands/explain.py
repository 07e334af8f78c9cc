"""``meshplan explain``: why this plan, and what another choice would cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshplan.catalogs.errors import EXIT_INFEASIBLE, SpecError
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption, PlanArgument
from meshplan.cli.render import Format, show_document, show_text, terminal_width

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.cli.answers.plans import Choices
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.serving.power.budget import PowerBudget

app = typer.Typer(rich_markup_mode=None, add_completion=False)


MoreChoices = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CHOICE=VALUE]...", help="More choices for --instead.", show_default=False),
]
InsteadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--instead",
        metavar="CHOICE=VALUE",
        help="Another choice, such as tensor_parallel=4 or tp=4; several may be given (see: catalog choices).",
        show_default=False,
    ),
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE.svg", help="Draw the plan's pipeline schedule, stage by stage.", show_default=False),
]
ParetoOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE.html", help="Draw a serving plan's Pareto front as a page.", show_default=False),
]
PictureOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.html",
        help="Draw the rank mapping: nodes by stage, the links between them, the path that decides.",
        show_default=False,
    ),
]
PowerBudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="POWER",
        help="How many copies of a serving plan a rack, row or site of so much power holds, such as 40kW.",
        show_default=False,
    ),
]
PowerRiskOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of the windows of 1 s in which they may exceed it. Default: 0.001.",
        show_default=False,
    ),
]
HostPowerOption = Annotated[
    str | None,
    typer.Option(
        metavar="POWER",
        help="What a host draws beside its boards, such as 3kW. Default: boards alone are counted.",
        show_default=False,
    ),
]


@app.command()
def explain(
    plan: PlanArgument,
    more: MoreChoices = None,
    instead: InsteadOption = None,
    timeline: TimelineOption = None,
    pareto: ParetoOption = None,
    picture: PictureOption = None,
    power_budget: PowerBudgetOption = None,
    power_risk: PowerRiskOption = None,
    host_power: HostPowerOption = None,
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Explain PLAN: its proof of optimality, the alternatives, the binding limits, the evidence behind its numbers.

    With --instead: the best plan that makes the other choice, side by side. Exit code 3 when none fits.
    With --timeline: the pipeline schedule of a training plan as a picture; with --pareto: the front of a serving plan;
    with --picture: the rank mapping and its links. With --power-budget: how many copies of a serving plan fit under a
    power limit, at what risk, and what power limits of the boards cost that keep them below it.
    """
    from meshplan.cli.answers.plans import read_choices
    from meshplan.cli.stored import load_plan

    catalog = open_catalog(db, or_shipped=True)
    made = load_plan(plan, catalog)
    choices = read_choices([*(instead or []), *(more or [])], made)
    base = Path(plan).parent if plan.endswith(".json") else Path()
    limit = _power_budget(power_budget, power_risk, host_power, choices)
    if limit is not None:
        _explain_power(made, limit, catalog, form, base=base)
    elif timeline is not None:
        _draw(made, catalog, timeline, form, force=force)
    elif pareto is not None:
        _draw_pareto(made, pareto, force=force)
    elif picture is not None:
        _draw_mapping(made, catalog, picture, form, base=base, force=force)
    elif choices:
        _explain_instead(made, choices, catalog, form)
    else:
        _explain(made, form)


def _power_budget(budget: str | None, risk: float | None, host: str | None, choices: Choices) -> PowerBudget | None:
    """The power budget that the options state; None where they state none.

    Raises:
        SpecError: options of a budget without one, or another question beside it.
    """
    if budget is None and risk is None and host is None:
        return None
    from meshplan.catalogs.units import Dimension, parse_quantity
    from meshplan.planner.serving.power.budget import DEFAULT_RISK, PowerBudget

    if budget is None:
        option = "--power-risk" if risk is not None else "--host-power"
        raise SpecError.at(option, "says nothing without --power-budget, such as 40kW", of="the question")
    if choices:
        message = "counts copies of the plan as it is: plan with the other choices, then ask of that plan"
        raise SpecError.at("--power-budget", message, of="the question")
    return PowerBudget(
        budget_w=parse_quantity(budget, Dimension.W),
        risk=DEFAULT_RISK if risk is None else risk,
        host_w=None if host is None else parse_quantity(host, Dimension.W),
    )


def _explain_power(made: Plan, budget: PowerBudget, catalog: Catalog, form: Format, *, base: Path) -> None:
    """How many copies of the plan the power budget holds."""
    from meshplan.cli.reports.serving.power import power_report
    from meshplan.planner.core.kinds import offered

    found = offered(made, "power_budget", "power over time")(made, budget, catalog, base)
    if form is Format.TABLE:
        show_text(power_report(found, terminal_width()))
    else:
        show_document(found, form)


def _draw(made: Plan, catalog: Catalog, path: Path, form: Format, *, force: bool) -> None:
    """Write the schedule's picture, and show it in the terminal."""
    from meshplan.catalogs.writing import write_file
    from meshplan.planner.core.kinds import offered
    from meshplan.planner.training.timeline import timeline_svg, timeline_text

    run, title = offered(made, "timeline", "pipeline to draw")(made, catalog)
    write_file(path, timeline_svg(run, title=title), force=force)
    if form is Format.TABLE:
        show_text(f"{title}\n{timeline_text(run, width=terminal_width())}\nwritten to {path}\n")
    else:
        stages = [
            {"stage": stage, "idle_s": run.idle_s[stage], "peak_in_flight": run.peak_in_flight[stage]}
            for stage in range(len(run.stages))
        ]
        document = {"plan_id": made.plan_id, "title": title, "file": str(path), "step_s": run.flushed_s}
        show_document({**document, "stages": stages}, form)


def _draw_pareto(made: Plan, path: Path, *, force: bool) -> None:
    """Write the page with a serving plan's Pareto front."""
    from meshplan.catalogs.writing import write_file
    from meshplan.planner.core.kinds import offered

    page = offered(made, "pareto_page", "Pareto front")(made)
    write_file(path, page, force=force)
    show_text(f"written to {path}\n")


def _draw_mapping(made: Plan, catalog: Catalog, path: Path, form: Format, *, base: Path, force: bool) -> None:
    """Write the mapping's picture, and show it in the terminal."""
    from meshplan.catalogs.writing import write_file
    from meshplan.planner.core.kinds import offered
    from meshplan.planner.rank_mapping.pictures import mapping_page, mapping_text

    view = offered(made, "mapping_view", "mapping to draw")(made, catalog, base)
    write_file(path, mapping_page(view), force=force)
    if form is Format.TABLE:
        show_text(f"{mapping_text(view, width=terminal_width())}written to {path}\n")
    else:
        show_document({"plan_id": made.plan_id, "file": str(path), "mapping": made.mapping}, form)


def _explain(made: Plan, form: Format) -> None:
    from meshplan.cli.answers.plans import explanation_document
    from meshplan.cli.reports.plan import report_of, show_plan
    from meshplan.planner.core.kinds import KINDS

    explain_plan = KINDS[made.kind].offers("explain")
    if explain_plan is None:
        show_plan(made, form)
    elif form is Format.TABLE:
        show_text(report_of(made.kind).explanation_report(made, explain_plan(made), width=terminal_width()))
    else:
        show_document(explanation_document(made), form)


def _explain_instead(made: Plan, choices: Choices, catalog: Catalog, form: Format) -> None:
    from meshplan.cli.answers.plans import instead_of
    from meshplan.cli.reports.comparison import choices_section, metrics_section
    from meshplan.cli.reports.parts import paragraph

    found = instead_of(made, choices, catalog)
    label = ", ".join(f"{name}={value}" for name, value in choices.items())
    if form is Format.TABLE:
        width = terminal_width()
        verdict = f"{label} instead: {found.reason}" if found.other else f"no plan with {label}: {found.reason}"
        sections = [paragraph(verdict, width)]
        if found.comparison is not None:
            # the other is not stored, so its id would lead nowhere
            named = replace(found.comparison, plan_ids=("this plan", "instead"))
            sections += [choices_section(named, width), metrics_section(named, width)]
        show_text("\n".join(section for section in sections if section))
    else:
        show_document(found.to_document(made), form)
    if found.other is None:
        raise typer.Exit(EXIT_INFEASIBLE)
