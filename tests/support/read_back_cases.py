"""From emitted files back to our terms, by the readers of ``meshplan import`` (plain functions; no fixtures)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.imports.command import read_inputs
from meshplan.planner.imports.completion import complete_training
from meshplan.planner.imports.reading import Reading
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.spec import FixedSpec
from meshplan.planner.training.problem.switches import ALL_TO_ALL, FRAMEWORKS_OWN, USUAL_MODULES

# The framework's own file of each target.
FILES = {
    "megatron": "megatron_args.txt",
    "torchtitan": "torchtitan_args.txt",
    "deepspeed": "deepspeed_config.json",
    "accelerate": "accelerate_config.yaml",
    "axolotl": "axolotl.yaml",
    "torchtune": "torchtune.yaml",
}
HANDED_OVER = "training_config.json"


def num_devices(emitted: EmittedPlan) -> int:
    """How many devices the emitted hosts.txt asks for."""
    text = next(file.content for file in emitted.artifacts if file.path.name == "hosts.txt")
    return sum(len(line.split()[2].split(",")) for line in text.splitlines() if line and line[0] != "#")


def read_back(target: str, emitted: EmittedPlan, folder: Path, *, extra: Sequence[str] = ()) -> Reading:
    """What the reader makes of the framework's file, and of ``extra`` ones."""
    names = [FILES[target], *extra]
    for file in emitted.artifacts:
        if file.path.name in names:
            (folder / file.path.name).write_text(file.content)
    reading = read_inputs([str(folder / name) for name in names])
    assert reading.source == target
    reading.problems += reading.launch.problems
    complete_training(reading, num_devices(emitted))
    return reading


# What a choice is where a framework needs no argument for it.
NEEDS_NO_ARGUMENT = {
    "optimizer_offload": False,
    "optimizer_offload_percent": 100,
    "parameter_offload": False,
    "vocabulary_parallel": False,
    "activation_offload": False,
    "activation_offload_num_layers": 0,
    "expert_parallel_overlap": False,
    "expert_dispatcher": ALL_TO_ALL,
    "context_parallel_style": "ring",
    "context_parallel_heads": 1,
    "zero_hpz_partition_size": 1,
    "outer_zero_stage": 0,
    "gathered_num_layers": 0,
    "recompute_modules": USUAL_MODULES,
    "gradient_precision": FRAMEWORKS_OWN,
    "cuda_graphs": "none",
    "loss": FRAMEWORKS_OWN,
    "optimizer": FRAMEWORKS_OWN,
    "optimizer_in_backward": False,
}


def differences(reading: Reading, config: TrainingConfig, *, handed: bool = True) -> dict[str, tuple[Any, Any]]:
    """Terms that came back changed: name → (planned, read).

    Args:
        reading: what came back.
        config: what was emitted.
        handed: the file handed to the user's script was read too, so that every term is known.
    """
    of_one_type = FixedSpec.model_fields.keys() - {"stages"}  # stages are those of jobs on several node types
    names = {*of_one_type, "num_microbatches", "global_batch_size", "sequence_length", "precision"}
    if not handed:
        names &= reading.source_flags.keys() | {"data_parallel"}
    planned = {name: getattr(config, name) for name in names}
    if config.zero_stage == 0 and "data_parallel_shard" in planned:
        planned["data_parallel_shard"] = 1
    if reading.source == "torchtitan" and config.data_parallel_shard == config.context_parallel == 1:
        planned["zero_stage"] = 0  # a shard degree of 1 shards nothing, whatever the stage
    if config.expert_capacity_factor:
        planned["expert_capacity_factor"] = config.expert_capacity_factor
    needs_no_argument = {
        "recompute_num_layers": config.activation_recompute != "block",  # nothing to count
        "sequence_parallel": config.tensor_parallel == 1,  # nothing is split
        "layers_per_chunk": len(set(config.layers_per_chunk)) == 1,  # even: determined by stages and chunks
    }
    needs_no_argument |= {name: getattr(config, name) == value for name, value in NEEDS_NO_ARGUMENT.items()}
    if config.context_parallel == 1:
        planned.pop("context_parallel_style", None)
    planned = {name: value for name, value in planned.items() if not needs_no_argument.get(name)}
    if config.offload_to != "host":
        planned["offload_to"] = config.offload_to
    if config.pipeline_parallel == 1:
        planned.pop("pipeline_schedule", None)  # one stage has none
    if reading.source != "megatron":
        # Other frameworks have no argument for these; the planner's rules keep them at 1.
        for name in ("virtual_pipeline_stages", "expert_tensor_parallel", "layers_per_chunk"):
            planned.pop(name, None)
    found = {name: (value, reading.values.get(name)) for name, value in planned.items()}
    # TorchTitan's weights of the ends become layers where the model is known, which a command line alone does not say.
    if reading.source == "megatron" and len(set(config.layers_per_chunk)) > 1:
        found["layers_per_chunk"] = (config.layers_per_chunk, reading.values.get("layers_per_chunk"))
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}
