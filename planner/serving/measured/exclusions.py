"""Published serving runs that are excluded from errors and fits, by rules that look at one row alone.

A rule reads what the publisher says of the row, or what it measured; none uses a prediction, and none excludes a row
for what another row of its server shows. ``validate`` still predicts and lists the rows, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Jobs of a planner's self-check (the "gtl" sections of the source): their stated concurrency was not held in flight,
# as token times that do not move with it show (GB200 Qwen3-32B 9 to 133 ms, DeepSeek-R1 85 to 92 ms at 40 to 224).
PLANNER_CHECK = "gtl_"
# InferenceX runs DeepSeek on TensorRT-LLM with and without multi-token prediction, which its table does not list. Its
# configurations with it (dsr1-*-trt-mtp) were added and first swept in January 2026 with the release of that time, with
# which those without it had last run in December (perf-changelog.yaml, pull request 392), and then had an image of
# their own (pull requests 1488 and 1489), github.com/SemiAnalysisAI/InferenceX, read 2026-11-22.
PREDICTING_SOURCE, PREDICTING_RELEASE = "InferenceX", "1.2.0rc6.post3"
PREDICTING_SINCE = {"1.1.0rc2.post2": "2026-01"}
# Its Qwen3.5 in fp8 on SGLang and four B200 without expert parallelism is qwen3.5-fp8-b200-sglang-mtp, which has that
# layout alone (pull request 898, of March 2026; the search space stands in 897); without prediction four devices have
# expert parallelism (804), at least until that was replaced (918).
PREDICTING_LAYOUT, PREDICTING_UNTIL = {"tensor_parallel": 4, "expert_parallel": 1}, "2026-03-24"
PREDICTS_TOKENS = "a configuration of the benchmark with multi-token prediction, which its table does not list"
# A first token after seconds from a server with so few requests that their prompts fill seconds of no device: the
# server compiles, or waits for something else.
SICK_TTFT_S, SICK_CONCURRENCY, SICK_TOKENS = 5.0, 32, 32 * 8192


def exclusions(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Id → reason, for the excluded rows."""
    found: dict[str, str] = {}
    for row in rows:
        if row.get("task") == "serving" and isinstance(row.get("id"), str):
            reason = next((reason for applies, reason in _RULES if applies(row)), None)
            if reason is not None:
                found[row["id"]] = reason
    return found


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    return value if isinstance(value, Mapping) else {}


def _section(row: Mapping[str, Any]) -> str:
    return str(_part(row, "source").get("section", ""))


def measured_on(row: Mapping[str, Any]) -> str:
    """Day on which a row was measured, ISO 8601, where its source prints it; else empty.

    >>> measured_on({"source": {"section": "db-dump/2026-04-27; measured=2025-11-02T00:00:00.000Z"}})
    '2025-11-02'
    """
    found = re.search(r"measured=(\d{4}-\d{2}-\d{2})", _section(row))
    return found[1] if found else ""


def _is_planner_check(row: Mapping[str, Any]) -> bool:
    return PLANNER_CHECK in _section(row)


def _predicts_tokens(row: Mapping[str, Any]) -> bool:
    framework = _part(row, "framework")
    release, name = str(framework.get("version")), str(_part(row, "model").get("name", ""))
    if PREDICTING_SOURCE not in str(_part(row, "source").get("title", "")):
        return False
    if framework.get("name") == "SGLang" and "Qwen3.5" in name:
        degrees = _part(row, "parallelism")
        is_alone = all(degrees.get(degree) == size for degree, size in PREDICTING_LAYOUT.items())
        return is_alone and row.get("precision") == "fp8" and "" < measured_on(row) < PREDICTING_UNTIL
    if framework.get("name") != "TensorRT-LLM" or "deepseek" not in name.lower():
        return False
    since = PREDICTING_SINCE.get(release)
    return release == PREDICTING_RELEASE or (since is not None and measured_on(row) >= since)


def _is_sick(row: Mapping[str, Any]) -> bool:
    workload, measured = _part(row, "workload"), _part(row, "measured")
    concurrency, length, ttft = workload.get("concurrency"), workload.get("input_length") or 0, measured.get("ttft_s")
    if not isinstance(concurrency, int) or not isinstance(length, int | float) or not isinstance(ttft, int | float):
        return False
    return ttft >= SICK_TTFT_S and concurrency <= SICK_CONCURRENCY and concurrency * length <= SICK_TOKENS


_RULES: tuple[tuple[Callable[[Mapping[str, Any]], bool], str], ...] = (
    (_predicts_tokens, PREDICTS_TOKENS),
    (_is_planner_check, "planner self-check: the stated concurrency was not held"),
    (_is_sick, "sick server: seconds to the first token at a concurrency of 32 or less"),
)
