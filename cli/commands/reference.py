"""``meshplan catalog schema|choices|support``: what a spec may contain, and which choices each target can express."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from meshplan.catalogs.errors import EmitError, closest_names, did_you_mean
from meshplan.cli.options import FormatOption
from meshplan.cli.render import Column, Format, Row, show_document, show_rows, show_text

_FIELD_COLUMNS = (
    Column(key="key", title="Key", wrap=False),
    Column(key="type", title="Type"),
    Column(key="default", title="Default"),
    Column(key="meaning", title="Meaning"),
)
_TARGET_COLUMNS = (
    Column(key="target", title="Target", wrap=False),
    Column(key="all", title="taken", right=True, wrap=False),
    Column(key="some", title="some values", right=True, wrap=False),
    Column(key="none", title="refused", right=True, wrap=False),
    Column(key="parsers", title="Files read by the parser of"),
)
_SUPPORT_COLUMNS = (
    Column(key="feature", title="Choice", wrap=False),
    Column(key="takes", title="Takes"),
    Column(key="expressed_by", title="Flags"),
    Column(key="since", title="New in"),
    Column(key="verified_by", title="Verified by", footnote=True, wrap=False),
)
_ALL_COLUMNS = tuple(
    Column(key=key, title=key)
    for key in (
        "target",
        "feature",
        "takes",
        "refuses",
        "expressed_by",
        "since",
        "verified_by",
        "parser_verified",
    )
)


def _meaning(row: Row) -> str:
    """What a choice is, its abbreviations and its default in one cell: columns of their own leave it no room."""
    short = f"short {row['abbreviations']}" if row["abbreviations"] else ""
    default = f"default {row['default']}" if row["default"] not in {"", "default"} else ""
    said = "; ".join(part for part in (short, default) if part)
    return f"{row['about']} ({said})" if said else str(row["about"])


_CHOICE_COLUMNS = (
    Column(key="name", title="Choice", wrap=False),
    Column(key="about", title="Meaning", derive=_meaning),
    Column(key="frameworks", title="In", footnote=True, wrap=False),
)
_ALL_CHOICE_COLUMNS = tuple(
    Column(key=key, title=key.capitalize())
    for key in ("name", "spec", "abbreviations", "type", "default", "about", "frameworks", "since")
)


class SpecKind(StrEnum):
    """Kinds of specs: each has a JSON Schema."""

    TRAINING = "training"
    SERVING = "serving"
    ALLOCATION = "gpu-allocation"
    RANK_MAPPING = "rank-mapping"
    EXPERT_PLACEMENT = "expert-placement"
    DIFFUSION = "diffusion"
    EDGE = "edge"
    SWEEP = "sweep"


# The names stand in the help text: as a list of choices they are one word, wider than a terminal.
_KIND_HELP = f"Kind of the spec: {', '.join(SpecKind)}."


def schema(
    kind: Annotated[SpecKind, typer.Option("--kind", metavar="KIND", help=_KIND_HELP)] = SpecKind.TRAINING,
    form: FormatOption = Format.JSON,
) -> None:
    """Print the JSON Schema of a kind of specs, for editors that complete and check as you type."""
    from meshplan.planner.core.kinds import KINDS
    from meshplan.planner.core.reading.spec_reader import spec_schema

    model = _model(kind)
    show_document(KINDS[kind.value].offers("SCHEMA") if model is None else spec_schema(model), form)


def fields(
    kind: Annotated[
        SpecKind, typer.Argument(metavar="[KIND]", show_choices=False, help=_KIND_HELP)
    ] = SpecKind.TRAINING,
    form: FormatOption = Format.TABLE,
) -> None:
    """List every key of a kind of specs: type, default, meaning; --format markdown makes a reference page."""
    from meshplan.planner.core.reading.spec_reference import reference_rows

    show_rows(list(reference_rows(_model(kind))), _FIELD_COLUMNS, form)


def _model(kind: SpecKind) -> Any:
    """The pydantic model of a kind of specs; None for kinds that read theirs in another way."""
    from meshplan.planner.core.kinds import KINDS
    from meshplan.planner.sweep.spec import SweepSpec

    return SweepSpec if kind is SpecKind.SWEEP else KINDS[kind.value].offers("SPEC")


def support(
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="One target, choice by choice.", show_default=False)
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """List the emit targets and how many choices of a plan each takes; of one TARGET: which, and with which flags.

    Every line is found by emitting a probe plan and says which parser verified the files. The CSV and JSON forms give
    every choice of every target, and the reason why one is refused.
    """
    from meshplan.planner.launch.support import support_matrix

    rows = support_matrix()
    names = list(dict.fromkeys(str(row["target"]) for row in rows))
    if target is not None and target not in names:
        raise EmitError(f"unknown target {target!r}{did_you_mean(closest_names(target, names))}; {', '.join(names)}")
    chosen = [row for row in rows if target in (None, row["target"])]
    if form is not Format.TABLE:
        show_rows(chosen, _ALL_COLUMNS, form)
    elif target is not None:
        is_new = any(row["since"] for row in chosen)  # of most targets no release was compared
        show_rows(chosen, [column for column in _SUPPORT_COLUMNS if is_new or column.key != "since"], form)
    else:
        show_rows([_summary(name, chosen) for name in names], _TARGET_COLUMNS, form)
        show_text("Choices of a plan that each target takes; one by one: meshplan catalog support TARGET\n")


def _summary(target: str, rows: Sequence[Row]) -> Row:
    """One target: how many choices it takes with every value that was tried, with some, with none."""
    mine = [row for row in rows if row["target"] == target]
    releases = dict.fromkeys(
        f"{row['parser_verified']['framework']} {row['parser_verified']['version']}"
        for row in mine
        if row["parser_verified"]
    )
    return {
        "target": target,
        # Engines are not probed choice by choice: what their tables say is taken.
        "all": sum(not row["refuses"] for row in mine),
        "some": sum(bool(row["takes"]) and bool(row["refuses"]) for row in mine),
        "none": sum(not row["takes"] and bool(row["refuses"]) for row in mine),
        "parsers": ", ".join(releases),
    }


def choices(form: FormatOption = Format.TABLE) -> None:
    """List the choices of a training plan: type, default, meaning, abbreviations, and which frameworks take them.

    A framework is named, with the release that was checked, where probe plans with several values can be emitted.
    The other forms also give the type and the place in a spec; --format markdown makes a reference page.
    """
    from meshplan.planner.launch.support import choice_rows

    show_rows(choice_rows(), _CHOICE_COLUMNS if form is Format.TABLE else _ALL_CHOICE_COLUMNS, form)
