"""Measured runs of diffusion pipelines: read, predicted, and constants that a fit finds again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_runs import observations

from meshplan.catalogs.constants.diffusion import DiffusionConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.diffusion.estimator.latency import latency
from meshplan.planner.diffusion.measured.fit import Runs, fitted, prepared
from meshplan.planner.diffusion.measured.held_out import choices
from meshplan.planner.diffusion.measured.rows import measured_run
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import MachineReader

# Rows of the ML.ENERGY leaderboard v3.0, whose address each row has.
ROWS = [
    json.loads(line) for line in (Path(__file__).parents[2] / "data" / "diffusion_runs.jsonl").read_text().splitlines()
]


@pytest.fixture(scope="module")
def runs(catalog: Catalog) -> Runs:
    reader = MachineReader(catalog)
    return prepared([measured_run(row, reader) for row in ROWS])


def test_pipelines_on_a_device_without_a_run_lie_where_nine_of_ten_should(catalog: Catalog) -> None:
    """An H200 has the constants of the H100, and newer software: its interval is that of an unseen device."""
    rows = validate_rows(observations("diffusion"), catalog).rows
    assert len(rows) == 3
    for row in rows:
        for metric, measured in row.measured.items():
            assert row.predicted[metric].low <= measured <= row.predicted[metric].high, (row.id, metric)


def test_a_row_decodes_as_it_says(catalog: Catalog) -> None:
    """The catalog's pipelines decode videos in tiles, which overlap; this run decoded it whole."""
    (whole,) = [row for row in observations("diffusion") if row["id"].startswith("wan")]
    tiled = {**whole, "workload": {**whole["workload"], "vae_decode": "tiled, sliced"}}
    found = [row.breakdown_s["VAE"] for row in validate_rows([whole, tiled], catalog).rows]
    assert found[1] == pytest.approx((4 / 3) ** 2 * found[0])


def test_published_runs_are_predicted(catalog: Catalog) -> None:
    validation = validate_rows(ROWS, catalog)
    assert [row.status for row in validation.rows] == ["ok"] * len(ROWS)
    for metric, most in (("latency_s", 0.10), ("energy_per_item_j", 0.10), ("power_w", 0.10)):
        errors = [abs(row.error[metric]) for row in validation.rows]
        assert np.median(errors) < most, metric
    assert not any(row.oom for row in validation.rows)  # they ran


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model", "name"), "nobody/nothing", "unknown diffusion model"),
        (("parallelism", "ulysses"), 3, "degrees multiply to 3"),
        (("parallelism", "ring"), "two", r"parallelism\.ring must be a whole number"),
        (("workload", "torch_compile"), True, "torch_compile is on"),
        (("workload", "steps"), 0, r"workload\.steps"),
        (("measured", "latency_s"), -1.0, r"measured\.latency_s"),
        (("hardware", "device"), "abacus", "abacus"),
        (("precision",), "fp8", "only bf16"),
    ],
)
def test_rows_that_are_not_estimated_say_why(path: tuple[str, ...], value: Any, words: str, catalog: Catalog) -> None:
    row = copy.deepcopy(next(row for row in ROWS if row["hardware"]["num_devices"] == 1))
    inner: Any = row
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(UnsupportedError, match=words):
        measured_run(row, MachineReader(catalog))


def test_a_fit_finds_the_constants_that_made_the_runs(runs: Runs) -> None:
    """Latencies computed with other constants than a fit starts from: half of the predictions agree to 2 % again."""
    truth = DiffusionConstants(
        gemm_efficiency=0.8, attention_efficiency=0.3, elementwise_efficiency=0.3, launch_s=2e-5, vae_efficiency=0.08
    )
    made = latency(runs.asked, truth).total_s
    again = Runs(
        runs=runs.runs,
        asked=runs.asked,
        generation=runs.generation,
        generations=runs.generations,
        cell=runs.cell,
        latency_s=made,
        power_share=runs.power_share,
    )
    found = fitted(again, np.ones(len(runs.runs), dtype=bool))
    start = latency(runs.asked, DiffusionConstants()).total_s
    for index, name in enumerate(runs.generations):
        mine = runs.generation == index
        predicted = latency(runs.asked, found[name]).total_s
        assert np.median(np.abs(start[mine] / made[mine] - 1.0)) > 0.1
        assert np.median(np.abs(predicted[mine] / made[mine] - 1.0)) < 0.02


def test_the_choice_of_a_cell_by_perfect_predictions_is_right(runs: Runs) -> None:
    found = choices(runs, runs.latency_s, tie=0.0)
    assert all(one.is_right and one.regret == 0.0 for one in found)
