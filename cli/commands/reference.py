"""``meshplan catalog schema|choices|support``: what a spec may contain, and which choices each target can express."""

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
_CHOICE_COLUMNS = (
    Column(key="name", title="Choice", wrap=False),
    Column(key="abbreviations", title="Short", wrap=False),
    Column(key="default", title="Default"),
    Column(key="about", title="Meaning"),
    Column(key="frameworks", title="Frameworks", footnote=True, wrap=False),
)
_ALL_CHOICE_COLUMNS = tuple(
    Column(key=key, title=key.capitalize())
    for key in ("name", "spec", "abbreviations", "type", "default", "about", "frameworks")
)


class SpecKind(StrEnum):
    """Kinds of questions: each has a JSON Schema."""

    TRAINING = "training"
    SERVING = "serving"
    ALLOCATION = "gpu-allocation"
    RANK_MAPPING = "rank-mapping"
    EXPERT_PLACEMENT = "expert-placement"


def schema(
    kind: Annotated[SpecKind, typer.Option("--kind", help="Kind of the spec.")] = SpecKind.TRAINING,
    form: FormatOption = Format.JSON,
) -> None:
    """Print the JSON Schema of a kind of specs, for editors that complete and check as you type."""
    from meshplan.planner.core.kinds import KINDS
    from meshplan.planner.core.spec_reader import spec_schema

    asked = KINDS[kind.value]
    model = asked.offers("SPEC")
    show_document(asked.offers("SCHEMA") if model is None else spec_schema(model), form)


def support(form: FormatOption = Format.TABLE) -> None:
    """List which choices of a plan each emit target takes, with which flags, and which parser verified them.

    Every line is found by emitting a probe plan; the CSV and JSON forms also give the reason why a choice is refused.
    """
    from meshplan.planner.launch.support import support_matrix

    show_rows(support_matrix(), _SUPPORT_COLUMNS if form is Format.TABLE else _ALL_COLUMNS, form)


def choices(form: FormatOption = Format.TABLE) -> None:
    """List the choices of a training plan: type, default, meaning, abbreviations, and which frameworks take them.

    A framework is named, with the release that was checked, where probe plans with several values can be emitted.
    The other forms also give the type and the place in a spec; --format markdown makes a reference page.
    """
    from meshplan.planner.launch.support import choice_rows

    show_rows(choice_rows(), _CHOICE_COLUMNS if form is Format.TABLE else _ALL_CHOICE_COLUMNS, form)
