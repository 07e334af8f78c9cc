"""A training plan as an Accelerate configuration: FSDP2 with replicas, shards, tensor and context parallelism.

``accelerate launch`` starts the user's script on each host; it divides the processes equally, so hosts with unequal
numbers of ranks are refused. Its parser takes typing errors inside ``fsdp_config``: the suite in
tests/conformance/accelerate compares every key with the parser's own option strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.untrusted.quoting import yaml_text
from meshplan.planner.emit.artifact import Artifact, ParserVerified, commented, stamp
from meshplan.planner.emit.hosts import host_placements
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, Term, count, feature_rows, nested, stated, write_all
from meshplan.planner.emit.training import own_script as script
from meshplan.planner.emit.training.adapters import adapter_notes
from meshplan.planner.emit.training.job import Job
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.training.terms import TrainingRows, refuse
from meshplan.planner.training.problem.frameworks.accelerate import ACCELERATE

TARGET = "accelerate"
CONFIG_FILE = PurePosixPath("accelerate_config.yaml")
VERIFIED = ParserVerified(
    framework="accelerate",
    version=ACCELERATE.version,
    mode="launch_command_parser, _validate_launch_command, prepare_multi_gpu_env, ParallelismConfig; no model",
)
_PARSER = "parser and ParallelismConfig"
_rows = TrainingRows(_PARSER)
_KNOWN_NAMES = {"precision": ("bf16", "fp16"), "activation_recompute": ("none", "full")}
_ZERO_SHARDED_GRADIENTS, _ZERO_SHARDED_PARAMETERS = 2, 3
_SIZES = "parallelism_config.parallelism_config_"
_RESHARD = "fsdp_config.fsdp_reshard_after_forward"
_RECOMPUTE = "fsdp_config.fsdp_activation_checkpointing"
_RECOMPUTE_OFFLOAD = "fsdp_config.fsdp_activation_checkpointing_offload"
_STATES = "fsdp_config.fsdp_offload_params"
_STRATEGY = "fsdp_config.fsdp_sharding_strategy"  # of FSDP1; in the order of torch's ShardingStrategy
_STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
_NOTES = (
    "The script gets what the YAML has no key for from MESHPLAN_CONFIG: micro_batch_size, num_microbatches, "
    "sequence_length.",
)

_STARTER = r"""exec "${{ACCELERATE:-accelerate}}" launch \
  --config_file "$here/{config_file}" \
  --num_machines "$num_hosts" \
  --num_processes "$world_size" \
  --machine_rank "$node_rank" \
  --main_process_ip "$MASTER_ADDR" \
  --main_process_port "$MASTER_PORT" \
  "${{program[@]}}" "$@"
"""


def _read_sharding(arguments: Arguments) -> Mapping[str, Any]:
    """FSDP2 has a switch, FSDP1 a strategy, given by its name or by its number from 1 on."""
    strategy = arguments.get(_STRATEGY)
    if strategy is not None:
        names = {**_STRATEGIES, **{str(number): stage for number, stage in enumerate(_STRATEGIES.values(), start=1)}}
        if str(strategy) not in names:
            raise ValueError(f"{_STRATEGY} is one of {', '.join(_STRATEGIES)}, not {strategy!r}")
        return {"zero_stage": names[str(strategy)]}
    reshards = arguments.get(_RESHARD)
    if reshards is None:
        return {}
    if not isinstance(reshards, bool):
        raise ValueError(f"{_RESHARD} is true or false, not {reshards!r}")
    return {"zero_stage": _ZERO_SHARDED_PARAMETERS if reshards else _ZERO_SHARDED_GRADIENTS}


def _size(name: str, field: str) -> Term:
    key = f"{_SIZES}{name}"
    return _rows.term(
        field,
        lambda config, _: {key: getattr(config, field)},
        lambda arguments: stated(**{field: count(arguments, key)}),
        key,
        expressed_by=key.partition(".")[2],
    )


def _read_recompute(arguments: Arguments) -> Mapping[str, Any]:
    full = arguments.get(_RECOMPUTE)
    if full not in {None, True, False}:
        raise ValueError(f"{_RECOMPUTE} is true or false, not {full!r}")
    return {} if full is None else {"activation_recompute": "full" if full else "none"}


def _read_precision(arguments: Arguments) -> Mapping[str, Any]:
    name = arguments.get("mixed_precision")
    if name not in {None, "no", *_KNOWN_NAMES["precision"], "fp8"}:
        raise ValueError(f"mixed_precision is no, bf16, fp16 or fp8, not {name!r}")
    return {} if name is None else {"precision": "fp32" if name == "no" else name}


TERMS = (
    _size("tp_size", "tensor_parallel"),
    _size("cp_size", "context_parallel"),
    _size("dp_shard_size", "data_parallel_shard"),
    _rows.term(
        "data_parallel",
        lambda config, _: {f"{_SIZES}dp_replicate_size": config.data_parallel // config.data_parallel_shard},
        lambda arguments: stated(data_parallel_replicate=count(arguments, f"{_SIZES}dp_replicate_size")),
        f"{_SIZES}dp_replicate_size",
        expressed_by="parallelism_config_dp_replicate_size × parallelism_config_dp_shard_size",
    ),
    _rows.term(
        "zero_stage",
        lambda config, _: {_RESHARD: config.zero_stage == _ZERO_SHARDED_PARAMETERS},
        _read_sharding,
        _RESHARD,
        _STRATEGY,
        expressed_by="fsdp_version 2, fsdp_reshard_after_forward (3: true, 2: false)",
    ),
    _rows.term(
        "activation_recompute",
        lambda config, _: {_RECOMPUTE: config.activation_recompute == "full"},
        _read_recompute,
        _RECOMPUTE,
        expressed_by="fsdp_activation_checkpointing (full: true, none: false)",
    ),
    _rows.switch(_RECOMPUTE_OFFLOAD, "activation_offload", on=True, note=" (with activation_recompute full)"),
    _rows.term(
        "parameter_offload",
        lambda config, _: {_STATES: True} if config.parameter_offload else {},
        lambda arguments: (
            {"parameter_offload": True, "optimizer_offload": True} if arguments.get(_STATES) is True else {}
        ),
        _STATES,
        expressed_by="fsdp_offload_params: parameters, gradients and optimizer states together (zero_stage 3)",
    ),
    _rows.covered("optimizer_offload", "fsdp_offload_params, with the parameters"),
    _rows.term(
        "precision",
        lambda config, _: {"mixed_precision": config.precision},
        _read_precision,
        "mixed_precision",
        expressed_by="mixed_precision: bf16, fp16",
    ),
    _rows.handed_over("micro_batch_size"),
    _rows.handed_over("global_batch_size"),
    _rows.handed_over("sequence_length"),
    _rows.handed_over("decoder_sequence_length"),
)


def configuration(request: TrainingRequest) -> dict[str, Any]:
    """The YAML as a mapping.

    Raises:
        CannotExpressError: Accelerate's YAML has no key for a choice.
    """
    refuse(ACCELERATE, request.shape, request.config, _KNOWN_NAMES)
    return nested(
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "use_cpu": False,
            "rdzv_backend": "static",
            "same_network": True,
            "num_processes": request.config.world_size,
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            **write_all(TERMS, request.config, request.shape),
        }
    )


def job(request: TrainingRequest) -> Job:
    """The user's script with Accelerate's YAML and the plan's choices beside it."""
    arguments = configuration(request)
    head = commented(stamp(request.plan, VERIFIED))
    made = script.script_job(
        request,
        rules=ACCELERATE,
        target=TARGET,
        verified=VERIFIED,
        files=(Artifact(path=CONFIG_FILE, content=head + yaml_text(arguments)),),
        notes=(*_NOTES, *adapter_notes(request.plan, script=request.script)),
        starter=_STARTER.format(config_file=CONFIG_FILE),
    )
    placements = host_placements(made.rank_table, request.hosts, target=TARGET)
    sizes = {len(placement.devices) for placement in placements}
    if len(sizes) > 1:
        raise CannotExpressError(
            TARGET, f"hosts with unequal numbers of processes ({sorted(sizes)})", "a plan that uses all hosts alike"
        )
    return made


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    placed = Feature(
        name="rank_table",
        expressed_by="accelerate launch --machine_rank and CUDA_VISIBLE_DEVICES; equal numbers of ranks per host only",
        verified_by="accelerate's parser; other tables are refused",
    )
    return (*feature_rows(TERMS), placed)
