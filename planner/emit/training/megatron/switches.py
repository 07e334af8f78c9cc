"""Rows of Megatron-LM's mapping table about recompute, the format of gradients and CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.terms import Arguments, count, stated
from meshplan.planner.emit.training.megatron.hybrid import has_pattern
from meshplan.planner.emit.training.terms import TrainingRows
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.switches import (
    ADAMW_BF16_MOMENTS,
    RECOMPUTE_MODULES,
    USUAL_MODULES,
    in_order,
)

_GRANULARITY, _MODULES = "--recompute-granularity", "--recompute-modules"
_METHOD, _LAYERS, _OLD_SELECTIVE = "--recompute-method", "--recompute-num-layers", "--recompute-activations"
_BF16_GRADIENTS = "--grad-reduce-in-bf16"
_GRAPHS, _GRAPHED = "--cuda-graph-impl", "--cuda-graph-modules"
# Gradients that are not numbers would have to be looked for between kernels of the one graph.
_NO_LOOK = "--no-check-for-nan-in-loss-and-grad"
_PRECISION_AWARE, _MOMENTS = "--use-precision-aware-optimizer", ("--exp-avg-dtype", "--exp-avg-sq-dtype")
_rows = TrainingRows("parser")


def _recompute(config: TrainingConfig, _: ModelShape) -> Arguments:
    if config.activation_recompute == "selective":
        return {_GRANULARITY: "selective"}
    if config.activation_recompute == "full":
        return {_GRANULARITY: "full", _METHOD: "uniform", _LAYERS: "1"}
    if config.activation_recompute == "block":
        return {_GRANULARITY: "full", _METHOD: "block", _LAYERS: str(config.recompute_num_layers)}
    return {}


def _granularity(arguments: Arguments) -> str | None:
    granularity = arguments.get(_GRANULARITY)
    if granularity not in {None, "selective", "full"}:
        raise ValueError(f"{_GRANULARITY} is selective or full, not {granularity!r}")
    return "selective" if granularity is None and _OLD_SELECTIVE in arguments else granularity


def _read_recompute(arguments: Arguments) -> Mapping[str, Any]:
    granularity = _granularity(arguments)
    if granularity == "full" and arguments.get(_METHOD) == "block":
        return stated(activation_recompute="block", recompute_num_layers=count(arguments, _LAYERS))
    return stated(activation_recompute=granularity)


def _write_modules(config: TrainingConfig, _: ModelShape) -> Arguments:
    selects = config.activation_recompute == "selective"
    return {_MODULES: " ".join(config.recompute_modules)} if selects else {}


def _read_modules(arguments: Arguments) -> Mapping[str, Any]:
    """Without selective recompute Megatron-LM does not look at the modules; their order means nothing to it."""
    named = str(arguments.get(_MODULES, "")).split()
    if _granularity(arguments) != "selective" or not named:
        return {}
    unknown = sorted(set(named) - set(RECOMPUTE_MODULES))
    if unknown:
        raise ValueError(f"{_MODULES} {' '.join(unknown)}: not modelled; known: {', '.join(RECOMPUTE_MODULES)}")
    modules = in_order(named)
    return {} if modules == USUAL_MODULES else {"recompute_modules": modules}


def _gradients(config: TrainingConfig, _: ModelShape) -> Arguments:
    """Sums in fp32 are the default beside bf16 weights."""
    return {_BF16_GRADIENTS: ""} if config.gradient_precision == "bf16" else {}


def _read_gradients(arguments: Arguments) -> Mapping[str, Any]:
    return {"gradient_precision": "bf16"} if _BF16_GRADIENTS in arguments else {}


def _graphs(config: TrainingConfig, shape: ModelShape) -> Arguments:
    """The parts of a layer whose shapes are known before the router has spoken; or the whole step."""
    if config.cuda_graphs == "full":
        return {_GRAPHS: "full_iteration", _NO_LOOK: ""}
    if config.cuda_graphs == "partial":
        modules = "attn mlp" if shape.moe is None else "attn moe_router"
        return {_GRAPHS: "transformer_engine", _GRAPHED: f"{modules} mamba" if has_pattern(shape) else modules}
    return {}


def _read_graphs(arguments: Arguments) -> Mapping[str, Any]:
    by = arguments.get(_GRAPHS, "none")
    known = {"none": "none", "transformer_engine": "partial", "local": "partial", "full_iteration": "full"}
    if by not in known:
        raise ValueError(f"{_GRAPHS} is one of {', '.join(known)}, not {by!r}")
    return {} if by == "none" else {"cuda_graphs": known[by]}


ACTIVATION_RECOMPUTE = _rows.term(
    "activation_recompute",
    _recompute,
    _read_recompute,
    _GRANULARITY,
    _OLD_SELECTIVE,
    _METHOD,
    _LAYERS,
    expressed_by=f"{_GRANULARITY}, {_METHOD}, {_LAYERS}",
)
RECOMPUTED_MODULES = _rows.term("recompute_modules", _write_modules, _read_modules, _MODULES)
GRADIENT_PRECISION = _rows.term(
    "gradient_precision", _gradients, _read_gradients, _BF16_GRADIENTS, expressed_by=f"{_BF16_GRADIENTS} (bf16)"
)
CUDA_GRAPHS = _rows.term(
    "cuda_graphs", _graphs, _read_graphs, _GRAPHS, _GRAPHED, _NO_LOOK, expressed_by=f"{_GRAPHS}, {_GRAPHED}"
)


def _write_optimizer(config: TrainingConfig, _: ModelShape) -> Arguments:
    if config.optimizer != ADAMW_BF16_MOMENTS:
        return {}
    return {_PRECISION_AWARE: "", **dict.fromkeys(_MOMENTS, "bf16")}


def _read_optimizer(arguments: Arguments) -> Mapping[str, Any]:
    formats = {str(arguments.get(key, "fp32")) for key in _MOMENTS}
    if formats == {"fp32"}:
        return {}
    if formats != {"bf16"}:
        raise ValueError(f"{' and '.join(_MOMENTS)}: moments are modelled in bf16, both, or in fp32")
    return {"optimizer": ADAMW_BF16_MOMENTS}


OPTIMIZER = _rows.term(
    "optimizer",
    _write_optimizer,
    _read_optimizer,
    *_MOMENTS,
    expressed_by=f"{_PRECISION_AWARE}, {', '.join(_MOMENTS)} bf16",
)
