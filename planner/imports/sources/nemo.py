"""What overrides of NeMo 1's pre-training scripts state: ``model.tensor_model_parallel_size=4 trainer.devices=8``.

The keys of ``model.`` are Megatron-LM's arguments by other spellings (NVIDIA NeMo 1, "GPT model training"), so that
source reads them. What stands in the YAML that the overrides are laid over is not here: such terms are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshplan.planner.emit.terms import count
from meshplan.planner.imports.reading import Given, Reading
from meshplan.planner.imports.sources import megatron

SOURCE = "nemo"
_RENAMED = {
    "--encoder-seq-length": "--seq-length",
    "--virtual-pipeline-model-parallel-size": "--num-virtual-stages-per-pipeline-rank",
    "--activations-checkpoint-granularity": "--recompute-granularity",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
}
_PRECISIONS = {"16": "--fp16", "16-mixed": "--fp16", "bf16": "--bf16", "bf16-mixed": "--bf16"}
_DEGREE = "model.tensor_model_parallel_size"


def _overrides(given: Given) -> dict[str, str]:
    """``key=value`` words of the command; Hydra writes new keys with a plus."""
    pairs = (word.lstrip("+").partition("=") for word in given.launch.program if "=" in word)
    return {key: value.strip("'\"") for key, _, value in pairs}


def recognises(given: Given) -> bool:
    """Whether these are NeMo's overrides."""
    overrides = _overrides(given)
    return _DEGREE in overrides or {"model.micro_batch_size", "trainer.devices"} <= overrides.keys()


def read(given: Given) -> Reading:
    """Megatron-LM's terms out of ``model.``, processes out of ``trainer.``."""
    overrides = _overrides(given)
    reading = megatron.read(replace(given, arguments=_arguments(overrides), loose=()))
    reading.source = SOURCE
    reading.unread += [
        f"{key}={value}" for key, value in overrides.items() if not key.startswith(("model.", "trainer."))
    ]
    launch = given.launch
    try:
        hosts = count(overrides, "trainer.num_nodes") or launch.num_hosts or 1
        devices = count(overrides, "trainer.devices") or launch.devices_per_host
    except ValueError as error:
        reading.report("cluster", str(error))
        return reading
    total = None if devices is None else hosts * devices
    reading.launch = replace(launch, num_hosts=hosts, devices_per_host=devices, num_devices=total)
    return reading


def _arguments(overrides: Mapping[str, str]) -> dict[str, str]:
    """Overrides as Megatron-LM's command line would give them."""
    arguments = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        flag = "--" + name.replace("_", "-")
        if section != "model" or value.lower() in {"null", "false"}:
            continue
        arguments[_RENAMED.get(flag, flag)] = "" if value.lower() == "true" else value
    precision = _PRECISIONS.get(overrides.get("trainer.precision", ""))
    return arguments if precision is None else {**arguments, precision: ""}
