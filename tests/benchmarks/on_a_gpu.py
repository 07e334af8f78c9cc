"""Predicted beside measured, for what we ran on one H100 and one H200: python tests/benchmarks/on_a_gpu.py

No constant was fitted to these runs (tests/support/gpu_runs.py says how they were made). Prints for each training on
the H100 the step, its interval, what tensors held at the peak beside the typical figure and the safe bound, and the
mean power; then each metric of what ran as observations: trainings, pipelines of Diffusers on the H200, and a vLLM
server that a plan's own files started, under five loads; then what one own run brings: each training in turn is the
only own run of its framework on its device, and the others there are predicted.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gpu_runs import measured_runs, observations, own_runs, without_and_with

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.kinds import Question
from meshplan.planner.training.measured.constants_fit import key_of
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.resolve import calibration_for
from meshplan.planner.training.service import estimate
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.summary import ValidatedRow

GIB = 2.0**30


def main() -> None:
    steps, peaks, powers, inside, safe = [], [], [], [], []
    head = ("step", "predicted", "interval", "", "peak", "typical", "safe", "W", "predicted")
    print(f"{'run':36}" + "".join(f"{title:>10}" for title in head))
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(str(Path(folder) / "catalog.sqlite"))
        for run in measured_runs():
            plan = estimate(Question(document=run.spec, catalog=catalog, base=Path()))
            step, peak = plan.predicted["iteration_s"], plan.predicted["peak_memory_bytes"]
            watts = plan.predicted["energy_j_per_step"].value / step.value
            cells = ["–"] * 4
            if took := run.measured.get("step_s"):
                steps.append(step.value / took - 1.0)
                inside.append(step.low <= took <= step.high)
                cells = [f"{took:.3f}", f"{step.value:.3f}", f"{step.low:.2f}–{step.high:.2f}", f"{steps[-1]:+.0%}"]
            if held := run.measured.get("allocated_bytes"):
                peaks.append(peak.value / held - 1.0)
                safe.append(held <= peak.high)
            cells += [f"{held / GIB:.1f}" if held else "–", f"{peak.value / GIB:.1f}", f"{peak.high / GIB:.1f}"]
            if drawn := run.measured.get("power_w"):
                powers.append(watts / drawn - 1.0)
                cells += [f"{drawn:.0f}", f"{watts:.0f}"]
            print(f"{run.name:36}" + "".join(f"{cell:>10}" for cell in cells))
    for name, errors in (("step", steps), ("peak", peaks), ("power", powers)):
        sizes = [abs(error) for error in errors]
        print(f"{name}: median {median(sizes):.1%}, mean {fmean(sizes):.1%}, signed median {median(errors):+.1%}")
    print(f"inside the interval {sum(inside)} of {len(inside)}; below the safe bound {sum(safe)} of {len(safe)}\n")
    as_observations()
    after_one_own_run()


def as_observations() -> None:
    """Rows that ``meshplan validate`` reads."""
    print(f"{'run':32}{'metric':>20}{'measured':>11}{'predicted':>11}{'between':>22}{'error':>8}")
    rows = [row for task in ("training", "diffusion", "serving") for row in observations(task)]
    for row in validate_rows(rows, Catalog.open("sqlite://")).rows:
        for metric, measured in row.measured.items():
            scale = GIB if metric.endswith("_bytes") else 1.0
            found = row.predicted[metric]
            between = f"{found.low / scale:.3g} … {found.high / scale:.3g}"
            print(
                f"{row.id:32}{metric:>20}{measured / scale:>11.4g}{found.value / scale:>11.4g}{between:>22}"
                f"{row.error[metric]:>+8.1%}"
            )


def after_one_own_run() -> None:
    """Errors of a framework's other runs on a device, before and after one of them was given."""
    catalog = Catalog.open("sqlite://")
    shipped = cache(partial(calibration_for, catalog))
    places: dict[Hashable, list[ObservedRun]] = defaultdict(list)
    for run in own_runs(catalog):
        places[key_of(run)[0], run.problem.machine.device.slug].append(run)
    before: list[ValidatedRow] = []
    after: list[ValidatedRow] = []
    for (framework, device), runs in places.items():
        pairs = [(point, run) for point, run in permutations(runs, 2) if "iteration_s" in point.measured]
        found = [without_and_with(point, run, shipped) for point, run in pairs]
        print(f"\n{framework} on {device}: {len(runs)} runs, {len(pairs)} predictions from one of them")
        _print_both([row for row, _ in found], [row for _, row in found])
        before += (row for row, _ in found)
        after += (row for _, row in found)
    print("\nall")
    _print_both(before, after)


def _print_both(before: Sequence[ValidatedRow], after: Sequence[ValidatedRow]) -> None:
    for metric in ("iteration_s", "peak_memory_bytes"):
        for words, rows in (("without", before), ("with one", after)):
            judged = [row for row in rows if metric in row.error]
            if not judged:
                continue
            sizes = [abs(row.error[metric]) for row in judged]
            intervals = [row.predicted[metric] for row in judged]
            width = median(found.high / found.value - 1.0 for found in intervals)
            lowest = 0.0 if metric == "peak_memory_bytes" else 1.0  # the bound of a peak has one side
            held = sum(
                lowest * found.low <= row.measured[metric] <= found.high
                for row, found in zip(judged, intervals, strict=True)
            )
            print(
                f"  {metric:18}{words:9} median {median(sizes):6.1%}, mean {fmean(sizes):6.1%}, "
                f"held {held} of {len(judged)}, up to +{width:.0%}"
            )


if __name__ == "__main__":
    main()
