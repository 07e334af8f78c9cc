"""Arguments of scripts that use the Hugging Face Trainer, and our own ``training_config.json``: what both hand over.

The names are those of ``transformers.TrainingArguments`` (transformers 5.23, documentation of the Trainer), in both
spellings. No emitter writes them, so this table is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshplan.planner.emit.terms import Arguments, ReadBack, Term, count, read_all, stated
from meshplan.planner.imports.reading import Given, Reading, as_written, with_dashes

_CONFIGURATIONS = frozenset({"--deepspeed", "--deepspeed-config", "--config-file"})
_MODEL = ("--model-name-or-path", "--model")


def _is_on(arguments: Arguments, key: str) -> bool:
    return str(arguments.get(key, "false")).lower() in {"", "true", "1"}


def _read_precision(arguments: Arguments) -> Mapping[str, Any]:
    on = [name for name in ("bf16", "fp16") if _is_on(arguments, f"--{name}")]
    if len(on) > 1:
        raise ValueError("--bf16 and --fp16 exclude each other")
    return {"precision": on[0]} if on else {}


def _row(name: str, read: Callable[[Arguments], Mapping[str, Any]], *keys: str) -> Term:
    return Term(name=name, write=lambda *_: {}, read=read, keys=keys, expressed_by=", ".join(keys), verified_by="")


def _number(name: str, *keys: str) -> Term:
    return _row(name, lambda arguments: stated(**{name: count(arguments, *keys)}), *keys)


TERMS = (
    _number("micro_batch_size", "--per-device-train-batch-size"),
    _number("num_microbatches", "--gradient-accumulation-steps"),
    _number("sequence_length", "--max-seq-length", "--max-length", "--model-max-length"),
    _row("precision", _read_precision, "--bf16", "--fp16"),
    _row(
        "activation_recompute",
        lambda arguments: {"activation_recompute": "full"} if _is_on(arguments, "--gradient-checkpointing") else {},
        "--gradient-checkpointing",
    ),
)


def take(reading: Reading, given: Given) -> None:
    """Fill in what the script's own arguments and ``training_config.json`` state."""
    arguments = with_dashes(given.arguments)
    reading.take(read_all(TERMS, arguments))
    stated_values = {term: value for term, value in given.known.items() if value is not None}
    reading.take(ReadBack(values=stated_values, source_flags=dict.fromkeys(stated_values, "training_config.json")))
    reading.model = reading.model or next((str(arguments[key]) for key in _MODEL if arguments.get(key)), "")
    known = {key for term in TERMS for key in term.keys} | _CONFIGURATIONS | set(_MODEL)
    reading.unread += [as_written(flag, value) for flag, value in arguments.items() if flag not in known]
