"""What Accelerate's YAML states, with ``accelerate launch`` and the arguments of a Trainer script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshplan.planner.emit.terms import Arguments, Term, count, read_all
from meshplan.planner.emit.training import deepspeed
from meshplan.planner.emit.training.accelerate import TERMS
from meshplan.planner.imports.reading import Given, Launch, Reading, as_written
from meshplan.planner.imports.sources import trainer

SOURCE = "accelerate"
_KEYS = ("distributed_type", "compute_environment", "num_processes")
_DEFAULT = "not stated; Accelerate's default"
_FULLY_SHARDED = 3
_FLAGS = {"--multi-gpu": "MULTI_GPU", "--use-fsdp": "FSDP", "--use-deepspeed": "DEEPSPEED"}
_DEEPSPEED = "deepspeed_config."
_COMMAND_KEYS = {
    "--mixed-precision": "mixed_precision",
    "--zero-stage": f"{_DEEPSPEED}zero_stage",
    "--gradient-accumulation-steps": f"{_DEEPSPEED}gradient_accumulation_steps",
    "--offload-optimizer-device": f"{_DEEPSPEED}offload_optimizer_device",
    "--offload-param-device": f"{_DEEPSPEED}offload_param_device",
    "--deepspeed-config-file": f"{_DEEPSPEED}deepspeed_config_file",
    "--fsdp-sharding-strategy": "fsdp_config.fsdp_sharding_strategy",
}
_DEEPSPEED_TERMS = (
    trainer.number("num_microbatches", f"{_DEEPSPEED}gradient_accumulation_steps"),
    Term(
        name="zero_stage",
        write=lambda *_: {},
        read=lambda arguments: _stage(arguments.get(f"{_DEEPSPEED}zero_stage")),
        keys=(f"{_DEEPSPEED}zero_stage",),
        expressed_by="",
        verified_by="",
    ),
)
_FSDP_VERSIONS = ("1", "2")
# Written in every file, or about the machine: no part of a plan.
_NO_CHOICES = frozenset(
    {"compute_environment", "distributed_type", "use_cpu", "rdzv_backend", "same_network", "num_processes"}
    | {"num_machines", "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "debug"}
    | {"downcast_bf16", "gpu_ids", "enable_cpu_affinity", "fsdp_config.fsdp_version"}
    | {"fsdp_config.fsdp_auto_wrap_policy"}
)
# What plans price of choices that they do not make; another value decides, and is told.
_PRICED: Mapping[str, tuple[str, ...]] = {
    "use_cpu": ("false",),
    "fsdp_config.fsdp_auto_wrap_policy": ("transformer_based_wrap",),
}


def _stage(value: Any) -> dict[str, int]:
    """``zero_stage`` as a number; nothing where it is not there."""
    if value is None:
        return {}
    if str(value) not in {"0", "1", "2", "3"}:
        raise ValueError(f"zero_stage is 0, 1, 2 or 3, not {value!r}")
    return {"zero_stage": int(value)}


def recognises(given: Given) -> bool:
    """Whether the document is Accelerate's, or the launcher is."""
    options = given.launch.options
    is_launcher = given.launch.launcher == SOURCE and "--config-file" not in options
    is_document = sum(key in given.document for key in _KEYS) > 1
    return is_document or is_launcher or any(flag in options for flag in _FLAGS)


def read(given: Given) -> Reading:
    """Sizes of the mesh, sharding, precision; FSDP of both versions and plain data parallelism."""
    document = {**given.document, **_stated_by_command(given.launch.options)}
    kind = str(document.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        return _read_deepspeed(given, document)
    # The rules of the target "accelerate" are those of FSDP; plain replicas are anybody's.
    reading = Reading(source=SOURCE, target=SOURCE if kind == "FSDP" else "any", launch=given.launch)
    if kind not in {"FSDP", "MULTI_GPU", "NO"}:
        reading.report(
            "distributed_type",
            f"{kind} is not read (FSDP, DEEPSPEED and MULTI_GPU are)",
        )
    version = document.get("fsdp_config.fsdp_version", 1)
    if kind == "FSDP" and str(version) not in _FSDP_VERSIONS:
        reading.report(
            "fsdp_config.fsdp_version", f"{version!r} is no version of FSDP; known: {', '.join(_FSDP_VERSIONS)}"
        )
    reading.launch = _launch(reading, document, given.launch)
    reading.take(read_all(TERMS, document))
    reading.unread += _unread(document, TERMS)
    trainer.take(reading, given)
    for term in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        reading.assume(term, 1, _DEFAULT)
    values = reading.values
    replicas = values.pop("data_parallel_replicate", None)
    if "data_parallel_shard" in values:
        values["data_parallel"] = values["data_parallel_shard"] * (replicas or 1)
        reading.source_flags["data_parallel"] = reading.source_flags["data_parallel_shard"]
    elif replicas:
        values["num_shard_groups"] = replicas
    reading.assume("zero_stage", _FULLY_SHARDED if kind == "FSDP" else 0, f"distributed_type {kind}")
    reading.assume("sequence_parallel", False, "Accelerate has no key for it")
    reading.assume("activation_recompute", "none", _DEFAULT)
    reading.assume("precision", "fp32", "mixed_precision is not stated")
    return reading


def _stated_by_command(options: Arguments) -> dict[str, Any]:
    """Options of ``accelerate launch`` as keys of its YAML."""
    found: dict[str, Any] = {}
    for flag, kind in _FLAGS.items():
        if flag in options:
            found["distributed_type"] = kind
    for flag, key in _COMMAND_KEYS.items():
        if flag in options:
            found[key] = options[flag]
    return found


def _read_deepspeed(given: Given, document: Mapping[str, Any]) -> Reading:
    """Accelerate's own section for DeepSpeed, or the file that it names."""
    reading = Reading(source=SOURCE, target="deepspeed", launch=given.launch)
    reading.launch = _launch(reading, document, given.launch)
    reading.take(read_all(deepspeed.TERMS, given.document))
    reading.take(read_all(_DEEPSPEED_TERMS, document))
    name = document.get("deepspeed_config.deepspeed_config_file")
    if name and "zero_stage" not in reading.values:
        trainer.take_deepspeed(reading, str(name))
    for section, choice in (("optimizer", "optimizer_offload"), ("param", "parameter_offload")):
        device = document.get(f"{_DEEPSPEED}offload_{section}_device", "none")
        if device in {"cpu", "nvme"}:
            reading.values[choice] = True
            reading.source_flags[choice] = f"offload_{section}_device {device}"
            reading.values["offload_to"] = "nvme" if device == "nvme" else "host"
    precision = document.get("mixed_precision")
    if precision in {"bf16", "fp16"}:
        reading.values["precision"], reading.source_flags["precision"] = precision, f"mixed_precision {precision}"
    trainer.take(reading, given)
    reading.unread += _unread(given.document, (*deepspeed.TERMS, *_DEEPSPEED_TERMS))
    trainer.complete(reading)
    return reading


def _unread(document: Mapping[str, Any], terms: Iterable[Term]) -> list[str]:
    """Keys that decide something and that nothing here reads, with their values."""
    known = {key for term in terms for key in term.keys} | _NO_CHOICES
    known -= trainer.not_as_priced(document, _PRICED)
    return [as_written(key, value) for key, value in document.items() if key not in known]


def _launch(reading: Reading, document: dict[str, Any] | Any, launch: Launch) -> Launch:
    """The command's numbers, else the file's."""
    found: dict[str, int | None] = {}
    for key, mine in (("num_processes", launch.num_devices), ("num_machines", launch.num_hosts)):
        try:
            found[key] = mine or count(document, key)
        except ValueError as error:
            reading.report("cluster", str(error))
            found[key] = mine
    hosts, total = found["num_machines"], found["num_processes"]
    per_host = total // hosts if total and hosts else None
    return replace(launch, num_hosts=hosts, devices_per_host=per_host, num_devices=total)
