"""Train as a meshplan plan says, with the Hugging Face Trainer; adapters (LoRA, QLoRA) by PEFT.

meshplan copies this file beside the launch scripts as ``train.py`` and never imports it. It expresses data
parallelism: DeepSpeed's ZeRO (``DEEPSPEED_CONFIG``) or what ``accelerate launch`` sets up. Choices are read from
``MESHPLAN_CONFIG``; what a plan does not decide comes from the environment:

MODEL (folder or Hugging Face name), DATA (text, .jsonl with "text", or a dataset's name; for an encoder–decoder with
"input" and "target", such as a text without some spans and these; unset: synthetic tokens), MAX_STEPS (100), LR (1e-4),
WARMUP_STEPS (0), WEIGHT_DECAY (0.1), OUTPUT (nothing is saved where it is unset).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

SYNTHETIC_SEQUENCES = 4096
IGNORED = -100  # label that PyTorch's cross-entropy leaves out
PEAKS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")  # of torch.cuda.memory_stats()
BYTES_OF_FLOAT32 = 4
BETAS, EPSILON = (0.9, 0.95), 1e-8  # of AdamW


def read_choices() -> dict[str, Any]:
    """``training_config.json``, checked against the processes that were started."""
    document: dict[str, Any] = json.loads(Path(os.environ["MESHPLAN_CONFIG"]).read_text(encoding="utf-8"))
    planned, started = document["config"]["world_size"], int(os.environ.get("WORLD_SIZE", "1"))
    if planned != started:
        raise SystemExit(f"train.py: the plan is for {planned} processes, {started} were started")
    return document


def training_arguments(document: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``transformers.TrainingArguments``."""
    config = document["config"]
    arguments: dict[str, Any] = {
        "output_dir": os.environ.get("OUTPUT", "output"),
        "save_strategy": "steps" if os.environ.get("OUTPUT") else "no",
        "per_device_train_batch_size": config["micro_batch_size"],
        "gradient_accumulation_steps": config["num_microbatches"],
        "max_steps": int(os.environ.get("MAX_STEPS", "100")),
        "learning_rate": float(os.environ.get("LR", "1e-4")),
        "warmup_steps": int(os.environ.get("WARMUP_STEPS", "0")),
        "weight_decay": float(os.environ.get("WEIGHT_DECAY", "0.1")),
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPSILON,
        "bf16": config["precision"] == "bf16",
        "fp16": config["precision"] == "fp16",
        "logging_steps": 1,
        "report_to": "none",
        "include_num_input_tokens_seen": "all",
        "dataloader_drop_last": True,
    }
    # Under FSDP accelerate's own configuration wraps the layers: asking twice is an error.
    if config["activation_recompute"] == "full" and os.environ.get("FSDP_ACTIVATION_CHECKPOINTING") != "true":
        arguments["gradient_checkpointing"] = True
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    # The Trainer leaves gradients whole until the last micro-batch (accelerator.no_sync); the plan counts shards.
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if "DEEPSPEED_CONFIG" in os.environ:
        arguments["deepspeed"] = deepspeed_configuration(arguments)
    return arguments


def deepspeed_configuration(arguments: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's JSON; with states in host memory DeepSpeed has to make the optimizer itself.

    The Trainer compares what its own arguments say, and stops where they differ.
    """
    made: dict[str, Any] = json.loads(Path(os.environ["DEEPSPEED_CONFIG"]).read_text(encoding="utf-8"))
    if "offload_optimizer" in made.get("zero_optimization", {}):
        same = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
        values = {name: arguments[field] for name, field in same.items()}
        betas = [arguments["adam_beta1"], arguments["adam_beta2"]]
        made["optimizer"] = {"type": "AdamW", "params": {**values, "betas": betas}}
    return made


def load_model(document: dict[str, Any]) -> Any:
    """The model: random weights for pre-training, else the checkpoint, with its adapters where the plan has them."""
    # optional: meshplan itself runs without these
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    of_class = AutoModelForSeq2SeqLM if document["config"].get("decoder_sequence_length") else AutoModelForCausalLM
    name = os.environ.get("MODEL") or document["model"]
    if not name:
        raise SystemExit("train.py: set MODEL to a folder or a Hugging Face name")
    announce(document, name)
    if document["phase"] == "pretraining":
        # In 32 bits, as the optimizer updates them: a published configuration names the precision of its checkpoint.
        model = of_class.from_config(AutoConfig.from_pretrained(name), dtype=torch.float32)
        model.config.use_cache = False
        return model
    adapters = document.get("adapters")
    precision = torch.bfloat16 if document["config"]["precision"] == "bf16" else torch.float16
    # Trained weights are kept in 32 bits and cast by the Trainer; frozen ones in the precision of the plan.
    loaded: dict[str, Any] = {"dtype": precision if adapters else torch.float32}
    if adapters and "frozen_weights" in adapters:
        loaded["quantization_config"] = quantization(precision)
    model = of_class.from_pretrained(name, **loaded)
    model.config.use_cache = False
    return model if not adapters else with_adapters(model, adapters)


def announce(document: dict[str, Any], name: str) -> None:
    """One line on the first rank before the model is made, which says nothing for minutes where it is large."""
    if os.environ.get("RANK", "0") != "0":
        return
    count = document["num_parameters"]
    size = f"{count / 1e9:.3g} billion parameters as planned"
    if document["phase"] == "pretraining":
        what = f"makes {name} with random weights, {size}, {BYTES_OF_FLOAT32 * count / 2**30:.1f} GiB of float32"
    else:
        what = f"loads the checkpoint {name}, {size}"
    print(f"train.py: {what} before it is sharded; the first step follows", flush=True)  # noqa: T201 - as the steps


def quantization(precision: Any) -> Any:
    """Frozen weights in four bits; stored in the type of the rest, because FSDP shards only weights of one type."""
    # optional: meshplan itself runs without it
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision,
        bnb_4bit_quant_storage=precision,
    )


def with_adapters(model: Any, adapters: dict[str, Any]) -> Any:
    """The model with every weight frozen but the adapters'."""
    # optional: meshplan itself runs without it
    from peft import LoraConfig, get_peft_model

    rank = adapters["lora_rank"]
    made = LoraConfig(
        r=rank,
        lora_alpha=int(os.environ.get("LORA_ALPHA", str(2 * rank))),
        target_modules=adapters["target_modules"],
        modules_to_save=adapters.get("modules_to_save"),
        task_type="CAUSAL_LM",
    )
    model.enable_input_require_grads()  # recomputation needs a gradient at the input of the first layer
    made_model = get_peft_model(model, made)
    made_model.print_trainable_parameters()
    return made_model


def load_data(document: dict[str, Any], vocab_size: int) -> Any:
    """Sequences of exactly the planned length: packed text, or random tokens; pairs of them for an encoder–decoder."""
    # optional: meshplan itself runs without these
    from datasets import Dataset, load_dataset
    from transformers import AutoTokenizer

    length, source = document["config"]["sequence_length"], os.environ.get("DATA")
    target = document["config"].get("decoder_sequence_length", 0)
    if not source:
        rows = synthetic_tokens(vocab_size, length)
        return Dataset.from_dict(
            {"input_ids": rows, "labels": synthetic_tokens(vocab_size, target) if target else rows}
        )
    suffix = Path(source).suffix
    kind = {".jsonl": "json", ".json": "json", ".txt": "text"}.get(suffix)
    data = load_dataset(kind, data_files=source, split="train") if kind else load_dataset(source, split="train")
    tokenizer = AutoTokenizer.from_pretrained(os.environ.get("MODEL") or document["model"])
    if target:
        return data.map(
            lambda batch: pairs(tokenizer, batch, length, target), batched=True, remove_columns=data.column_names
        )

    def packed(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokens = [token for text in batch["text"] for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
        chunks = [tokens[first : first + length] for first in range(0, len(tokens) - length + 1, length)]
        return {"input_ids": chunks, "labels": [list(chunk) for chunk in chunks]}

    return data.map(packed, batched=True, remove_columns=data.column_names)


def synthetic_tokens(vocab_size: int, length: int) -> list[list[int]]:
    """Random sequences, 64 of them over and over."""
    # optional: meshplan itself runs without it
    import torch

    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (64, length), generator=draw).tolist()
    return [tokens[index % len(tokens)] for index in range(SYNTHETIC_SEQUENCES)]


def pairs(tokenizer: Any, batch: dict[str, list[str]], length: int, target: int) -> dict[str, list[list[int]]]:
    """Inputs and targets cut or padded to the planned lengths; the loss leaves padding out."""
    fixed = {"padding": "max_length", "truncation": True}
    read = tokenizer(batch["input"], max_length=length, **fixed)
    written = tokenizer(text_target=batch["target"], max_length=target, **fixed)["input_ids"]
    labels = [[IGNORED if token == tokenizer.pad_token_id else token for token in row] for row in written]
    return {"input_ids": read["input_ids"], "attention_mask": read["attention_mask"], "labels": labels}


def main() -> None:
    """Train, and print time and peak memory of every step: ``meshplan plans record PLAN --from LOG`` reads them."""
    # optional: meshplan itself runs without these
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class StepTimes(TrainerCallback):  # type: ignore[misc]
        """A line a step on the first rank."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.is_world_process_zero:
                line = {"step": state.global_step, "step_time_s": time.perf_counter() - self.started}
                if torch.cuda.is_available():
                    held = torch.cuda.memory_stats()
                    line |= {name: held[name] for name in PEAKS}
                print(f"meshplan {json.dumps(line)}", flush=True)  # noqa: T201 - the log of a training run

    document = read_choices()
    # First the arguments: with ZeRO stage 3 the model is then made in shards.
    arguments = TrainingArguments(**training_arguments(document))
    model = load_model(document)
    data = load_data(document, model.config.vocab_size)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[StepTimes()])
    trainer.train()
    if os.environ.get("OUTPUT"):
        trainer.save_model()


if __name__ == "__main__":
    main()
