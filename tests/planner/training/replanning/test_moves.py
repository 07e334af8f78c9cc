"""Bytes that move between two layouts, against a count cell by cell, rank by rank."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from core_cases import DENSE, MOE
from moves_cases import LAYERS, RECIPE, config, layout

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.replanning.moves import Layout, moves

# Cells along each side of a square: every degree drawn below divides it.
CELLS = 24


def drawn(draw: random.Random, *, has_experts: bool) -> TrainingConfig:
    """A random layout on at most 16 devices."""
    while True:
        t, p, c, d = (draw.choice([1, 2, 3, 4]) for _ in range(4))
        v = draw.choice([1, 1, 3]) if p in (2, 4) else 1
        if t * p * c * d > 16 or LAYERS % (p * v):
            continue
        e = draw.choice([1, 2, 4]) if has_experts else 1
        x = draw.choice([1, 2]) if has_experts else 1
        if (t * c * d) % (e * x) or CELLS % (c * d) or CELLS % (t * c * d // x):
            continue
        zero = draw.choice([0, 1, 3])
        return config(
            tensor_parallel=t,
            pipeline_parallel=p,
            virtual_pipeline_stages=v,
            context_parallel=c,
            data_parallel=d,
            expert_parallel=e,
            expert_tensor_parallel=x,
            zero_stage=zero,
        )


def cells_of(made: TrainingConfig, rank: int) -> dict[tuple[str, int], set[tuple[int, int]]]:
    """(kind, layer) → cells that a rank holds, from the definition of each degree."""
    t_count, c_count, d_count, p_count = (
        made.tensor_parallel,
        made.context_parallel,
        made.data_parallel,
        made.pipeline_parallel,
    )
    coordinates = list(product(range(p_count), range(d_count), range(c_count), range(t_count)))
    p, d, c, t = coordinates[rank]
    per_chunk = LAYERS // len(made.layers_per_chunk)
    layers = {layer for layer in range(LAYERS) if layer // per_chunk % p_count == p}
    layers |= ({-1} if p == 0 else set()) | ({LAYERS} if p == p_count - 1 else set())
    x_count, e_count = made.expert_tensor_parallel, made.expert_parallel
    of_stage = list(product(range(t_count * c_count * d_count // x_count // e_count), range(e_count), range(x_count)))
    replica, e, x = of_stage[rank - p * t_count * c_count * d_count]
    replicas = t_count * c_count * d_count // x_count // e_count
    held: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for row, column in product(range(CELLS), range(CELLS)):
        in_columns = column * t_count // CELLS == t
        in_shard = row * c_count * d_count // CELLS == d * c_count + c
        in_experts = row * e_count // CELLS == e and column * x_count // CELLS == x
        in_expert_shard = in_experts and (row - e * CELLS // e_count) * e_count * replicas // CELLS == replica
        for kind, is_held in (
            ("weights", in_columns and (in_shard or made.zero_stage < 3)),
            ("states", in_columns and (in_shard or made.zero_stage < 1)),
            ("expert_weights", in_experts and (in_expert_shard or made.zero_stage < 3)),
            ("expert_states", in_experts and (in_expert_shard or made.zero_stage < 1)),
        ):
            if is_held:
                for layer in layers:
                    held.setdefault((kind, layer), set()).add((row, column))
    return held


def cell_bytes(shape: ModelShape, kind: str, layer: int) -> float:
    """Bytes of one cell."""
    size = RECIPE.weight_bytes if "weights" in kind else RECIPE.optimizer_bytes
    experts = 0
    if shape.moe is not None and 0 <= layer < LAYERS and shape.is_moe_layer(layer):
        experts = shape.moe.num_experts * shape.expert_parameters
    if kind.startswith("expert"):
        return size * experts / CELLS**2
    if not 0 <= layer < LAYERS:
        return size * shape.vocab_size * shape.hidden_size / CELLS**2
    return size * (shape.layer_parameters(layer) - experts) / CELLS**2


def counted(shape: ModelShape, old: Layout, new: Layout, gone: set[tuple[int, int]]) -> tuple[float, float, float]:
    """Bytes needed, moved and lost, cell by cell."""
    before = {place: cells_of(old.config, rank) for rank, place in enumerate(old.places)}
    left = {place: held for place, held in before.items() if place not in gone}
    needed = moved = 0.0
    for rank, place in enumerate(new.places):
        for key, cells in cells_of(new.config, rank).items():
            size = cell_bytes(shape, *key)
            needed += size * len(cells)
            moved += size * len(cells - left.get(place, {}).get(key, set()))
    everything = {key for held in before.values() for key in held}
    lost = 0.0
    for key in everything:
        had = set().union(*(held.get(key, set()) for held in before.values()))
        have = set().union(*(held.get(key, set()) for held in left.values()))
        lost += cell_bytes(shape, *key) * len(had - have)
    return needed, moved, lost


@pytest.mark.parametrize("seed", range(16))
def test_bytes_are_those_of_a_count_by_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    shape = replace(MOE if seed % 2 else DENSE, num_hidden_layers=LAYERS)
    if shape.moe is not None:
        shape = replace(shape, moe=replace(shape.moe, moe_layers=(False, *(True,) * (LAYERS - 1))))
    old, new = (layout(drawn(draw, has_experts=shape.moe is not None)) for _ in range(2))
    gone = {old.places[-1]} if seed % 3 == 0 else set()
    needed, moved, lost = counted(shape, old, new, gone)
    found = moves(shape, RECIPE, old, new, tuple(gone))
    assert found.needed == pytest.approx(needed)
    assert found.lost == pytest.approx(lost, abs=1e-6 * needed)
    if not lost:
        assert found.moved == pytest.approx(moved)
        assert found.kept == pytest.approx(needed - moved)


def test_the_same_layout_moves_nothing() -> None:
    same = layout(config(tensor_parallel=2, pipeline_parallel=2, data_parallel=2))
    shape = replace(DENSE, num_hidden_layers=LAYERS)
    found = moves(shape, RECIPE, same, same)
    assert (found.moved, found.lost) == (0.0, 0.0)
    assert found.kept == found.needed


def test_a_replica_survives_where_states_are_whole() -> None:
    shape = replace(DENSE, num_hidden_layers=LAYERS)
    old = layout(config(tensor_parallel=2, data_parallel=4, zero_stage=0))
    new = layout(config(tensor_parallel=2, data_parallel=3, zero_stage=0))
    assert moves(shape, RECIPE, old, new, old.places[-2:]).lost == 0.0
    sharded = layout(replace(old.config, zero_stage=1))
    assert moves(shape, RECIPE, sharded, new, old.places[-2:]).lost > 0.0


def test_an_encoder_in_front_moves_with_the_embedding() -> None:
    """Twice the replicas of a model hold twice its bytes; with an encoder in front those of the encoder more."""
    encoder = replace(DENSE, bidirectional=True, vocab_size=0, tie_word_embeddings=True)
    both = replace(DENSE, encoder=encoder)
    found = [
        moves(shape, RECIPE, layout(config()), layout(config(data_parallel=2, zero_stage=0))) for shape in (DENSE, both)
    ]
    crossed = DENSE.num_hidden_layers * both.cross_attention_parameters
    added = 2 * (RECIPE.weight_bytes + RECIPE.optimizer_bytes) * (encoder.num_parameters + crossed)
    assert found[1].needed - found[0].needed == pytest.approx(added)
