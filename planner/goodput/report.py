"""What a plan says of its run, as plain JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.plan import Interval
from meshplan.planner.goodput.checkpoints import daly_interval, young_interval
from meshplan.planner.goodput.copies import batch_share
from meshplan.planner.goodput.forecast import Ending, spare_table
from meshplan.planner.goodput.run import RunSetting
from meshplan.planner.goodput.spares import waiting_share


def run_metrics(
    setting: RunSetting, devices: int, end: Ending, usd_per_hour_per_device: float | None
) -> dict[str, Interval]:
    """Time, money and effective training time ratio of the run, with their intervals.

    Args:
        setting: its conditions.
        devices: of the plan, spares left out.
        end: when it ends.
        usd_per_hour_per_device: price of one device, spares included; None where none is known.
    """
    metrics = {
        "run_time_s": Interval(value=end.mean_s, low=end.low_s, high=end.high_s),
        "effective_training_time_ratio": Interval(value=setting.ratio(devices), low=end.ratio_low, high=end.ratio_high),
    }
    if usd_per_hour_per_device is not None:
        usd_per_s = usd_per_hour_per_device * (devices + setting.spare_devices) / SECONDS_PER_HOUR
        metrics["usd_per_run"] = Interval(
            value=end.mean_s * usd_per_s, low=end.low_s * usd_per_s, high=end.high_s * usd_per_s
        )
    return metrics


def run_document(
    setting: RunSetting, devices: int, training_s: float, end: Ending, assumed: Sequence[str], *, copies: int = 1
) -> dict[str, Any]:
    """The run of a plan.

    Args:
        setting: its conditions.
        devices: of the plan, spares left out.
        training_s: W, seconds of undisturbed training.
        end: when it ends.
        assumed: conditions that the spec leaves out.
        copies: of all states, on nodes of their own; several could restart apart.
    """
    stops, costs, interval = setting.stops(devices), setting.checkpoints(devices), setting.interval(devices)
    young, daly = young_interval(stops, costs), daly_interval(stops, costs)
    return {
        "effective_training_time_ratio": setting.ratio(devices),
        "training_s": training_s,
        "interruptions": stops.per_s * end.mean_s * (1.0 - waiting_share(stops)),
        "mean_time_between_interruptions_s": None if stops.per_s <= 0.0 else 1.0 / stops.per_s,
        "failures_per_node_day": {
            "value": setting.rate.per_node_day,
            "low": setting.rate.low,
            "high": setting.rate.high,
            "source": setting.rate.source,
        },
        "restart_s": setting.restart_s,
        "checkpoint": {
            "bytes": setting.state_bytes,
            "interval_s": interval,
            "is_pinned": setting.interval_s is not None,
            "block_s": costs.block_s,
            "durable_s": costs.durable_s,
            "young_s": young if math.isfinite(young) else None,
            "daly_s": daly if math.isfinite(daly) else None,
        },
        "waiting_share": waiting_share(stops),
        "spare_nodes": setting.spares,
        "spares": [
            {"spare_nodes": row.spares, "waiting_share": row.waiting_share, "hours_saved": row.hours_saved}
            for row in spare_table(setting, devices, training_s)
        ],
        "finish_by_s": setting.finish_by_s,
        "finish_by_probability": end.by_date,
        "assumed": list(assumed),
        **({} if copies == 1 else {"copies": {"count": copies, "batch_share": batch_share(stops, copies)}}),
    }
