"""What a torchtune recipe states: its YAML, ``tune run`` and ``key=value`` words after it (torchtune 0.6, docs)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshplan.planner.emit.terms import read_all
from meshplan.planner.emit.training.torchtune import NO_CHOICES, TERMS
from meshplan.planner.imports.launchers import read_launch
from meshplan.planner.imports.reading import Given, Reading, as_written
from meshplan.planner.imports.sources import trainer
from meshplan.planner.training.problem.problem import Phase

SOURCE = "torchtune"
_COMPONENT = "model._component_"
# What the emitter writes in a form of its own, and what plans for torchtune do not have.
_ONLY_READ = (
    trainer.number("lora_rank", "model.lora_rank"),
    trainer.number("tensor_parallel", "tensor_parallel_dim"),
    trainer.number("data_parallel_shard", "data_parallel_shard_dim"),
    trainer.number("num_shard_groups", "data_parallel_replicate_dim"),
)
_READ_BELOW = (_COMPONENT, "model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")
# What plans price of choices that they do not make; another value decides, and is told.
_PRICED: Mapping[str, tuple[str, ...]] = {
    "optimizer._component_": ("torch.optim.adamw",),
    "compile": ("true",),
    "dataset.packed": ("true",),
}
_MODEL = re.compile(r"torchtune\.models\.\w+\.(?:(q?lora)_)?([a-z0-9_]+)")


def recognises(given: Given) -> bool:
    """Whether this is a recipe of torchtune."""
    program = "".join(given.launch.program[:1]).rsplit("/", 1)[-1]
    return program == "tune" or "torchtune" in str(given.document.get(_COMPONENT, ""))


def read(given: Given) -> Reading:
    """Batch, length, adapters; distributed recipes shard parameters (FSDP2)."""
    words = [word.partition("=") for word in (*given.launch.program, *given.loose)]
    stated = {key: value for key, sign, value in words if sign and not key.startswith("-")}
    document = {key: value for key, value in {**given.document, **stated}.items() if value not in (None, "", "null")}
    reading = Reading(source=SOURCE, target=SOURCE, launch=given.launch)
    reading.take(read_all((*TERMS, *_ONLY_READ), document))
    if reading.values.get("data_parallel_shard") == 1 or "-1" in str(document.get("data_parallel_shard_dim", "")):
        reading.values.pop("data_parallel_shard", None)
    recipe = " ".join(given.launch.program)
    if given.launch.program[1:2] == ("run",):
        # "tune run" takes torchrun's options before the recipe.
        reading.launch = read_launch(("torchrun", *recipe.partition(" --config")[0].split()[2:], "recipe.py"))
    found = _MODEL.search(str(document.get(_COMPONENT, "")))
    config = re.search(r"--config[ =](\S+)", recipe)
    named = re.search(r"q?lora", recipe)
    adapter = (found.group(1) if found else None) or (named.group() if named else None)
    on_mlp = document.get("model.apply_lora_to_mlp")
    trainer.take_adapter(
        reading, adapter, is_narrow=False, adapts_mlp=None if on_mlp is None else str(on_mlp).lower() == "true"
    )
    reading.assume("phase", Phase.FINE_TUNING.value, "no adapter: every weight of a checkpoint")
    if found:
        reading.model = _name(found.group(2))
    elif config:  # a recipe that comes with torchtune: llama3_1/8B_lora
        family, _, size = config.group(1).partition("/")
        reading.model = "-".join(filter(None, (_name(family), size.partition("_")[0].lower())))
    reading.assume("precision", "bf16", "not stated; the dtype of torchtune's own configurations")
    known = {key for term in (*TERMS, *_ONLY_READ) for key in term.keys} | set(_READ_BELOW) | NO_CHOICES
    known -= trainer.not_as_priced(document, _PRICED)
    reading.unread += [as_written(key, value) for key, value in document.items() if key not in known]
    if "single_device" in recipe:
        reading.launch = replace(reading.launch, num_hosts=1, devices_per_host=1, num_devices=1)
    reading.assume("zero_stage", 3, "recipes for several devices shard parameters (FSDP2)")
    if reading.values.get("tensor_parallel", 1) > 1:
        reading.target = "any"  # the rules of the target torchtune are those of data parallelism
    trainer.complete(reading)
    return reading


def _name(component: str) -> str:
    """``llama3_1_8b`` → ``llama-3.1-8b``."""
    name = re.sub(r"^(llama|qwen|gemma|mistral|phi)(\d)", r"\1-\2", component)
    return re.sub(r"-(\d)_(\d)(?=_|$)", r"-\1.\2", name).replace("_", "-")
