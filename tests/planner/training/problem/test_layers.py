"""How layers fall into pipeline chunks where nobody says."""

from __future__ import annotations

import pytest
from degree_brute_force import is_weighted, layer_splits
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.training.problem.layers import (
    split_layers_evenly,
    split_layers_ignoring_ends,
    splits_by_weights,
)


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 2))
def test_every_layer_is_dealt_once(layers: int, chunks: int, nextn: int) -> None:
    if chunks > layers + 2:
        return
    for dealt in (
        split_layers_evenly(layers, chunks, num_nextn_predict_layers=nextn),
        split_layers_ignoring_ends(layers, chunks),
    ):
        assert len(dealt) == chunks
        assert sum(dealt) == layers
        assert min(dealt) >= 0


@pytest.mark.parametrize("layers", range(1, 15))
@pytest.mark.parametrize("chunks", range(1, 6))
def test_splits_by_weights_are_all_that_there_are(layers: int, chunks: int) -> None:
    """Against every split, judged by what it looks like and not by how it is made."""
    assert set(splits_by_weights(layers, chunks)) == {
        split for split in layer_splits(layers, chunks) if is_weighted(split)
    }


@pytest.mark.parametrize(
    ("layers", "chunks", "dealt"),
    [
        (32, 3, (10, 11, 11)),
        (32, 5, (6, 6, 6, 7, 7)),
        (60, 16, (3,) * 4 + (4,) * 12),
    ],
)
def test_an_even_deal_leaves_the_rest_to_the_last_chunks(layers: int, chunks: int, dealt: tuple[int, ...]) -> None:
    """As InternEvo's partition_uniform."""
    assert split_layers_ignoring_ends(layers, chunks) == dealt


def test_prediction_layers_make_room_on_the_last_chunk() -> None:
    """DeepSeek-V3's 61 layers on 16 chunks: the last one has a layer, the prediction layer and two losses."""
    assert split_layers_evenly(61, 16, num_nextn_predict_layers=1) == (4,) * 15 + (1,)
    assert split_layers_evenly(61, 32, num_nextn_predict_layers=1)[-1] == 0
