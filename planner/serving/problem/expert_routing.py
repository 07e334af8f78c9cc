"""How tokens choose experts, where the experts lie, and how tokens travel: what a serving spec says under ``experts``.

Loads are recorded by an engine (the formats of ``meshplan experts``,
:mod:`meshplan.planner.expert_placement.problem.recordings`), or a named skew: with ``zipf`` z the r-th most popular of
E experts takes a share r^−z / Σ i^−z of a layer's token copies, in an order that is drawn for each layer.

A recording may hold fewer layers than the model has MoE layers (published ones often hold three): they stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.problems import Problems
from meshplan.planner.core.reading.spec_fields import SpecModel
from meshplan.planner.expert_placement.problem.maps import read_map
from meshplan.planner.expert_placement.problem.recordings import ExpertRecording, read_recording
from meshplan.planner.expert_placement.setting import recording_format
from meshplan.planner.serving.problem.config import Layout

ZIPF_SEED = 0  # of the order of popularity in each layer
MAX_ZIPF = 4.0


class Dispatch(Enum):
    """Where a token is between two MoE layers."""

    RETURNS = "returns"  # on the attention rank that holds its KV cache: vLLM, SGLang, TensorRT-LLM
    STAYS = "stays"  # on the device of its first expert, all KV caches being everywhere (ExFlow, arXiv:2401.08383)


class ExpertRoutingSpec(SpecModel):
    """How tokens choose experts, and where these lie."""

    loads: str | None = Field(
        default=None,
        min_length=1,
        description="recorded routing: a file or folder in a format of meshplan experts; its layers stand for all, the "
        "map that was in force is not used",
    )
    zipf: Annotated[float, Field(ge=0, le=MAX_ZIPF)] | None = Field(
        default=None,
        description="named skew: the r-th most popular expert takes a share in proportion to r^-zipf; 0: all the same",
    )
    placement: str | None = Field(
        default=None,
        min_length=1,
        description="map of experts as meshplan experts --emit sglang writes it; its copies take memory from the KV "
        "cache. Default: one copy each, in order",
    )
    dispatch: Dispatch = Field(
        default=Dispatch.RETURNS,
        description="returns: a token is back on its attention rank after each layer (all engines); stays: on the "
        "device of its expert, with all KV caches on every device (ExFlow; no engine of these does it)",
    )

    @property
    def contradiction(self) -> str | None:
        """What does not go together, of a model that has experts."""
        if (self.loads is None) == (self.zipf is None):
            return "give loads (a recording) or zipf (a named skew)"
        if self.dispatch is Dispatch.STAYS and self.loads is None:
            return "dispatch: stays needs loads with transitions from layer to layer"
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRouting:
    """Routing of the MoE layers that were recorded, which stand for all; arrays are not written to.

    Args:
        load: [L, E] share of a layer's token copies that choose each expert; rows sum to 1.
        source: where the loads come from, for the plan's provenance.
        placement: [L, S] expert in each slot, slot i on device i // (S / devices); None: one copy each, in order.
        transitions: [L − 1, E, E] tokens from an expert to one of the next recorded layer, or None.
        token_experts: [L, tokens, top_k] experts of each recorded token, −1 where a layer lacks it; or None.
        dispatch: see :class:`Dispatch`.
    """

    load: FloatArray
    source: str
    placement: IntArray | None = None
    transitions: FloatArray | None = None
    token_experts: IntArray | None = None
    dispatch: Dispatch = Dispatch.RETURNS

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return int(self.load.shape[1])

    @property
    def num_slots(self) -> int:
        """Slots of a layer over all devices."""
        return self.num_experts if self.placement is None else int(self.placement.shape[1])

    @property
    def num_copies(self) -> int:
        """Slots of a layer beyond one for each expert."""
        return self.num_slots - self.num_experts

    def copies_on(self, layout: Layout) -> int:
        """Further copies of experts in each layer under a layout: none where experts are not spread."""
        return self.num_copies if layout.expert_parallel > 1 else 0

    def misfit(self, layout: Layout) -> str | None:
        """Why a layout cannot have this placement; None where it can."""
        if layout.expert_parallel == 1:
            return None
        if self.num_slots % layout.expert_parallel:
            return f"the map's {self.num_slots} slots of experts do not divide over the devices of the experts"
        if self.dispatch is Dispatch.STAYS and layout.attention_data_parallel != layout.expert_parallel:
            return "tokens that stay with their experts need attention on single devices"
        return None


def copies_of(routing: ExpertRouting | None, layout: Layout) -> int:
    """Copies of experts in a layer beyond one each; none where nothing is said of routing."""
    return 0 if routing is None else routing.copies_on(layout)


def expert_routing(
    asked: ExpertRoutingSpec | None, shape: ModelShape, base: Path, problems: Problems
) -> ExpertRouting | None:
    """Read what a spec says of its experts; None where it says nothing, or where something is wrong.

    Args:
        asked: the part of the spec.
        shape: the model.
        base: folder against which paths are resolved.
        problems: what is wrong is added here.
    """
    if asked is None:
        return None
    if shape.moe is None:
        problems.say("experts", f"{shape.name} is a dense model; leave experts out")
        return None
    if asked.contradiction is not None:
        problems.say("experts", asked.contradiction)
        return None
    try:
        placement = (
            None if asked.placement is None else read_map(base / asked.placement, num_experts=shape.moe.num_experts)
        )
        if asked.loads is None:
            layers = shape.num_moe_layers if placement is None else len(placement)
            load = zipf_load(layers, shape.moe.num_experts, asked.zipf or 0.0)
            return ExpertRouting(load=load, source=f"zipf {asked.zipf or 0.0:g}, as the spec says", placement=placement)
        path = base / asked.loads
        recording = read_recording(path, recording_format(path), num_experts=shape.moe.num_experts)
        return recorded_routing(
            recording, shape, source=f"recorded: {asked.loads}", placement=placement, dispatch=asked.dispatch
        )
    except SpecError as error:
        for problem in error.problems:
            problems.say("experts", str(problem))
    return None


def zipf_load(num_layers: int, num_experts: int, exponent: float) -> FloatArray:
    """[L, E] shares r^−exponent / Σ i^−exponent of the experts of rank r, whose order is drawn for each layer.

    >>> zipf_load(1, 2, 1.0).round(4).max().item()
    0.6667
    """
    share = np.arange(1, num_experts + 1) ** -exponent
    share /= share.sum()
    return np.random.default_rng(ZIPF_SEED).permuted(np.tile(share, (num_layers, 1)), axis=1)


def recorded_routing(
    recording: ExpertRecording,
    shape: ModelShape,
    *,
    source: str,
    placement: IntArray | None = None,
    dispatch: Dispatch = Dispatch.RETURNS,
) -> ExpertRouting:
    """Routing as it was recorded, the time windows together; a layer without load counts as even.

    Args:
        recording: of this model.
        shape: the model.
        source: for the plan's provenance.
        placement: [L, S] a map; None: one copy each, in order.
        dispatch: see :class:`Dispatch`.

    Raises:
        SpecError: the recording or the map is of another model, or lacks what the dispatch needs.
    """
    recording = of_moe_layers(recording, shape, source)
    load, transitions = recording.load.sum(axis=0), recording.transitions
    total = load.sum(axis=1, keepdims=True)
    if dispatch is Dispatch.STAYS and (transitions is None or not transitions.sum()):
        raise _error(f"dispatch: stays needs transitions from layer to layer, which {source} does not hold")
    if placement is not None and len(placement) != len(load):
        raise _error(f"the map of experts has {len(placement)} layers, {source} has {len(load)}")
    return ExpertRouting(
        load=np.divide(load, total, out=np.full_like(load, 1.0 / load.shape[1]), where=total > 0.0),
        source=source,
        placement=placement,
        transitions=transitions,
        token_experts=recording.token_experts,
        dispatch=dispatch,
    )


def of_moe_layers(recording: ExpertRecording, shape: ModelShape, source: str) -> ExpertRecording:
    """The MoE layers of a recording that also counts dense layers, which come first; others as they are.

    Raises:
        SpecError: it is of another model.
    """
    if shape.moe is None:
        raise _error(f"{shape.name} is a dense model")
    _, layers, experts = recording.load.shape
    if experts != shape.moe.num_experts:
        raise _error(f"{source} holds {experts} experts per layer, {shape.name} has {shape.moe.num_experts}")
    if layers <= shape.num_moe_layers:
        return recording
    first = layers - shape.num_moe_layers
    if layers != shape.num_hidden_layers or not all(shape.moe.moe_layers[first:]):
        raise _error(f"{source} holds {layers} layers, {shape.name} has {shape.num_moe_layers} MoE layers")
    return replace(
        recording,
        load=recording.load[:, first:],
        layer_ids=recording.layer_ids[first:],
        transitions=None if recording.transitions is None else recording.transitions[first:],
        current=None if recording.current is None else recording.current[first:],
        token_experts=None if recording.token_experts is None else recording.token_experts[first:],
    )


def _error(message: str) -> SpecError:
    return SpecError.at("", message, of="the routing")
