"""What is sent of a model: fragments cover it, and low rank counts matrix by matrix."""

from __future__ import annotations

import itertools

import pytest
from core_cases import DENSE, MOE

from meshplan.planner.training.far_apart.payloads import fragment_shares, layers_of_sites, low_rank


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_fragments_are_the_model(count: int) -> None:
    shares = fragment_shares(DENSE, count)
    assert len(shares) == count
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0.0


def test_low_rank_is_counted_matrix_by_matrix() -> None:
    hidden, width, rank = DENSE.hidden_size, DENSE.intermediate_size, 2
    queries, keys = DENSE.num_attention_heads * DENSE.head_dim, DENSE.num_key_value_heads * DENSE.head_dim
    layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer += [(width, hidden)] * (DENSE.mlp_matrices - 1) + [(hidden, width)]
    matrices = layer * DENSE.num_hidden_layers
    matrices += [(DENSE.vocab_size, hidden)] * (1 if DENSE.tie_word_embeddings else 2)
    rest = DENSE.num_parameters - sum(m * n for m, n in matrices)
    found = low_rank(DENSE, rank, 1)
    assert found is not None
    assert found.numbers == rank * sum(m + n for m, n in matrices) + rest
    assert found.flops == sum(6 * m * n * rank + 2 * m * rank**2 for m, n in matrices)


def test_parts_of_a_split_matrix_are_compressed_by_themselves() -> None:
    whole, split = low_rank(DENSE, 1, 1), low_rank(DENSE, 1, 2)
    assert whole is not None
    assert split is not None
    assert whole.numbers < split.numbers < 2 * whole.numbers


def test_a_rank_that_is_too_high_sends_the_matrix_whole() -> None:
    found = low_rank(DENSE, DENSE.hidden_size, 1)
    assert found is not None
    assert found.numbers == DENSE.num_parameters


def test_experts_are_matrices_too() -> None:
    found = low_rank(MOE, 1, 1)
    assert found is not None
    assert found.numbers < MOE.num_parameters / 4


def test_whole_layers_are_dealt_so_that_no_other_deal_is_sooner_done() -> None:
    for rates, layers in (((1.0, 1.0), 7), ((3.0, 1.0), 9), ((2.0, 1.0, 5.0), 11)):
        dealt = layers_of_sites(rates, layers)
        every = (deal for deal in itertools.product(range(1, layers + 1), repeat=len(rates)) if sum(deal) == layers)
        done = [max(count / rate for count, rate in zip(deal, rates, strict=True)) for deal in (dealt, *every)]
        assert sum(dealt) == layers
        assert done[0] == min(done)
