"""Arguments of scripts that use the Hugging Face Trainer, and our own ``training_config.json``: what both hand over.

The names are those of ``transformers.TrainingArguments`` (transformers 5.23, documentation of the Trainer) and of
TRL's and LLaMA-Factory's scripts, in both spellings. No emitter writes them, so these tables are only read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meshplan.planner.emit.terms import Arguments, ReadBack, Term, count, read_all, stated
from meshplan.planner.imports.reading import OUR_FILE, Assumption, Given, Reading, as_written, with_dashes

SOURCE = "trainer"
_CONFIGURATIONS = frozenset({"--deepspeed", "--deepspeed-config", "--config-file", "--ds-config"})
_MODEL = ("--model-name-or-path", "--model", "--model-id", "--model-name")
_BATCH = "--per-device-train-batch-size"
# Names in training scripts that people write themselves; each counts sequences of one device and one forward pass.
_OWN_BATCH = (
    *("--batch-size", "--micro-batch-size", "--batch-size-per-gpu", "--batch-size-per-device", "--bsz"),
    *("--per-device-batch-size", "--per-gpu-train-batch-size", "--train-micro-batch-size-per-gpu"),
    "--batch-size-training",
)
_OWN_PASSES = ("--grad-accumulation-steps", "--gradient-accumulation", "--grad-accum-steps", "--accum-steps")
# Switches of Meta's fine-tuning recipes for Llama.
_FSDP_SWITCH, _WRAPPED = "--enable-fsdp", "--fsdp-config.fsdp-activation-checkpointing"
_FSDP = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "no_shard": 0}
_DEFAULT_BATCH = 8  # of TrainingArguments.per_device_train_batch_size
_READ_BELOW = frozenset({"--fsdp", "--use-peft", "--load-in-4bit", "--finetuning-type", "--quantization-bit"})


def _is_on(arguments: Arguments, key: str) -> bool:
    return str(arguments.get(key, "false")).lower() in {"", "true", "1", "yes", "auto"}


def _row(name: str, read: Callable[[Arguments], Mapping[str, Any]], *keys: str) -> Term:
    return Term(name=name, write=lambda *_: {}, read=read, keys=keys, expressed_by=", ".join(keys), verified_by="")


def number(name: str, *keys: str) -> Term:
    """A positive whole number; ``auto`` and nothing state none."""

    def read(arguments: Arguments) -> Mapping[str, Any]:
        given = {key: arguments[key] for key in keys if arguments.get(key) not in {None, "auto", "", -1, "-1"}}
        return stated(**{name: count(given, *given)}) if given else {}

    return _row(name, read, *keys)


def switch(name: str, value: Any, *keys: str) -> Term:
    """A choice that is ``value`` where one of the switches is on."""
    return _row(name, lambda arguments: {name: value} if any(_is_on(arguments, key) for key in keys) else {}, *keys)


def precision_row(*keys: str) -> Term:
    """``bf16`` or ``fp16`` behind switches of those names."""

    def read(arguments: Arguments) -> Mapping[str, Any]:
        on = [key.strip("-") for key in keys if _is_on(arguments, key)]
        if len(on) > 1 and "auto" not in {str(arguments.get(key)) for key in keys}:
            raise ValueError(f"{' and '.join(keys)} exclude each other")
        return {"precision": on[0]} if on else {}

    return _row("precision", read, *keys)


TERMS = (
    number("micro_batch_size", _BATCH, *_OWN_BATCH),
    number("num_microbatches", "--gradient-accumulation-steps", *_OWN_PASSES),
    number(
        "sequence_length",
        *("--max-seq-length", "--max-length", "--model-max-length", "--cutoff-len", "--block-size"),
        *("--max-seq-len", "--seq-length", "--seq-len", "--context-length"),
    ),
    number("zero_stage", "--zero-stage", "--ds-stage"),
    number("lora_rank", "--lora-r", "--lora-rank"),
    precision_row("--bf16", "--fp16"),
    switch("precision", "bf16", "--pure-bf16", "--fsdp-config.pure-bf16"),
    switch("activation_recompute", "full", "--gradient-checkpointing", _WRAPPED),
    switch("zero_stage", 3, _FSDP_SWITCH),
)


def _arguments(given: Given) -> dict[str, Any]:
    """Flags, and the keys of a file that holds such flags (TRL's and LLaMA-Factory's YAML)."""
    written = {f"--{key}": value for key, value in given.document.items()}
    return with_dashes({**written, **given.arguments})


def recognises(given: Given) -> bool:
    """Whether the flags are those of a script with the Trainer, or a plan's choices for one."""
    arguments = _arguments(given)
    if given.known and not given.document:
        return True
    has_batch = any(flag in arguments for flag in (*_OWN_BATCH, *_OWN_PASSES))
    return (
        _BATCH in arguments
        or _FSDP_SWITCH in arguments
        or {"--model-name-or-path", "--output-dir"} <= arguments.keys()
        or (has_batch and bool(given.launch.launcher))
    )


def read(given: Given) -> Reading:
    """A script without a configuration of its own: plain replicas, ``--fsdp``, or a DeepSpeed file that is not here."""
    reading = Reading(source=SOURCE, target="any", launch=given.launch)
    arguments = _arguments(given)
    take(reading, replace(given, arguments=arguments))
    fsdp = str(arguments.get("--fsdp", "")).split()
    for name in fsdp[:1]:
        reading.target = "accelerate"
        reading.assume("zero_stage", _FSDP.get(name, 3), f"--fsdp {name}")
    if arguments.get("--deepspeed"):
        take_deepspeed(reading, str(arguments["--deepspeed"]))
    reading.assume("micro_batch_size", _DEFAULT_BATCH, "not stated; the Trainer's default")
    complete(reading)
    return reading


def take(reading: Reading, given: Given) -> None:
    """Fill in what the script's own arguments and ``training_config.json`` state."""
    arguments = with_dashes(given.arguments)
    reading.take(read_all(TERMS, arguments))
    stated_values = {term: value for term, value in given.known.items() if value is not None}
    reading.take(ReadBack(values=stated_values, source_flags=dict.fromkeys(stated_values, OUR_FILE)))
    reading.model = reading.model or next((str(arguments[key]) for key in _MODEL if arguments.get(key)), "")
    adapter = str(arguments.get("--finetuning-type", "lora" if _is_on(arguments, "--use-peft") else ""))
    narrow = _is_on(arguments, "--load-in-4bit") or str(arguments.get("--quantization-bit")) == "4"
    take_adapter(reading, adapter if adapter == "lora" else None, is_narrow=narrow)
    own = [flag for flag in (*_OWN_BATCH, *_OWN_PASSES) if flag in arguments]
    if own:
        why = "read as of one device and forward pass, which only the script knows; --micro-batch-size sets another"
        reading.assumed.append(Assumption(term=" ".join(own), value=arguments[own[0]], why=why))
    known = {key for term in TERMS for key in term.keys} | _CONFIGURATIONS | set(_MODEL) | _READ_BELOW
    reading.unread += [as_written(flag, value) for flag, value in arguments.items() if flag not in known]


def take_adapter(reading: Reading, adapter: object, *, is_narrow: bool, adapts_mlp: bool | None = None) -> None:
    """LoRA or QLoRA, and what has adapters where the file says it; a rank without either is no choice of the plan."""
    if adapter not in ("lora", "qlora"):  # of any type: a YAML may hold a list here
        reading.values.pop("lora_rank", None)
        return
    reading.values["phase"] = "qlora" if is_narrow or adapter == "qlora" else "lora"
    reading.assume("lora_rank", 16, "adapters without a rank")
    if adapts_mlp is not None:
        reading.values["lora_targets"] = "all-linear" if adapts_mlp else "attention"


def take_deepspeed(reading: Reading, name: str) -> None:
    """The stage of a DeepSpeed file that is not here, by its name (``zero3.json``, ``ds_z2_config.json``)."""
    reading.target = "deepspeed"
    stage = re.search(r"(?:zero|z|stage)[_-]?([0-3])", name.rsplit("/", 1)[-1].lower())
    if stage is None:
        reading.report("fixed.zero_stage", f"{name!r} is not here and its name tells no stage: give the file too")
        return
    reading.assume("zero_stage", int(stage.group(1)), f"by the name of {name}, which is not here; give the file too")
    if "offload" in name.lower():
        reading.assume("optimizer_offload", True, f"by the name of {name}")


def complete(reading: Reading) -> None:
    """What the Trainer does where nothing says otherwise."""
    for term in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        reading.assume(term, 1, "the Trainer has data parallelism only")
    reading.assume("sequence_parallel", False, "the Trainer keeps whole sequences")
    reading.assume("zero_stage", 0, "no configuration shards states")
    reading.assume("activation_recompute", "none", "not stated; the Trainer's default")
    reading.assume("precision", "fp32", "neither bf16 nor fp16 is set")


def not_as_priced(document: Mapping[str, Any], priced: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Keys of choices that plans do not make, whose value is none of those that they price: it is to be told.

    Args:
        document: key → value, as a file has it.
        priced: key → values that mean what plans price, in small letters: options of a command are texts.
    """
    return {key for key, values in priced.items() if key in document and str(document[key]).lower() not in values}
