"""Rows that are not judged: named by rules over the rows, for whole servers, and never by a prediction."""

from __future__ import annotations

from typing import Any

from meshplan.planner.serving.exclusions import exclusions


def row(name: str, *, concurrency: int = 8, ttft_s: float = 0.2, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "task": "serving",
        "group": "g",
        "source": {"section": "a.csv"},
        "model": {"name": "meta-llama/Llama-3.1-70B"},
        "framework": {"name": "TensorRT-LLM"},
        "parallelism": {"tensor_parallel": 8},
        "workload": {"concurrency": concurrency, "input_length": 1024},
        "measured": {"ttft_s": ttft_s},
        "caveats": [],
        **changes,
    }


def test_ordinary_rows_are_judged() -> None:
    assert exclusions([row("a"), row("b", concurrency=1024, ttft_s=40.0)]) == {}


def test_a_sick_server_loses_all_its_rows_and_no_other() -> None:
    healthy = row("c", parallelism={"tensor_parallel": 4})
    assert set(exclusions([row("a", ttft_s=7.0), row("b"), healthy])) == {"a", "b"}


def test_planner_checks_are_not_judged() -> None:
    assert set(exclusions([row("a", source={"section": "x.csv; gtl_task_id=3"}), row("b", precision="fp8")])) == {"a"}


def test_only_models_that_can_predict_tokens_are_suspected_of_it() -> None:
    caveats = ["repeats differ by more than 1.3x in token time"]
    suspected = row("a", caveats=caveats, model={"name": "deepseek-ai/DeepSeek-V3"})
    assert set(exclusions([suspected])) == {"a"}
    assert exclusions([row("b", caveats=caveats)]) == {}


def test_malformed_rows_are_left_to_the_reader() -> None:
    assert exclusions([{"task": "serving"}, {"id": 3, "task": "serving"}, {"id": "a", "task": "training"}]) == {}
    assert exclusions([row("a", workload=3, measured=None, caveats="no list")]) == {}
