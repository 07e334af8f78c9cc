"""What a benchmark beside a server says of its requests: ``vllm bench serve`` and ``sglang.bench_serving``.

Flags and defaults as of vLLM 0.33.0 (benchmarks/serve.py, benchmarks/datasets/datasets.py) and SGLang 0.5.23
(benchmark/serving.py, benchmark/datasets). Requests that are drawn from a dataset have lengths that no command states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshplan.planner.imports.launchers import read_launch, split_options
from meshplan.planner.imports.reading import StatedLoad, as_written, with_dashes
from meshplan.planner.imports.shell import Statement

Flags = Mapping[str, Any]
# Flags of rate and number, read for every benchmark.
_RATE, _IN_FLIGHT, _NUMBER, _BURSTINESS = "--request-rate", "--max-concurrency", "--num-prompts", "--burstiness"
_LOAD = frozenset({_RATE, _IN_FLIGHT, _NUMBER, _BURSTINESS, "--dataset-name"})


def stated_load(statements: Iterable[Statement]) -> StatedLoad | None:
    """The load of the last benchmark of a script; None without one, or where its numbers cannot be read."""
    for statement in reversed(list(statements)):
        program = read_launch(statement.words).program
        for words, read in _BENCHMARKS.items():
            if program[: len(words)] == words:
                flags, _ = split_options(program[len(words) :])
                try:
                    return _stated(with_dashes(flags), read, f"{' '.join(words)}, line {statement.line}")
                except ValueError:
                    return None
    return None


def _stated(flags: Flags, read: Callable[[Flags], dict[str, Any]], place: str) -> StatedLoad:
    requests = read(flags)
    load, left_out = _load(flags)
    workload = {**requests, **load}
    if not requests:
        left_out.append(f"the lengths of {flags.get('--dataset-name', 'its dataset')}, which {place} draws from")
    return StatedLoad(workload=workload, said_by=dict.fromkeys(workload, place), left_out=tuple(left_out))


def _load(flags: Flags) -> tuple[dict[str, Any], list[str]]:
    """When requests come: at a rate, as many as are answered, or all at once."""
    found: dict[str, Any] = {"num_requests": _whole(flags, _NUMBER, 1000)}
    left_out = []
    rate = float(flags.get(_RATE, math.inf))
    if math.isfinite(rate):
        found["request_rate_per_s"] = rate
        if _IN_FLIGHT in flags:
            left_out.append(as_written(_IN_FLIGHT, flags[_IN_FLIGHT]))
        shape = float(flags.get(_BURSTINESS, 1.0))  # of a Gamma distribution, whose variation is 1/√shape
        if shape < 1.0:
            found |= {"arrival": "gamma", "burstiness": shape**-0.5}
        elif shape > 1.0:
            left_out.append(as_written(_BURSTINESS, flags[_BURSTINESS]))
    elif _IN_FLIGHT in flags:
        found["concurrency"] = _whole(flags, _IN_FLIGHT, 1)
    else:
        found["arrival"] = "all_at_once"
    return found, left_out


def _vllm(flags: Flags) -> dict[str, Any]:
    """Random prompts about a mean, or prefixes that are repeated."""
    dataset = flags.get("--dataset-name", "random")
    if dataset == "prefix_repetition":
        prefix = _whole(flags, "--prefix-repetition-prefix-len", 256)
        return {
            "input_length": prefix + _whole(flags, "--prefix-repetition-suffix-len", 256),
            "output_length": _whole(flags, "--prefix-repetition-output-len", 128),
            "prefix_tokens": prefix,
            "num_prefixes": _whole(flags, "--prefix-repetition-num-prefixes", 10),
        }
    if dataset != "random":
        return {}
    spread, prefix = float(flags.get("--random-range-ratio", 0.0)), _whole(flags, "--random-prefix-len", 0)
    found: dict[str, Any] = {"prefix_tokens": prefix, "num_prefixes": 1} if prefix else {}
    for name, usual in (("input", 1024), ("output", 128)):
        mean = _whole(flags, f"--random-{name}-len", _whole(flags, f"--{name}-len", usual))
        more = prefix if name == "input" else 0
        found |= _between(
            f"{name}_length", math.floor(mean * (1.0 - spread)) + more, math.ceil(mean * (1.0 + spread)) + more
        )
    return found


def _sglang(flags: Flags) -> dict[str, Any]:
    """Random prompts up to a length, or groups that share a system prompt."""
    dataset = flags.get("--dataset-name", "sharegpt")
    if dataset == "generated-shared-prefix" and _whole(flags, "--gsp-num-turns", 1) == 1:
        prefix, share = _whole(flags, "--gsp-system-prompt-len", 2048), float(flags.get("--gsp-range-ratio", 1.0))
        question, answer = _whole(flags, "--gsp-question-len", 128), _whole(flags, "--gsp-output-len", 256)
        return {
            **_between("input_length", prefix + math.floor(question * share), prefix + question),
            **_between("output_length", math.floor(answer * share), answer),
            "prefix_tokens": prefix,
            "num_prefixes": _whole(flags, "--gsp-num-groups", 64),
        }
    if dataset not in ("random", "random-ids"):
        return {}
    share, found = float(flags.get("--random-range-ratio", 0.0)), dict[str, Any]()
    for name in ("input", "output"):
        most = _whole(flags, f"--random-{name}-len", 1024)
        found |= _between(f"{name}_length", math.floor(most * share), most)
    return found


def _between(name: str, least: int, most: int) -> dict[str, Any]:
    """Lengths that are alike, or spread evenly between two."""
    least = max(least, 1)
    return {name: most} if least >= most else {f"{name}s": {"min": least, "max": most, "counts": [1]}}


def _whole(flags: Flags, name: str, usual: int) -> int:
    return int(flags[name]) if flags.get(name) not in (None, "") else usual


# First words of a benchmark, as a launcher leaves them → the reader of its lengths.
_BENCHMARKS: Mapping[tuple[str, ...], Callable[[Flags], dict[str, Any]]] = {
    ("vllm", "bench", "serve"): _vllm,
    ("sglang.bench_serving",): _sglang,
    ("sglang.benchmark.serving",): _sglang,
}
