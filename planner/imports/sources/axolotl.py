"""What an Axolotl YAML states (docs.axolotl.ai, configuration reference), with the command that starts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.planner.emit.terms import read_all
from meshplan.planner.emit.training.axolotl import NO_CHOICES, TERMS
from meshplan.planner.imports.reading import Assumption, Given, Reading, as_written
from meshplan.planner.imports.sources import trainer
from meshplan.planner.training.problem.problem import Phase

SOURCE = "axolotl"
_KEYS = ("base_model", "sequence_len", "micro_batch_size", "datasets")
# What the emitter writes in a form of its own, and what plans for Axolotl do not have.
_ONLY_READ = (
    trainer.number("lora_rank", "lora_r"),
    trainer.number("tensor_parallel", "tensor_parallel_size"),
)
# How a model is wrapped, loaded and saved: published recipes have them.
_SAYS_NOTHING = frozenset(
    {
        *(f"fsdp_config.{key}" for key in ("transformer_layer_cls_to_wrap", "state_dict_type", "sync_module_states")),
        *("fsdp_config.limit_all_gathers", "fsdp_config.use_orig_params", "fsdp_config.final_state_dict_type"),
        *("flash_attention", "num_epochs", "saves_per_epoch", "dataset_prepared_path"),
    }
)
# What plans price of choices that they do not make; another value decides, and is told.
_PRICED: Mapping[str, tuple[str, ...]] = {
    "flash_attention": ("true",),
    "attn_implementation": ("flash_attention_2", "flash_attention_3", "sdpa"),
    "optimizer": ("adamw_torch_fused", "adamw_torch"),
    "sample_packing": ("true",),
    "pad_to_sequence_len": ("true",),
}
_MLP = ("gate_proj", "up_proj", "down_proj")
_READ_BELOW = frozenset(
    {
        *("adapter", "load_in_4bit", "deepspeed", "base_model", "reinit_weights", "lora_alpha", "lora_dropout"),
        *("lora_target_modules", "lora_target_linear", "lora_modules_to_save"),
    }
)


def recognises(given: Given) -> bool:
    """Whether the document is Axolotl's."""
    return sum(key in given.document for key in _KEYS) > 1


def read(given: Given) -> Reading:
    """Batch, length, adapters, and how states are sharded: a DeepSpeed file by its name, or FSDP."""
    document = {key: value for key, value in given.document.items() if value not in (None, "")}
    reading = Reading(source=SOURCE, target=SOURCE, launch=given.launch)
    reading.take(read_all((*TERMS, *_ONLY_READ), document))
    reading.model = str(document.get("base_model", ""))
    known = {key for term in (*TERMS, *_ONLY_READ) for key in term.keys} | _READ_BELOW | NO_CHOICES | _SAYS_NOTHING
    known -= trainer.not_as_priced(document, _PRICED)
    reading.unread += [
        as_written(key, value)
        for key, value in document.items()
        if key not in known and key.replace(".fsdp_", ".") not in known  # keys are taken with and without it
    ]
    trainer.take_adapter(
        reading,
        document.get("adapter"),
        is_narrow=document.get("load_in_4bit") is True,
        adapts_mlp=_adapts_mlp(document),
    )
    if "phase" not in reading.values and document.get("reinit_weights") is not True:
        reading.assume("phase", Phase.FINE_TUNING.value, "no adapter: every weight of a checkpoint")
    if "sample_packing" not in document:
        why = "not stated: Axolotl then pads each text to its own length, and plans price full sequences"
        reading.assumed.append(Assumption(term="sample_packing", value=True, why=why))
    if document.get("deepspeed"):
        trainer.take_deepspeed(reading, str(document["deepspeed"]))
    elif any(key.startswith("fsdp") for key in document):
        reading.assume("zero_stage", 3, "fsdp: parameters are sharded")
    if reading.values.get("tensor_parallel", 1) > 1:
        reading.target = "accelerate"  # plans for axolotl split no matrix products
    trainer.complete(reading)
    return reading


def _adapts_mlp(document: Mapping[str, Any]) -> bool | None:
    """Whether adapters sit on the MLP too; None where the file does not say it."""
    if document.get("lora_target_linear") is True:
        return True
    named = document.get("lora_target_modules")
    return any("mlp" in str(one) or str(one) in _MLP for one in named) if isinstance(named, tuple) else None
