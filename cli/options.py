"""Options that every command shares, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshplan.cli.completion import complete_plan
from meshplan.cli.render import Format

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="Catalog: a file or an SQLAlchemy URL. Default: $MESHPLAN_DB, else a file in your data directory.",
        show_default=False,
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How to print the answer on stdout.")]
SpecArgument = Annotated[
    Path, typer.Argument(metavar="SPEC", help="YAML or JSON file with 'kind:'.", show_default=False)
]
SpecOrOptions = Annotated[
    Path | None,
    typer.Argument(
        metavar="[SPEC]", help="YAML or JSON file with 'kind:', or - for standard input.", show_default=False
    ),
]
PlanArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN",
        help="Stored plan: tag, id or its beginning, 'latest'; or the path of a plan's JSON file.",
        show_default=False,
        autocompletion=complete_plan,
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the launcher files.", show_default=False)
]
ScriptOption = Annotated[
    str,
    typer.Option(
        "--script", metavar="FILE", help="Your training script, where the framework has none.", show_default=False
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that are already there.")]
TracesOption = Annotated[
    Path | None,
    typer.Option(
        "--traces",
        metavar="DIR",
        help="Traces that serving runs replayed, TYPE.csv or TYPE.jsonl[.gz].",
        show_default=False,
    ),
]
# NumPy's generators take no negative seed, a service none of more than 32 bits.
SeedOption = Annotated[
    int,
    typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="Where pseudo-random choices start from."),
]


def server_of(context: typer.Context) -> str | None:
    """The service that shall answer (``meshplan --server URL …``); None for this process."""
    given = context.find_root().params.get("server")
    return None if given is None else str(given)
