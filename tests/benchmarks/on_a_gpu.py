"""Predicted beside measured, for what we ran on one H100 and one H200: python tests/benchmarks/on_a_gpu.py

No constant was fitted to these runs (tests/support/gpu_runs.py says how they were made). Prints for each training on
the H100 the step, its interval, what tensors held at the peak beside the typical figure and the safe bound, and the
mean power; then each metric of the H200's trainings and pipelines of Diffusers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gpu_runs import measured_runs, observations

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.kinds import Question
from meshplan.planner.training.service import estimate
from meshplan.planner.validate import validate_rows

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
    other_device()


def other_device() -> None:
    """The H200's rows by ``meshplan validate``."""
    print(f"{'run on the H200':32}{'metric':>20}{'measured':>11}{'predicted':>11}{'between':>22}{'error':>8}")
    result = validate_rows([*observations("training"), *observations("diffusion")], Catalog.open("sqlite://"))
    for row in result.rows:
        for metric, measured in row.measured.items():
            scale = GIB if metric.endswith("_bytes") else 1.0
            found = row.predicted[metric]
            between = f"{found.low / scale:.3g} … {found.high / scale:.3g}"
            print(
                f"{row.id:32}{metric:>20}{measured / scale:>11.4g}{found.value / scale:>11.4g}{between:>22}"
                f"{row.error[metric]:>+8.1%}"
            )


if __name__ == "__main__":
    main()
