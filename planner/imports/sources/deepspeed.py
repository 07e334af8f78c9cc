"""What DeepSpeed's JSON states, with the launcher and the arguments of a script that uses the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.planner.emit.terms import read_all
from meshplan.planner.emit.training.deepspeed import TERMS
from meshplan.planner.imports.reading import Given, Reading, as_written
from meshplan.planner.imports.sources import trainer

SOURCE = "deepspeed"
_KEYS = ("train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization.stage")
_DEFAULT = "not stated; DeepSpeed's default"
# What plans price of a choice that they do not make; another value decides, and is told.
_PRICED: Mapping[str, tuple[str, ...]] = {"zero_optimization.overlap_comm": ("true", "auto")}


def recognises(given: Given) -> bool:
    """Whether the document is DeepSpeed's."""
    return any(key in given.document for key in _KEYS)


def read(given: Given) -> Reading:
    """Batch, ZeRO stage, precision and AutoTP; what the JSON has no key for comes from the script's arguments."""
    reading = Reading(source=SOURCE, target=SOURCE, launch=given.launch)
    reading.take(read_all(TERMS, given.document))
    known = {key for term in TERMS for key in term.keys} - trainer.not_as_priced(given.document, _PRICED)
    reading.unread += [as_written(key, value) for key, value in given.document.items() if key not in known]
    trainer.take(reading, given)
    for term in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        reading.assume(term, 1, _DEFAULT)
    reading.assume("sequence_parallel", False, "AutoTP keeps whole sequences")
    reading.assume("zero_stage", 0, _DEFAULT)
    reading.assume("precision", "fp32", "neither bf16 nor fp16 is enabled")
    reading.assume("activation_recompute", "none", "not stated; it is the script's choice")
    if reading.values["tensor_parallel"] > 1:
        # DeepSpeed's total counts every rank as a batch of its own; the planner counts sequences.
        total = reading.values.pop("global_batch_size", None)
        if total is not None:
            reading.left_out.append(f"train_batch_size {total}: under AutoTP it counts ranks, not sequences")
    return reading
