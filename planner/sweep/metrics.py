"""Which metrics the plans of a kind may predict: what ``best`` and ``pareto`` of a sweep can name.

A misspelt metric is refused before the first point is answered. A plan need not have every metric of its kind: costs
need a price, whole runs a number of tokens, latencies of serving a percentile that the spec names.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshplan.catalogs.errors import Problem, closest_names, did_you_mean
from meshplan.planner.serving.problem.slo import LATENCIES, PERCENTILES

# What the headline of every answer may say beside its predictions.
_OF_ANY = ("num_devices", "gap", "cpu_s")
METRICS: dict[str, tuple[str, ...]] = {
    "training": (
        "iteration_s",
        "tokens_per_s",
        "tokens_per_s_per_device",
        "samples_per_s",
        "model_flops_per_s_per_device",
        "mfu",
        "hfu",
        "run_time_s",
        "usd_per_run",
        "effective_training_time_ratio",
        "energy_j_per_step",
        "peak_memory_bytes",
        "usd_per_hour",
    ),
    "serving": (
        *(f"{latency}_{percentile}_s" for latency in LATENCIES for percentile in PERCENTILES),
        "requests_per_s",
        "output_tokens_per_s",
        "output_tokens_per_s_per_device",
        "usd_per_hour",
        "usd_per_million_tokens",
        "power_w",
        "energy_j_per_token",
    ),
    "diffusion": ("latency_s", "images_per_s", "videos_per_s", "power_w", "energy_per_item_j", "usd_per_item"),
    "edge": ("tokens_per_s", "time_per_token_s"),
    "gpu-allocation": ("usd_per_hour",),
}


def unknown_metric_problems(best: str | None, pareto: Iterable[str] | None, kinds: Iterable[str]) -> list[Problem]:
    """The metrics of a sweep that no plan of its kinds predicts, each with its path; none where a kind is not listed.

    Args:
        best: what the sweep names.
        pareto: likewise.
        kinds: of its questions.
    """
    asked = sorted(set(kinds))
    if any(kind not in METRICS for kind in asked):
        return []
    known = [*dict.fromkeys(name for kind in asked for name in (*METRICS[kind], *_OF_ANY))]
    named = [("best", name) for name in ([best] if best is not None else [])]
    named += [(f"pareto[{place}]", name) for place, name in enumerate(pareto or [])]
    return [
        Problem(path=path, message=f"no plan predicts {name!r}{_instead(name, known)}")
        for path, name in named
        if name not in known
    ]


def _instead(name: str, known: list[str]) -> str:
    return did_you_mean(closest_names(name, known)) or f"; metrics: {', '.join(known)}"
