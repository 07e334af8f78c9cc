"""A training plan as an Accelerate configuration: FSDP2 with replicas, shards, tensor and context parallelism.

``accelerate launch`` starts the user's script on each host; it divides the processes equally, so hosts with unequal
numbers of ranks are refused. Its parser takes typing errors inside ``fsdp_config``: the suite in
tests/conformance/accelerate compares every key with the parser's own option strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit import script
from meshplan.planner.emit.artifact import Artifact, ParserVerified, TrainingRequest, commented, stamp
from meshplan.planner.emit.job import Job
from meshplan.planner.emit.placement import host_placements
from meshplan.planner.emit.registry import Feature
from meshplan.planner.emit.terms import BY_THE_SCRIPT, HANDED_OVER, Term, feature_rows, refuse
from meshplan.planner.problems.pytorch_frameworks import ACCELERATE
from meshplan.planner.problems.training import TrainingConfig

TARGET = "accelerate"
CONFIG_FILE = PurePosixPath("accelerate_config.yaml")
VERIFIED = ParserVerified(
    framework="accelerate",
    version=ACCELERATE.version,
    mode="launch_command_parser, _validate_launch_command, prepare_multi_gpu_env, ParallelismConfig; no model",
)
_PARSER = "parser and ParallelismConfig"
_KNOWN_NAMES = {"precision": ("bf16", "fp16"), "activation_recompute": ("none", "full")}
_ZERO_SHARDED_PARAMETERS = 3
_NOTES = (
    "The script gets what the YAML has no word for from MESHPLAN_CONFIG: micro_batch_size, num_microbatches, "
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


def _sharding(config: TrainingConfig) -> Mapping[str, Any]:
    return {"fsdp_config": {"fsdp_reshard_after_forward": config.zero_stage == _ZERO_SHARDED_PARAMETERS}}


def _size(name: str, field: str) -> Term:
    return Term(
        name=field,
        words=lambda config: {"parallelism_config": {f"parallelism_config_{name}": getattr(config, field)}},
        said_by=f"parallelism_config_{name}",
        verified_by=_PARSER,
    )


def _handed(name: str) -> Term:
    return Term(name=name, words=lambda _: {}, said_by=HANDED_OVER, verified_by=BY_THE_SCRIPT)


TERMS = (
    _size("tp_size", "tensor_parallel"),
    _size("cp_size", "context_parallel"),
    _size("dp_shard_size", "data_parallel_shard"),
    Term(
        name="data_parallel",
        words=lambda config: {
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": config.data_parallel // config.data_parallel_shard
            }
        },
        said_by="parallelism_config_dp_replicate_size × parallelism_config_dp_shard_size",
        verified_by=_PARSER,
    ),
    Term(
        name="zero_stage",
        words=_sharding,
        said_by="fsdp_version 2, fsdp_reshard_after_forward (3: true, 2: false)",
        verified_by=_PARSER,
    ),
    Term(
        name="activation_recompute",
        words=lambda config: {"fsdp_config": {"fsdp_activation_checkpointing": config.activation_recompute == "full"}},
        said_by="fsdp_activation_checkpointing (full: true, none: false)",
        verified_by=_PARSER,
    ),
    Term(
        name="precision",
        words=lambda config: {"mixed_precision": config.precision},
        said_by="mixed_precision: bf16, fp16",
        verified_by=_PARSER,
    ),
    _handed("micro_batch_size"),
    _handed("global_batch_size"),
    _handed("sequence_length"),
)


def configuration(request: TrainingRequest) -> dict[str, Any]:
    """The YAML as a mapping.

    Raises:
        CannotExpressError: Accelerate has no word for a choice.
    """
    refuse(ACCELERATE, request.shape, request.config, _KNOWN_NAMES)
    words: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "use_cpu": False,
        "rdzv_backend": "static",
        "same_network": True,
        "num_processes": request.config.world_size,
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "parallelism_config": {},
    }
    for term in TERMS:
        for key, value in term.words(request.config).items():
            if isinstance(value, dict):
                words[key].update(value)
            else:
                words[key] = value
    return words


def job(request: TrainingRequest) -> Job:
    """The user's script with Accelerate's YAML and the plan's choices beside it."""
    words = configuration(request)
    head = commented(stamp(request.plan, VERIFIED))
    made = Job(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        rank_order=ACCELERATE.rank_orders[0],
        environment={},
        program=script.program(request),
        files=(
            Artifact(path=CONFIG_FILE, content=head + yaml.safe_dump(words, sort_keys=False)),
            script.config_file(request, VERIFIED),
        ),
        settings=(script.script_setting(request.script),),
        notes=_NOTES,
        starter=_STARTER.format(config_file=CONFIG_FILE),
    )
    placements = host_placements(made.rank_table, request.hosts, target=TARGET)
    sizes = {len(placement.devices) for placement in placements}
    if len(sizes) > 1:
        raise CannotExpressError(
            TARGET, f"hosts with unequal numbers of processes ({sorted(sizes)})", "a plan that uses all hosts alike"
        )
    return made


def degrees(words: Mapping[str, Any]) -> dict[str, int]:
    """Our degrees, read back from Accelerate's YAML."""
    sizes = words["parallelism_config"]
    shard = int(sizes["parallelism_config_dp_shard_size"])
    return {
        "tensor_parallel": int(sizes["parallelism_config_tp_size"]),
        "context_parallel": int(sizes["parallelism_config_cp_size"]),
        "data_parallel": shard * int(sizes["parallelism_config_dp_replicate_size"]),
        "data_parallel_shard": shard,
        "zero_stage": 3 if words["fsdp_config"]["fsdp_reshard_after_forward"] else 2,
    }


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    placed = Feature(
        name="rank_table",
        expressed_by="accelerate launch --machine_rank and CUDA_VISIBLE_DEVICES; equal numbers of ranks a host only",
        verified_by="accelerate's parser; other tables are refused",
    )
    return (*feature_rows(TERMS), placed)
