"""A training plan as DeepSpeed's JSON. The training script is the user's: ``deepspeed.initialize(config=…)``.

DeepSpeed's parser silently accepts unknown top-level keys, so the keys are compared with its own list in
tests/conformance/deepspeed. What the JSON has no key for (recomputation, sequence length) is handed to the script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.artifact import Artifact, ParserVerified
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, count, feature_rows, nested, stated, write_all
from meshplan.planner.emit.training import own_script as script
from meshplan.planner.emit.training.adapters import adapter_notes
from meshplan.planner.emit.training.job import Job
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.training.terms import TrainingRows, offloaded_percent, refuse
from meshplan.planner.emit.training.torchrun import RANK_TABLE
from meshplan.planner.training.problem.choices import ALL_STATES
from meshplan.planner.training.problem.frameworks.deepspeed import DEEPSPEED
from meshplan.planner.training.problem.problem import TrainingConfig

TARGET = "deepspeed"
CONFIG_FILE = PurePosixPath("deepspeed_config.json")
VERIFIED = ParserVerified(
    framework="deepspeed",
    version=DEEPSPEED.version,
    mode="DeepSpeedConfig with the plan's number of ranks; no engine is built",
)
_PARSER = "parser (DeepSpeedConfig)"
_rows = TrainingRows(_PARSER)
_KNOWN_NAMES = {"precision": ("bf16", "fp16"), "activation_recompute": ("none", "full")}
_PRECISION_KEYS = {"bf16": ("bf16.enabled", "bfloat16.enabled"), "fp16": ("fp16.enabled",)}
_ZERO_STAGES = (0, 1, 2, 3)
_AUTO = "auto"
_OFFLOAD = "zero_optimization.offload_optimizer"
_PARAMETERS = "zero_optimization.offload_param"
_RATIO, _GROUP = f"{_OFFLOAD}.ratio", "zero_optimization.sub_group_size"
# Groups of a rank's parameters of which some step on the device.
_GROUPS = 20
_CHECKPOINTING = "activation_checkpointing.cpu_checkpointing"
# Our tier → DeepSpeed's device, and back.
_DEVICES = {"host": "cpu", "nvme": "nvme"}
NVME_PATH = "/local_nvme"
_NVME_NOTE = f"States lie on NVMe: put the path of a local file system in place of {NVME_PATH} in the JSON."
_CHECKPOINTING_NOTE = (
    "Kept activations go to host memory through DeepSpeed's own checkpointing: the script must call "
    "deepspeed.checkpointing.configure with this JSON and run every layer through deepspeed.checkpointing.checkpoint."
)
_SECOND_COPY = "zero_optimization.zero_hpz_partition_size"
_OFFLOAD_NOTE = (
    "With the optimizer states in host memory the script must hand over DeepSpeedCPUAdam as its optimizer; DeepSpeed "
    "refuses one that runs on the device."
)
_NOTES = (
    f"The script reads {CONFIG_FILE} (its path is in DEEPSPEED_CONFIG) and passes it to deepspeed.initialize. It gets "
    "what the JSON has no key for from MESHPLAN_CONFIG: activation_recompute, sequence_length.",
)
_TENSOR_NOTE = (
    "With tensor parallelism DeepSpeed counts every rank as a batch: its log shows train_batch_size × tensor_parallel."
)


def _batch(config: TrainingConfig, _: ModelShape) -> Arguments:
    """The batch triple. Under tensor parallelism its product would count every rank, so the total is left out."""
    arguments = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.num_microbatches,
    }
    return arguments if config.tensor_parallel > 1 else {"train_batch_size": config.global_batch_size, **arguments}


def _decided(arguments: Arguments, key: str) -> int | None:
    """``"auto"`` leaves the value to the Hugging Face Trainer: nothing is stated."""
    return None if arguments.get(key) == _AUTO else count(arguments, key)


def _read_batch(arguments: Arguments) -> Mapping[str, Any]:
    return stated(
        micro_batch_size=_decided(arguments, "train_micro_batch_size_per_gpu"),
        num_microbatches=_decided(arguments, "gradient_accumulation_steps"),
    )


def _zero(config: TrainingConfig, _: ModelShape) -> Arguments:
    if config.zero_stage == 0:
        return {"zero_optimization.stage": 0}
    return {
        "zero_optimization.stage": config.zero_stage,
        "zero_optimization.overlap_comm": True,
        "zero_optimization.contiguous_gradients": True,
    }


def _read_zero(arguments: Arguments) -> Mapping[str, Any]:
    stage = arguments.get("zero_optimization.stage")
    if stage is not None and (isinstance(stage, bool) or stage not in _ZERO_STAGES):
        raise ValueError(f"zero_optimization.stage is 0, 1, 2 or 3, not {stage!r}")
    return stated(zero_stage=stage)


def _offload(section: str, config: TrainingConfig) -> dict[str, Any]:
    """Where states go; on NVMe the optimizer reads and writes them beside its work."""
    arguments: dict[str, Any] = {f"{section}.device": _DEVICES[config.offload_to], f"{section}.pin_memory": True}
    if config.offload_to == "nvme":
        arguments[f"{section}.nvme_path"] = NVME_PATH
        if section == _OFFLOAD:
            arguments |= {f"{section}.pipeline_read": True, f"{section}.pipeline_write": True}
    return arguments


def _share(config: TrainingConfig, shape: ModelShape) -> dict[str, Any]:
    """A ratio counts groups of parameters (runtime/zero/stage3.py, _create_fp32_partitions): so many that a step of it
    is a twentieth. What stays on the device is rounded down to whole groups.
    """
    if not config.optimizer_offload or config.optimizer_offload_percent == ALL_STATES:
        return {}
    owned = shape.num_parameters // config.data_parallel_shard
    return {_RATIO: config.optimizer_offload_percent / ALL_STATES, _GROUP: max(owned // _GROUPS, 1)}


def _read_offload(section: str, choice: str, arguments: Arguments) -> Mapping[str, Any]:
    device = arguments.get(f"{section}.device")
    if device not in {None, "none", *_DEVICES.values()}:
        raise ValueError(f"{section}.device is none, cpu or nvme, not {device!r}")
    if device in {None, "none"}:
        return {}
    return {choice: True, **({"offload_to": "nvme"} if device == "nvme" else {})}


def _read_tensor(arguments: Arguments) -> Mapping[str, Any]:
    """0 (the default) switches AutoTP off."""
    key = "tensor_parallel.autotp_size"
    return {} if arguments.get(key) in {None, 0} else stated(tensor_parallel=count(arguments, key))


def _read_precision(arguments: Arguments) -> Mapping[str, Any]:
    on = [name for name, keys in _PRECISION_KEYS.items() if any(arguments.get(key) is True for key in keys)]
    if len(on) > 1:
        raise ValueError("both bf16 and fp16 are enabled; DeepSpeed takes one")
    return {"precision": on[0]} if on else {}


TERMS = (
    _rows.term(
        "micro_batch_size",
        _batch,
        _read_batch,
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        expressed_by="train_micro_batch_size_per_gpu",
    ),
    _rows.term(
        "global_batch_size",
        lambda *_: {},
        lambda arguments: stated(global_batch_size=_decided(arguments, "train_batch_size")),
        "train_batch_size",
        expressed_by="train_batch_size, gradient_accumulation_steps",
    ),
    _rows.term(
        "zero_stage",
        _zero,
        _read_zero,
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
        expressed_by="zero_optimization.stage",
    ),
    _rows.term(
        "zero_hpz_partition_size",
        lambda config, _: {_SECOND_COPY: config.zero_hpz_partition_size} if config.zero_hpz_partition_size > 1 else {},
        lambda arguments: stated(zero_hpz_partition_size=count(arguments, _SECOND_COPY)),
        _SECOND_COPY,
        expressed_by=f"{_SECOND_COPY} (zero_stage 3)",
    ),
    _rows.term(
        "optimizer_offload",
        lambda config, _: _offload(_OFFLOAD, config) if config.optimizer_offload else {},
        lambda arguments: _read_offload(_OFFLOAD, "optimizer_offload", arguments),
        *tuple(f"{_OFFLOAD}.{key}" for key in ("device", "pin_memory", "nvme_path", "pipeline_read", "pipeline_write")),
        expressed_by="zero_optimization.offload_optimizer.device: cpu (zero_stage 1, 2, 3), nvme (3)",
    ),
    _rows.term(
        "optimizer_offload_percent",
        _share,
        lambda arguments: offloaded_percent(arguments.get(_RATIO), _RATIO),
        _RATIO,
        _GROUP,
        expressed_by=f"{_RATIO} (zero_stage 3), with a smaller {_GROUP}",
    ),
    _rows.term(
        "parameter_offload",
        lambda config, _: _offload(_PARAMETERS, config) if config.parameter_offload else {},
        lambda arguments: _read_offload(_PARAMETERS, "parameter_offload", arguments),
        *tuple(f"{_PARAMETERS}.{key}" for key in ("device", "pin_memory", "nvme_path")),
        expressed_by="zero_optimization.offload_param.device: cpu, nvme (zero_stage 3)",
    ),
    _rows.covered("offload_to", "the device of offload_optimizer and offload_param: cpu, nvme"),
    _rows.switch(
        _CHECKPOINTING,
        "activation_offload",
        on=True,
        note=" (with activation_recompute full)",
        verified_by=f"{_PARSER}; that the script uses DeepSpeed's checkpointing is not checked",
    ),
    _rows.term(
        "tensor_parallel",
        lambda config, _: {"tensor_parallel.autotp_size": config.tensor_parallel} if config.tensor_parallel > 1 else {},
        _read_tensor,
        "tensor_parallel.autotp_size",
        expressed_by="tensor_parallel.autotp_size (zero_stage up to 2, without sequence_parallel)",
    ),
    _rows.term(
        "precision",
        lambda config, _: {f"{config.precision}.enabled": True},
        _read_precision,
        *tuple(key for keys in _PRECISION_KEYS.values() for key in keys),
        expressed_by="bf16.enabled, fp16.enabled",
    ),
    _rows.handed_over("activation_recompute"),
    _rows.handed_over("sequence_length"),
    _rows.handed_over("decoder_sequence_length"),
)


def configuration(request: TrainingRequest) -> dict[str, Any]:
    """The JSON as a mapping.

    Raises:
        CannotExpressError: DeepSpeed's JSON has no key for a choice.
    """
    refuse(DEEPSPEED, request.shape, request.config, _KNOWN_NAMES)
    return nested(write_all(TERMS, request.config, request.shape))


def job(request: TrainingRequest) -> Job:
    """The user's script with DeepSpeed's JSON and the plan's choices beside it."""
    text = json.dumps(configuration(request), indent=2) + "\n"
    tensor_note = (_TENSOR_NOTE,) if request.config.tensor_parallel > 1 else ()
    return script.script_job(
        request,
        rules=DEEPSPEED,
        target=TARGET,
        verified=VERIFIED,
        more_bash=f"export DEEPSPEED_CONFIG=$here/{CONFIG_FILE}\n",
        # JSON has no comments and DeepSpeed owns every key, so the stamp is in training_config.json.
        files=(Artifact(path=CONFIG_FILE, content=text),),
        notes=(
            *_NOTES,
            *tensor_note,
            *adapter_notes(request.plan, script=request.script),
            *([_OFFLOAD_NOTE] if request.config.optimizer_offload else []),
            *([_NVME_NOTE] if request.config.offload_to == "nvme" else []),
            *([_CHECKPOINTING_NOTE] if request.config.activation_offload else []),
        ),
    )


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (*feature_rows(TERMS), RANK_TABLE)
