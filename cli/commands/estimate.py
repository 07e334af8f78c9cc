"""``meshplan estimate``: one pinned configuration, completely priced."""

from __future__ import annotations

import typer

from meshplan.catalogs.errors import EXIT_INFEASIBLE
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption, SpecArgument, server_of
from meshplan.cli.question import SetOption, with_settings
from meshplan.cli.render import Format

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def estimate(
    context: typer.Context,
    spec: SpecArgument,
    settings: SetOption = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Price the one configuration that SPEC pins under 'fixed'; what it leaves out takes its plain default.

    Nothing is searched and nothing is stored. Exit code 3 when it does not fit the devices' memory; the breakdown is
    still printed.
    """
    from meshplan.cli.client import Client
    from meshplan.cli.reports.plan import is_infeasible, show_plan
    from meshplan.planner.core.reading.documents import read_question
    from meshplan.planner.service import estimate_plan

    service = server_of(context)
    document, base = with_settings(read_question(spec), settings or ()), spec.parent
    if service is None:
        made = estimate_plan(document, open_catalog(db, or_shipped=True), base=base)
    else:
        made = Client(service).estimate(document)
    show_plan(made, form)
    if is_infeasible(made):
        raise typer.Exit(EXIT_INFEASIBLE)
