"""Published serving runs that no estimator should be judged by, named by rules that look at the rows alone.

A rule reads what the publisher says of a row, or compares measurements with each other; none sees a prediction. The
rows stay in the files and in ``validate``'s listing, with the rule's reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Jobs of a planner's self-check (the "gtl" sections of the source): their stated concurrency was not held in flight,
# as token times that do not move with it show (GB200 Qwen3-32B 9 to 133 ms, DeepSeek-R1 85 to 92 ms at 40 to 224).
PLANNER_CHECK = "gtl_"
# Where repeats differ so much the source names multi-token prediction as the likely reason; only DeepSeek's own models
# among these rows ship such a layer (num_nextn_predict_layers of their configuration).
REPEATS_DIFFER = "repeats differ by more than 1.3x"
# A first token after seconds from a server with so few requests that their prompts fill seconds of no device: the
# server compiles, or waits for something else.
SICK_TTFT_S, SICK_CONCURRENCY, SICK_TOKENS = 5.0, 32, 32 * 8192


def exclusions(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Id → reason, for the rows that are not to be scored."""
    found: dict[str, str] = {}
    curves: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("task") == "serving" and isinstance(row.get("id"), str):
            curves[curve_of(row)].append(row)
    for members in curves.values():
        for says, reason in _RULES:
            if any(says(row) for row in members):
                found |= {row["id"]: reason for row in members}
                break
    return found


def curve_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows share that differ in their concurrency or lengths only: one server, as it was started."""
    section = _section(row)
    server = next((part.strip() for part in section.split(";") if "config_id" in part), "")
    workload = {key: value for key, value in _part(row, "workload").items() if key in ("quantization", "disaggregated")}
    parts = [
        row.get("group"),
        server,
        row.get("precision"),
        _part(row, "framework"),
        _part(row, "parallelism"),
        workload,
    ]
    return tuple(repr(part) for part in parts)


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    return value if isinstance(value, Mapping) else {}


def _section(row: Mapping[str, Any]) -> str:
    return str(_part(row, "source").get("section", ""))


def _caveats(row: Mapping[str, Any]) -> str:
    caveats = row.get("caveats")
    return " ".join(str(item) for item in caveats) if isinstance(caveats, list) else ""


def _is_planner_check(row: Mapping[str, Any]) -> bool:
    return PLANNER_CHECK in _section(row)


def _may_predict_tokens(row: Mapping[str, Any]) -> bool:
    name = str(_part(row, "model").get("name", ""))
    return REPEATS_DIFFER in _caveats(row) and "deepseek" in name.lower() and "TensorRT" in str(row["framework"])


def _is_sick(row: Mapping[str, Any]) -> bool:
    workload, measured = _part(row, "workload"), _part(row, "measured")
    concurrency, ttft = workload.get("concurrency"), measured.get("ttft_s")
    if not isinstance(concurrency, int) or not isinstance(ttft, int | float):
        return False
    tokens = concurrency * int(workload.get("input_length") or 0)
    return ttft >= SICK_TTFT_S and concurrency <= SICK_CONCURRENCY and tokens <= SICK_TOKENS


_RULES: tuple[tuple[Callable[[Mapping[str, Any]], bool], str], ...] = (
    (_is_planner_check, "planner self-check: the stated concurrency was not held"),
    (_may_predict_tokens, "repeats of this server differ by more than 1.3x: probably multi-token prediction"),
    (_is_sick, "sick server: seconds to the first token at a concurrency of 32 or less"),
)
