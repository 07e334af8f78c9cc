"""An answer without a plan: one shape for all kinds, and nothing is said to be hopeless that nobody tried."""

from __future__ import annotations

import pytest

from meshplan.cli.reports.no_plan import miss_text, no_plan_section

MISS = {"limit": "ttft_p99_s", "excess_text": "0.4 s too much", "label": "2 × TP4"}


@pytest.mark.parametrize(
    ("found", "tried", "said"),
    [
        ([], ["more devices", "a lower rate"], ["Least change: none of those tried: more devices; a lower rate"]),
        ([], [], ["Least change: none was looked for"]),
        ([{"change": "16 devices"}], ["more devices"], ["Least change: 16 devices", "Tried: more devices"]),
        (
            [{"change": "16 devices", "label": "TP8"}, {"change": "5 USD/h", "constraint": "max_usd_per_hour"}],
            ["more devices"],
            [
                "Least changes, each sufficient by itself:",
                "  - 16 devices (with TP8)",
                "  - 5 USD/h (max_usd_per_hour)",
            ],
        ),
        (
            [{"change": "without fixed.tensor_parallel: 3", "constraint": "fixed.tensor_parallel"}],
            [],
            ["Least change: without fixed.tensor_parallel: 3"],
        ),
    ],
)
def test_changes_stand_beside_what_was_tried(found: list[dict[str, str]], tried: list[str], said: list[str]) -> None:
    solution = {"binding_constraint": "devices: 8", "nearest_miss": MISS, "least_change": found, "tried": tried}
    lines = no_plan_section(solution, 80).splitlines()
    assert lines[:2] == ["Binding constraint: devices: 8", "Nearest miss: ttft_p99_s: 0.4 s too much with 2 × TP4"]
    assert lines[2 : 2 + len(said)] == said


def test_a_miss_without_a_label_is_told_by_its_degrees() -> None:
    miss = {"limit": "device memory", "excess_text": "1 GiB too much", "config": {"tensor_parallel": 8}}
    assert miss_text({"nearest_miss": miss}) == "device memory: 1 GiB too much with TP8"
    assert miss_text({}) == ""
