"""Arguments of scripts that use the Hugging Face Trainer, and our own ``training_config.json``: what both hand over.

The names are those of ``transformers.TrainingArguments`` (transformers 5.23, documentation of the Trainer), in both
spellings. No emitter says them, so this table is read only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshplan.planner.emit.training.terms import Read, Term, Words, count, read_all, stated
from meshplan.planner.imports.reading import Given, Reading, as_written

_CONFIGURATIONS = frozenset({"--deepspeed", "--deepspeed-config", "--config-file"})
_MODEL = ("--model-name-or-path", "--model")


def _is_on(words: Words, key: str) -> bool:
    return str(words.get(key, "false")).lower() in {"", "true", "1"}


def _read_precision(words: Words) -> Mapping[str, Any]:
    on = [name for name in ("bf16", "fp16") if _is_on(words, f"--{name}")]
    if len(on) > 1:
        raise ValueError("--bf16 and --fp16 exclude each other")
    return {"precision": on[0]} if on else {}


def _row(name: str, read: Callable[[Words], Mapping[str, Any]], *keys: str) -> Term:
    return Term(name=name, words=lambda *_: {}, read=read, keys=keys, said_by=", ".join(keys), verified_by="")


def _number(name: str, *keys: str) -> Term:
    return _row(name, lambda words: stated(**{name: count(words, *keys)}), *keys)


TERMS = (
    _number("micro_batch_size", "--per-device-train-batch-size"),
    _number("num_microbatches", "--gradient-accumulation-steps"),
    _number("sequence_length", "--max-seq-length", "--max-length", "--model-max-length"),
    _row("precision", _read_precision, "--bf16", "--fp16"),
    _row(
        "activation_recompute",
        lambda words: {"activation_recompute": "full"} if _is_on(words, "--gradient-checkpointing") else {},
        "--gradient-checkpointing",
    ),
)


def take(reading: Reading, given: Given) -> None:
    """Fill in what the script's own arguments and ``training_config.json`` say."""
    words = {word.replace("_", "-") if word.startswith("--") else word: value for word, value in given.words.items()}
    reading.take(read_all(TERMS, words))
    said = {term: value for term, value in given.known.items() if value is not None}
    reading.take(Read(values=said, said_by=dict.fromkeys(said, "training_config.json")))
    reading.model = reading.model or next((str(words[key]) for key in _MODEL if words.get(key)), "")
    known = {key for term in TERMS for key in term.keys} | _CONFIGURATIONS | set(_MODEL)
    reading.unread += [as_written(word, value) for word, value in words.items() if word not in known]
