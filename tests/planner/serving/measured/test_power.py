"""The power curve: planted constants come back, what is left out was not seen, a plan's watts are its simulation's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.constants.power import PowerConstants, power_calibration
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.cluster.power import DeviceWork, peak_bytes_per_j, power_share
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.power import run_utilization
from meshplan.planner.serving.measured.power_fit import PREDICTED, PowerRow, calibrate_power, fitted, power_rows
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving, serving_calibration
from meshplan.planner.serving.search.candidates import power_at
from meshplan.planner.serving.search.search import estimate_pinned
from meshplan.planner.validation.between_sources import expected, source_errors
from meshplan.planner.validation.machines import MachineReader, read_rows

MEASURED = Path(__file__).parents[3] / "validation" / "serving-power.jsonl"
PLANTED = PowerConstants(
    waiting_share=0.24,
    memory_pj_per_bit=8.0,
    narrow_share=0.4,
    compute_share=0.8,
    compute_exponent=0.6,
    bulk_share=0.2,
)


@pytest.fixture(scope="module")
def rows(catalog: Catalog) -> list[PowerRow]:
    reader = MachineReader(catalog)
    runs = [PreparedRun(served_run(row, reader)) for row in read_rows(MEASURED)]
    return power_rows(runs, lambda run: serving_calibration(catalog, *run.key).constants)


def planted(rows: list[PowerRow], *, count: int = 120, constants: PowerConstants = PLANTED) -> list[PowerRow]:
    """Rows over all utilisations whose power is that of the planted constants, in six groups."""
    draws = np.random.default_rng(0)
    found = []
    for number in range(count):
        wide, narrow, compute, bulk = draws.uniform(0.0, 1.0, 4) * (0.8, 0.5, 0.4, 1.0)
        parts = {"wide_s": wide, "narrow_s": narrow, "compute_s": compute, "bulk_s": bulk * compute}
        use = DeviceWork(**{name: np.array(part) for name, part in parts.items()})
        row = rows[number % len(rows)]
        found.append(replace(row, use=use, share=float(power_share(constants, use, row.bytes_per_j)), rate_error=None))
    return found


def _published_by(prepared: PreparedRun, source: str) -> PreparedRun:
    return PreparedRun(replace(prepared.run, group=f"{source}|{prepared.run.group}"))


def test_planted_constants_come_back(rows: list[PowerRow]) -> None:
    """Each row a group of its own: a group counts as one row, and six say little beside what is known beforehand."""
    alone = [
        replace(row, prepared=_published_by(row.prepared, str(number))) for number, row in enumerate(planted(rows))
    ]
    found = fitted(alone)
    for name in PowerConstants.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(PLANTED, name), rel=0.1), name


def test_servers_that_wait_for_their_host_do_not_move_the_curve(rows: list[PowerRow]) -> None:
    """A quarter of the rows draws half of what its kernels would, the others what they would, give or take 5 %."""
    alike, draws = planted(rows), np.random.default_rng(3)
    measured = [replace(row, share=row.share * math.exp(draws.normal(0.0, 0.05))) for row in alike]
    found = fitted([replace(row, share=row.share / (1 if index % 4 else 2)) for index, row in enumerate(measured)])
    ratios = [float(power_share(found, row.use, row.bytes_per_j)) / row.share for row in alike]
    assert np.mean(np.log(ratios)) == pytest.approx(0.0, abs=0.02)


def test_what_a_waiting_board_takes_is_known_beforehand(rows: list[PowerRow]) -> None:
    """Runs say little of it, so that what others measured of boards that wait holds it back."""
    found = fitted(planted(rows, constants=replace(PLANTED, waiting_share=0.4)))
    assert PowerConstants().waiting_share < found.waiting_share < 0.35
    assert found.compute_share == pytest.approx(PLANTED.compute_share, rel=0.2)


def test_every_run_is_judged_by_a_fit_without_its_group(rows: list[PowerRow]) -> None:
    result = calibrate_power(rows, source="six runs", date="2026-11-23")
    (calibration,) = result.calibrations
    assert calibration.num_runs == len(rows) == 6
    group = rows[0].group
    without = fitted([row for row in rows if row.group != group])
    (error,) = (
        item.error for item in result.folds["group"] if item.id == rows[0].prepared.run.id and item.metric == PREDICTED
    )
    assert error == pytest.approx(rows[0].held_out(without)[0].error)
    assert list(result.folds) == ["source", "group", "device"]


def test_the_interval_is_that_of_sources_held_out(rows: list[PowerRow]) -> None:
    """Rows of two sources, the second of which draws half as much again: neither tells the other so."""
    sources = [replace(row, prepared=_published_by(row.prepared, "ab"[number % 2])) for number, row in enumerate(rows)]
    many = [replace(row, share=row.share * (1.5 if row.group[0] == "b" else 1.0)) for row in planted(sources)]
    result = calibrate_power(many, source="two", date="2026-11-23")
    (calibration,) = result.calibrations
    judged = [item for item in result.held_out if item.metric == PREDICTED]
    found = [abs(np.log1p(item.error)) for item in judged]
    assert np.median(found) == pytest.approx(np.log(1.5), rel=0.3)
    another = expected([("", source_errors(judged, lambda item: item.source))])
    assert another is not None
    assert calibration.error_p90["power"] == pytest.approx(another.half_width, abs=1e-4)
    assert calibration.error_p90["power"] > np.max(found)  # two sources say little of a third


def test_no_rows_leave_the_defaults() -> None:
    assert fitted([]) == PowerConstants()


def test_the_shipped_curve_says_where_it_comes_from() -> None:
    shipped = power_calibration()
    assert shipped.num_runs > 300
    assert "ML.ENERGY" in shipped.source
    assert 0.0 < shipped.error_p90["power"] < math.log(2.0)  # three sources


def test_power_of_decodes_is_that_of_the_run_without_its_prompts(catalog: Catalog, rows: list[PowerRow]) -> None:
    """Splitwise prints the level of decodes: longer prompts, at the limit of the boards, lower its averages."""
    row = next(row for row in read_rows(MEASURED.parent / "serving-observations.jsonl") if "splitwise" in row["id"])
    prepared = PreparedRun(served_run(row, MachineReader(catalog)))
    assert prepared.run.power_of_decodes
    assert not any(row.prepared.run.power_of_decodes for row in rows)
    served = prepared.served(ServingConstants())
    whole, alone = run_utilization(served, prepared.workers[0]), prepared.utilization(served)
    segments = served.workers[0].segments
    decodes = segments[segments.prompt_tokens == 0.0]
    prompts = replace(served, workers=(replace(served.workers[0], segments=segments[segments.prompt_tokens > 0.0]),))
    prefill = run_utilization(prompts, prepared.workers[0])
    assert whole is not None
    assert alone is not None
    assert prefill is not None
    share = float((decodes.end_s - decodes.start_s).sum()) / (served.end_s - float(served.arrival_s.min()))
    for name in ("wide_s", "compute_s"):
        assert getattr(whole, name) == pytest.approx(getattr(prefill, name) + share * getattr(alone, name)), name
    assert alone.compute_s < 0.5 * whole.compute_s


@pytest.mark.parametrize("rate", [2.0, 12.0])
def test_the_closed_form_agrees_with_the_simulation(catalog: Catalog, rate: float) -> None:
    """Watts of a plan come from its rate; the same worker's iterations, one by one, say the same."""
    document = {
        "kind": "serving",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 1000, "output_length": 300, "request_rate_per_s": rate, "num_requests": 600},
        "fixed": {"mode": "aggregated", "tensor_parallel": 1, "num_workers": 1},
    }
    problem = resolve_serving(read_serving_spec(document), catalog, Path()).problem
    simulated, _ = estimate_pinned(problem)
    candidate = simulated.candidate
    worker = candidate.parts[0][0].worker
    use, bytes_per_j = run_utilization(simulated.judged.run, worker), peak_bytes_per_j(worker.machine.device)
    assert use is not None
    by_iteration = 700.0 * float(power_share(problem.power.constants, use, bytes_per_j))
    assert power_at(candidate, simulated.judged.requests_per_s) == pytest.approx(by_iteration, rel=0.05)
