"""Megatron-LM's mapping table: one row of :data:`TERMS` for each term of a plan, said and read back.

Checked against megatron-core 0.19.2 by tests/conformance/megatron.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training.terms import Term, Words, count, count_term, stated
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.switches import ALL_TO_ALL

_PARSER = "parser"
_PARSER_AND_GROUPS = "parser and process groups"
_ARGUMENT_LEVEL = "flags and types only, the rest needs Transformer Engine"
ZERO_SHARDED_GRADIENTS, _ZERO_SHARDED_PARAMETERS = 2, 3
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
# Master weights stay in bf16. Block scaling holds the exponent, so that both passes take e4m3.
_LOW_PRECISION = {
    "fp8": {"--bf16": "", "--fp8-format": "hybrid"},
    "mxfp8": {"--bf16": "", "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--bf16": "", "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}
_CAPACITY, _PAD = "--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity"
_MAX_CAPACITY = 1024
_DISPATCHER, _BACKEND = "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"
_OVERLAP = "--overlap-moe-expert-parallel-comm"
_SCALED_FP8_RECIPES = ("delayed", "tensorwise", "blockwise")
_EXCHANGE, _EXCHANGE_SIZES = "--cp-comm-type", "--hierarchical-context-parallel-sizes"
_LEVELS = 2
_OUTER = "--outer-dp-sharding-strategy"
# The first word of a style is the one that is written.
_EXCHANGES = {
    "p2p": "ring",
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "a2a": "all-to-all",
    "a2a+p2p": "all-to-all+ring",
}
_LAYOUT = re.compile(r"[EtmL|()*0-9]+")
_REPEATED = re.compile(r"(?P<unit>[EtmL|]|\([EtmL|]*\))\*(?P<times>[0-9]{1,4})")
_LONGEST_LAYOUT = 10_000  # letters; layers of the deepest models are in the hundreds


def pipeline_layout(config: TrainingConfig, shape: ModelShape) -> str:
    """``--pipeline-model-parallel-layout``: E embedding, t layer, m multi-token prediction, L loss, | next chunk.

    Chunks are listed in the order in which a token visits them, which is the order of ``layers_per_chunk``.
    """
    chunks = [f"t*{layers}" if layers > 1 else "t" * layers for layers in config.layers_per_chunk]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * shape.num_nextn_predict_layers + "L"
    return "|".join(chunks)


def read_layout(layout: str) -> tuple[int, ...]:
    """Layers of each chunk, from a layout: letters, ``x*n`` and ``(…)*n``; commas say nothing.

    >>> read_layout("E|(t|)*3,tm|L")
    (0, 1, 1, 1, 1, 0)

    Raises:
        ValueError: it is no layout, or longer than any model.
    """
    text = layout.replace(",", "")
    if not _LAYOUT.fullmatch(text):
        raise ValueError(f"the layout {layout!r} has signs other than E t m L | ( ) * and numbers")
    while (repeated := _REPEATED.search(text)) is not None:
        times, unit = int(repeated["times"]), repeated["unit"].strip("()")
        if times * len(unit) > _LONGEST_LAYOUT:
            raise ValueError(f"the layout {layout!r} is longer than {_LONGEST_LAYOUT} letters")
        text = text[: repeated.start()] + unit * times + text[repeated.end() :]
        if len(text) > _LONGEST_LAYOUT:
            raise ValueError(f"the layout {layout!r} is longer than {_LONGEST_LAYOUT} letters")
    if not set(text) <= set("EtmL|"):
        raise ValueError(f"the layout {layout!r} has a parenthesis or a number that belongs to nothing")
    return tuple(chunk.count("t") for chunk in text.split("|"))


def _layers(config: TrainingConfig, shape: ModelShape) -> Words:
    """The split of the layers; also says how many virtual stages there are."""
    if len(set(config.layers_per_chunk)) > 1:
        return {"--pipeline-model-parallel-layout": pipeline_layout(config, shape)}
    if config.virtual_pipeline_stages > 1:
        return {"--num-virtual-stages-per-pipeline-rank": str(config.virtual_pipeline_stages)}
    return {}


def _read_layers(words: Words) -> Mapping[str, Any]:
    layout = words.get("--pipeline-model-parallel-layout")
    stages = count(words, "--pipeline-model-parallel-size") or 1
    if layout is not None:
        chunks = read_layout(layout)
        if len(chunks) % stages:
            raise ValueError(f"the layout {layout!r} has {len(chunks)} chunks for {stages} stages")
        return {"layers_per_chunk": chunks, "virtual_pipeline_stages": len(chunks) // stages}
    layers_per_chunk = count(words, "--num-layers-per-virtual-pipeline-stage")
    if layers_per_chunk is None:
        return stated(virtual_pipeline_stages=count(words, "--num-virtual-stages-per-pipeline-rank"))
    layers = count(words, "--num-layers")
    if layers is None or layers % (stages * layers_per_chunk):
        raise ValueError(f"{layers_per_chunk} layers a virtual stage × {stages} stages do not divide {layers} layers")
    return {"virtual_pipeline_stages": layers // (stages * layers_per_chunk)}


def _experts(config: TrainingConfig, shape: ModelShape) -> Words:
    return {} if shape.moe is None else {"--expert-model-parallel-size": str(config.expert_parallel)}


def _expert_tensor(config: TrainingConfig, shape: ModelShape) -> Words:
    return {} if shape.moe is None else {"--expert-tensor-parallel-size": str(config.expert_tensor_parallel)}


def _capacity(config: TrainingConfig, _: ModelShape) -> Words:
    """Padded, so that shapes are fixed and the estimate's rows are those that run."""
    if not config.expert_capacity_factor:
        return {}
    return {_CAPACITY: f"{config.expert_capacity_factor:.9g}", _PAD: ""}


def _read_capacity(words: Words) -> Mapping[str, Any]:
    """A negative factor is Megatron-LM's word for none."""
    if _CAPACITY not in words:
        return {}
    try:
        factor = float(words[_CAPACITY])
    except (TypeError, ValueError):
        raise ValueError(f"{_CAPACITY} {words[_CAPACITY]!r} is no number") from None
    if not factor < _MAX_CAPACITY or factor == 0:
        raise ValueError(f"{_CAPACITY} {words[_CAPACITY]!r} is not above 0 and below {_MAX_CAPACITY}")
    return {"expert_capacity_factor": factor} if factor > 0 else {}


def _dispatcher(config: TrainingConfig, shape: ModelShape) -> Words:
    if shape.moe is None:
        return {}
    if config.expert_dispatcher == ALL_TO_ALL:
        return {_DISPATCHER: ALL_TO_ALL}
    return {_DISPATCHER: "flex", _BACKEND: config.expert_dispatcher}


def _read_dispatcher(words: Words) -> Mapping[str, Any]:
    """Megatron-LM's own default is an all-gather, which no plan is priced for."""
    kind = words.get(_DISPATCHER)
    if kind is None or kind == ALL_TO_ALL:
        return {} if kind is None else {"expert_dispatcher": ALL_TO_ALL}
    backend = str(words.get(_BACKEND, "deepep"))
    if kind != "flex" or backend not in ("deepep", "hybridep"):
        raise ValueError(f"{_DISPATCHER} {kind} {backend if kind == 'flex' else ''}".strip() + " is not modelled")
    return {"expert_dispatcher": backend}


def _context_style(config: TrainingConfig, _: ModelShape) -> Words:
    """Transformer Engine spells all_gather with an underscore, whatever Megatron's help says."""
    if config.context_parallel == 1 or config.context_parallel_style == "ring":
        return {}
    word = next(word for word, style in _EXCHANGES.items() if style == config.context_parallel_style)
    if config.context_parallel_heads == 1:
        return {_EXCHANGE: word}
    heads = config.context_parallel_heads
    return {_EXCHANGE: word, _EXCHANGE_SIZES: f"{heads} {config.context_parallel // heads}"}


def _read_context_style(words: Words) -> Mapping[str, Any]:
    """One way for all layers; the sizes of two levels are heads first, then the ring."""
    named = set(str(words.get(_EXCHANGE, "p2p")).split())
    if len(named) != 1 or not named <= _EXCHANGES.keys():
        raise ValueError(f"{_EXCHANGE} is one of {', '.join(_EXCHANGES)} for all layers, not {words.get(_EXCHANGE)!r}")
    style = _EXCHANGES[named.pop()]
    split = (count(words, "--context-parallel-size") or 1) > 1
    if style != "all-to-all+ring" or not split:
        return {"context_parallel_style": style} if split and style != "ring" else {}
    sizes = str(words.get(_EXCHANGE_SIZES, "")).split()
    if len(sizes) != _LEVELS:
        raise ValueError(f"{_EXCHANGE} a2a+p2p needs {_EXCHANGE_SIZES} with two numbers")
    heads, ring = (count({_EXCHANGE_SIZES: size}, _EXCHANGE_SIZES) or 1 for size in sizes)
    if heads == 1 or ring == 1:  # Transformer Engine takes the level that is left
        return {} if heads == 1 else {"context_parallel_style": "all-to-all"}
    return {"context_parallel_style": style, "context_parallel_heads": heads}


def _zero(config: TrainingConfig, _: ModelShape) -> Words:
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


def _read_zero(words: Words) -> Mapping[str, Any]:
    if "--use-torch-fsdp2" in words:
        return {"zero_stage": _ZERO_SHARDED_PARAMETERS}
    if "--use-megatron-fsdp" in words:
        strategy = words.get("--data-parallel-sharding-strategy", "no_shard")
        if strategy not in _STRATEGIES:
            raise ValueError(f"--data-parallel-sharding-strategy is one of {', '.join(_STRATEGIES)}, not {strategy!r}")
        return {"zero_stage": _STRATEGIES[strategy]}
    return {"zero_stage": 1} if "--use-distributed-optimizer" in words else {}


def _shard_groups(config: TrainingConfig, _: ModelShape) -> Words:
    groups = config.data_parallel // config.data_parallel_shard
    if config.zero_stage == 0 or groups == 1:
        return {}
    return {"--num-distributed-optimizer-instances": str(groups)}


def _read_outer(words: Words) -> Mapping[str, Any]:
    strategy = str(words.get(_OUTER, "no_shard"))
    if strategy not in {"no_shard", "optim"}:
        raise ValueError(f"{_OUTER} is no_shard or optim, not {strategy!r}")
    groups = count(words, "--num-distributed-optimizer-instances") or 1
    return {"outer_zero_stage": 1} if strategy == "optim" and groups > 1 else {}


def _recompute(config: TrainingConfig, _: ModelShape) -> Words:
    if config.activation_recompute == "selective":
        return {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}
    if config.activation_recompute == "full":
        return {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}
    if config.activation_recompute == "block":
        layers = str(config.recompute_num_layers)
        return {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": layers}
    return {}


def _read_recompute(words: Words) -> Mapping[str, Any]:
    granularity = words.get("--recompute-granularity")
    if granularity not in {None, "selective", "full"}:
        raise ValueError(f"--recompute-granularity is selective or full, not {granularity!r}")
    if granularity is None and "--recompute-activations" in words:
        granularity = "selective"
    if granularity == "full" and words.get("--recompute-method") == "block":
        return stated(activation_recompute="block", recompute_num_layers=count(words, "--recompute-num-layers"))
    return stated(activation_recompute=granularity)


def _precision(config: TrainingConfig, _: ModelShape) -> Words:
    return _LOW_PRECISION.get(config.precision, {f"--{config.precision}": ""})


def _read_precision(words: Words) -> Mapping[str, Any]:
    on = [name for name in ("bf16", "fp16") if f"--{name}" in words]
    if len(on) > 1:
        raise ValueError("--bf16 and --fp16 exclude each other")
    if "--fp4-format" in words:
        return {"precision": "nvfp4"}
    if "--fp8-format" in words:
        recipe = words.get("--fp8-recipe", "delayed")
        if recipe not in {"mxfp8", *_SCALED_FP8_RECIPES}:
            known = ", ".join(("mxfp8", *_SCALED_FP8_RECIPES))
            raise ValueError(f"--fp8-recipe {recipe!r} is not modelled; known: {known}")
        return {"precision": "mxfp8" if recipe == "mxfp8" else "fp8"}
    return {"precision": on[0]} if on else {}


def _sequence_length(config: TrainingConfig, shape: ModelShape) -> Words:
    positions = shape.num_position_embeddings or max(config.sequence_length, shape.max_sequence_length or 0)
    return {"--seq-length": str(config.sequence_length), "--max-position-embeddings": str(positions)}


TERMS = (
    count_term(
        "--tensor-model-parallel-size",
        "tensor_parallel",
        aliases=("--model-parallel-size",),
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="sequence_parallel",
        words=lambda config, _: {"--sequence-parallel": ""} if config.sequence_parallel else {},
        read=lambda words: {"sequence_parallel": True} if "--sequence-parallel" in words else {},
        keys=("--sequence-parallel",),
        said_by="--sequence-parallel",
        verified_by=_PARSER,
    ),
    count_term("--pipeline-model-parallel-size", "pipeline_parallel", verified_by=_PARSER_AND_GROUPS),
    Term(
        name="layers_per_chunk",
        words=_layers,
        read=_read_layers,
        keys=(
            "--pipeline-model-parallel-layout",
            "--num-virtual-stages-per-pipeline-rank",
            "--num-layers-per-virtual-pipeline-stage",
        ),
        said_by="--pipeline-model-parallel-layout (uneven), --num-virtual-stages-per-pipeline-rank (even)",
        verified_by=_PARSER,
    ),
    count_term("--context-parallel-size", "context_parallel", verified_by=_PARSER_AND_GROUPS),
    Term(
        name="context_parallel_style",
        words=_context_style,
        read=_read_context_style,
        keys=(_EXCHANGE, _EXCHANGE_SIZES),
        said_by=f"{_EXCHANGE}, {_EXCHANGE_SIZES}",
        verified_by=f"{_PARSER}; {_ARGUMENT_LEVEL}",
    ),
    Term(
        name="expert_parallel",
        words=_experts,
        read=lambda words: stated(expert_parallel=count(words, "--expert-model-parallel-size")),
        keys=("--expert-model-parallel-size",),
        said_by="--expert-model-parallel-size",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="expert_tensor_parallel",
        words=_expert_tensor,
        read=lambda words: stated(expert_tensor_parallel=count(words, "--expert-tensor-parallel-size")),
        keys=("--expert-tensor-parallel-size",),
        said_by="--expert-tensor-parallel-size",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="expert_capacity_factor",
        words=_capacity,
        read=_read_capacity,
        keys=(_CAPACITY, _PAD),
        said_by=f"{_CAPACITY}, {_PAD}",
        verified_by=_PARSER,
    ),
    Term(
        name="zero_stage",
        words=_zero,
        read=_read_zero,
        keys=(
            "--use-distributed-optimizer",
            "--use-megatron-fsdp",
            "--use-torch-fsdp2",
            "--data-parallel-sharding-strategy",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
            "--ckpt-format",
            "--init-model-with-meta-device",
        ),
        said_by="--use-distributed-optimizer (1), --use-megatron-fsdp --data-parallel-sharding-strategy (2, 3)",
        verified_by=_PARSER,
    ),
    Term(
        name="data_parallel_shard",
        words=_shard_groups,
        read=lambda words: stated(num_shard_groups=count(words, "--num-distributed-optimizer-instances")),
        keys=("--num-distributed-optimizer-instances",),
        said_by="--num-distributed-optimizer-instances",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="outer_zero_stage",
        words=lambda config, _: {_OUTER: "optim"} if config.outer_zero_stage else {},
        read=_read_outer,
        keys=(_OUTER,),
        said_by=f"{_OUTER} optim (zero_stage 3 in groups)",
        verified_by=_PARSER,
    ),
    Term(
        name="activation_recompute",
        words=_recompute,
        read=_read_recompute,
        keys=(
            "--recompute-granularity",
            "--recompute-activations",
            "--recompute-modules",
            "--recompute-method",
            "--recompute-num-layers",
        ),
        said_by="--recompute-granularity, --recompute-modules, --recompute-method, --recompute-num-layers",
        verified_by=_PARSER,
    ),
    Term(
        name="expert_dispatcher",
        words=_dispatcher,
        read=_read_dispatcher,
        keys=(_DISPATCHER, _BACKEND),
        said_by=f"{_DISPATCHER}, {_BACKEND}",
        verified_by=_PARSER,
    ),
    Term(
        name="expert_parallel_overlap",
        words=lambda config, _: {_OVERLAP: ""} if config.expert_parallel_overlap else {},
        read=lambda words: {"expert_parallel_overlap": True} if _OVERLAP in words else {},
        keys=(_OVERLAP,),
        said_by=_OVERLAP,
        verified_by=_PARSER,
    ),
    Term(
        name="optimizer_offload",
        # The optimizer on the host takes the precision-aware path, and the parser insists on both.
        words=lambda config, _: (
            {"--optimizer-cpu-offload": "", "--use-precision-aware-optimizer": ""} if config.optimizer_offload else {}
        ),
        read=lambda words: {"optimizer_offload": True} if "--optimizer-cpu-offload" in words else {},
        keys=("--optimizer-cpu-offload", "--use-precision-aware-optimizer"),
        said_by="--optimizer-cpu-offload, --use-precision-aware-optimizer",
        verified_by=_PARSER,
    ),
    Term(
        name="precision",
        words=_precision,
        read=_read_precision,
        keys=("--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe"),
        said_by="--bf16, --fp16, --fp8-format, --fp8-recipe (mxfp8), --fp4-format, --fp4-recipe (nvfp4)",
        verified_by=f"{_PARSER}; fp8 with experts, nvfp4: {_ARGUMENT_LEVEL}",
    ),
    count_term("--micro-batch-size", "micro_batch_size", verified_by=_PARSER),
    count_term("--global-batch-size", "global_batch_size", verified_by=_PARSER),
    Term(
        name="sequence_length",
        words=_sequence_length,
        read=lambda words: stated(sequence_length=count(words, "--seq-length")),
        keys=("--seq-length", "--max-position-embeddings"),
        said_by="--seq-length, --max-position-embeddings",
        verified_by=_PARSER,
    ),
)
