"""Measured peaks in parts: a linear function of the memory constants, and how much more than expected may be needed.

*Parts.* Bytes of a rank are linear in the constants: states + extra_bytes_per_parameter · owned parameters +
activation_factor · activations + logits_bytes_per_entry · logits + fixed_bytes (+ communication_bytes with several
devices). The peak is the largest of these functions over the stages and the moments of a step.

*Safe bound.* With S the expected bytes of weights, gradients and optimizer states of the fullest rank, A those of
activations and logits, F what is fixed and M the measured peak, it is F + f_s·S + f_a·A with 1 ≤ f_s ≤ f_a: parameters
are counted, what is kept for the backward pass is estimated, so that a run with few states cannot put on them what its
activations lack. The factors are found by quantile regression (Koenker and Bassett, Econometrica 46 (1978) 33) of the
bound relative to the peak: they minimise

    Σ_i w_i/M_i · [max(0, bound_i − M_i) + λ·max(0, M_i − bound_i)],

which leaves a share 1/(1 + λ) of the weight above the bound; with λ large none.

*Method.* The objective is convex. For a given f_a the best f_s is a weighted quantile of (M − F − f_a·A)/S, and f_a is
found by ternary search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, MemoryConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.memory import Components, MemoryModel
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.measured.memory.reported import NO_RESERVE, Reserve, reserve_of
from meshplan.planner.training.measured.observations import ObservedRun

# constant → (prior mean, prior standard deviation), of the literature. A process takes 0.5 GB of context, a workspace
# of the matrix library and what the allocator keeps; NCCL's buffers grow with its communicators.
PRIOR: Mapping[str, tuple[float, float]] = {
    "fixed_bytes": (2.0e9, 1.0e9),
    "communication_bytes": (2.0e9, 1.0e9),
    "activation_factor": (1.0, 0.15),
    "logits_bytes_per_entry": (12.0, 3.0),
    "extra_bytes_per_parameter": (0.0, 5.0),
}
LITERATURE = np.array([mean for mean, _ in PRIOR.values()])
# The same where the peak is that of allocated tensors: no device context, no communication buffers, no cache.
ALLOCATED: Mapping[str, tuple[float, float]] = {"fixed_bytes": (0.5e9, 0.5e9), "communication_bytes": (0.0, 0.1e9)}
# Constants of what each step allocates anew.
WORK = ("activation_factor", "logits_bytes_per_entry")
SAFE_FIXED_BYTES = 0.3e9
MOST = 4.0  # a factor beyond this says that the run is not the one that was priced
ROUNDS = 40
# Cost of a byte above the bound, in bytes that the bound is too high: none of the own peaks may be above it, and of
# many own peaks 2 % of the weight, of frameworks of the same layout 1 %.
NONE_ABOVE, TWO_PERCENT_ABOVE, ONE_PERCENT_ABOVE = 1e4, 49.0, 99.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Bytes of one stage at one moment.

    Args:
        slope: per unit of each constant of :data:`PRIOR`, [J].
        states: weights, gradients and optimizer states under extra_bytes_per_parameter 0.
    """

    slope: FloatArray
    states: float


class Peak:
    """One measured peak, or usable memory as its upper limit, with the model's coefficients."""

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        peak = run.measured.get("peak_memory_bytes")
        self.is_limit = not peak
        self.measured = float(peak or run.problem.limits.memory_bytes)
        rows = _rows(run)
        self._slopes = np.stack([row.slope for row in rows])
        self._bases = np.array([row.states for row in rows])
        self._work = np.array([name in WORK for name in PRIOR])
        self._reserve = reserve_of(run)

    def fullest(self, theta: FloatArray) -> int:
        """Index of the stage and moment with the most bytes."""
        return int(np.argmax(self._slopes @ theta + self._bases))

    def linear(self, theta: FloatArray) -> tuple[FloatArray, float]:
        """Coefficients and constant part of what is reported of the fullest stage and moment under ``theta``.

        Where device memory cuts the reserve, that is left aside.
        """
        index = self.fullest(theta)
        beside = 0.0 if self.is_limit else self._reserve.typical
        return self._slopes[index] * (1.0 + beside * self._work), float(self._bases[index])

    def needed_bytes(self, theta: FloatArray) -> float:
        """Expected bytes of the fullest rank."""
        return float(np.max(self._slopes @ theta + self._bases))

    def typical_bytes(self, theta: FloatArray) -> float:
        """What is expected to be reported of the fullest rank."""
        work = float((self._slopes[self.fullest(theta)] * theta)[self._work].sum())
        return self._reserve.reported_bytes(self.needed_bytes(theta), work)

    def log_excess(self, theta: FloatArray) -> float:
        """ln(measured/expected)."""
        return float(np.log(self.measured / self.typical_bytes(theta)))

    def counts(self, theta: FloatArray) -> bool:
        """A limit counts only where the model is beyond it."""
        return not self.is_limit or self.needed_bytes(theta) > self.measured

    def parts(self, theta: FloatArray, weight: float = 1.0) -> PeakParts:
        """The expected parts of the fullest rank."""
        index = self.fullest(theta)
        values = dict(zip(PRIOR, self._slopes[index] * theta, strict=True))
        return PeakParts(
            states=float(self._bases[index] + values["extra_bytes_per_parameter"]),
            work=float(sum(values[name] for name in WORK)),
            fixed=float(values["fixed_bytes"] + values["communication_bytes"]) + SAFE_FIXED_BYTES,
            measured=self.measured,
            reserve=self._reserve,
            weight=weight,
        )


def _rows(run: ObservedRun) -> list[_Row]:
    """Every stage at every moment."""
    plain = _moments(run, MemoryConstants(fixed_bytes=1.0, logits_bytes_per_entry=1.0))
    with_extra = _moments(
        run, MemoryConstants(fixed_bytes=1.0, logits_bytes_per_entry=1.0, extra_bytes_per_parameter=1.0)
    )
    several = float(run.config.world_size > 1)
    rows = []
    for one, extra in zip(plain, with_extra, strict=True):
        held, owned = ({name: float(value[0]) for name, value in each.items()} for each in (one, extra))
        states = held["weights"] + held["gradients"] + held["optimizer"]
        slope = {
            "fixed_bytes": 1.0,
            "communication_bytes": several,
            "activation_factor": held["activations"],
            "logits_bytes_per_entry": held["logits"],
            "extra_bytes_per_parameter": owned["optimizer"] - held["optimizer"],
        }
        rows.append(_Row(slope=np.array([slope[name] for name in PRIOR]), states=states))
    return rows


def _moments(run: ObservedRun, constants: MemoryConstants) -> list[Components]:
    recipe = recipe_named(run.framework).recipe
    model = MemoryModel(
        shape=run.problem.shape,
        workload=run.problem.workload,
        candidates=candidates_of(run.problem, run.config),
        calibration=replace(Calibration(framework=run.framework, architecture="any", recipe=recipe), memory=constants),
    )
    return [moment for stage in model.candidates.split.classes for moment in model.moments(stage)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakParts:
    """The expected parts of one measured peak, bytes.

    Args:
        states: weights, gradients and optimizer states, S.
        work: activations and logits, A.
        fixed: what no factor scales, F.
        measured: the peak, M.
        reserve: what a reported peak has beside the activations and logits.
        weight: w.
    """

    states: float
    work: float
    fixed: float
    measured: float
    reserve: Reserve = NO_RESERVE
    weight: float = 1.0

    @property
    def reported_work(self) -> float:
        """Activations and logits with the most that lies beside them."""
        return self.work * (1.0 + self.reserve.most)

    def bound(self, factors: SafeFactors) -> float:
        """The safe bound of what is reported under the factors."""
        work = factors.work * self.work
        return self.reserve.reported_bytes(self.fixed + factors.states * self.states + work, work, most=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeFactors:
    """f_s and f_a."""

    states: float
    work: float

    def widened(self, margin: float) -> SafeFactors:
        """Both larger by a margin."""
        return SafeFactors(states=self.states + margin, work=self.work + margin)


def safe_factors(peaks: Sequence[PeakParts], above_cost: float = NONE_ABOVE) -> SafeFactors:
    """The least factors that bound the peaks.

    Args:
        peaks: measured peaks.
        above_cost: λ.

    >>> one = PeakParts(states=10.0, work=5.0, fixed=1.0, measured=18.0)
    >>> other = PeakParts(states=10.0, work=0.0, fixed=1.0, measured=12.0)
    >>> found = safe_factors([one, other])
    >>> round(found.states, 2), round(found.work, 2)
    (1.1, 1.2)
    """
    if not peaks:
        return SafeFactors(states=1.0, work=1.0)
    states, work, fixed, measured, weight = np.array(
        [[one.states, one.reported_work, one.fixed, one.measured, one.weight] for one in peaks], dtype=np.float64
    ).T
    needed, scale = measured - fixed, weight / measured

    def best_states(of_work: float) -> tuple[float, float]:
        left = needed - of_work * work
        factor = min(max(_quantile(left, states, scale, above_cost), 1.0), of_work)
        over = states * factor - left
        return factor, float(np.sum(scale * np.where(over > 0.0, over, -above_cost * over)))

    low, high = 1.0, MOST
    for _ in range(ROUNDS):
        third = (high - low) / 3.0
        if best_states(low + third)[1] <= best_states(high - third)[1]:
            high -= third
        else:
            low += third
    return SafeFactors(states=best_states(high)[0], work=high)


def _quantile(left: FloatArray, states: FloatArray, scale: FloatArray, above_cost: float) -> float:
    """The factor of the states that leaves a share 1/(1 + λ) of the weighted bytes above the bound."""
    points = left / np.maximum(states, 1.0)
    order = np.argsort(points)
    pull = (scale * states)[order]
    below = np.cumsum(pull)
    reached = below * (1.0 + above_cost) >= above_cost * below[-1]
    return float(points[order][int(np.argmax(reached))])
