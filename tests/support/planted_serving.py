"""Serving runs that the simulator itself made under known constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.validation.machines import MachineReader, read_rows

ROWS = Path(__file__).parents[1] / "validation" / "serving-observations.jsonl"
PLANTED = ServingConstants(
    decode_factor=1.15,
    prefill_factor=0.9,
    host_step_s=2e-3,
    host_s_per_seq=2e-5,
    launch_s_per_layer=0.5e-3,
    first_token_steps=1.5,
    first_token_offset_s=40e-3,
)


def is_plain(row: Mapping[str, Any]) -> bool:
    """One kind of worker, whose attention has one rank: what ranks exchange is a part that host and kernels hide."""
    return "disagg" not in row["group"] and row["parallelism"].get("attention_data_parallel", 1) == 1


def prepared(
    reader: MachineReader, concurrencies: Sequence[int], group: str, *, output_length: int = 128
) -> list[PreparedRun]:
    """Runs of one closed loop at several concurrencies, measured as the simulator says under the planted constants.

    The engine hides nothing of the host and was warmed up, so that its constants show.
    """
    row = next(row for row in read_rows(ROWS) if row["workload"].get("concurrency") and is_plain(row))
    run = served_run(row, reader)
    run = replace(run, recipe=replace(run.recipe, hides_host=False), warms_up=True)
    found = []
    for count in concurrencies:
        workload = replace(run.workload, concurrency=count, num_requests=4 * count, output_length=output_length)
        made = PreparedRun(replace(run, id=f"{group}-{count}", group=group, workload=workload, derived={}))
        values = made.predicted(PLANTED)
        found.append(PreparedRun(replace(made.run, measured={name: values[name] for name in ("ttft_s", "tpot_s")})))
    return found
