"""``meshplan catalog schema|support``: what a spec may contain, and which choices each emit target can express."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from meshplan.cli.options import FormatOption
from meshplan.cli.render import Column, Format, show_document, show_rows

_SUPPORT_COLUMNS = (
    Column(key="target", title="Target", wrap=False),
    Column(key="feature", title="Choice", wrap=False),
    Column(key="takes", title="Takes"),
    Column(key="expressed_by", title="Flags"),
    Column(key="verified_by", title="Verified by", footnote=True, wrap=False),
)
_ALL_COLUMNS = tuple(
    Column(key=key, title=key)
    for key in ("target", "feature", "takes", "refuses", "expressed_by", "verified_by", "parser_verified")
)


class SpecKind(StrEnum):
    """Kinds of specs that have a JSON Schema."""

    TRAINING = "training"
    SERVING = "serving"
    ALLOCATION = "gpu-allocation"


def schema(
    kind: Annotated[SpecKind, typer.Option("--kind", help="Kind of the spec.")] = SpecKind.TRAINING,
    form: FormatOption = Format.JSON,
) -> None:
    """Print the JSON Schema of a kind of specs, for editors that complete and check as you type."""
    from meshplan.planner.core.kinds import KINDS
    from meshplan.planner.core.spec_reader import spec_schema

    show_document(spec_schema(KINDS[kind.value].offers("SPEC")), form)


def support(form: FormatOption = Format.TABLE) -> None:
    """List which choices of a plan each emit target takes, with which flags, and which parser verified them.

    Every line is found by emitting a probe plan; the CSV and JSON forms also give the reason why a choice is refused.
    """
    from meshplan.planner.launch.support import support_matrix

    show_rows(support_matrix(), _SUPPORT_COLUMNS if form is Format.TABLE else _ALL_COLUMNS, form)
