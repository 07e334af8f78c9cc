"""What a load generator or a training run has written, as measured figures of a plan (``plans record --from``).

=================================  =====================================================================================
output                             where its form is stated
=================================  =====================================================================================
vllm bench serve --save-result     vllm/benchmarks/serve.py: ``mean_ttft_ms``, ``p99_tpot_ms``, ``request_throughput`` …
sglang.bench_serving --output-file sglang/benchmark/serving.py: a JSON object a line; ``mean_e2e_latency_ms`` …
text of both on the terminal       "Mean TTFT (ms):", "Request throughput (req/s):" …
genai-perf, aiperf                 ``profile_export_*.json``: ``time_to_first_token`` {unit, avg, p50, p99}, …
Megatron-LM                        training.py ``training_log``: "elapsed time per iteration (ms)"
TorchTitan                         components/metrics.py: "step:  1  loss: … memory: 47.91GiB(50.44%)  tps: 5,123"
PyTorch's allocator                ``torch.cuda.memory_stats()``, ``memory_summary()``: :mod:`.torch_memory`
train.py of meshplan               ``meshplan {"step": 1, "step_time_s": 3.5, "allocated_bytes.all.peak": …}``
=================================  =====================================================================================

Of training steps the median counts, without the first tenth (at least one step): those compile and fill caches.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.measurable import ALLOCATED, PEAK, measurable
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.reading.documents import parse_document
from meshplan.planner.imports.measured.torch_memory import torch_memory

MAX_LOG_BYTES = 2**28
_MS = 1e-3
_WARM_UP_SHARE = 0.1
_METRICS = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e", "e2e_latency": "e2e"}
_TEXT = re.compile(
    r"^\s*(Mean|Median|P(\d+(?:\.\d+)?)) (TTFT|TPOT|ITL|E2EL|E2E Latency) \(ms\):\s+([\d.,eE+]+)\s*$", re.MULTILINE
)
_THROUGHPUT = re.compile(
    r"^\s*(Request throughput \(req/s\)|Output token throughput \(tok/s\)):\s+([\d.,eE+]+)\s*$", re.MULTILINE
)
_RATES = {
    "request_throughput": "requests_per_s",
    "output_throughput": "output_tokens_per_s",
    "Request throughput (req/s)": "requests_per_s",
    "Output token throughput (tok/s)": "output_tokens_per_s",
    "output_token_throughput": "output_tokens_per_s",
}
_AIPERF = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "e2e"}
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_MEGATRON_STEP = re.compile(r"iteration\s+\d+/\s*\d+\s*\|.*?elapsed time per iteration \(ms\):\s*([\d.]+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TITAN = re.compile(r"step:\s*\d+\s.*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,.]+)")
_GIB = 2**30
_OURS = re.compile(r'^.*?meshplan (\{"step".*?\})', re.MULTILINE)


def read_log(path: Path, plan: Plan) -> dict[str, float]:
    """Metrics that the plan predicts, as they were measured, in SI units.

    Args:
        path: JSON, JSON lines, or the log itself.
        plan: what ran.

    Raises:
        SpecError: unreadable, of no known form, or nothing in it is predicted by the plan.
    """
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise _refused(f"{path} has more than {MAX_LOG_BYTES} bytes; give the part with the results")
        text = _ANSI.sub("", path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise _refused(f"cannot read {path}: {error.strerror}") from error
    found: dict[str, float] = {}
    for reader in _READERS:
        found = reader(text, plan)
        if found:
            break
    found = {**found, **_memory(text, plan)}
    if not found:
        raise _refused(
            f"{path} holds no result of vllm bench serve, sglang.bench_serving, genai-perf, aiperf, Megatron-LM, "
            "TorchTitan or train.py, and no statistics of PyTorch's allocator"
        )
    predicted = measurable(plan)
    known = {name: value for name, value in found.items() if name in predicted and 0 < value < math.inf}
    if not known:
        raise _refused(f"{path} measures {', '.join(sorted(found))}; this plan predicts {', '.join(sorted(predicted))}")
    return known


def _documents(text: str) -> Iterator[Mapping[str, Any]]:
    """The document, or each line that is one."""
    if not text.lstrip().startswith("{"):
        return
    lines = [line for line in text.splitlines() if line.strip()]
    parts = (
        lines
        if len(lines) > 1 and all(line.startswith("{") and line.rstrip().endswith("}") for line in lines)
        else [text]
    )
    for part in parts:
        try:
            yield parse_document(part, is_json=True, name="the result")
        except SpecError:
            return


def _bench_json(text: str, _: Plan) -> dict[str, float]:
    """The last run of vllm bench serve or sglang.bench_serving."""
    found: dict[str, float] = {}
    for document in _documents(text):
        made: dict[str, float] = {}
        for key, value in document.items():
            if not _is_number(value):
                continue
            if key in _RATES:
                made[_RATES[key]] = float(value)
            named = re.fullmatch(r"(mean|median|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el|e2e_latency)_ms", key)
            if named:
                made[_name(named.group(1), named.group(2))] = float(value) * _MS
        found = made or found
    return found


def _aiperf_json(text: str, _: Plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for document in _documents(text):
        for key, metric in _AIPERF.items():
            row = document.get(key)
            if not isinstance(row, Mapping):
                continue
            unit = _UNITS.get(str(row.get("unit", "ms")).lower(), _MS)
            for statistic, value in row.items():
                if _is_number(value) and (statistic == "avg" or re.fullmatch(r"p\d+", statistic)):
                    found[_name("mean" if statistic == "avg" else statistic, metric)] = float(value) * unit
        for key, metric in _RATES.items():
            row = document.get(key)
            if isinstance(row, Mapping) and _is_number(row.get("avg")):
                found[metric] = float(row["avg"])
    return found


def _bench_text(text: str, _: Plan) -> dict[str, float]:
    """What both print on the terminal."""
    found = {}
    for statistic, percentile, metric, value in _TEXT.findall(text):
        word = f"p{percentile}" if percentile else statistic.lower()
        found[_name(word, metric.lower().replace(" ", "_"))] = _number(value) * _MS
    for words, value in _THROUGHPUT.findall(text):
        found[_RATES[words]] = _number(value)
    return found


def _name(statistic: str, metric: str) -> str:
    """``p99``, ``ttft`` → ``ttft_p99_s``."""
    return f"{_METRICS.get(metric, metric)}_{'p50' if statistic == 'median' else statistic}_s"


def _megatron(text: str, plan: Plan) -> dict[str, float]:
    steps = [_number(value) * _MS for value in _MEGATRON_STEP.findall(text)]
    return _training(steps, [], plan)


def _memory(text: str, plan: Plan) -> Mapping[str, float]:
    """What PyTorch says; where the constants' own peaks were of tensors, theirs is the peak that the plan predicts."""
    found = torch_memory(text)
    calibration = plan.provenance.get("calibration")
    framework = str(calibration.get("framework", "")) if isinstance(calibration, Mapping) else ""
    if framework and recipe_named(framework).unstated.peak_is_allocated and ALLOCATED in found:
        return {PEAK: found[ALLOCATED]}
    return found


def _torchtitan(text: str, plan: Plan) -> dict[str, float]:
    """``tps`` counts tokens per second and device."""
    rows = [(_number(memory) * _GIB, _number(rate)) for memory, rate in _TITAN.findall(text)]
    config = plan.config
    if not rows or "global_batch_size" not in config:
        return {}
    tokens = config["global_batch_size"] * config["sequence_length"]
    devices = len(plan.rank_table or ()) or 1
    steps = [tokens / (rate * devices) for _, rate in rows if rate > 0]
    return _training(steps, [memory for memory, _ in rows], plan)


def _own(text: str, plan: Plan) -> dict[str, float]:
    steps = []
    for line in _OURS.findall(text):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if _is_number(row.get("step")) and _is_number(row.get("step_time_s")):
            steps.append(float(row["step_time_s"]))
    return _training(steps, [], plan)


def _training(steps: Sequence[float], memory: Sequence[float], plan: Plan) -> dict[str, float]:
    """The median step after warm-up, and the largest memory; a line whose time is no time counts as none."""
    steps = [step_s for step_s in steps if 0 < step_s < math.inf]
    if not steps:
        return {}
    warm_up = max(1, round(len(steps) * _WARM_UP_SHARE)) if len(steps) > 1 else 0
    step_s = statistics.median(steps[warm_up:])
    found = {"iteration_s": step_s}
    if memory:
        found["peak_memory_bytes"] = max(memory)
    config = plan.config
    if "global_batch_size" in config:
        tokens_per_s = config["global_batch_size"] * config["sequence_length"] / step_s
        found["tokens_per_s"] = tokens_per_s
        found["tokens_per_s_per_device"] = tokens_per_s / (len(plan.rank_table or ()) or 1)
    return found


def _is_number(value: object) -> bool:
    """A number that a float holds: JSON may write 1e999 or 400 digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _number(text: str) -> float:
    """The figure of a line; 0 where it is none, as a log that was cut or mixed has them."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


_READERS: tuple[Callable[[str, Plan], dict[str, float]], ...] = (
    _bench_json,
    _aiperf_json,
    _bench_text,
    _megatron,
    _torchtitan,
    _own,
)


def _refused(message: str) -> SpecError:
    return SpecError.at("", message, of="what was measured")
