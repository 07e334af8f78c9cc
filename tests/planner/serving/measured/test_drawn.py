"""Requests as a row describes them: lengths, stages, shared prefixes; limits and engines by what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.constants.engine_recipes import engine_observed_as, is_exactly_known
from meshplan.catalogs.constants.serving_benchmarks import prompts_drawn_in
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.drawn import attended_history, drawn_requests, is_described, num_before
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.validation.fields import Section, UnsupportedError
from meshplan.planner.validation.machines import MachineReader, read_rows

MEASURED = Path(__file__).parents[3] / "validation" / "serving-power.jsonl"
# Two blocks of Mamba-2 with an MLP and one of attention, as large as Nemotron-Nano-9B's.
HYBRID = {
    "num_hidden_layers": 5,
    "hidden_size": 4480,
    "intermediate_size": 15680,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "gated_mlp": False,
    "hybrid_override_pattern": "M-M-*",
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
FIXED = {"input_length": 100, "output_length": 50}


def asked(**workload: Any) -> Section:
    return Section({"workload": workload}, "workload")


def test_nominal_lengths_need_no_drawing() -> None:
    assert not is_described(asked(**FIXED, request_rate_per_s=1.0))
    assert is_described(asked(input_length=100, output_length_mean=50))
    assert is_described(asked(**FIXED, stages=[{"rate_per_s": 1, "duration_s": 1}]))


def test_a_histogram_comes_back_with_its_mean_and_its_tail() -> None:
    counts = [100, 300, 0, 0, 100]
    section = asked(
        input_length=10, output_length_histogram={"from": 0.0, "to": 500.0, "counts": counts}, num_requests=500
    )
    drawn = drawn_requests(section, Arrival.ALL_AT_ONCE).output_length
    found, _ = np.histogram(drawn, bins=5, range=(0.0, 500.0))
    assert found == pytest.approx(counts, abs=3)
    assert drawn.mean() == pytest.approx(190, rel=0.01)  # (100·50 + 300·150 + 100·450)/500
    scaled = drawn_requests(asked(**section.values, output_length_mean=380.0), Arrival.ALL_AT_ONCE).output_length
    assert scaled.mean() == pytest.approx(380, rel=0.01)


def test_quantiles_come_back() -> None:
    printed = {"mean": 100.0, "min": 10, "p50": 80, "p90": 200, "p99": 400, "max": 500}
    section = asked(input_length_distribution=printed, output_length=5, num_requests=2000)
    drawn = drawn_requests(section, Arrival.ALL_AT_ONCE).input_length
    assert np.quantile(drawn, [0.5, 0.9, 0.99]) == pytest.approx([80, 200, 400], rel=0.02)
    assert drawn.min() >= 10
    assert drawn.max() <= 500


def test_unprinted_prompts_are_spread_as_others_print_theirs_or_gaps_ask_for() -> None:
    chat = drawn_requests(asked(prompt_set="lm-arena-chat", output_length=5, num_requests=4000), Arrival.ALL_AT_ONCE)
    assert chat.input_length.mean() == pytest.approx(300, rel=0.01)
    assert np.log(chat.input_length).std() == pytest.approx(0.985, rel=0.1)  # the outermost hundredth is left out
    code = drawn_requests(asked(prompt_set="sourcegraph-fim", output_length=5, num_requests=4000), Arrival.ALL_AT_ONCE)
    assert code.input_length.mean() == pytest.approx(1250, rel=0.01)
    assert np.log(code.input_length).std() == pytest.approx(0.3, rel=0.1)
    questions = drawn_requests(asked(prompt_set="gpqa", output_length=5, num_requests=100), Arrival.ALL_AT_ONCE)
    assert set(questions.input_length.tolist()) == {224}


def test_chat_is_read_whole_where_no_prefix_is_cached(catalog: Catalog) -> None:
    """ML.ENERGY prints 634 tokens with their history; vLLM keeps no prefixes of models with recurrent layers."""
    chat = asked(prompt_set="lm-arena-chat", output_length=5, num_requests=4000)
    whole = drawn_requests(chat, Arrival.ALL_AT_ONCE, caches_prefixes=False)
    assert whole.input_length.mean() == pytest.approx(634, rel=0.01)
    row = next(row for row in read_rows(MEASURED) if row["workload"].get("prompt_set") == "lm-arena-chat")
    recurrent = {**row, "model": HYBRID}
    reader = MachineReader(catalog)
    found = [served_run(one, reader).workload for one in (row, recurrent)]
    assert [one.input_length for one in found] == pytest.approx([300, 634], rel=0.01)
    assert [one.shared_history for one in found] == [334, 0]  # computed once, held once, read by every token


def test_no_history_is_added_to_prompts_that_are_printed_or_no_turns() -> None:
    assert attended_history(asked(prompt_set="lm-arena-chat", output_length=5)) == 634 - 300
    assert not attended_history(asked(prompt_set="lm-arena-chat", input_length=100, output_length=5))
    assert not attended_history(asked(prompt_set="gpqa", output_length=5))
    assert not attended_history(asked(**FIXED))


def test_stages_follow_each_other_and_a_stage_comes_after_those_before_it() -> None:
    stages = [{"rate_per_s": 2.0, "duration_s": 100}, {"rate_per_s": 8.0, "duration_s": 50}]
    both = drawn_requests(asked(**FIXED, stages=stages, stage="all"), Arrival.POISSON).arrival_s
    assert len(both) == 200 + 400
    assert np.count_nonzero(both < 100.0) == 200
    assert both[-1] <= 150.0
    assert (np.diff(both) >= 0.0).all()
    assert num_before(asked(**FIXED, stages=stages, stage="all")) == 0
    second = asked(**FIXED, stages=stages, stage=1)
    assert drawn_requests(second, Arrival.POISSON).arrival_s.tolist() == both.tolist()
    assert num_before(second) == 200
    first = asked(**FIXED, stages=stages, stage=0)
    assert drawn_requests(first, Arrival.POISSON).arrival_s.tolist() == both[:200].tolist()
    assert num_before(first) == 0


def test_shared_prefixes_are_whole_blocks_that_a_worker_may_hold() -> None:
    shared = {"shared_prefix_tokens": 100, "num_shared_prefixes": 7, "num_requests": 700, "request_rate_per_s": 5.0}
    requests = drawn_requests(asked(**FIXED, **shared), Arrival.POISSON)
    assert requests.cached_tokens is not None
    assert requests.prefix is not None
    assert set(requests.cached_tokens.tolist()) == {96}  # blocks of 16
    assert set(requests.prefix.tolist()) == set(range(7))
    off = drawn_requests(asked(**FIXED, **shared, prefix_caching=False), Arrival.POISSON)
    assert off.cached_tokens is None


def test_prompts_that_are_sent_in_turn_come_back_whole() -> None:
    shared = {"shared_prefix_tokens": 40, "num_shared_prefixes": 7, "users_per_prefix": 3}
    section = asked(**FIXED, **shared, num_requests=700, request_rate_per_s=5.0)
    requests = drawn_requests(section, Arrival.POISSON)
    assert requests.cached_tokens is not None
    assert requests.prefix is not None
    assert set(requests.cached_tokens.tolist()) == {96}  # whole blocks of the prompt, not of what prompts share
    assert requests.prefix.tolist() == [i % 21 for i in range(700)]
    really = drawn_requests(section, Arrival.POISSON, prompts_drawn_in("Sim-to-real accuracy validation, ground truth"))
    assert really.prefix is not None
    assert really.prefix.tolist() == [i % 100 for i in range(700)]
    assert prompts_drawn_in("another source") is None


@pytest.mark.parametrize(
    "workload",
    [
        {"output_length": 5, "num_requests": 3},  # no word about prompts
        {**FIXED, "stages": "two"},
        {**FIXED, "stages": [{"rate_per_s": 1}]},
        {**FIXED, "stages": [{"rate_per_s": 1, "duration_s": 1}], "stage": 1},
        {"input_length": 5, "output_length_histogram": {"from": 1, "to": 5, "counts": []}, "num_requests": 3},
        {"input_length": 5, "output_length_histogram": {"from": 5, "to": 1, "counts": [1]}, "num_requests": 3},
        {"input_length": 5, "output_length_histogram": {"from": 1, "to": 5, "counts": [-1, 1]}, "num_requests": 3},
    ],
)
def test_what_is_not_described_is_refused_with_a_reason(workload: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        drawn_requests(asked(**workload), Arrival.POISSON if "stages" in workload else Arrival.ALL_AT_ONCE)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("vLLM", "vllm"),
        ("vLLM with the Mooncake connector", "vllm"),
        ("NVIDIA NIM (TensorRT-LLM backend)", "trtllm"),
        ("LMDeploy TurboMind", "vllm"),
        ("SGLang ROCm build", "sglang"),
        ("vllm-neuron", None),
        ("Somebody's server", None),
    ],
)
def test_engines_are_known_by_what_they_are(name: str, engine: str | None) -> None:
    recipe = engine_observed_as(name, "0.11.2", "")
    assert (None if recipe is None else recipe.engine) == engine
    assert is_exactly_known(name) == (name == "vLLM")
