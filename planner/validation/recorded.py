"""What was recorded of stored plans (``meshplan plans record``), as runs that constants are adapted to.

A recording is data from outside. It enters the constants of its cluster only where it can be what the plan ran as:

- *refused* when it is recorded: no positive finite number, or :data:`ABSURD` times off its prediction: another unit;
- *left out*, with the reason, when constants are adapted: figures that contradict each other or physics (another model,
  batch or number of devices), and outliers. An outlier is farther off the constants *without own runs* than
  :data:`OUTLIER_WIDTHS` half-widths of their interval or a factor of :data:`OUTLIER`, whichever is less. Where the
  cluster really is so, its owner says so by name (``calibrate --recorded --accept PLAN``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.planner.core.plan import Interval

# Measured over predicted, either way, beyond which a figure is in another unit: milliseconds for seconds, GB for bytes.
ABSURD = 1000.0
# ... of a run that constants are fitted to at once: the prediction may be off by ten itself, the other way.
UNBELIEVED = ABSURD / 10.0
# A half-width holds 90 % of the runs of unknown clusters: three are five standard deviations of a normal error.
OUTLIER_WIDTHS = 3.0
# Where intervals are wide themselves: no source of the evidence has a median beyond a factor of 2.
OUTLIER = 5.0
# Figures of one run that follow from its step time agree better than this, however they were averaged.
CONTRADICTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording of a stored plan.

    Args:
        plan_id: which plan.
        number: among the recordings of the plan, from 1.
        date: day, ISO 8601.
        figures: metric → value, SI units.
    """

    plan_id: str
    number: int
    date: str
    figures: Mapping[str, float]

    @property
    def name(self) -> str:
        """Unique, short."""
        return f"{self.plan_id}#{self.number}"

    @property
    def text(self) -> str:
        """For provenance: plan, day, figures."""
        figures = ", ".join(f"{metric} {value:.6g}" for metric, value in sorted(self.figures.items()))
        return f"plan {self.plan_id} {self.date}: {figures}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A recording as a run of its kind.

    Args:
        recording: where it comes from.
        key: framework or engine, and hardware generation: which constants it says something about.
        cluster: identity of the cluster (:func:`meshplan.planner.cluster.identity.cluster_identity`).
        run: the run, as the kind fits it.
        start: the kind's constants without own runs of the cluster.
        off: metric → measured over predicted with these, and the half-width of their interval, in the logarithm.
        unused: figures that no constant is fitted to.
    """

    recording: Recording
    key: tuple[str, str]
    cluster: str
    run: Any
    start: Any
    off: Mapping[str, tuple[float, float]]
    unused: tuple[str, ...] = ()


def absurd(value: float, predicted: Interval) -> str:
    """Why a figure cannot be the predicted one in its unit; empty where it can.

    >>> absurd(1e9, Interval(value=2.0, low=1.5, high=2.5))
    '1e+09 is 500,000,000 times the predicted 2: another unit, or another plan'
    """
    return _far(value, predicted, ABSURD)


def in_another_unit(value: float, predicted: Interval) -> str:
    """Why constants are not fitted to a figure of a user's own files; empty where they are."""
    return _far(value, predicted, UNBELIEVED)


def _far(value: float, predicted: Interval, most: float) -> str:
    if predicted.value <= 0.0 or 1.0 / most <= value / predicted.value <= most:
        return ""
    ratio = value / predicted.value
    times = f"{ratio:,.0f} times" if ratio > 1.0 else f"1/{1.0 / ratio:,.0f} of"
    return f"{value:.4g} is {times} the predicted {predicted.value:.4g}: another unit, or another plan"


def outlier(run: RecordedRun) -> str:
    """Why a run is too far off to be believed without its owner's word; empty where it is not."""
    for metric, (ratio, width) in run.off.items():
        most = min(OUTLIER_WIDTHS * width, math.log(OUTLIER))
        if abs(math.log(ratio)) > most:
            return (
                f"outlier: {metric} is {ratio:.3g} times what this cluster is expected to take; 1/{math.exp(most):.2g} "
                f"to {math.exp(most):.2g} is believed. If it is right: meshplan calibrate --recorded --accept "
                f"{run.recording.plan_id}"
            )
    return ""


def contradiction(implied: Mapping[str, float]) -> str:
    """Why figures cannot be of one run of the plan; empty where they can.

    Args:
        implied: metric → what the step would take by it, s.
    """
    if not implied:
        return ""
    low, high = min(implied, key=lambda name: implied[name]), max(implied, key=lambda name: implied[name])
    if implied[high] <= implied[low] * (1.0 + CONTRADICTION):
        return ""
    return (
        f"{low} means a step of {implied[low]:.4g} s and {high} one of {implied[high]:.4g} s in this plan: another "
        "model, batch or number of devices"
    )
