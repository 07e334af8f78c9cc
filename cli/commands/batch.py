"""``meshplan batch``: which global batch trains soonest."""

from __future__ import annotations

from typing import Annotated

import typer

from meshplan.catalogs.errors import EXIT_INFEASIBLE, SpecError, UnitError
from meshplan.cli.asking import Asked
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption, SpecArgument
from meshplan.cli.progress import progress_line
from meshplan.cli.question import SetOption, question
from meshplan.cli.render import Format, show_document, show_text, terminal_width

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def batch(
    spec: SpecArgument,
    noise: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            help="Gradient noise scale: tokens, or tokens over the progress of the run, such as 0:1M,0.5:4M,1:8M.",
            show_default=False,
        ),
    ],
    batches: Annotated[
        str,
        typer.Option(
            metavar="TOKENS,…",
            help="Global batches to compare. Default: halves and doubles of the question's own; of an open one (auto) "
            "those around the noise scale.",
            show_default=False,
        ),
    ] = "",
    settings: SetOption = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Plan SPEC at several global batches, and weigh their rates against the tokens that each needs for the same loss.

    The spec's batch and its num_training_tokens are the reference; of an open batch (auto) its reference_batch. Exit
    code 3 where no batch has a plan.
    """
    from meshplan.planner.batch_size.noise import read_noise
    from meshplan.planner.batch_size.study import study_document
    from meshplan.planner.core.kinds import kind_of
    from meshplan.planner.service import make_plan
    from meshplan.planner.training.replanning.chosen_batch import batch_study
    from meshplan.planner.training.service import resolve

    catalog = open_catalog(db, or_shipped=True)
    document, base = question(spec, Asked(), settings or (), catalog)
    if kind_of(document).name != "training":
        raise SpecError.at("kind", "only a training question has a global batch")
    with progress_line() as on_progress:
        study = batch_study(
            document,
            read_noise(noise),
            lambda each: make_plan(each, catalog, base=base, on_progress=on_progress),
            lambda each: resolve(each, catalog, base),
            batches=_sizes(batches),
        )
    if form is Format.TABLE:
        from meshplan.cli.reports.whole_run.batches import batches_report

        show_text(batches_report(study, width=terminal_width()))
    else:
        show_document(study_document(study), form)
    if study.schedule is None:
        raise typer.Exit(EXIT_INFEASIBLE)


def _sizes(text: str) -> list[int]:
    """Batches as users write them.

    Raises:
        SpecError: one is no number of tokens.
    """
    from meshplan.catalogs.units import parse_tokens
    from meshplan.planner.batch_size.noise import MOST_TOKENS

    try:
        return [parse_tokens(part.strip(), least=1, most=MOST_TOKENS) for part in text.split(",") if part.strip()]
    except UnitError as error:
        raise SpecError.at("--batches", str(error)) from error
