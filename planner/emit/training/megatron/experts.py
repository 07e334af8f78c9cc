"""Rows of Megatron-LM's mapping table about experts: how many tokens each takes, and how they reach it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.terms import Arguments
from meshplan.planner.emit.training.terms import TrainingRows
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.switches import ALL_TO_ALL

_CAPACITY, _PAD = "--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity"
_MAX_CAPACITY = 1024
_DISPATCHER, _BACKEND = "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"
_rows = TrainingRows("parser")


def _capacity(config: TrainingConfig, _: ModelShape) -> Arguments:
    """Padded, so that shapes are fixed and the estimate's rows are those that run."""
    if not config.expert_capacity_factor:
        return {}
    return {_CAPACITY: f"{config.expert_capacity_factor:.9g}", _PAD: ""}


def _read_capacity(arguments: Arguments) -> Mapping[str, Any]:
    """A negative factor means none to Megatron-LM."""
    if _CAPACITY not in arguments:
        return {}
    try:
        factor = float(arguments[_CAPACITY])
    except (TypeError, ValueError):
        raise ValueError(f"{_CAPACITY} {arguments[_CAPACITY]!r} is no number") from None
    if not factor < _MAX_CAPACITY or factor == 0:
        raise ValueError(f"{_CAPACITY} {arguments[_CAPACITY]!r} is not above 0 and below {_MAX_CAPACITY}")
    return {"expert_capacity_factor": factor} if factor > 0 else {}


def _dispatcher(config: TrainingConfig, shape: ModelShape) -> Arguments:
    if shape.moe is None:
        return {}
    if config.expert_dispatcher == ALL_TO_ALL:
        return {_DISPATCHER: ALL_TO_ALL}
    return {_DISPATCHER: "flex", _BACKEND: config.expert_dispatcher}


def _read_dispatcher(arguments: Arguments) -> Mapping[str, Any]:
    """Megatron-LM's own default is an all-gather, which no plan is priced for."""
    kind = arguments.get(_DISPATCHER)
    if kind is None or kind == ALL_TO_ALL:
        return {} if kind is None else {"expert_dispatcher": ALL_TO_ALL}
    backend = str(arguments.get(_BACKEND, "deepep"))
    if kind != "flex" or backend not in ("deepep", "hybridep"):
        raise ValueError(f"{_DISPATCHER} {kind} {backend if kind == 'flex' else ''}".strip() + " is not modelled")
    return {"expert_dispatcher": backend}


EXPERT_CAPACITY_FACTOR = _rows.term(
    "expert_capacity_factor", _capacity, _read_capacity, _CAPACITY, _PAD, expressed_by=f"{_CAPACITY}, {_PAD}"
)
EXPERT_DISPATCHER = _rows.term(
    "expert_dispatcher", _dispatcher, _read_dispatcher, _DISPATCHER, _BACKEND, expressed_by=f"{_DISPATCHER}, {_BACKEND}"
)
