"""The question of a command: a spec from a file, from standard input or from options, with ``--set`` applied."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.asking import Asked, refused

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the spec: workload.sequence_length=16k.",
        show_default=False,
    ),
]

# Keys of a spec that are one option each.
_KEYS = {
    "objective": "objective",
    "target": "constraints.target",
    "rate": "workload.request_rate_per_s",
    "concurrency": "workload.concurrency",
    "sequence_length": "workload.sequence_length",
    "tokens": "workload.num_training_tokens",
    "model": "model",
}


def question(spec: Path | None, asked: Asked, settings: Sequence[str], catalog: Catalog) -> tuple[dict[str, Any], Path]:
    """The spec from a file, from standard input (``-``) or from options, with ``--set`` applied; and its folder.

    Raises:
        SpecError: neither or both were given, or one cannot be read.
    """
    from meshplan.planner.core.reading.documents import parse_document, read_question  # start-up: --help needs no YAML

    if (spec is None) == asked.is_empty:
        what = "give a spec file or --model and --gpus" + (
            "" if spec is None else f", not both; {_beside_a_file(asked)}"
        )
        if spec is not None and str(asked.gpus).isdecimal():  # --gpus 8 H100
            what = f"--gpus: write {asked.gpus}x{spec}, in one word"
        raise refused("", what)
    base = Path()
    if spec is None:
        asked.has_trace = any(setting.startswith("workload.trace=") for setting in settings)
        document = asked.document(catalog)
        for assumption in asked.assumed:
            sys.stderr.write(f"assumed: {assumption}\n")
    elif str(spec) == "-":
        document = parse_document(sys.stdin.read(), name="standard input")
    else:
        document, base = read_question(spec), spec.parent
    return with_settings(document, settings), base


def _beside_a_file(asked: Asked) -> str:
    """What to write in place of options beside a spec file."""
    given = {name: getattr(asked, name) for name in _KEYS if getattr(asked, name) is not None}
    instead = " ".join(f"--set {_KEYS[name]}={value}" for name, value in given.items())
    return f"a file is overridden by {instead}" if instead else "--set overrides a file"


def with_settings(document: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The spec with keys overridden: ``workload.sequence_length=16k``, ``cluster.nodes.0.count=4``.

    Values are read as in YAML. Missing sections are made.

    Raises:
        SpecError: an override has no ``=``, or walks through what is no section.
    """
    from meshplan.planner.core.reading.settings import put  # start-up: as above

    changed = copy.deepcopy(dict(document))
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise refused("--set", f"{setting!r} is not KEY=VALUE, such as workload.sequence_length=16k")
        put(changed, path, _value(text))
    return changed


def _value(text: str) -> Any:
    from meshplan.planner.core.reading.documents import parse_document  # start-up: YAML is loaded for questions only

    return parse_document(f"value: {text}", name=f"--set …={text}")["value"]
