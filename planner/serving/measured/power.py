"""How busy the devices of a measured run were, by its simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.planner.cluster.power import DeviceWork
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.power.draw import segment_work
from meshplan.planner.serving.simulation.metrics import steady_window_s
from meshplan.planner.serving.simulation.run import Segments, ServingRun


def run_utilization(
    served: ServingRun, worker: Worker, steady: int | None = None, *, decodes_alone: bool = False
) -> DeviceWork | None:
    """Utilisations of a device, mean over the run's identical workers.

    Args:
        served: the simulated run.
        worker: of which kind its workers are.
        steady: only the time in which so many requests run (:func:`steady_window_s`); None, or where there is no such
            time: the whole run.
        decodes_alone: only the time of iterations without prompts.
    """
    window = None if steady is None else steady_window_s(served, steady)
    start, end = window or (float(served.arrival_s[served.is_served].min(initial=np.inf)), served.end_s)
    runs = [run.segments for run in served.workers]
    seconds = len(runs) * (end - start)
    if decodes_alone:
        runs = [run[run.prompt_tokens == 0.0] for run in runs]
        seconds = sum(float(_inside(run, start, end).sum()) for run in runs)
    if not end > start or not seconds > 0.0:
        return None
    return _total([_work(worker, run, start, end) for run in runs]).times(1.0 / seconds)


def _inside(segments: Segments, start_s: float, end_s: float) -> FloatArray:
    """Time of each segment between two times."""
    return np.clip(segments.end_s, start_s, end_s) - np.clip(segments.start_s, start_s, end_s)


def _work(worker: Worker, segments: Segments, start_s: float, end_s: float) -> DeviceWork:
    """Work between two times; iterations of a segment are spread evenly over it."""
    seconds = np.maximum(segments.end_s - segments.start_s, np.finfo(float).tiny)
    return segment_work(worker, segments).times(_inside(segments, start_s, end_s) / seconds).sum()


def _total(parts: Sequence[DeviceWork]) -> DeviceWork:
    names = DeviceWork.__dataclass_fields__
    return DeviceWork(**{name: np.asarray(sum(getattr(part, name) for part in parts)) for name in names})
