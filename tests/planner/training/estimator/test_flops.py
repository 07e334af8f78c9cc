"""Model FLOPs against arithmetic by hand and published totals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, LATENT, MOE
from emit_cases import LLAMA_70B

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.flops import forward_flops_per_token, mean_context, model_flops_per_step

# Brown et al. 2020, arXiv:2005.14165, Table 2.1: 96 layers, d_model 12288, 96 heads of 128; GPT-2's vocabulary.
GPT3_175B = ModelShape(
    slug="gpt3-175b",
    name="GPT-3 175B",
    family="gpt2",
    num_hidden_layers=96,
    hidden_size=12288,
    intermediate_size=4 * 12288,
    gated_mlp=False,
    num_attention_heads=96,
    num_key_value_heads=96,
    head_dim=128,
    vocab_size=50257,
    tie_word_embeddings=True,
    num_position_embeddings=2048,
)


def by_hand(shape: ModelShape, sequence_length: int) -> float:
    """6 per parameter that multiplies (embeddings do not), and 6·s·h a layer of causal attention; per token."""
    h = shape.hidden_size
    multiplying = shape.num_parameters - shape.embedding_parameters
    if shape.tie_word_embeddings:
        multiplying += shape.vocab_size * h
    width = shape.num_attention_heads * shape.head_dim
    return 6.0 * multiplying + 6.0 * shape.num_hidden_layers * sequence_length * width


@pytest.mark.parametrize("slug", ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"])
def test_llama_needs_six_per_parameter_and_attention(catalog: Catalog, slug: str) -> None:
    shape = catalog.model_shape(slug)
    assert model_flops_per_step(shape, 8192, 1) == pytest.approx(8192 * by_hand(shape, 8192), rel=1e-4)


def test_llama_405b_took_what_its_paper_says(catalog: Catalog) -> None:
    """3.8e25 FLOPs for 15.6e12 tokens (Llama team 2024, arXiv:2407.21783, §3.2), counted as 6·N·D."""
    shape = catalog.model_shape("llama-3.1-405b")
    tokens = 15.6e12
    matrix = forward_flops_per_token(shape, 8192)
    assert 3.0 * tokens * (matrix.matrix + matrix.head) == pytest.approx(3.8e25, rel=0.02)


def test_gpt3_took_what_its_paper_says() -> None:
    """3.14e23 FLOPs for 300e9 tokens (Brown et al. 2020, arXiv:2005.14165, Appendix D), counted as 6·N·D."""
    flops = forward_flops_per_token(GPT3_175B, 2048)
    assert 3.0 * 300e9 * (flops.matrix + flops.head) == pytest.approx(3.14e23, rel=0.01)


def test_narayanan_formula() -> None:
    """96·B·s·l·h²·(1 + s/6h + V/16lh) with recompute (arXiv:2104.04473, eq. 3) is 4/3 of ours with full attention."""
    s, h, layers, v = 2048, GPT3_175B.hidden_size, GPT3_175B.num_hidden_layers, GPT3_175B.vocab_size
    flops = forward_flops_per_token(GPT3_175B, s)
    full_attention = 3.0 * s * (flops.matrix + 2.0 * flops.attention + flops.head)
    # The paper recomputes the layers, not the LM head: 8 passes of the layers, 6 of the head.
    published = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert full_attention + s * (flops.matrix + 2.0 * flops.attention) == pytest.approx(published, rel=1e-3)


def test_only_visited_experts_count() -> None:
    more = replace(MOE, moe=replace(MOE.moe, num_experts=16)) if MOE.moe else MOE
    few, many = forward_flops_per_token(MOE, 1024), forward_flops_per_token(more, 1024)
    router = 2.0 * 3 * 8 * MOE.hidden_size  # eight more columns in three routers
    assert many.matrix - few.matrix == pytest.approx(router)


def test_multi_token_prediction_is_one_more_layer_and_head() -> None:
    without = replace(LATENT, num_nextn_predict_layers=0)
    plain, more = forward_flops_per_token(without, 1024), forward_flops_per_token(LATENT, 1024)
    assert more.head == pytest.approx(2.0 * plain.head)
    assert more.matrix == pytest.approx(plain.matrix * 5 / 4)


def test_mean_context_by_counting() -> None:
    for length, window in ((64, None), (64, 16), (64, 64), (64, 100), (7, 3)):
        reach = length if window is None else min(window, length)
        seen = [min(token + 1, reach) for token in range(length)]  # the token itself included
        assert mean_context(length, window) == pytest.approx(sum(seen) / length, abs=0.5)


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    short, long = forward_flops_per_token(LLAMA_70B, 8192), forward_flops_per_token(LLAMA_70B, 16384)
    assert long.attention == pytest.approx(2.0 * short.attention)
    assert (long.matrix, long.head) == (short.matrix, short.head)
    assert forward_flops_per_token(DENSE, 64).attention > 0


def test_frozen_weights_need_no_weight_gradient() -> None:
    shape = DENSE
    flops = forward_flops_per_token(shape, 4096)
    saved = model_flops_per_step(shape, 4096, 8) - model_flops_per_step(shape, 4096, 8, frozen_weights=True)
    assert saved == pytest.approx(4096 * 8 * (flops.matrix + flops.head))
