"""What a TorchTitan command line, or a TOML file of its older releases, states."""

from __future__ import annotations

from typing import Any

from meshplan.planner.emit.terms import read_all
from meshplan.planner.emit.training.torchtitan import (
    ASYNC,
    COMPILE,
    FLOAT8_MODULE,
    FLOAT8_SUFFIX,
    KERNEL_FLAGS,
    SUBCOMMAND,
    TERMS,
)
from meshplan.planner.imports.reading import Given, Reading, as_written, with_dashes
from meshplan.planner.training.problem.frameworks.torchtitan import ALWAYS_FLOAT8, TORCHTITAN_CONFIGS

SOURCE = "torchtitan"
_SECTIONS = ("--parallelism.", "--training.", "--model.", "--activation-checkpoint.", SUBCOMMAND)
_MODEL_FLAGS = ("--module", "--config", "--model.name", "--model.flavor")
# Keys of files before the section [parallelism].
_RENAMED = {
    "--training.data-parallel-degree": "--parallelism.data-parallel-shard-degree",
    "--training.tensor-parallel-degree": "--parallelism.tensor-parallel-degree",
    "--training.batch-size": "--training.local-batch-size",
    "--experimental.pipeline-parallel-degree": "--parallelism.pipeline-parallel-degree",
    "--experimental.context-parallel-degree": "--parallelism.context-parallel-degree",
}
_DEFAULT = "not stated; TorchTitan's default"
_FULLY_SHARDED, _SHARDED_GRADIENTS = 3, 2


def recognises(given: Given) -> bool:
    """Whether this is TorchTitan's."""
    program = " ".join(given.launch.program[:1])
    return "torchtitan" in program or any(flag.startswith("--parallelism.") for flag in _arguments(given))


def read(given: Given) -> Reading:
    """Degrees and batch from flags; the older TOML has the same terms under the same names."""
    reading = Reading(source=SOURCE, target=SOURCE, launch=given.launch)
    arguments = _arguments(given)
    reading.take(read_all(TERMS, arguments))
    module, config = arguments.get("--module", ""), arguments.get("--config", "")
    if not config and "--model.flavor" in arguments:
        module = arguments.get("--model.name", "")
        config = f"{arguments.get('--model.name')}_{arguments['--model.flavor']}".lower()
    # Written by meshplan for a plan in fp8; of a file of arguments alone the module is not told.
    if module in {FLOAT8_MODULE, ""} and config.endswith(FLOAT8_SUFFIX):
        module, config = "", config.removesuffix(FLOAT8_SUFFIX)
        reading.values["precision"] = "fp8"
    slugs = [slug for slug, names in TORCHTITAN_CONFIGS.items() if names == (module or names[0], config)]
    if slugs:
        reading.model = slugs[0]
        reading.assume("model", slugs[0], f"builds the layers of {config}" + _others(slugs[1:]))
        if ALWAYS_FLOAT8.intersection(slugs):
            reading.values["precision"] = "fp8"
            reading.left_out.append(f"{config} converts its linear layers to float8: read as precision fp8")
    known = {key for term in TERMS for key in term.keys} | KERNEL_FLAGS | set(_MODEL_FLAGS)
    reading.unread += [as_written(flag, value) for flag, value in arguments.items() if flag not in known]
    if not _is_on(arguments, COMPILE):
        reading.left_out.append(f"no {COMPILE}: operators one by one; a spec is priced with compiled ones")
    if _is_on(arguments, ASYNC):
        reading.left_out.append(f"{ASYNC}: a spec is priced without")
    _complete(reading)
    return reading


def _is_on(arguments: dict[str, Any], flag: str) -> bool:
    """A switch of the command line, or a value of a TOML file."""
    return str(arguments.get(flag, "false")).lower() in {"", "true"}


def _others(slugs: list[str]) -> str:
    return f"; so do {', '.join(slugs)}" if slugs else ""


def _arguments(given: Given) -> dict[str, Any]:
    """Flags with dashes; ``activation_checkpoint.mode`` of a TOML is a sub-command in current releases."""
    arguments: dict[str, Any] = {f"--{key}": value for key, value in given.document.items()} | dict(given.arguments)
    dashed = {flag: "true" if value is True else value for flag, value in with_dashes(arguments).items()}
    for older, newer in _RENAMED.items():
        if older in dashed:
            dashed.setdefault(newer, dashed.pop(older))
    mode = dashed.pop("--activation-checkpoint.mode", None)
    return dashed if mode is None else {**dashed, f"{SUBCOMMAND}{mode}": ""}


def _complete(reading: Reading) -> None:
    """TorchTitan's defaults, and the terms that follow from several of its arguments."""
    for term in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        reading.assume(term, 1, _DEFAULT)
    values = reading.values
    reading.assume("sequence_parallel", values["tensor_parallel"] > 1, _DEFAULT)
    reading.assume("activation_recompute", "none", "no sub-command activation-checkpoint")
    reading.assume("precision", "bf16", _DEFAULT)
    replicas, shards = values.pop("data_parallel_replicate", 1), values.get("data_parallel_shard")
    if shards is not None:
        values["data_parallel"] = replicas * shards
        reading.source_flags["data_parallel"] = reading.source_flags["data_parallel_shard"]
    else:
        values["num_shard_groups"] = replicas
    staged = values["pipeline_parallel"] > 1
    sharded = shards != 1 or values["context_parallel"] > 1
    if not sharded:
        values["zero_stage"] = 0
    reading.assume("zero_stage", _SHARDED_GRADIENTS if staged else _FULLY_SHARDED, "fsdp-reshard-after-forward default")
    local = values.pop("local_batch_size", None)
    if local is None:
        return
    if not staged:
        reading.assume("micro_batch_size", local, "local-batch-size: one forward pass")
        return
    micro = reading.assume("micro_batch_size", 1, _DEFAULT)
    if local % micro:
        reading.report("micro_batch_size", f"local-batch-size {local} is no multiple of the micro-batch {micro}")
    else:
        values["num_microbatches"] = local // micro
