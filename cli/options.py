"""Options that every command shares, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer
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
