"""A question from the fields of a form: the same words as the options of ``meshplan plan``, and the same spec.

The form's YAML, its errors and its command line are all made here, of what
:class:`meshplan.cli.asking.Asked` makes of the options, so that form and command line cannot differ.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import Problem, SpecError, UnknownEntryError
from meshplan.catalogs.models.diffusion import diffusion_model
from meshplan.cli.asking import (
    ASSUMED_BATCH,
    ASSUMED_LENGTHS,
    ASSUMED_SEQUENCE,
    Asked,
    assumed_lengths,
    shape_of,
)
from meshplan.cli.commands.init import spec_text
from meshplan.cli.web.asking import check_question
from meshplan.planner.cluster.lookup import unknown_names
from meshplan.planner.core.reading.documents import parse_document
from meshplan.planner.launch.registry import engine_names, framework_names

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

SERVE, TRAIN, MAKE = "serve", "train", "make"
_HERE = Path(__file__).parents[1] / "examples"
# The whole examples, for the editor; tests hold them against those at the root of the project.
EXAMPLE_TEXTS = {file.stem: file.read_text(encoding="utf-8") for file in sorted(_HERE.glob("*.yaml"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of the form.

    Args:
        name: as in :class:`~meshplan.cli.asking.Asked`, and in the page's address.
        label: for people.
        hint: what may be written.
        purposes: which of ``serve``, ``train`` and ``make`` (images or videos) have it; empty for all.
        assumed: what an empty field means for most models.
        listed: the list of names that complete it.
    """

    name: str
    label: str
    hint: str
    purposes: tuple[str, ...] = ()
    assumed: str = ""
    listed: str = ""


FIELDS = (
    Field(name="model", label="Model", hint="a name of the catalog: llama-3.1-70b, flux.1-dev", listed="models"),
    Field(name="gpus", label="GPUs", hint="16xH100, nodes: 2xdgx-h100, several types: 8xA100,8xH100", listed="devices"),
    Field(
        name="lengths",
        label="Tokens in / out",
        hint="4000/1000; of a text to embed: 512",
        purposes=(SERVE,),
        assumed=ASSUMED_LENGTHS,
    ),
    Field(name="rate", label="Requests a second", hint="5; empty: as many as it takes", purposes=(SERVE, MAKE)),
    Field(
        name="slo",
        label="Latency limits",
        hint="ttft_p99=3s,tpot_p95=50ms; of images: latency=10s",
        purposes=(SERVE, MAKE),
    ),
    Field(
        name="sequence_length",
        label="Tokens of a sequence",
        hint="8192 or 8k",
        purposes=(TRAIN,),
        assumed=ASSUMED_SEQUENCE,
    ),
    Field(
        name="batch",
        label="Batch of a step",
        hint="512 sequences, or 4M tokens",
        purposes=(TRAIN,),
        assumed=ASSUMED_BATCH,
    ),
    Field(name="tokens", label="Tokens of the run", hint="1e12 or 15T; empty: not asked", purposes=(TRAIN,)),
    Field(name="objective", label="Best at", hint="empty: throughput, of images: latency", listed="objectives"),
    Field(
        name="target", label="Framework or engine", hint="megatron, vllm, …", purposes=(SERVE, TRAIN), listed="targets"
    ),
)
EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "training": {
        "purpose": TRAIN,
        "model": "llama-3.1-70b",
        "gpus": "8xdgx-h100",
        "sequence_length": "8192",
        "batch": "512",
        "tokens": "1e12",
        "objective": "throughput",
        "target": "megatron",
    },
    "training on two GPU types": {
        "purpose": TRAIN,
        "model": "llama-3.1-8b",
        "gpus": "1xdgx-a100-80gb,1xdgx-h100",
        "batch": "64",
    },
    "serving": {
        "purpose": SERVE,
        "model": "llama-3.1-70b",
        "gpus": "1xdgx-h100",
        "lengths": "4000/1000",
        "rate": "2",
        "slo": "ttft_p99=3s,tpot_p95=50ms",
        "objective": "throughput_per_device",
        "target": "vllm",
    },
    "images": {"purpose": MAKE, "model": "flux.1-dev", "gpus": "1xdgx-h100", "slo": "latency=10s"},
}
# The beginning of a problem's path → the field that it is shown at.
_FIELD_OF = {
    "workload.input_length": "lengths",
    "workload.output_length": "lengths",
    "workload.request_rate_per_s": "rate",
    "workload.sequence_length": "sequence_length",
    "workload.global_batch": "batch",
    "workload.num_training_tokens": "tokens",
    "constraints.target": "target",
    "cluster": "gpus",
    "model": "model",
    "slo": "slo",
    "objective": "objective",
}


def form_view(fields: Mapping[str, str], catalog: Catalog) -> dict[str, Any]:
    """The spec that the fields mean, as YAML and as a command, and every problem at its field.

    Args:
        fields: of :data:`FIELDS`, and ``purpose``.
        catalog: in which names are looked up.
    """
    purpose = fields["purpose"] if fields.get("purpose") in (TRAIN, MAKE) else SERVE
    given = {
        field.name: text
        for field in FIELDS
        if purpose in (field.purposes or (purpose,)) and (text := fields.get(field.name, "").strip() or field.assumed)
    }
    if not fields.get("lengths", "").strip() and purpose == SERVE:
        given["lengths"] = assumed_lengths(shape_of(given.get("model", ""), catalog))[0]
    command = "meshplan plan " + " ".join(
        f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in given.items()
    )
    shown = {"purpose": purpose, "command": command, "yaml": "", "errors": []}
    try:
        document = _asked(given, purpose).document(catalog)
    except SpecError as error:
        return {**shown, "errors": _located(error)}
    return {**shown, "yaml": spec_text(document), "errors": problems_of(document, catalog)}


def _asked(given: Mapping[str, str], purpose: str) -> Asked:
    _check_model(given.get("model", ""), purpose)
    targets, target = engine_names() if purpose == SERVE else framework_names(), given.get("target")
    if target is not None and target not in targets:
        message = f"must be one of {', '.join(targets)}, not {target!r}"
        raise SpecError.at("--target", message)
    rate = given.get("rate")
    try:
        number = None if rate is None else float(rate)
    except ValueError:
        message = f"{rate!r} is no number of requests a second"
        raise SpecError.at("--rate", message) from None
    return Asked(**{**given, "rate": number})  # type: ignore[arg-type]  # every other option is text


def _check_model(model: str, purpose: str) -> None:
    """A model that makes images is for that purpose, and no other is.

    Raises:
        SpecError: at the model's field.
    """
    try:
        pictures = diffusion_model(model).name
    except UnknownEntryError as error:
        if purpose == MAKE and model:
            raise SpecError.at("model", str(error)) from None
        return
    if purpose != MAKE:
        message = f"{pictures} makes images or videos: choose that above"
        raise SpecError.at("model", message)


def text_view(text: str, catalog: Catalog) -> dict[str, Any]:
    """What is wrong with a spec that somebody writes as YAML."""
    try:
        document = parse_document(text, name="the text")
    except SpecError as error:
        return {"errors": _located(error)}
    return {"errors": problems_of(document, catalog)}


def problems_of(document: dict[str, Any], catalog: Catalog) -> list[dict[str, str]]:
    """Every problem of a spec that is seen without a search: its keys, its values, the names of hardware and model."""
    try:
        check_question(document)
    except SpecError as error:
        return _located(error)
    if "cluster" not in document:
        return []
    return [_at(problem) for problem in unknown_names(document, catalog)]


def _located(error: SpecError) -> list[dict[str, str]]:
    return [_at(problem) for problem in error.problems]


def _at(problem: Problem) -> dict[str, str]:
    """A problem with the field that it is shown at; empty: above the form."""
    path = problem.path.removeprefix("--").replace("-", "_")
    own = next((field.name for field in FIELDS if field.name == path), "")
    field = own or next((name for start, name in _FIELD_OF.items() if problem.path.startswith(start)), "")
    return {"path": problem.path, "message": problem.message, "field": field}
