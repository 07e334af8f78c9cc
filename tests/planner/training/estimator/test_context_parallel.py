"""Ways to split a sequence: exchange by hand, where styles meet, the causal imbalance, memory, and rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import (
    DENSE,
    HYBRID,
    LATENT,
    MOE,
    WINDOWED,
    assert_rows_see_no_other,
    configured,
    machine_with,
    problem_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from training_constants import with_time

from meshplan.catalogs.constants.training import Calibration, FrameworkRecipe
from meshplan.catalogs.models.layers.recurrent import Mixer
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.choice import CONTEXT_PARALLEL_STYLES
from meshplan.planner.training.problem.frameworks.accelerate import ACCELERATE
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

FEW = settings(max_examples=60, deadline=None)
EXCHANGE = "context-parallel communication"
STYLES = st.sampled_from(CONTEXT_PARALLEL_STYLES)
NO_LATENCY = {"scale_up_latency_s": 0.0, "scale_out_latency_s": 0.0}


def split(problem: TrainingProblem, style: str, context: int = 4, *, heads: int = 1, **choices: Any) -> TrainingConfig:
    return configured(
        problem,
        context_parallel=context,
        context_parallel_style=style,
        context_parallel_heads=2 if style == "all-to-all+ring" and heads == 1 else heads,
        **choices,
    )


def question(shape: ModelShape = DENSE, *, devices: int = 8, sequence: int = 32768, **machine: Any) -> TrainingProblem:
    return problem_of(
        shape,
        num_devices=devices,
        global_batch_size=8,
        sequence_length=sequence,
        machine=machine_with(devices, **machine),
    )


def exchange_s(problem: TrainingProblem, config: TrainingConfig) -> float:
    """Exposed exchange of one layer and micro-batch."""
    layers = problem.shape.num_hidden_layers * config.num_microbatches
    return price(problem, config).breakdown_s[EXCHANGE] / layers


def test_ulysses_sends_what_its_authors_say() -> None:
    """arXiv:2309.14509, §3.2: every device sends 4·N·h/P elements a layer forward, all but its own part of them."""
    shape = replace(DENSE, num_key_value_heads=DENSE.num_attention_heads)
    problem = question(shape, **NO_LATENCY)
    config = split(problem, "all-to-all", 8)
    elements = 4 * 32768 * shape.hidden_size / 8
    rate = 450e9 * problem.calibration.time.scale_up_efficiency
    assert exchange_s(problem, config) == pytest.approx(2 * 2.0 * elements * (7 / 8) / rate)


def test_few_key_value_heads_are_copied_for_every_rank() -> None:
    """4 key/value heads over 8 ranks: each rank sends one head of its tokens to each rank."""
    problem = question(**NO_LATENCY)
    tokens, rate = 32768 / 8, 450e9 * problem.calibration.time.scale_up_efficiency
    heads = 2 * DENSE.num_attention_heads + 2 * 8
    expected = 2 * 2.0 * tokens * heads * DENSE.head_dim * (7 / 8) / rate
    assert exchange_s(problem, split(problem, "all-to-all", 8)) == pytest.approx(expected)


def test_latent_attention_exchanges_expanded_heads() -> None:
    problem = question(LATENT, **NO_LATENCY)
    latent = LATENT.latent
    assert latent is not None
    wide = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    elements = 32768 / 4 * LATENT.num_attention_heads * (2 * wide + 2 * latent.v_head_dim)
    rate = 450e9 * problem.calibration.time.scale_up_efficiency
    layers = LATENT.num_hidden_layers + LATENT.num_nextn_predict_layers
    seconds = price(problem, split(problem, "all-to-all")).breakdown_s[EXCHANGE] / 8 / layers
    assert seconds == pytest.approx(2 * 2.0 * elements * (3 / 4) / rate)


@pytest.mark.parametrize("style", ["ring", "all-to-all"])
def test_recurrent_layers_exchange_heads_whatever_the_style_of_attention(style: str) -> None:
    """megatron-core 0.19.2, MambaContextParallel: gate, input, B, C and step to the ranks that have the heads, the
    output back. One group of 16 heads over 4 ranks: every rank sends B and C, 64 elements each, to each rank."""
    blocks = HYBRID.blocks
    assert blocks is not None
    layers = HYBRID.num_hidden_layers
    shape = replace(HYBRID, blocks=replace(blocks, mixers=(Mixer.RECURRENT,) * layers))
    problem = question(shape, **NO_LATENCY)
    elements = 32768 / 4 * (2 * 1024 + 2 * 4 * 64 + 16 + 1024)
    rate = 450e9 * problem.calibration.time.scale_up_efficiency
    assert exchange_s(problem, split(problem, style)) == pytest.approx(2 * 2.0 * elements * (3 / 4) / rate)


def test_a_gather_moves_what_a_ring_moves_and_hides_nothing() -> None:
    """Three passes over keys and values either way; without overlap and latency the two are alike."""
    problem = question(**NO_LATENCY)
    bare = replace(problem, calibration=with_time(problem.calibration, context_parallel_overlap=0.0))
    assert exchange_s(bare, split(bare, "all-gather")) == pytest.approx(exchange_s(bare, split(bare, "ring")))
    assert exchange_s(problem, split(problem, "all-gather")) > exchange_s(problem, split(problem, "ring"))


@FEW
@given(
    shape=st.sampled_from((DENSE, MOE, LATENT, WINDOWED)),
    tensor=st.sampled_from((1, 2)),
    context=st.sampled_from((2, 4, 8)),
    zero=st.sampled_from((0, 1, 3)),
    recompute=st.sampled_from(("none", "full")),
)
def test_the_two_dimensional_style_ends_in_its_parts(
    shape: ModelShape, tensor: int, context: int, zero: int, recompute: str
) -> None:
    """All ranks exchanging heads inside rings of one are an all-to-all."""
    problem = question(shape, devices=64)
    choices = {"tensor_parallel": tensor, "data_parallel": 2, "zero_stage": zero, "activation_recompute": recompute}
    whole = price(problem, split(problem, "all-to-all", context, **choices))
    inside = price(problem, split(problem, "all-to-all+ring", context, heads=context, **choices))
    assert inside.step_s == pytest.approx(whole.step_s, rel=1e-12)
    assert inside.safe_bytes == pytest.approx(whole.safe_bytes, rel=1e-12)


def test_heads_stay_inside_a_node_and_the_ring_crosses() -> None:
    """16 ranks over two nodes: the all-to-all of 8 neighbours is that of one node, the ring has one step."""
    problem = question(devices=16, **NO_LATENCY)
    bare = replace(problem, calibration=with_time(problem.calibration, context_parallel_overlap=0.0))
    time = bare.calibration.time
    tokens = 32768 / 16
    sent = 2 * 2.0 * tokens * (2 * 16 + 2 * 8) * 128 * (7 / 8) / (450e9 * time.scale_up_efficiency)
    ring = 3 * 2.0 * tokens * 8 * 2 * 128 / (50e9 * time.network_efficiency)
    assert exchange_s(bare, split(bare, "all-to-all+ring", 16, heads=8)) == pytest.approx(sent + ring)


# --- causal imbalance ---


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_last_rank_of_a_plain_ring_works_most(ranks: int) -> None:
    """Counted token by token: rank i of a plain ring holds tokens from i·s/c on, each attends to those before it."""
    sequence = 4096
    share = sequence // ranks
    work = [sum(range(rank * share, (rank + 1) * share)) + share for rank in range(ranks)]
    problem = question(sequence=sequence)
    zigzag = price(problem, split(problem, "ring", ranks)).breakdown_s["attention"]
    plain = price(problem, split(problem, "ring-plain", ranks)).breakdown_s["attention"]
    assert plain / zigzag == pytest.approx(max(work) * ranks / sum(work), rel=1e-3)


def test_a_framework_that_does_not_balance_rings_still_balances_heads() -> None:
    """torchtitan's recipe of 2024 deals tokens in order: its ring is the plain one."""
    recipe = FrameworkRecipe(balances_context_parallel=False)
    problem = replace(question(), calibration=Calibration(framework="any", architecture="any", recipe=recipe))
    seconds = {
        style: price(problem, split(problem, style)).breakdown_s["attention"] for style in CONTEXT_PARALLEL_STYLES
    }
    assert seconds["ring"] == seconds["ring-plain"] == seconds["all-gather"]
    assert seconds["ring"] / seconds["all-to-all"] == pytest.approx(2 - 1 / 4)
    assert seconds["all-to-all+ring"] / seconds["all-to-all"] == pytest.approx(2 - 1 / 2)


# --- properties ---


def priced(problem: TrainingProblem, style: str, **choices: Any) -> Priced:
    return price(problem, split(problem, style, **choices))


@FEW
@given(style=STYLES, shape=st.sampled_from((DENSE, MOE, LATENT)), stages=st.sampled_from((1, 2)), context=st.just(4))
def test_an_exchange_never_takes_less_memory_than_a_ring(
    style: str, shape: ModelShape, stages: int, context: int
) -> None:
    # With so few logits memory is fullest while a layer runs, and exchanges.
    problem = question(replace(shape, vocab_size=8), devices=16)
    choices = {"context": context, "pipeline_parallel": stages}
    ring, other = priced(problem, "ring", **choices), priced(problem, style, **choices)
    assert other.safe_bytes >= ring.safe_bytes
    assert (other.safe_bytes > ring.safe_bytes) == (style in {"all-gather", "all-to-all", "all-to-all+ring"})


@FEW
@given(style=STYLES, recompute=st.sampled_from(("none", "full", "block")), slower=st.floats(1.0, 20.0))
def test_slower_links_are_never_faster(style: str, recompute: str, slower: float) -> None:
    fast, slow = question(devices=32), question(devices=32, scale_out_bytes_per_s=50e9 / slower)
    layers = 2 if recompute == "block" else 0
    choices = {"context": 16, "activation_recompute": recompute, "recompute_num_layers": layers}
    assert priced(slow, style, **choices).step_s >= priced(fast, style, **choices).step_s


def test_recompute_repeats_the_forward_exchange() -> None:
    problem = question()
    once, again = (
        exchange_s(problem, split(problem, "all-to-all", activation_recompute=mode)) for mode in ("none", "full")
    )
    assert again / once == pytest.approx(3 / 2)


def test_rows_of_different_styles_do_not_see_each_other() -> None:
    problem = question(devices=32)
    configs = [split(problem, style, 8) for style in CONTEXT_PARALLEL_STYLES]
    assert_rows_see_no_other(problem, [*configs, configured(problem, data_parallel=8)])


# --- rules ---

SINKS = replace(WINDOWED, slug="sinks", attention_sinks=True)

CASES: list[tuple[ModelShape, str, dict[str, Any], set[str]]] = [
    (WINDOWED, "ring", {}, {"sliding_windows_need_whole_sequences"}),
    (WINDOWED, "all-to-all+ring", {}, {"sliding_windows_need_whole_sequences"}),
    (WINDOWED, "all-to-all", {}, set()),
    (WINDOWED, "all-gather", {}, set()),
    (SINKS, "all-gather", {}, {"attention_sinks_need_all_to_all"}),
    (SINKS, "all-to-all", {}, set()),
    (DENSE, "all-to-all", {}, set()),
    (DENSE, "all-to-all", {"context": 8}, {"whole_kv_heads_for_all_to_all"}),
    (DENSE, "all-to-all", {"tensor_parallel": 2}, {"whole_kv_heads_for_all_to_all"}),
    (DENSE, "all-to-all", {"context": 3}, {
        "query_heads_divide_for_all_to_all", "kv_heads_divide_for_all_to_all", "whole_kv_heads_for_all_to_all",
        "sequence_divisible_by_twice_context_parallel",
    }),
    (DENSE, "all-to-all+ring", {"context": 16, "heads": 4}, set()),
    (DENSE, "all-to-all+ring", {"heads": 4}, {"context_parallel_heads_are_part_of_the_group"}),
    (DENSE, "ring", {"heads": 2}, {"context_parallel_heads_are_part_of_the_group"}),
    (DENSE, "ring-plain", {}, {"megatron_context_parallel_styles"}),
    (LATENT, "all-to-all", {}, {"latent_attention_needs_a_ring"}),
    (LATENT, "all-to-all+ring", {}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "style", "choices", "broken"), CASES)
def test_megatron_takes_what_transformer_engine_runs(
    shape: ModelShape, style: str, choices: dict[str, Any], broken: set[str]
) -> None:
    problem = question(shape, devices=64)
    config = split(problem, style, **choices)
    assert {rule.name for rule in MEGATRON.broken(shape, config)} == broken


def test_other_frameworks_have_words_for_rings_only() -> None:
    problem = question(devices=64)
    allowed = {
        rules.name: [
            style
            for style in CONTEXT_PARALLEL_STYLES
            if not any("context_parallel" in rule.name and "styles" in rule.name for rule in rules.broken(
                DENSE, split(problem, style, zero_stage=3)
            ))
        ]
        for rules in (TORCHTITAN, ACCELERATE, ANY_FRAMEWORK)
    }  # fmt: skip
    assert allowed == {
        "torchtitan": ["ring", "ring-plain"],
        "accelerate": ["ring"],
        "any": list(CONTEXT_PARALLEL_STYLES),
    }


def test_any_framework_copies_key_value_heads() -> None:
    problem = question(devices=64)
    assert not ANY_FRAMEWORK.broken(DENSE, split(problem, "all-to-all", 8))
    assert not ANY_FRAMEWORK.broken(DENSE, split(problem, "all-to-all", 16))
    assert ANY_FRAMEWORK.broken(DENSE, split(problem, "all-to-all", 32))  # 16 query heads
