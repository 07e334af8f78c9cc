"""Constants of diffusion pipelines: fits them to measured runs and prints the error with a model held out.

    python tests/benchmarks/diffusion.py OBSERVATIONS.jsonl [--export catalogs/seed/diffusion_calibrations.yaml]

Takes about half a minute of CPU. With ``--export`` it writes the file that ships.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import yaml

from meshplan.planner.diffusion.measured.fit import calibrations, prepared
from meshplan.planner.diffusion.measured.held_out import choices, interval_errors, order_error, without_model
from meshplan.planner.diffusion.measured.rows import measured_run
from meshplan.planner.service import load_catalog
from meshplan.planner.validation.held_out import today
from meshplan.planner.validation.machines import MachineReader, read_rows

HEAD = """\
# Constants of diffusion pipelines: see planner/diffusion/measured/fit.py.
# Made by `python tests/benchmarks/diffusion.py OBSERVATIONS... --export FILE`; do not edit by hand.
"""
TIES = (0.0, 0.0025, 0.005, 0.01, 0.02)
# The width that ships; `tie chosen inside the fold` prints what choosing it by the other models gives.
TIE = 0.0025


def main() -> None:
    paths = [Path(word) for word in sys.argv[1:] if not word.startswith("--")]
    export = Path(sys.argv[sys.argv.index("--export") + 1]) if "--export" in sys.argv else None
    paths = [path for path in paths if path != export]
    reader = MachineReader(load_catalog("sqlite://"))
    rows = [row for path in paths for row in read_rows(path) if row.get("task") == "diffusion"]
    runs = prepared([measured_run(row, reader) for row in rows])
    start = time.process_time()
    predicted = without_model(runs)
    errors = predicted.errors(runs)
    slugs = np.array([run.job.model.slug for run in runs.runs])
    print(f"{len(runs.runs)} runs; fits with a model left out: {time.process_time() - start:.1f} s of CPU")
    for name in ("all", *dict.fromkeys(slugs.tolist())):
        mine = slugs == name if name != "all" else np.ones(len(slugs), dtype=bool)
        text = "  ".join(
            f"{metric} median {np.median(np.abs(e[mine])):6.1%} mean {np.mean(np.abs(e[mine])):6.1%} "
            f"signed {np.median(e[mine]):+6.1%}"
            for metric, e in errors.items()
        )
        print(f"{name:28s} {text}")
    order = order_error(runs, predicted.latency_s)
    print(f"order of two degrees of a cell: median error {order:.2%}")
    by_tie = {tie: choices(runs, predicted.latency_s, tie=tie) for tie in TIES}
    for tie, found in by_tie.items():
        report(f"tie {tie:.2%}", found)
    report("tie chosen inside the fold", chosen_inside(by_tie))
    report("any number of devices", choices(runs, predicted.latency_s, tie=TIE, any_count=True))
    if export is None:
        return
    sets = calibrations(
        runs,
        interval_errors(runs),
        tie=TIE,
        order_error=round(order, 4),
        source=f"{len(runs.runs)} runs of: {'; '.join(dict.fromkeys(row['source']['title'] for row in rows))}",
        date=today(),
    )
    content = {"source": sets[0].source, "date": sets[0].date, "calibrations": []}
    for one in sets:
        print(one)
        entry = one.to_document()
        content["calibrations"].append({k: v for k, v in entry.items() if k not in ("source", "date")})
    export.write_text(HEAD + yaml.safe_dump(content, sort_keys=False, width=120), encoding="utf-8")


def chosen_inside(by_tie):
    """Each model's cells with the width that serves the other models best."""
    found = []
    for model in dict.fromkeys(one.cell[0] for one in by_tie[0.0]):
        rest = {tie: sum(one.is_right for one in each if one.cell[0] != model) for tie, each in by_tie.items()}
        found += [one for one in by_tie[max(rest, key=lambda tie: rest[tie])] if one.cell[0] == model]
    return found


def report(title: str, found) -> None:
    regret = np.array([one.regret for one in found])
    by_count = {
        count: np.mean([one.is_right for one in found if one.cell[3] == count])
        for count in sorted({one.cell[3] for one in found})
    }
    print(
        f"{title}: right in {np.mean([one.is_right for one in found]):.1%} of {len(found)} cells "
        f"({', '.join(f'{count} devices {share:.0%}' for count, share in by_count.items())}); regret mean "
        f"{regret.mean():.2%} p90 {np.quantile(regret, 0.9):.2%} max {regret.max():.1%}, above 3 % in "
        f"{np.sum(regret > 0.03)} cells"
    )


if __name__ == "__main__":
    main()
