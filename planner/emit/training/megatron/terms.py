"""Megatron-LM's mapping table: one row of :data:`TERMS` for each term of a plan, written and read back.

Checked against megatron-core 0.19.2 by tests/conformance/megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.terms import Arguments, count, stated
from meshplan.planner.emit.training.megatron.experts import EXPERT_CAPACITY_FACTOR, EXPERT_DISPATCHER
from meshplan.planner.emit.training.megatron.layers import LAYERS_PER_CHUNK
from meshplan.planner.emit.training.megatron.switches import (
    ACTIVATION_RECOMPUTE,
    CUDA_GRAPHS,
    GRADIENT_PRECISION,
    OPTIMIZER,
    RECOMPUTED_MODULES,
)
from meshplan.planner.emit.training.terms import TrainingRows, offloaded_percent
from meshplan.planner.training.problem.choices import ALL_STATES
from meshplan.planner.training.problem.problem import OFFLOADED_LAYERS, TrainingConfig

_PARSER = "parser"
_rows, _grouped_rows = TrainingRows(_PARSER), TrainingRows("parser and process groups")
_ARGUMENT_LEVEL = "flags and types only, the rest needs Transformer Engine"
ZERO_SHARDED_GRADIENTS, _ZERO_SHARDED_PARAMETERS = 2, 3
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
# Master weights stay in bf16. Block scaling holds the exponent, so that both passes take e4m3.
_LOW_PRECISION = {
    "fp8": {"--bf16": "", "--fp8-format": "hybrid"},
    "mxfp8": {"--bf16": "", "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--bf16": "", "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}
_SCALED_FP8_RECIPES = ("delayed", "tensorwise", "blockwise")
_EXCHANGE, _EXCHANGE_SIZES = "--cp-comm-type", "--hierarchical-context-parallel-sizes"
_LEVELS = 2
_OUTER = "--outer-dp-sharding-strategy"
_SHARE = "--optimizer-offload-fraction"  # all where it is not stated
_AWAY = "--cpu-offloading-num-layers"
# The first name of a style is the one that is written.
_EXCHANGES = {
    "p2p": "ring",
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "a2a": "all-to-all",
    "a2a+p2p": "all-to-all+ring",
}


def _context_style(config: TrainingConfig, _: ModelShape) -> Arguments:
    """Transformer Engine spells all_gather with an underscore, unlike Megatron-LM's help text."""
    if config.context_parallel == 1 or config.context_parallel_style == "ring":
        return {}
    argument = next(argument for argument, style in _EXCHANGES.items() if style == config.context_parallel_style)
    if config.context_parallel_heads == 1:
        return {_EXCHANGE: argument}
    heads = config.context_parallel_heads
    return {_EXCHANGE: argument, _EXCHANGE_SIZES: f"{heads} {config.context_parallel // heads}"}


def _read_context_style(arguments: Arguments) -> Mapping[str, Any]:
    """One way for all layers; the sizes of two levels are heads first, then the ring."""
    named = set(str(arguments.get(_EXCHANGE, "p2p")).split())
    if len(named) != 1 or not named <= _EXCHANGES.keys():
        known, found = ", ".join(_EXCHANGES), arguments.get(_EXCHANGE)
        raise ValueError(f"{_EXCHANGE} is one of {known} for all layers, not {found!r}")
    style = _EXCHANGES[named.pop()]
    split = (count(arguments, "--context-parallel-size") or 1) > 1
    if style != "all-to-all+ring" or not split:
        return {"context_parallel_style": style} if split and style != "ring" else {}
    sizes = str(arguments.get(_EXCHANGE_SIZES, "")).split()
    if len(sizes) != _LEVELS:
        raise ValueError(f"{_EXCHANGE} a2a+p2p needs {_EXCHANGE_SIZES} with two numbers")
    heads, ring = (count({_EXCHANGE_SIZES: size}, _EXCHANGE_SIZES) or 1 for size in sizes)
    if heads == 1 or ring == 1:  # Transformer Engine takes the level that is left
        return {} if heads == 1 else {"context_parallel_style": "all-to-all"}
    return {"context_parallel_style": style, "context_parallel_heads": heads}


def _zero(config: TrainingConfig, _: ModelShape) -> Arguments:
    overlap = {"--overlap-grad-reduce": ""}
    if config.zero_stage == 0:
        return overlap
    sharded = {"--use-distributed-optimizer": "", **overlap, "--overlap-param-gather": ""}
    if config.zero_stage < ZERO_SHARDED_GRADIENTS:
        return sharded
    strategy = next(name for name, stage in _STRATEGIES.items() if stage == config.zero_stage)
    sharded |= {
        "--use-megatron-fsdp": "",
        "--data-parallel-sharding-strategy": strategy,
        "--ckpt-format": "fsdp_dtensor",
    }
    if config.zero_stage == _ZERO_SHARDED_PARAMETERS:
        sharded["--init-model-with-meta-device"] = ""
    return sharded


def _read_zero(arguments: Arguments) -> Mapping[str, Any]:
    if "--use-torch-fsdp2" in arguments:
        return {"zero_stage": _ZERO_SHARDED_PARAMETERS}
    if "--use-megatron-fsdp" in arguments:
        strategy = arguments.get("--data-parallel-sharding-strategy", "no_shard")
        if strategy not in _STRATEGIES:
            raise ValueError(f"--data-parallel-sharding-strategy is one of {', '.join(_STRATEGIES)}, not {strategy!r}")
        return {"zero_stage": _STRATEGIES[strategy]}
    return {"zero_stage": 1} if "--use-distributed-optimizer" in arguments else {}


def _shard_groups(config: TrainingConfig, _: ModelShape) -> Arguments:
    groups = config.data_parallel // config.data_parallel_shard
    if config.zero_stage == 0 or groups == 1:
        return {}
    return {"--num-distributed-optimizer-instances": str(groups)}


def _read_outer(arguments: Arguments) -> Mapping[str, Any]:
    strategy = str(arguments.get(_OUTER, "no_shard"))
    if strategy not in {"no_shard", "optim"}:
        raise ValueError(f"{_OUTER} is no_shard or optim, not {strategy!r}")
    groups = count(arguments, "--num-distributed-optimizer-instances") or 1
    return {"outer_zero_stage": 1} if strategy == "optim" and groups > 1 else {}


def _precision(config: TrainingConfig, _: ModelShape) -> Arguments:
    return _LOW_PRECISION.get(config.precision, {f"--{config.precision}": ""})


def _read_precision(arguments: Arguments) -> Mapping[str, Any]:
    on = [name for name in ("bf16", "fp16") if f"--{name}" in arguments]
    if len(on) > 1:
        raise ValueError("--bf16 and --fp16 exclude each other")
    if "--fp4-format" in arguments:
        return {"precision": "nvfp4"}
    if "--fp8-format" in arguments:
        recipe = arguments.get("--fp8-recipe", "delayed")
        if recipe not in {"mxfp8", *_SCALED_FP8_RECIPES}:
            known = ", ".join(("mxfp8", *_SCALED_FP8_RECIPES))
            raise ValueError(f"--fp8-recipe {recipe!r} is not modelled; known: {known}")
        return {"precision": "mxfp8" if recipe == "mxfp8" else "fp8"}
    return {"precision": on[0]} if on else {}


def _sequence_length(config: TrainingConfig, shape: ModelShape) -> Arguments:
    positions = shape.num_position_embeddings or max(config.sequence_length, shape.max_sequence_length or 0)
    return {"--seq-length": str(config.sequence_length), "--max-position-embeddings": str(positions)}


TERMS = (
    _grouped_rows.number("--tensor-model-parallel-size", "tensor_parallel", aliases=("--model-parallel-size",)),
    _rows.switch("--sequence-parallel", "sequence_parallel"),
    _grouped_rows.number("--pipeline-model-parallel-size", "pipeline_parallel"),
    LAYERS_PER_CHUNK,
    _grouped_rows.number("--context-parallel-size", "context_parallel"),
    _rows.term(
        "context_parallel_style",
        _context_style,
        _read_context_style,
        _EXCHANGE,
        _EXCHANGE_SIZES,
        expressed_by=f"{_EXCHANGE}, {_EXCHANGE_SIZES}",
        verified_by=f"{_PARSER}; {_ARGUMENT_LEVEL}",
    ),
    _grouped_rows.number("--expert-model-parallel-size", "expert_parallel", only_with_experts=True),
    _grouped_rows.number("--expert-tensor-parallel-size", "expert_tensor_parallel", only_with_experts=True),
    EXPERT_CAPACITY_FACTOR,
    _rows.term(
        "zero_stage",
        _zero,
        _read_zero,
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--data-parallel-sharding-strategy",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--ckpt-format",
        "--init-model-with-meta-device",
        expressed_by="--use-distributed-optimizer (1), --use-megatron-fsdp --data-parallel-sharding-strategy (2, 3)",
    ),
    _grouped_rows.term(
        "data_parallel_shard",
        _shard_groups,
        lambda arguments: stated(num_shard_groups=count(arguments, "--num-distributed-optimizer-instances")),
        "--num-distributed-optimizer-instances",
    ),
    _rows.term(
        "outer_zero_stage",
        lambda config, _: {_OUTER: "optim"} if config.outer_zero_stage else {},
        _read_outer,
        _OUTER,
        expressed_by=f"{_OUTER} optim (zero_stage 3 in groups)",
    ),
    ACTIVATION_RECOMPUTE,
    RECOMPUTED_MODULES,
    GRADIENT_PRECISION,
    CUDA_GRAPHS,
    EXPERT_DISPATCHER,
    _rows.switch("--overlap-moe-expert-parallel-comm", "expert_parallel_overlap"),
    OPTIMIZER,
    # The optimizer on the host takes the precision-aware path, and the parser insists on both.
    _rows.term(
        "optimizer_offload",
        lambda config, _: (
            {"--optimizer-cpu-offload": "", "--use-precision-aware-optimizer": ""} if config.optimizer_offload else {}
        ),
        lambda arguments: {"optimizer_offload": True} if "--optimizer-cpu-offload" in arguments else {},
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
        expressed_by="--optimizer-cpu-offload, --use-precision-aware-optimizer",
    ),
    _rows.term(
        "optimizer_offload_percent",
        lambda config, _: (
            {_SHARE: f"{config.optimizer_offload_percent / ALL_STATES:g}"}
            if config.optimizer_offload and config.optimizer_offload_percent < ALL_STATES
            else {}
        ),
        lambda arguments: offloaded_percent(arguments.get(_SHARE), _SHARE),
        _SHARE,
    ),
    _rows.term(
        OFFLOADED_LAYERS,
        lambda config, _: (
            {_AWAY: str(config.activation_offload_num_layers)} if config.activation_offload_num_layers else {}
        ),
        lambda arguments: stated(activation_offload_num_layers=count(arguments, _AWAY)),
        _AWAY,
        verified_by=f"{_PARSER}; {_ARGUMENT_LEVEL}",
    ),
    _rows.term(
        "precision",
        _precision,
        _read_precision,
        "--bf16",
        "--fp16",
        "--fp8-format",
        "--fp8-recipe",
        "--fp4-format",
        "--fp4-recipe",
        expressed_by="--bf16, --fp16, --fp8-format, --fp8-recipe (mxfp8), --fp4-format, --fp4-recipe (nvfp4)",
        verified_by=f"{_PARSER}; fp8 with experts, nvfp4: {_ARGUMENT_LEVEL}",
    ),
    _rows.number("--micro-batch-size", "micro_batch_size", aliases=("--batch-size",)),
    _rows.number("--global-batch-size", "global_batch_size"),
    _rows.term(
        "sequence_length",
        _sequence_length,
        lambda arguments: stated(sequence_length=count(arguments, "--seq-length")),
        "--seq-length",
        "--max-position-embeddings",
        expressed_by="--seq-length, --max-position-embeddings",
    ),
)
