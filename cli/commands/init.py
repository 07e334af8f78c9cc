"""``meshplan init``: a spec from five answers, with comments, ready for ``meshplan plan``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.asking import (
    ASSUMED_BATCH,
    ASSUMED_SEQUENCE,
    Asked,
    BatchOption,
    GpusOption,
    LengthsOption,
    ModelOption,
    RateOption,
    SequenceOption,
    SloOption,
    TargetOption,
    assumed_lengths,
    makes_no_tokens,
    shape_of,
)
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshplan.catalogs.database.repository import Catalog

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# What stands beside a line of the spec: key → comment; below, what a kind says otherwise.
_COMMENTS = {
    "model": "a name of `meshplan catalog list models`, a Hugging Face id, or the path of a config.json",
    "type": "`meshplan catalog list nodes`",
    "max_devices": "of the nodes above; the plan may take fewer",
    "sequence_length": "tokens",
    "global_batch_size": "sequences of one optimizer step",
    "global_batch_tokens": "tokens of one optimizer step; or global_batch_size: sequences",
    "input_length": "tokens of a prompt",
    "output_length": "tokens of an answer",
    "request_rate_per_s": "or concurrency: 64, or trace: FILE.csv; without any the plan says what it can take",
    "slo": "{ttft,tpot,itl,e2e}_{mean,p50,p90,p95,p99}_s, in seconds",
    "target": "the plan obeys its rules, and --out writes its files",
}
_COMMENTS_OF_IMAGES = {
    "model": "a name of `meshplan catalog list diffusion-models`, or its Hugging Face id",
    "width": "pixels",
    "height": "pixels",
    "steps": "of denoising",
    "request_rate_per_s": "items; replicas are as many as carry it",
    "slo": "latency_s: from the start of a batch to its decoded pictures; usd_per_item",
}
_VERBS = {"training": "Train", "serving": "Serve", "diffusion": "Make images or videos with"}
_OBJECTIVES = {
    "training": "throughput            # or usd_per_run, num_devices, energy",
    "serving": "throughput_per_device # or usd_per_million_tokens, num_devices, max_request_rate, energy",
    "diffusion": "latency               # or throughput_per_device, usd_per_item, num_devices, energy",
}
_TARGETS = {"training": "megatron", "serving": "vllm", "diffusion": "xdit"}


@app.command()
def init(
    context: typer.Context,
    *,
    model: ModelOption = None,
    gpus: GpusOption = None,
    lengths: LengthsOption = None,
    rate: RateOption = None,
    slo: SloOption = None,
    sequence_length: SequenceOption = None,
    batch: BatchOption = None,
    target: TargetOption = None,
    out: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Where to write; default stdout.")] = None,
    force: ForceOption = False,
    db: DatabaseOption = None,
) -> None:
    """Write a commented spec: five questions at a terminal, or the options of ``meshplan plan``."""
    asked = Asked.of(context)
    catalog = open_catalog(db)
    if sys.stdin.isatty():
        _ask(asked, catalog)
    text = spec_text(asked.document(catalog))
    for assumption in asked.assumed:
        sys.stderr.write(f"assumed: {assumption}\n")
    if out is None:
        sys.stdout.write(text)
        return
    from meshplan.catalogs.writing import write_file  # start-up: only a file needs it

    write_file(out, text, force=force)
    sys.stdout.write(f"wrote {out}; next:\n  meshplan plan {out}\n")


def _ask(asked: Asked, catalog: Catalog) -> None:
    """Ask for what the options leave open."""
    asked.model = asked.model or _prompt("Which model (Hugging Face id, catalog name, config.json)?")
    asked.gpus = asked.gpus or _prompt("Which GPUs (16xH100, 2xdgx-h100)?")
    if asked.pictures(catalog) is not None:
        asked.slo = asked.slo or _prompt("Limit of the latency (empty for none)?", "latency=10s") or None
        return
    shape = shape_of(asked.model, catalog)
    if not (asked.says_serving or asked.says_training):
        purpose = "serve" if makes_no_tokens(shape) else _prompt("Train or serve?", "serve").lower()
        if purpose.startswith("t"):
            asked.sequence_length = _prompt("Tokens of a sequence?", ASSUMED_SEQUENCE)
        else:
            lengths, words = assumed_lengths(shape)
            asked.lengths = _prompt(f"{words.partition(' (')[0].capitalize()}?", lengths)
    if asked.says_training:
        asked.batch = asked.batch or _prompt("Sequences of one optimizer step, or its tokens?", ASSUMED_BATCH)
    elif asked.slo is None:
        usual = "e2e_p99=1s" if makes_no_tokens(shape) else "ttft_p99=2s,tpot_p95=50ms"
        asked.slo = _prompt("Latency limits (empty for none)?", usual) or None


def _prompt(text: str, default: str | None = None) -> str:
    # The questions go to stderr, so that `meshplan init > question.yaml` holds the spec alone.
    return str(typer.prompt(text, default=default, err=True)).strip()


def spec_text(document: Mapping[str, Any]) -> str:
    """A spec as YAML with comments, sections apart; ``objective`` and ``constraints.target`` are always written out."""
    from meshplan.catalogs.untrusted.quoting import yaml_text  # start-up: --help needs no YAML

    kind = str(document["kind"])
    whole = {
        **{key: value for key, value in document.items() if key not in ("objective", "constraints")},
        "objective": document.get("objective", ""),
        "constraints": {"target": _TARGETS[kind], **document.get("constraints", {})},
    }
    comments = _COMMENTS | (_COMMENTS_OF_IMAGES if kind == "diffusion" else {})
    lines = [f"# {_VERBS[kind]} {document['model']}: meshplan plan FILE --out plans"]
    for key, value in whole.items():
        if key == "objective" and not value:
            lines.append(f"\nobjective: {_OBJECTIVES[kind]}")
            continue
        section = yaml_text({key: value}, allow_unicode=True, width=1000).rstrip().splitlines()
        if isinstance(value, dict) or key == "objective":
            lines.append("")
        lines += [_commented(line, comments) for line in section]
    return "\n".join(lines) + "\n"


def _commented(line: str, comments: Mapping[str, str]) -> str:
    key = line.strip().removeprefix("- ").partition(":")[0]
    return f"{line:<32} # {comments[key]}" if key in comments else line
