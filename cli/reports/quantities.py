"""How predicted and measured metrics read: a title, and the value in the unit a person would choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration, format_flops, format_usd

# Metric → what people call it, in the order in which they ask.
METRIC_TITLES = {
    "iteration_s": "step time",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_device": "tokens/s per device",
    "samples_per_s": "sequences/s",
    "model_flops_per_s_per_device": "model FLOP/s per device",
    "mfu": "MFU",
    "hfu": "HFU",
    "num_devices": "devices",
    "peak_memory_bytes": "peak memory per device",
    "allocated_memory_bytes": "memory of tensors",
    "run_time_s": "time of the run",
    "usd_per_run": "cost of the run",
    "effective_training_time_ratio": "share of the run that trains",
    "usd_per_hour": "cost per hour",
    "energy_j_per_step": "energy of a step",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "output_tokens_per_s_per_device": "output tokens/s per device",
    "usd_per_million_tokens": "cost of a million tokens",
    "power_w": "average power",
    "energy_j_per_token": "energy of a token",
    "latency_s": "latency of a batch",
    "images_per_s": "images/s",
    "videos_per_s": "videos/s",
    "energy_per_item_j": "energy of an image or video",
    "usd_per_item": "cost of an image or video",
}
# Latencies of serving, as in ``ttft_p99_s``.
LATENCY_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between tokens",
    "e2e": "end-to-end latency",
}
TICK = "✔"  # marks the chosen row, and an SLO that is met
_AS_FACTOR = 10.0  # from which on a change is shown as a factor
_GIB = 2**30
_BAR_WIDTH = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"
JOULES_PER_KWH = 3.6e6
_KILO = 1e3
# Metric → (what one of the unit is in SI, unit).
_SCALED = {
    "energy_j_per_step": (JOULES_PER_KWH, "kWh"),
    "energy_j_per_token": (1.0, "J"),
    "energy_per_item_j": (_KILO, "kJ"),
    "power_w": (_KILO, "kW"),  # below one in watts
}


def metric_title(name: str) -> str:
    """What people call the metric ``name``."""
    latency, _, rest = name.partition("_")
    if latency in LATENCY_TITLES and rest.endswith("_s"):
        return f"{LATENCY_TITLES[latency]}, {rest.removesuffix('_s')}"
    return METRIC_TITLES.get(name, name)


def metric_text(name: str, value: float) -> str:
    """The value of the metric ``name`` with its unit.

    >>> metric_text("mfu", 0.5168), metric_text("iteration_s", 57.6), metric_text("tokens_per_s", 72821.03)
    ('51.7%', '57.60 s', '72,821')
    >>> metric_text("power_w", 54.5), metric_text("power_w", 4970.0)
    ('54.5 W', '4.97 kW')
    """
    if name in ("mfu", "hfu", "effective_training_time_ratio"):
        return percent(value)
    if "flops_per_s" in name:
        return format_flops(value)
    if name == "usd_per_item":  # of a picture: often below a cent
        return f"${value:.3g}"
    if name.startswith("usd"):
        return format_usd(value)
    if name in _SCALED:
        scale, unit = (1.0, "W") if name == "power_w" and abs(value) < _KILO else _SCALED[name]
        return f"{value / scale:,.3g} {unit}"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return format_duration(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.4g}"  # noqa: PLR2004 - three digits are enough


def interval_text(name: str, interval: Mapping[str, Any]) -> str:
    """``low … high`` of a metric; nothing where there is no spread."""
    low, high = interval["low"], interval["high"]
    return "" if low == high else f"{metric_text(name, low)} … {metric_text(name, high)}"


def short_interval_text(name: str, interval: Mapping[str, Any]) -> str:
    """The same with a unit that both ends have named once, as far as a table has no room for it twice.

    >>> short_interval_text("iteration_s", {"low": 10.4812, "high": 14.594})
    '10.48 … 14.59 s'
    """
    text = interval_text(name, interval)
    low, _, high = text.partition(" … ")
    value, _, unit = low.rpartition(" ")
    return f"{value} … {high}" if value and high.endswith(f" {unit}") else text


def latency_name(key: str) -> str:
    """A latency of a spec or a plan as its field writes it.

    >>> latency_name("ttft_p99_s"), latency_name("e2e_mean_s")
    ('TTFT p99', 'E2E mean')
    """
    latency, _, percentile = key.removesuffix("_s").partition("_")
    return f"{latency.upper()} {percentile}"


def rate_text(per_s: float) -> str:
    """Requests a second, to three digits.

    >>> rate_text(1.0), rate_text(2.304), rate_text(1200.0)
    ('1 request/s', '2.3 requests/s', '1,200 requests/s')
    """
    shown = float(f"{per_s:.3g}")
    return f"{shown:,g} {'request' if shown == 1.0 else 'requests'}/s"


def tokens_text(count: float) -> str:
    """Tokens of a whole run with the prefixes that ``--tokens`` reads.

    >>> tokens_text(6.25e11), tokens_text(15e12), tokens_text(5e8)
    ('625B', '15T', '500M')
    """
    for prefix, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= factor:
            return f"{count / factor:.3g}{prefix}"
    return f"{count:,.0f}"


def percent(share: float) -> str:
    """A share.

    >>> percent(0.1234)
    '12.3%'
    """
    return f"{share:.1%}"


def signed_percent(change: float) -> str:
    """A relative change, its sign always shown; ten times and more as a factor.

    >>> signed_percent(0.25), signed_percent(-0.015), signed_percent(198.08)
    ('+25.0%', '−1.5%', '×199')
    """
    if change >= _AS_FACTOR - 1.0:
        return f"×{1.0 + change:,.0f}"
    return f"{'−' if change < 0 else '+'}{percent(abs(change))}"


def gib(value: float) -> str:
    """Bytes in GiB without the unit, which stands in the heading.

    >>> gib(85899345920)
    '80.0'
    """
    return f"{value / _GIB:.1f}"


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """A bar of ``share`` of ``width`` characters, in eighths of a character.

    >>> bar(0.5, 4), bar(0.15625, 4)
    ('██', '▋')
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
