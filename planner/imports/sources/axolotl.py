"""What an Axolotl YAML states (docs.axolotl.ai, configuration reference), with the command that starts it."""

from __future__ import annotations

from meshplan.planner.emit.terms import read_all
from meshplan.planner.imports.reading import Given, Reading, as_written
from meshplan.planner.imports.sources import trainer

SOURCE = "axolotl"
_KEYS = ("base_model", "sequence_len", "micro_batch_size", "datasets")
_TERMS = (
    trainer.number("micro_batch_size", "micro_batch_size"),
    trainer.number("num_microbatches", "gradient_accumulation_steps"),
    trainer.number("sequence_length", "sequence_len"),
    trainer.number("lora_rank", "lora_r"),
    trainer.number("tensor_parallel", "tensor_parallel_size"),
    trainer.number("context_parallel", "context_parallel_size", "sequence_parallel_degree"),
    trainer.number("num_shard_groups", "dp_replicate_size"),
    trainer.precision_row("bf16", "fp16"),
    trainer.switch("activation_recompute", "full", "gradient_checkpointing"),
)
_READ_BELOW = ("adapter", "load_in_4bit", "deepspeed", "base_model")


def recognises(given: Given) -> bool:
    """Whether the document is Axolotl's."""
    return sum(key in given.document for key in _KEYS) > 1


def read(given: Given) -> Reading:
    """Batch, length, adapters, and how states are sharded: a DeepSpeed file by its name, or FSDP."""
    document = given.document
    reading = Reading(source=SOURCE, target="accelerate", launch=given.launch)
    reading.take(read_all(_TERMS, document))
    reading.model = str(document.get("base_model", ""))
    known = {key for term in _TERMS for key in term.keys} | set(_READ_BELOW)
    reading.unread += [as_written(key, value) for key, value in document.items() if key not in known]
    trainer.take_adapter(reading, document.get("adapter"), is_narrow=document.get("load_in_4bit") is True)
    if document.get("deepspeed"):
        trainer.take_deepspeed(reading, str(document["deepspeed"]))
    elif any(key.startswith("fsdp") for key in document):
        reading.assume("zero_stage", 3, "fsdp: parameters are sharded")
    trainer.complete(reading)
    return reading
