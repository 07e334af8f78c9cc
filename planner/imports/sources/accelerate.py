"""What Accelerate's YAML states, with ``accelerate launch`` and the arguments of a Trainer script."""

from __future__ import annotations

from typing import Any

from meshplan.planner.emit.terms import count, read_all
from meshplan.planner.emit.training.accelerate import TERMS
from meshplan.planner.imports.reading import Given, Launch, Reading, as_written
from meshplan.planner.imports.sources import trainer

SOURCE = "accelerate"
_KEYS = ("distributed_type", "compute_environment", "num_processes")
_DEFAULT = "not stated; Accelerate's default"
_FULLY_SHARDED = 3
_FSDP_VERSIONS = ("1", "2")
# Written in every file, or about the machine: no part of a plan.
_NO_CHOICES = frozenset(
    {"compute_environment", "distributed_type", "use_cpu", "rdzv_backend", "same_network", "num_processes"}
    | {"num_machines", "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "debug"}
    | {"downcast_bf16", "gpu_ids", "enable_cpu_affinity", "fsdp_config.fsdp_version"}
    | {"fsdp_config.fsdp_auto_wrap_policy"}
)


def recognises(given: Given) -> bool:
    """Whether the document is Accelerate's, or the launcher is."""
    return sum(key in given.document for key in _KEYS) > 1


def read(given: Given) -> Reading:
    """Sizes of the mesh, sharding, precision; FSDP of both versions and plain data parallelism."""
    document = given.document
    kind = str(document.get("distributed_type", "NO")).upper()
    # The rules of the target "accelerate" are those of FSDP; plain replicas are anybody's.
    reading = Reading(source=SOURCE, target=SOURCE if kind == "FSDP" else "any", launch=given.launch)
    if kind not in {"FSDP", "MULTI_GPU", "NO"}:
        reading.report(
            "distributed_type", f"{kind} has its own configuration: import that file (FSDP and MULTI_GPU are read)"
        )
    version = document.get("fsdp_config.fsdp_version", 1)
    if kind == "FSDP" and str(version) not in _FSDP_VERSIONS:
        reading.report(
            "fsdp_config.fsdp_version", f"{version!r} is no version of FSDP; known: {', '.join(_FSDP_VERSIONS)}"
        )
    reading.launch = _launch(reading, document, given.launch)
    reading.take(read_all(TERMS, document))
    known = {key for term in TERMS for key in term.keys} | _NO_CHOICES
    reading.unread += [as_written(key, value) for key, value in document.items() if key not in known]
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
    return Launch(
        program=launch.program,
        options=launch.options,
        num_hosts=hosts,
        devices_per_host=total // hosts if total and hosts else None,
        num_devices=total,
        problems=launch.problems,
    )
