"""How far predictions are off for a model that no constant was fitted to, and whether its best degrees are found.

A *cell* is a model, a device, a batch and a number of devices; its runs differ in the degrees alone. The choice of a
cell is right where the predicted best is the measured best; its regret is what the predicted best takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.constants.diffusion import ANY
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import INTERVAL_SHARE
from meshplan.planner.diffusion.estimator.latency import latency
from meshplan.planner.diffusion.estimator.power import power_share
from meshplan.planner.diffusion.measured.fit import Runs, constants_of, fitted, mean_constants
from meshplan.planner.diffusion.search.preference import preferred

METRICS = ("latency", "power", "energy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The degrees of one cell.

    Args:
        cell: (model, device, batch, devices).
        is_right: the predicted best is the measured best.
        regret: measured latency of the predicted best over that of the measured best, less 1.
    """

    cell: tuple[str, str, int, int]
    is_right: bool
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predictions of every run, each by constants that had not seen its group, [n].

    Args:
        latency_s: seconds.
        power_share: power of a device over its limit.
    """

    latency_s: FloatArray
    power_share: FloatArray

    def errors(self, runs: Runs) -> Mapping[str, FloatArray]:
        """Metric → predicted / measured − 1, [n]."""
        seconds, power = self.latency_s / runs.latency_s, self.power_share / runs.power_share
        return {"latency": seconds - 1.0, "power": power - 1.0, "energy": seconds * power - 1.0}


def without_model(runs: Runs) -> Predicted:
    """Each model predicted by a fit to the others."""
    return _left_out(runs, np.array([run.job.model.slug for run in runs.runs]))


def without_generation(runs: Runs) -> Predicted:
    """Each generation predicted by the mean constants of the others."""
    sets = fitted(runs, np.ones(len(runs.runs), dtype=bool))
    others = {
        name: mean_constants([constants for other, constants in sets.items() if other != name or len(sets) == 1])
        for name in sets
    }
    constants = constants_of(runs, others)
    taken = latency(runs.asked, constants)
    return Predicted(latency_s=taken.total_s, power_share=power_share(taken, constants))


def _left_out(runs: Runs, group: FloatArray) -> Predicted:
    seconds, power = np.zeros(len(runs.runs)), np.zeros(len(runs.runs))
    for name in dict.fromkeys(group.tolist()):
        mine = group == name
        constants = constants_of(runs, fitted(runs, ~mine))
        taken = latency(runs.asked, constants)
        seconds[mine], power[mine] = taken.total_s[mine], power_share(taken, constants)[mine]
    return Predicted(latency_s=seconds, power_share=power)


def choices(runs: Runs, predicted_s: FloatArray, *, tie: float, any_count: bool = False) -> Sequence[Choice]:
    """What would be chosen in every cell with at least two runs.

    Args:
        runs: the runs.
        predicted_s: their predicted latency, [n].
        tie: predictions closer than this are ordered by preference.
        any_count: cells of all numbers of devices are one, so that the number is chosen, too.
    """
    found = []
    named = [run.cell[:3] if any_count else run.cell for run in runs.runs]
    for cell in dict.fromkeys(named):
        members = np.array([index for index, name in enumerate(named) if name == cell])
        if len(members) > 1:
            configs = [runs.runs[i].config for i in members]
            chosen = members[preferred(configs, predicted_s[members], tie=tie)]
            best = members[np.argmin(runs.latency_s[members])]
            regret = float(runs.latency_s[chosen] / runs.latency_s[best] - 1.0)
            found.append(Choice(cell=runs.runs[best].cell, is_right=bool(chosen == best), regret=regret))
    return found


def order_error(runs: Runs, predicted_s: FloatArray) -> float:
    """Median error of how two runs of a cell compare, of all pairs: |log of predicted over measured ratio|."""
    sizes = []
    off = np.log(predicted_s / runs.latency_s)
    for index in range(int(runs.cell.max()) + 1):
        members = np.flatnonzero(runs.cell == index)
        sizes += [abs(off[i] - off[j]) for k, i in enumerate(members) for j in members[k + 1 :]]
    return float(np.median(sizes))


def interval_errors(runs: Runs) -> dict[str, dict[str, float]]:
    """Generation, and ``any`` → metric → 90th percentile of |log(predicted/measured)|, held out."""
    found = {}
    off = {name: np.abs(np.log1p(error)) for name, error in without_model(runs).errors(runs).items()}
    for index, generation in enumerate(runs.generations):
        mine = runs.generation == index
        found[generation] = {
            name: round(float(np.nanquantile(sizes[mine], INTERVAL_SHARE)), 4) for name, sizes in off.items()
        }
    general = without_generation(runs).errors(runs)
    found[ANY] = {
        name: max(
            round(float(np.nanquantile(np.abs(np.log1p(error)), INTERVAL_SHARE)), 4),
            *(found[generation][name] for generation in runs.generations),
        )
        for name, error in general.items()
    }
    return found
