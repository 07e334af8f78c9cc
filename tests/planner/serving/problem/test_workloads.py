"""Workloads as a spec describes them: lengths that differ, stages of rates, conversations, recorded blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.trace import read_trace
from meshplan.planner.serving.problem.workload.described import MOST_BLOCKS, SESSION_BLOCK_TOKENS, described_requests
from meshplan.planner.serving.problem.workload.spec import LengthsSpec, ServingWorkloadSpec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.simulation.arrivals import make_requests

LOAD: dict[str, Any] = {"input_length": 500, "output_length": 100, "request_rate_per_s": 4.0}


def workload(**fields: Any) -> ServingWorkloadSpec:
    return ServingWorkloadSpec.model_validate({**LOAD, **fields})


def question(**fields: Any) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": "llama-3.1-70b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {**LOAD, **fields},
        "constraints": {"target": "vllm"},
    }


# --- lengths ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 100), st.integers(1, 5000))
def test_a_histogram_is_drawn_as_it_is_counted(counts: list[int], least: int, width: int) -> None:
    if not sum(counts):
        counts = [*counts, 1]
    most = least + width
    drawn = LengthsSpec(min=least, max=most, counts=counts).distribution
    shares = (np.arange(20_000) + 0.5) / 20_000
    lengths = np.interp(shares, drawn.shares, drawn.tokens)
    found, _ = np.histogram(lengths, bins=np.linspace(least, most, len(counts) + 1))
    assert found / 20_000 == pytest.approx(np.array(counts) / sum(counts), abs=2e-3)
    assert drawn.mean == pytest.approx(lengths.mean(), rel=1e-2)


def test_percentiles_and_spreads_are_met() -> None:
    shares = np.random.default_rng(0).random(200_000)
    drawn = LengthsSpec(min=10, p50=200, p90=900, p99=3000, max=8000).distribution
    assert np.quantile(drawn.at(shares), [0.5, 0.9, 0.99]) == pytest.approx([200, 900, 3000], rel=0.03)
    assert (drawn.shortest, drawn.longest) == (10, 8000)
    normal = LengthsSpec(mean=1000, std=200, max=4000).distribution.at(shares)
    assert (normal.mean(), normal.std()) == (pytest.approx(1000, rel=0.01), pytest.approx(200, rel=0.03))
    clipped = LengthsSpec(mean=100, std=300, min=16, max=400).distribution.at(shares)
    assert (clipped.min(), clipped.max()) == (16, 400)
    assert LengthsSpec(mean=500, p50=200, max=8000).distribution.mean == pytest.approx(500)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({"mean": 100}, "give one of std"),
        ({"std": 10}, "std needs mean"),
        ({"mean": 100, "std": 10, "p50": 90, "max": 200}, "give one of std"),
        ({"p50": 90}, "say max"),
        ({"p50": 90, "p90": 80, "max": 200}, "do not rise"),
        ({"min": 300, "p50": 310, "max": 200}, "above max"),
        ({"min": 1, "max": 10, "counts": [0, 0]}, "request in some bin"),
        ({"mean": 500, "std": 10, "max": 200}, "outside min and max"),
    ],
)
def test_lengths_that_say_too_little_or_contradict_themselves(lengths: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        read_serving_spec(question(input_length=None, input_lengths=lengths))
    assert "workload.input_lengths" in str(caught.value)


def test_a_longer_run_begins_with_the_requests_of_a_shorter_one(catalog: Catalog) -> None:
    asked = question(input_length=None, input_lengths={"p50": 300, "p90": 900, "max": 2000}, prefix_tokens=200)
    found = resolve_serving(read_serving_spec(asked), catalog, Path()).problem.workload
    assert found.arrival is Arrival.POISSON
    assert found.input_length == 2000
    short, long = (make_requests(found_with(found, num), seed=3) for num in (100, 400))
    assert long.input_length[:100].tolist() == short.input_length.tolist()
    assert long.cached_tokens is not None
    assert long.cached_tokens.tolist() == np.minimum(long.input_length, 200).tolist()


def found_with(found: Any, num: int) -> Any:
    from dataclasses import replace

    return replace(found, num_requests=num)


# --- stages and conversations ----------------------------------------------------------------------------------------


def test_stages_bring_their_rates_one_after_the_other() -> None:
    stages = [{"request_rate_per_s": 2.0, "duration_s": 100.0}, {"request_rate_per_s": 10.0, "duration_s": 50.0}]
    requests = described_requests(workload(request_rate_per_s=None, stages=stages))
    assert requests is not None
    arrivals = requests.arrival_s
    assert [np.sum(arrivals < 100.0), np.sum(arrivals >= 100.0)] == [200, 500]
    assert (np.diff(arrivals) >= 0.0).all()
    assert arrivals.max() < 150.0


def test_conversations_grow_by_what_was_said() -> None:
    requests = described_requests(workload(sessions={"turns": 5, "gap_s": 20.0}, num_requests=4000))
    assert requests is not None
    assert requests.blocks is not None
    assert len(requests) == 4000
    assert set(requests.input_length.tolist()) == {500, 1100, 1700, 2300, 2900}
    rate = (len(requests) - 1) / (requests.arrival_s[-1] - requests.arrival_s[0])
    assert rate == pytest.approx(4.0, rel=0.1)
    first, last = np.array_split(requests.input_length, 2)  # no fewer turns at the start: they had begun before
    assert first.mean() == pytest.approx(last.mean(), rel=0.1)
    assert requests.cached_tokens is not None
    later = requests.input_length > 500
    found = requests.cached_tokens[later & (np.arange(len(requests)) > 2000)]
    said = requests.input_length[later & (np.arange(len(requests)) > 2000)] - 500
    assert (found <= said).all()
    assert (said - found < SESSION_BLOCK_TOKENS).mean() > 0.95  # but for turns whose earlier ones came before the run


@given(st.integers(1, 400), st.integers(2, 30), st.floats(0.1, 100.0), st.floats(0.1, 50.0))
@settings(max_examples=60, deadline=None)
def test_as_many_turns_come_as_are_asked_for(num: int, turns: int, gap_s: float, rate: float) -> None:
    asked = workload(request_rate_per_s=rate, sessions={"turns": turns, "gap_s": gap_s}, num_requests=num)
    requests = described_requests(asked)
    assert requests is not None
    assert len(requests) == num
    assert (np.diff(requests.arrival_s) >= 0.0).all()
    assert requests.arrival_s[0] >= 0.0


def test_conversations_share_a_prefix_too() -> None:
    fields = {"sessions": {"turns": 2, "gap_s": 5.0}, "prefix_tokens": 640, "num_prefixes": 3, "num_requests": 500}
    requests = described_requests(workload(**fields))
    assert requests is not None
    assert requests.cached_tokens is not None
    assert set(requests.input_length.tolist()) == {1140, 1740}
    firsts = requests.cached_tokens[requests.input_length == 1140]
    assert set(firsts.tolist()) == {0, 640}
    assert (firsts == 0).sum() <= 3  # whoever was the first with a prefix


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stages": [{"request_rate_per_s": 1, "duration_s": 10}]}, "leave request_rate_per_s and num_requests out"),
        (
            {"request_rate_per_s": None, "stages": [{"request_rate_per_s": 1e6, "duration_s": 1e6}]},
            "at most 1,000,000 are drawn",
        ),
        ({"request_rate_per_s": None, "sessions": {"turns": 3, "gap_s": 1}}, "sessions need request_rate_per_s"),
        ({"request_rate_per_s": 1e5, "sessions": {"turns": 900, "gap_s": 1e6}}, "at most 1,000,000 are drawn"),
        ({"num_requests": 9_000_000, "sessions": {"turns": 3, "gap_s": 1}}, "at most 1,000,000 are drawn"),
        ({"sessions": {"turns": 3, "gap_s": 1}, "prefix_hit_rate": 0.5}, "no prefix_hit_rate"),
        ({"sessions": {"turns": 3, "gap_s": 1}, "burstiness": 2, "arrival": "gamma"}, "leave concurrency and arrival"),
        ({"prefix_tokens": 10, "prefix_hit_rate": 0.5}, "not both"),
        ({"input_lengths": {"p50": 3, "max": 9}}, "input_length or input_lengths"),
        ({"input_length": None, "input_lengths": {"p50": 3, "max": 9}, "length_ratio": 0.5}, "leave it out beside"),
        ({"block_tokens": 16}, "give the trace"),
    ],
)
def test_what_excludes_each_other_is_said(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read_serving_spec(question(**fields))


def test_long_conversations_have_longer_blocks() -> None:
    asked = workload(input_length=30_000, sessions={"turns": 40, "gap_s": 5.0}, num_requests=500)
    requests = described_requests(asked)
    assert requests is not None
    assert requests.blocks is not None
    assert len(requests.blocks.names) <= MOST_BLOCKS
    assert requests.blocks.tokens_each > SESSION_BLOCK_TOKENS


def test_the_mean_of_a_workload_is_that_of_its_requests(catalog: Catalog) -> None:
    """Of conversations whole prompts, not their new tokens."""
    lengths = {"p50": 300, "max": 900}
    asked = question(input_length=None, input_lengths=lengths, sessions={"turns": 8, "gap_s": 30.0})
    found = resolve_serving(read_serving_spec(asked), catalog, Path()).problem.workload
    assert found.trace is not None
    assert found.mean_lengths == (pytest.approx(found.trace.input_length.mean()), pytest.approx(100.0))
    assert found.mean_lengths[0] > 1000


def test_conversations_longer_than_the_model_are_refused(catalog: Catalog) -> None:
    asked = question(input_length=20_000, sessions={"turns": 10, "gap_s": 30.0})
    with pytest.raises(SpecError, match="201000 tokens per request"):
        resolve_serving(read_serving_spec(asked), catalog, Path())


# --- recorded blocks -------------------------------------------------------------------------------------------------


def trace(path: Path, rows: list[str], header: str = "arrival_s,input_length,output_length,hash_ids") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_hashes_of_a_trace_are_blocks_of_its_prompts(tmp_path: Path) -> None:
    big = 2**90
    rows = [f"0,1000,5,7 {big}", f"1,1500,5,7;{big};9", '2,512,5,"[8]"', "3,700,5,7 11"]
    requests = read_trace(trace(tmp_path / "t.csv", rows))
    assert requests.blocks is not None
    assert requests.blocks.chains() == [[0, 1], [0, 1, 2], [3], [0, 4]]
    assert requests.cached_tokens is not None
    assert requests.cached_tokens.tolist() == [0, 1024, 0, 512]
    assert requests.blocks.first(2).chains() == [[0, 1], [0, 1, 2]]
    assert requests.cached_share == pytest.approx(1536 / 3712)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0,1500,5,7", "names 1 blocks of 512 tokens of a prompt of 1500"),
        ("0,1000,5,7 8 9", "workload.block_tokens"),
        ("0,1000,5,7 -8", "whole numbers between spaces"),
        ("0,1000,5,a b", "whole numbers between spaces"),
    ],
)
def test_hashes_that_do_not_fit_their_prompt(row: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said):
        read_trace(trace(tmp_path / "t.csv", [row]))


def test_hashes_and_prefixes_are_not_both_said(tmp_path: Path) -> None:
    header = "arrival_s,input_length,output_length,hash_ids,cached_tokens"
    with pytest.raises(SpecError, match="hash_ids say what cached_tokens says"):
        read_trace(trace(tmp_path / "t.csv", ["0,512,5,1,0"], header))


def test_blocks_of_another_length_are_read_by_it(catalog: Catalog, tmp_path: Path) -> None:
    rows = [f"{i},64,5,1 2 3 {i + 10}" for i in range(20)]
    trace(tmp_path / "t.csv", rows)
    asked = {**question(), "workload": {"trace": "t.csv", "block_tokens": 16}}
    found = resolve_serving(read_serving_spec(asked), catalog, tmp_path).problem.workload
    assert found.finds_what_is_held
    assert found.prefix_hit_rate == pytest.approx(19 * 48 / (20 * 64))


def test_requests_that_no_server_takes_are_told(catalog: Catalog, tmp_path: Path) -> None:
    trace(tmp_path / "t.csv", ["0,200000,5", "1,100,5"], "arrival_s,input_length,output_length")
    asked = {**question(), "workload": {"trace": "t.csv"}}
    with pytest.raises(SpecError, match=r"1 request of more tokens than .*the longest has 200,005"):
        resolve_serving(read_serving_spec(asked), catalog, tmp_path)
