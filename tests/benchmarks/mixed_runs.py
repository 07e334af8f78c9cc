"""Runs on several device types with a cluster's own constants: python tests/benchmarks/mixed_runs.py RUNS LAYERS [MORE]

RUNS: measured runs (JSON lines with ``hardware.pools`` and ``parallelism.stages``). LAYERS: CSV(.gz) of ``device,
micro_batch_size, tensor_parallel, layer, forward_time_s`` as AMP (arXiv:2210.07297) publishes them.

What a user with one node of each type and two runs could know, and nothing else: of each device the host time of a
layer at each degree of tensor parallelism, so that a block takes what its measured forward says (``ROUND``); of the
cluster what the first two runs of the file say of the efficiency of its network, by least squares of log errors over
a grid. Links inside nodes keep their shipped efficiency: two runs do not tell it from what else a micro-batch takes
(``--fit-inside`` reads both from them). The other runs are predicted: median error, rank correlation, and the regret of
the plan that the prediction likes best. Of every run: how its plan is admitted when it is pinned, by the safe bound,
to which searches keep, by the expected peak with a warning, or not (``planner/training/admission.py``). MORE: files of
runs whose measured peaks are compared, stage by stage where rows state them.

AMP's pipelines compute the forward of a layer twice, once of them to print its shape (ParallelTransformerLayerPipe in
megatron/model/transformer.py of DachengLi1/AMP at 708e87f; not at a40c7a4). Which of the two made the published trials
is not said. The 47 runs on 16 T4, which decide nothing else, say twice (``--forward-once`` asks what once says).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.admission import Admission
from meshplan.planner.training.estimator.candidates import StageClass
from meshplan.planner.training.measured.observations import ObservationReader
from meshplan.planner.training.measured.pools import pooled_run
from meshplan.planner.training.mixed.estimator import price_mixed, stage_model
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem
from meshplan.planner.training.problem.choice import RECOMPUTE_MODES

# Forwards and backward of a layer over its timed forwards: (1 + 2)/1 as AMP's own model has it, (2 + 2)/2 where the
# forward runs twice, timed and trained.
ROUND = {1: 3.0, 2: 2.0}
# Runs that the constants of the cluster are read from.
OWN = 2
# Efficiencies of links that are tried, and halvings of a host time's interval.
GRID = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BISECTIONS = 20


def block_s(path: Path) -> dict[tuple[str, int], float]:
    """(Device, tensor parallelism) → mean measured forward of a block, s."""
    found = defaultdict(list)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for row in csv.DictReader(file):
            if row["layer"] == "block":
                found[row["device"], int(row["tensor_parallel"])].append(float(row["forward_time_s"]))
    return {which: fmean(times) for which, times in found.items()}


def with_host_times(problem: MixedProblem, blocks: Mapping[tuple[str, int], float], run: Run) -> MixedProblem:
    """The question with each pool's host time of a layer at the run's degree of tensor parallelism."""
    pools, tensor = list(problem.pools), run.tensor
    for index, own in enumerate(problem.pools):
        asked = ROUND[run.forwards] * blocks[own.machine.device.slug, tensor]
        low, high = 0.0, asked
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            pools[index] = replace(own, calibration=_with(own.calibration, host_s_per_layer=middle))
            shorter = layer_s(replace(problem, pools=tuple(pools)), index, run) < asked
            low, high = (middle, high) if shorter else (low, middle)
    return replace(problem, pools=tuple(pools))


def layer_s(problem: MixedProblem, pool: int, run: Run) -> float:
    """Time of a layer of one sequence, forwards and backward."""
    stage = StageClass(layers=(1,), has_embedding=False, has_head=False, first_index=1, count=1)
    recompute = RECOMPUTE_MODES.index(run.timed.stages[0].activation_recompute)
    columns = {"tensor_parallel": run.tensor, "recompute": recompute}
    model = stage_model(problem, pool, stage, num_stages=2, num_microbatches=1, **columns)
    return float(model.figures([stage])[0].seconds[0])


def with_links(problem: MixedProblem, inside: float | None, outside: float) -> MixedProblem:
    """The question with the efficiencies of its links; None: as shipped."""
    given = {"network_efficiency": outside} | ({} if inside is None else {"scale_up_efficiency": inside})
    pools = [replace(own, calibration=_with(own.calibration, **given)) for own in problem.pools]
    return replace(problem, pools=tuple(pools))


def _with(calibration: Any, **constants: float) -> Any:
    time = replace(calibration.time, **{name: np.asarray(value) for name, value in constants.items()})
    return replace(calibration, time=time)


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks of values, ties shared."""
    array = np.array(values)
    return np.array([(array < one).sum() + ((array == one).sum() - 1) / 2.0 for one in array])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run.

    Args:
        row: as published.
        problem: the question, without the cluster's own constants.
        plan: what was run.
        measured_s: of a step; None where it failed.
        forwards: of each layer in a pass.
    """

    row: Mapping[str, Any]
    problem: MixedProblem
    plan: MixedConfig
    measured_s: float | None
    forwards: int = 2

    @property
    def timed(self) -> MixedConfig:
        """The plan as its time is priced: a second forward takes what full recompute does, and keeps nothing."""
        mode = "full" if self.forwards > 1 else "none"
        return replace(self.plan, stages=tuple(replace(one, activation_recompute=mode) for one in self.plan.stages))

    @property
    def name(self) -> str:
        """What was run, in short."""
        stages = " | ".join(
            f"{stage.num_layers:g} on "
            + " + ".join(
                f"{share.data_parallel}×{self.problem.names[share.pool].split('-')[0]}" for share in stage.shares
            )
            for stage in self.plan.stages
        )
        size, rounds = self.plan.stages[0].shares[0].micro_batch_size, self.plan.num_microbatches
        return f"{self.row['id']} (tp {self.tensor}, {rounds} micro-batches of {size}; {stages})"

    @property
    def tensor(self) -> int:
        """Tensor parallelism, the same in all stages of AMP's plans."""
        return self.plan.stages[0].tensor_parallel


def read(path: Path) -> list[Run]:
    """The runs of a file."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(str(Path(folder) / "catalog.sqlite"))
        for row in (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()):
            problem, plan, _ = pooled_run(ObservationReader(catalog), row, catalog)
            seconds = row["measured"].get("iteration_s")
            found.append(Run(row=row, problem=problem, plan=plan, measured_s=seconds))
    return found


def fitted(
    own: Sequence[Run], blocks: Mapping[tuple[str, int], float], *, fits_inside: bool
) -> tuple[float | None, float]:
    """Efficiencies of links inside and between nodes that two runs speak for; None: as shipped."""
    found: list[tuple[float, float | None, float]] = []
    for inside in GRID if fits_inside else (None,):
        known = [with_host_times(with_links(run.problem, inside, 1.0), blocks, run) for run in own]
        for outside in GRID:
            steps = [
                price_mixed(with_links(problem, inside, outside), run.timed).step_s
                for problem, run in zip(known, own, strict=True)
            ]
            error = sum(np.log(step / (run.measured_s or 0.0)) ** 2 for step, run in zip(steps, own, strict=True))
            found.append((float(error), inside, outside))
    _, inside, outside = min(found, key=lambda one: one[0])
    return inside, outside


def print_times(runs: Sequence[Run], blocks: Mapping[tuple[str, int], float], *, fits_inside: bool) -> None:
    """Step times of the runs that the constants were not read from."""
    own = [run for run in runs if run.measured_s][:OWN]
    inside, outside = fitted(own, blocks, fits_inside=fits_inside)
    names = ", ".join(run.row["id"] for run in own)
    within = "as shipped" if inside is None else f"{inside:.0%}"
    print(f"own runs {names}: links inside nodes {within}, between nodes {outside:.0%}")
    pairs = []
    for run in runs:
        if run.measured_s:
            problem = with_host_times(with_links(run.problem, inside, outside), blocks, run)
            step, took = price_mixed(problem, run.timed).step_s, run.measured_s
            if run not in own:
                pairs.append((step, took))
            kind = " own" if run in own else ""
            print(f"{run.name}:{kind} measured {took:.2f} s, predicted {step:.2f} s, {step / took - 1.0:+.0%}")
    predicted, measured = zip(*pairs, strict=True)
    errors = [step / took - 1.0 for step, took in pairs]
    rho = float(np.corrcoef(ranks(predicted), ranks(measured))[0, 1])
    regret = measured[int(np.argmin(predicted))] / min(measured) - 1.0
    sizes = list(map(abs, errors))
    print(
        f"{len(errors)} runs: {median(sizes):.1%} median, {fmean(sizes):.1%} mean error, {median(errors):+.1%} signed"
    )
    print(f"order {rho:.2f}, regret {regret:.1%}")


def print_admission(runs: Sequence[Run]) -> None:
    """Which runs are refused as pinned plans, and which are admitted with a warning."""
    for kind, chosen in {
        "likely out of memory": [run for run in runs if likely(run) == "out_of_memory"],
        "ran": [run for run in runs if run.measured_s],
    }.items():
        shares = [(run.row["id"], price_mixed(run.problem, run.plan)) for run in chosen]
        refused = [name for name, priced in shares if priced.admission is Admission.NONE]
        warned = [name for name, priced in shares if priced.admission is Admission.TYPICAL]
        print(
            f"{kind}: {len(chosen)}; refused as a pinned plan (beyond memory by the expected peak) {refused}, admitted "
            f"with a warning (beyond it by the safe bound alone, which a search keeps to) {warned}"
        )


def likely(run: Run) -> str:
    """What a run that failed likely failed of."""
    return str((run.row.get("failure") or {}).get("likely", ""))


def print_peaks(runs: Sequence[Run]) -> None:
    """Peaks of stages that a row states, else of the worst."""
    errors, exceeded = [], 0
    for run in runs:
        priced = price_mixed(run.problem, run.plan)
        stated = {index: stage.get("peak_memory_bytes") for index, stage in enumerate(run.row["parallelism"]["stages"])}
        pairs = [(f"stage {share.stage}", stated[share.stage], share) for share in priced.shares if stated[share.stage]]
        worst = max(priced.shares, key=lambda share: share.typical_bytes)
        for where, peak, share in pairs or [("worst stage", run.row["measured"].get("peak_memory_bytes"), worst)]:
            if peak:
                errors.append(share.typical_bytes / peak - 1.0)
                exceeded += share.safe_bytes < peak
                print(
                    f"{run.row['id']}, {where}: measured {peak / 1e9:.2f} GB, expected {share.typical_bytes / 1e9:.2f} "
                    f"GB ({errors[-1]:+.0%}), at most {share.safe_bytes / 1e9:.2f} GB"
                )
    if errors:
        print(f"{len(errors)} peaks: {median(map(abs, errors)):.1%} median error, {exceeded} beyond the safe bound")


def main() -> None:
    """Print how far times and memory are off."""
    parser = argparse.ArgumentParser()
    parser.add_argument("timed", type=Path)
    parser.add_argument("layers", type=Path)
    parser.add_argument("further", type=Path, nargs="*")
    parser.add_argument("--fit-inside", action="store_true")
    parser.add_argument("--forward-once", action="store_true")
    asked = parser.parse_args()
    runs = [replace(run, forwards=1 if asked.forward_once else 2) for run in read(asked.timed)]
    print_times(runs, block_s(asked.layers), fits_inside=asked.fit_inside)
    print_admission(runs)
    for path in asked.further:
        print_peaks(read(path))


if __name__ == "__main__":
    main()
