"""Which bytes move from one layout of a job to another.

A device of the new layout needs its rectangles (:mod:`.holdings`); what it held itself it keeps, the rest comes from
other devices. Where no device left holds a part, the live states are lost: every device then loads its part of the last
checkpoint, since parts of different steps cannot be joined.

Bytes are exact for the rectangles, rank by rank; tests count them by brute force, square by square.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from meshplan.catalogs.constants.training import FrameworkRecipe
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import BoolArray
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.replanning.holdings import EMBEDDING, Holding, Place, Rectangle, holdings

# Areas below it are rounding.
_NOTHING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A job on devices.

    Args:
        config: its choices.
        places: (host, device) of each rank.
    """

    config: TrainingConfig
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What changing the layout takes, bytes.

    Args:
        needed: states of all devices of the new layout, copies included.
        kept: of these, what the same device held before.
        moved: what comes from other devices; 0 where the live states are lost.
        most_in: largest amount that one device receives.
        lost: states that no device left holds, each once; above 0 the job starts from its last checkpoint.
    """

    needed: float
    kept: float
    moved: float
    most_in: float
    lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """One kind of rectangle: which field of a holding, and bytes of the whole square of each layer."""

    name: str
    layer_bytes: Mapping[int, float]
    _known: dict[frozenset[int], float] = field(default_factory=dict)

    def bytes_of(self, layers: frozenset[int]) -> float:
        """Bytes of the whole squares of some layers; the ranks of a stage ask for the same ones."""
        if layers not in self._known:
            self._known[layers] = sum(self.layer_bytes.get(layer, 0.0) for layer in layers)
        return self._known[layers]


def moves(shape: ModelShape, recipe: FrameworkRecipe, old: Layout, new: Layout, gone: Sequence[Place] = ()) -> Moves:
    """What changing the layout takes.

    Args:
        shape: the model; all of its parameters are trained.
        recipe: bytes of a weight and of its optimizer states.
        old: before.
        new: after.
        gone: devices of the old layout that are not there any more.
    """
    before = dict(zip(old.places, holdings(old.config), strict=True))
    left = {place: held for place, held in before.items() if place not in set(gone)}
    tensors = tuple(_tensors(shape, recipe))
    needed = kept = 0.0
    received: list[float] = []
    for place, after in zip(new.places, holdings(new.config), strict=True):
        wants, has = _wanted(tensors, after, left.get(place))
        needed, kept = needed + wants, kept + has
        received.append(wants - has)
    lost = _lost(tensors, tuple(before.values()), tuple(left.values())) if gone else 0.0
    if lost > _NOTHING:
        return Moves(needed=needed, kept=0.0, moved=0.0, most_in=0.0, lost=lost)
    return Moves(needed=needed, kept=kept, moved=sum(received), most_in=max(received), lost=0.0)


def _tensors(shape: ModelShape, recipe: FrameworkRecipe) -> Iterator[_Tensor]:
    """The four rectangles of a holding with the bytes of their squares."""
    layers = range(shape.num_hidden_layers)
    experts = {
        layer: float(shape.moe.num_experts * shape.expert_parameters)
        for layer in layers
        if shape.moe is not None and shape.is_moe_layer(layer)
    }
    dense = {layer: float(shape.layer_parameters(layer)) - experts.get(layer, 0.0) for layer in layers}
    encoder = 0 if shape.encoder is None else shape.encoder.num_parameters  # in front of the first layer
    dense |= {EMBEDDING: float(shape.vocab_size * shape.hidden_size + encoder)}
    dense |= {shape.num_hidden_layers: float(shape.vocab_size * shape.hidden_size)}
    for name, counts, size in (
        ("weights", dense, recipe.weight_bytes),
        ("states", dense, recipe.optimizer_bytes),
        ("expert_weights", experts, recipe.weight_bytes),
        ("expert_states", experts, recipe.optimizer_bytes),
    ):
        yield _Tensor(name=name, layer_bytes={layer: count * size for layer, count in counts.items()})


def _wanted(tensors: Sequence[_Tensor], after: Holding, own: Holding | None) -> tuple[float, float]:
    """Bytes that a device needs, and those of them that it held."""
    needed = kept = 0.0
    for tensor in tensors:
        wants: Rectangle = getattr(after, tensor.name)
        needed += wants.area * tensor.bytes_of(after.layers)
        if own is not None:
            common = wants.overlap(getattr(own, tensor.name))
            kept += common * tensor.bytes_of(after.layers & own.layers)
    return needed, kept


def _lost(tensors: Sequence[_Tensor], before: Sequence[Holding], left: Sequence[Holding]) -> float:
    """Bytes, each once, that were held before and are held by nobody now."""
    lost = 0.0
    for layers in {held.layers for held in before}:
        for tensor in tensors:
            size = tensor.bytes_of(layers)
            had = frozenset(getattr(held, tensor.name) for held in before if held.layers == layers)
            have = frozenset(getattr(held, tensor.name) for held in left if held.layers == layers)
            lost += size * (_covered(had) - _covered(have))
    return lost


@cache
def _covered(rectangles: frozenset[Rectangle]) -> float:
    """Area of the union of rectangles: the cells between all of their edges are counted once."""
    if not rectangles:
        return 0.0
    rows = np.unique([edge for one in rectangles for edge in one.rows])
    columns = np.unique([edge for one in rectangles for edge in one.columns])
    covered: BoolArray = np.zeros((len(rows) - 1, len(columns) - 1), dtype=bool)
    for one in rectangles:
        top, bottom = np.searchsorted(rows, one.rows)
        left, right = np.searchsorted(columns, one.columns)
        covered[top:bottom, left:right] = True
    return float(np.diff(rows) @ covered @ np.diff(columns))
