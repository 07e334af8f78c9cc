"""A training plan on several node types as FlagScale files: one process mesh for each run of equal stages.

FlagScale (FlagOpen/FlagScale) starts Megatron-LM with ``hetero_*`` arguments; every other argument is Megatron-LM's,
with underscores. A mesh is [tensor, context, expert, data, pipeline]; ranks fill the meshes in order.

Source of the rules: FlagScale at commit 01397a03, ``flagscale/train/arguments.py``, ``pre_validate_args`` and
``post_validate_args``; processes of a host: ``flagscale/runner/utils.py``, ``get_nproc_per_node``; what torchrun gets:
``flagscale/runner/runner_train.py``, ``_get_runner_cmd_train`` (03343614); layout of the files: its Qwen3 example for
mixed devices (``examples/qwen3``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import Artifact, EmittedPlan, commented, stamp
from meshplan.planner.emit.training.megatron.job import unchecked_flags
from meshplan.planner.training.problem.problem import TrainingConfig

TARGET = "flagscale"
# Numbers of a mesh: tensor, context, expert, data and pipeline parallelism.
MESH_NUMBERS = 5
# Megatron-LM arguments that the meshes decide instead.
_BY_MESH = (
    "--pipeline-model-parallel-layout",
    "--tensor-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHosts:
    """Hosts of one node type.

    Args:
        node_type: as the plan names it.
        devices: how many are in use; each host is filled before the next.
        devices_per_host: devices of each.
    """

    node_type: str
    devices: int
    devices_per_host: int

    @property
    def slots(self) -> list[int]:
        """Processes of each host: the last one's may be fewer than it has devices."""
        full, rest = divmod(self.devices, self.devices_per_host)
        return [self.devices_per_host] * full + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Consecutive stages with the same degrees on one node type."""

    node_type: str
    tensor: int
    data: int
    layers: tuple[int, ...]
    micro_batch_size: int

    @property
    def degrees(self) -> list[int]:
        """As FlagScale writes a mesh."""
        return [self.tensor, 1, 1, self.data, len(self.layers)]


def meshes(stages: Sequence[Mapping[str, Any]]) -> tuple[Mesh, ...]:
    """The meshes of a plan's stages."""
    keys = ("node_type", "tensor_parallel", "data_parallel", "micro_batch_size")
    made = []
    for key, run in itertools.groupby(stages, key=lambda stage: tuple(stage[name] for name in keys)):
        layers = tuple(int(stage["num_layers"]) for stage in run)
        made.append(Mesh(node_type=key[0], tensor=key[1], data=key[2], micro_batch_size=key[3], layers=layers))
    return tuple(made)


def broken_rules(
    process_meshes: Sequence[int],
    *,
    layer_split: Sequence[int],
    device_types: Sequence[str],
    micro_batch_size: int,
    num_layers: int,
    ties_embeddings: bool,
    partial_reduce: bool,
) -> list[str]:
    """Which of FlagScale's rules arguments break, in words.

    Args:
        process_meshes: five numbers a mesh.
        layer_split: layers of each stage.
        device_types: one a mesh.
        micro_batch_size: of the first mesh.
        num_layers: of the model.
        ties_embeddings: embedding and LM head share weights.
        partial_reduce: ``use_partial_reduce_for_shared_embedding``.
    """
    if len(process_meshes) % MESH_NUMBERS:
        return ["a mesh has five numbers"]
    tensor, context, expert, data, stages = (list(process_meshes[place::MESH_NUMBERS]) for place in range(MESH_NUMBERS))
    broken = []
    if any(data[0] * micro_batch_size % other for other in data):
        broken.append(
            f"data_parallel × micro_batch_size of the first mesh, {data[0] * micro_batch_size}, must be a "
            f"multiple of every mesh's data parallelism {data}"
        )
    if len(set(context)) > 1:
        broken.append("context parallelism must be the same in all meshes")
    if any(one != 1 for one in expert) and any(one == 1 for one in expert):
        broken.append("expert parallelism must be 1 in all meshes or in none")
    if sum(layer_split) != num_layers or len(layer_split) != sum(stages):
        broken.append(f"{len(layer_split)} stages of {sum(layer_split)} layers, not {sum(stages)} of {num_layers}")
    if len(device_types) != len(tensor):
        broken.append(f"{len(device_types)} device types for {len(tensor)} meshes")
    if ties_embeddings and tensor[0] != tensor[-1]:
        broken.append("embedding and LM head share weights: first and last mesh need the same tensor parallelism")
    if ties_embeddings and data[0] != data[-1]:
        if max(data[0], data[-1]) % min(data[0], data[-1]):
            broken.append(
                "embedding and LM head share weights: the data parallelism of one end must divide the other's"
            )
        if not partial_reduce:
            broken.append("embedding and LM head share weights: use_partial_reduce_for_shared_embedding must be set")
    return broken


def files(plan: Plan, shape: ModelShape, first_stage: TrainingConfig, nodes: Sequence[NodeHosts]) -> EmittedPlan:
    """FlagScale's files of a plan.

    Args:
        plan: with stages.
        shape: the model.
        first_stage: the plan as if all stages were like the first, for Megatron-LM's own arguments.
        nodes: hosts of each node type in use, in the order of the ranks.

    Raises:
        CannotExpressError: FlagScale has no arguments for it.
    """
    config = plan.config
    made = meshes(config["stages"])
    order = [name for name, _ in itertools.groupby(mesh.node_type for mesh in made)]
    degrees = [number for mesh in made for number in mesh.degrees]
    split = [layers for mesh in made for layers in mesh.layers]
    types = [mesh.node_type for mesh in made]
    ties = shape.tie_word_embeddings
    broken = broken_rules(
        degrees,
        layer_split=split,
        device_types=types,
        micro_batch_size=made[0].micro_batch_size,
        num_layers=shape.num_hidden_layers,
        ties_embeddings=ties,
        partial_reduce=ties,
    )
    if len(order) > len(set(order)):
        broken.append("the stages of a node type must be consecutive")
    if broken:
        raise CannotExpressError(TARGET, "; ".join(broken), "the stages and shares are in plans show --format json")
    arguments = _arguments(first_stage, shape)
    arguments["pipeline_model_parallel_size"] = len(split)
    # FlagScale switches it off where a mesh has no tensor parallelism.
    if config["sequence_parallel"] and any(mesh.tensor > 1 for mesh in made):
        arguments["sequence_parallel"] = True
    system = {**arguments, **_recompute(plan), "hetero": _hetero(made, ties=ties)}
    head = commented(stamp(plan, None))
    hosts = "".join(
        f"{node.node_type}-{number} slots={slots} type={node.node_type}\n"
        for node in sorted(nodes, key=lambda node: order.index(node.node_type))
        for number, slots in enumerate(node.slots)
    )
    return EmittedPlan(
        target=TARGET,
        artifacts=(
            _text("README.md", _readme(plan, made)),
            _text("config.yaml", head + _yaml(_experiment(nodes))),
            _text("train/plan.yaml", head + _yaml({"system": system, "model": {}, "data": {"data_path": "???"}})),
            _text("hostfile", head + hosts),
        ),
        parser_verified=None,
        notes=("The files follow FlagScale's argument rules; they were not run.",),
    )


def _hetero(made: Sequence[Mesh], *, ties: bool) -> dict[str, Any]:
    """FlagScale's own arguments."""
    types = [mesh.node_type for mesh in made]
    return {
        "enable_hetero": True,
        "hetero_use_cpu_communication": False,
        "use_partial_reduce_for_shared_embedding": ties,
        "hetero_process_meshes": [number for mesh in made for number in mesh.degrees],
        "hetero_pipeline_layer_split": [layers for mesh in made for layers in mesh.layers],
        "hetero_device_types": types,
        "hetero_current_device_type": types[0],
        "standalone_embedding_stage": False,
    }


def _arguments(config: TrainingConfig, shape: ModelShape) -> dict[str, Any]:
    """Megatron-LM's arguments of model and batch, as YAML has them."""
    found: dict[str, Any] = {}
    for flag, *values in unchecked_flags(config, shape):
        if flag not in _BY_MESH:
            found[flag.removeprefix("--").replace("-", "_")] = _value(values)
    return found


def _value(values: Sequence[str]) -> Any:
    """A flag's value as YAML writes it; true where it has none."""
    plain = [yaml.safe_load(value) for value in values]
    return True if not plain else plain[0] if len(plain) == 1 else plain


def _recompute(plan: Plan) -> dict[str, Any]:
    """Recompute of each stage: [stages, micro-batches, 1 or 0], or one mode for all.

    Raises:
        CannotExpressError: selective recompute on some stages alone.
    """
    modes = [stage["activation_recompute"] for stage in plan.config["stages"]]
    if set(modes) == {"none"}:
        return {}
    if set(modes) == {"selective"}:
        return {"recompute_granularity": "selective"}
    if "selective" in modes:
        raise CannotExpressError(TARGET, "selective recompute on some stages alone", "fixed.activation_recompute: full")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if set(modes) == {"full"}:
        return full
    rounds = plan.config["num_microbatches"]
    runs = [(mode, len(list(run))) for mode, run in itertools.groupby(modes)]
    per_stage = [f"[{count},{rounds},{int(mode == 'full')}]" for mode, count in runs]
    return {**full, "recompute_granularity_per_stage_micro_batch": per_stage}


def _experiment(nodes: Sequence[NodeHosts]) -> dict[str, Any]:
    return {
        "defaults": ["_self_", {"train": "plan"}],
        "experiment": {
            "exp_name": "meshplan",
            "exp_dir": "./outputs",
            "task": {"type": "train", "backend": "megatron", "entrypoint": "flagscale/train/train_gpt.py"},
            "runner": {
                "backend": "torchrun",
                "nnodes": sum(len(node.slots) for node in nodes),
                # The runner starts the lesser of this and a host's slots.
                "nproc_per_node": max(slots for node in nodes for slots in node.slots),
                "hostfile": "./hostfile",
                # FlagScale's default, c10d, ranks the hosts by their names; static by their lines in the hostfile.
                "rdzv_backend": "static",
            },
        },
        "action": "run",
    }


def _readme(plan: Plan, made: Sequence[Mesh]) -> str:
    lines = [
        f"# Plan {plan.plan_id} with FlagScale",
        "",
        "1. In `hostfile`, replace each name before `slots` by a host of that node type; keep the order of the lines:",
        "   ranks fill the meshes in it.",
        "2. In `train/plan.yaml`, name your data and tokenizer under `data`.",
        "3. On the first host: `python run.py --config-path . --config-name config action=run`",
        "",
        "| mesh | on | tensor | data | stages | layers | micro-batch |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, mesh in enumerate(made):
        layers = " ".join(map(str, mesh.layers))
        cells = (number, mesh.node_type, mesh.tensor, mesh.data, len(mesh.layers), layers, mesh.micro_batch_size)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _text(path: str, content: str) -> Artifact:
    return Artifact(path=PurePosixPath(path), content=content)


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(document), sort_keys=False, default_flow_style=None, width=100)
