"""Runs on several device types with a cluster's own constants: python tests/benchmarks/mixed_runs.py RUNS LAYERS

RUNS: measured runs (JSON lines with ``hardware.pools`` and ``parallelism.stages``). LAYERS: CSV(.gz) of ``device,
micro_batch_size, tensor_parallel, layer, forward_time_s`` as AMP (arXiv:2210.07297) publishes them.

What a user with one node of each type and two runs could know, and nothing else: of each device the host time of a
layer, so that a block without tensor parallelism takes three times its measured forward (AMP's own rule for forward and
backward); of the cluster what the first two runs of the file say of the efficiency of its links, by least squares of
log errors over a grid. The other runs are predicted: median error, rank correlation, and the regret of the plan that
the prediction likes best.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.estimator.candidates import StageClass
from meshplan.planner.training.measured.observations import ObservationReader
from meshplan.planner.training.measured.pools import pooled_run
from meshplan.planner.training.mixed.estimator import price_mixed, stage_model
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem

# Forward and backward of a layer over its forward.
ROUND = 3.0
# Runs that the constants of the cluster are read from.
OWN = 2
# Efficiencies of links that are tried, and halvings of a host time's interval.
GRID = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BISECTIONS = 40


def block_s(path: Path) -> dict[str, float]:
    """Device → mean measured forward of a block without tensor parallelism, s."""
    found = defaultdict(list)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for row in csv.DictReader(file):
            if row["layer"] == "block" and row["tensor_parallel"] == "1":
                found[row["device"]].append(float(row["forward_time_s"]))
    return {device: fmean(times) for device, times in found.items()}


def with_host_times(problem: MixedProblem, blocks: Mapping[str, float]) -> MixedProblem:
    """The question with each pool's host time of a layer."""
    pools = list(problem.pools)
    for index, own in enumerate(problem.pools):
        asked = ROUND * blocks[own.machine.device.slug]
        low, high = 0.0, asked
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            pools[index] = replace(own, calibration=_with(own.calibration, host_s_per_layer=middle))
            shorter = layer_s(replace(problem, pools=tuple(pools)), index) < asked
            low, high = (middle, high) if shorter else (low, middle)
    return replace(problem, pools=tuple(pools))


def layer_s(problem: MixedProblem, pool: int) -> float:
    """Time of a layer of one sequence without tensor parallelism, forward and backward."""
    stage = StageClass(layers=(1,), has_embedding=False, has_head=False, first_index=1, count=1)
    model = stage_model(problem, pool, stage, num_stages=2, num_microbatches=1)
    return float(model.figures([stage])[0].seconds[0])


def with_links(problem: MixedProblem, inside: float, outside: float) -> MixedProblem:
    """The question with the efficiencies of its links."""
    pools = [
        replace(own, calibration=_with(own.calibration, scale_up_efficiency=inside, network_efficiency=outside))
        for own in problem.pools
    ]
    return replace(problem, pools=tuple(pools))


def _with(calibration: Any, **constants: float) -> Any:
    time = replace(calibration.time, **{name: np.asarray(value) for name, value in constants.items()})
    return replace(calibration, time=time)


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks of values, ties shared."""
    array = np.array(values)
    return np.array([(array < one).sum() + ((array == one).sum() - 1) / 2.0 for one in array])


def main() -> None:
    """Print the error of the runs that were not used."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    blocks = block_s(Path(sys.argv[2]))
    runs: list[tuple[str, MixedProblem, MixedConfig, float | None, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(str(Path(folder) / "catalog.sqlite"))
        for row in rows:
            problem, config, _ = pooled_run(ObservationReader(catalog), row, catalog)
            likely = str((row.get("failure") or {}).get("likely", ""))
            seconds = row["measured"].get("iteration_s")
            runs.append((row["id"], with_host_times(problem, blocks), config, seconds, likely))
    own = [one for one in runs if one[3]][:OWN]

    def error(inside: float, outside: float) -> float:
        priced = [price_mixed(with_links(made, inside, outside), plan).step_s for _, made, plan, _, _ in own]
        return sum(np.log(step / took) ** 2 for step, (_, _, _, took, _) in zip(priced, own, strict=True))

    inside, outside = min(product(GRID, GRID), key=lambda pair: error(*pair))
    print(f"own runs {', '.join(one[0] for one in own)}: links inside nodes {inside:.0%}, between nodes {outside:.0%}")
    errors, predicted, measured = [], [], []
    for name, made, plan, took, likely in runs:
        priced = price_mixed(with_links(made, inside, outside), plan)
        if took is None:
            print(f"{name}: failed, {likely}; {'does not fit' if not priced.fits else 'fits'}")
        elif name not in {one[0] for one in own}:
            errors.append(abs(priced.step_s / took - 1.0))
            predicted.append(priced.step_s)
            measured.append(took)
            print(f"{name}: measured {took:.2f} s, predicted {priced.step_s:.2f} s, {priced.step_s / took - 1.0:+.0%}")
    rho = float(np.corrcoef(ranks(predicted), ranks(measured))[0, 1])
    regret = measured[int(np.argmin(predicted))] / min(measured) - 1.0
    print(f"{len(errors)} runs: {median(errors):.1%} median, {fmean(errors):.1%} mean error")
    print(f"order {rho:.2f}, regret {regret:.1%}")


if __name__ == "__main__":
    main()
