"""From ``run:`` of a spec to the run's conditions."""

from __future__ import annotations

from meshplan.catalogs.units import format_duration
from meshplan.planner.core.problems import Problems
from meshplan.planner.goodput.conditions import FailureRate
from meshplan.planner.goodput.published import (
    BROKEN_SHARE,
    REPAIR_S,
    RESTART_S,
    SNAPSHOT_BYTES_PER_S,
    STORE_BYTES_PER_S,
    TYPICAL,
    counted_rate,
    stated_rate,
)
from meshplan.planner.goodput.run import RunSetting
from meshplan.planner.goodput.spec import RunSpec


def run_setting(
    spec: RunSpec, *, state_bytes: float, devices_per_node: int, spares: int, problems: Problems
) -> RunSetting:
    """The run's conditions, with defaults for what the spec leaves out.

    Args:
        spec: ``run:`` as the user wrote it.
        state_bytes: of a whole checkpoint.
        devices_per_node: devices that fail together.
        spares: nodes that stand by.
        problems: told where a pinned interval is too short for its checkpoint.
    """
    checkpoint = spec.checkpoint
    setting = RunSetting(
        rate=_rate(spec),
        devices_per_node=devices_per_node,
        restart_s=RESTART_S if spec.restart_time is None else spec.restart_time,
        broken_share=BROKEN_SHARE if spec.broken_share is None else spec.broken_share,
        repair_s=REPAIR_S if spec.repair_time is None else spec.repair_time,
        spares=spares,
        late_share=spec.silent_share,
        late_s=spec.silent_age or 0.0,
        slowdown=spec.straggler_slowdown,
        state_bytes=state_bytes,
        store_bytes_per_s=checkpoint.store_bandwidth or STORE_BYTES_PER_S,
        snapshot_bytes_per_s=SNAPSHOT_BYTES_PER_S if checkpoint.asynchronous else None,
        block_s=checkpoint.blocking_time,
        interval_s=checkpoint.interval,
        finish_by_s=spec.finish_by,
    )
    costs = setting.checkpoints(devices_per_node)
    if checkpoint.interval is not None and checkpoint.interval + costs.block_s < costs.durable_s:
        problems.say(
            "run.checkpoint.interval",
            f"{format_duration(checkpoint.interval)} is shorter than one checkpoint takes to be stored, "
            f"{format_duration(costs.durable_s)}: longer, or a faster run.checkpoint.store_bandwidth",
        )
    return setting


def assumed(spec: RunSpec) -> list[str]:
    """What the spec leaves out, and what is taken instead."""
    left_out = {
        "failures": spec.failures is None and spec.failures_per_node_day is None,
        "restart_time": spec.restart_time is None,
        "broken_share": spec.broken_share is None,
        "repair_time": spec.repair_time is None,
        "checkpoint.store_bandwidth": spec.checkpoint.store_bandwidth is None,
    }
    return [f"run.{name}" for name, is_missing in left_out.items() if is_missing]


def _rate(spec: RunSpec) -> FailureRate:
    if spec.failures_per_node_day is not None:
        before = stated_rate(spec.failures_per_node_day)
    else:
        before = TYPICAL if spec.failures is None else counted_rate(spec.failures)
    if spec.counted is None:
        return before
    # start-up: most specs have counted nothing yet
    from meshplan.planner.goodput.run_log import updated_rate

    return updated_rate(before, spec.counted.interruptions, spec.counted.node_days)
