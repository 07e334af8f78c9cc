"""Rows that are not judged: named by rules over each row, and never by a prediction or by another row."""

from __future__ import annotations

from typing import Any

from meshplan.planner.serving.measured.exclusions import exclusions


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


def test_a_sick_row_is_left_out_and_the_others_of_its_server_are_judged() -> None:
    assert set(exclusions([row("a", ttft_s=7.0), row("b", concurrency=16)])) == {"a"}


def test_planner_checks_are_not_judged() -> None:
    assert set(exclusions([row("a", source={"section": "x.csv; gtl_task_id=3"}), row("b")])) == {"a"}


def deepseek(name: str, release: str, measured: str, title: str = "an InferenceX dump") -> dict[str, Any]:
    return row(
        name,
        model={"name": "deepseek-ai/DeepSeek-R1"},
        framework={"name": "TensorRT-LLM", "version": release},
        source={"title": title, "section": f"dump; measured={measured}T00:00:00.000Z; image=x"},
    )


def test_configurations_with_token_prediction_are_known_by_release_and_date() -> None:
    rows = [
        deepseek("a", "1.2.0rc6.post3", "2026-02-05"),
        deepseek("b", "1.1.0rc2.post2", "2026-01-14"),
        deepseek("c", "1.1.0rc2.post2", "2025-12-15"),  # the same server otherwise
        deepseek("d", "1.2.0rc6.post2", "2026-02-03"),
        deepseek("e", "1.2.0rc6.post3", "2026-02-05", title="another table"),
        row("f", framework={"name": "TensorRT-LLM", "version": "1.2.0rc6.post3"}, source={"title": "InferenceX"}),
    ]
    assert set(exclusions(rows)) == {"a", "b"}


def qwen(name: str, measured: str, **fields: Any) -> dict[str, Any]:
    return row(
        name,
        **{
            "model": {"name": "Qwen/Qwen3.5-397B-A17B"},
            "framework": {"name": "SGLang", "version": "0.5.9"},
            "precision": "fp8",
            "parallelism": {"tensor_parallel": 4, "expert_parallel": 1},
            "source": {"title": "an InferenceX dump", "section": f"dump; measured={measured}T00:00:00.000Z; image=x"},
            **fields,
        },
    )


def test_a_layout_that_only_the_configuration_with_token_prediction_has_is_known() -> None:
    rows = [
        qwen("a", "2026-03-20"),
        qwen("b", "2026-03-24"),  # the configuration without it had changed
        qwen("c", "2026-03-20", parallelism={"tensor_parallel": 4, "expert_parallel": 4}),
        qwen("d", "2026-03-20", precision="nvfp4"),
        qwen("e", "2026-03-20", source={"title": "another table", "section": "measured=2026-03-20"}),
        qwen("f", "2026-03-20", parallelism=None),
    ]
    assert set(exclusions(rows)) == {"a"}


def test_malformed_rows_are_left_to_the_reader() -> None:
    assert exclusions([{"task": "serving"}, {"id": 3, "task": "serving"}, {"id": "a", "task": "training"}]) == {}
    assert exclusions([row("a", workload=3, measured=None, caveats="no list")]) == {}
