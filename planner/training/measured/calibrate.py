"""Fitting the estimator's named constants to measured runs, and saying how well they carry over.

*Notation.* Row i has the measured step y_i and the prediction f_i(θ); θ are the constants of
:class:`~meshplan.catalogs.constants.training.TimeConstants` in log units (efficiencies and overlaps in logit units, so
that they stay inside (0, 1)).

*Objective.* Σ_i w_i ρ(ln f_i(θ) − ln y_i)/σ² + Σ_j ((θ_j − θ⁰_j)/s_j)² with ρ Huber's loss, w_i = 1/√(rows of i's
group) so that near-duplicates do not outvote others, and a prior θ⁰: the literature for the global set, the global set
for a framework on a generation. The prior is what keeps a constant that the rows cannot see where physics put it.

*Method.* Gauss–Newton; the derivatives come from pricing a row under all perturbed constants in one vectorised call.

*Error.* Leave one group out: every group is predicted by constants fitted without it. That error, not the error of the
fit, becomes the interval. The constants of all rows are first moved as far as first order tells (:class:`_Tangent`).
"""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, MemoryConstants, TimeConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.measured.memory_fit import UNMEASURED_SAFE_FACTOR, MemoryFit, calibrate_memory
from meshplan.planner.training.measured.observations import ObservedRun

# name → prior standard deviation, in log (logit for fractions) units: how far a framework may be from the literature.
FITTED: Mapping[str, float] = {
    "gemm_efficiency": 0.6,
    "low_precision_efficiency": 0.2,
    "expert_gemm_efficiency": 0.8,
    "attention_efficiency": 0.6,
    "memory_op_efficiency": 0.6,
    "scale_up_efficiency": 0.6,
    "network_efficiency": 0.6,
    "tensor_parallel_overlap": 0.8,
    "data_parallel_window": 0.8,
    "fully_sharded_overlap": 1.0,
    "expert_parallel_overlap": 1.0,
    "expert_parallel_overlap_inside": 1.0,
    "expert_product_s": 1.0,
    "host_s_per_layer": 0.7,
    "host_s_per_moe_layer": 0.7,
    "graphed_host_share": 0.8,
    "step_overhead_s": 1.0,
    "data_parallel_s_per_rank": 1.0,
}
SPREAD = np.array(list(FITTED.values()))
# Fitted inside (0, 1). The low-precision factor is not: curves of narrow formats pay for quantisation that a training
# step fuses away.
FRACTIONS = frozenset(
    name
    for name in FITTED
    if name.endswith(("efficiency", "overlap", "inside", "window", "share")) and name != "low_precision_efficiency"
)
# Spread of a framework's constants about the global ones, relative to the prior of the global ones. Chosen by nested
# cross-validation (planner/README.md): constants that only mixtures of experts see are held closer, because no set has
# more than a handful of groups with experts.
LOOSE, TIGHT = 2.0, 0.3
EXPERT_CONSTANTS = frozenset(name for name in FITTED if "expert" in name or "moe" in name)
# Host time of a dense layer stands in for whatever else a few large runs lack: left loose, eleven runs of Megatron on
# Hopper made it 8 ms a layer, where eager frameworks were measured at 1 to 3. Held out the two are alike.
HOST = 0.5
LOCAL_SPREAD = SPREAD * np.array(
    [TIGHT if name in EXPERT_CONSTANTS else HOST if name == "host_s_per_layer" else LOOSE for name in FITTED]
)
# How far a user's cluster may be from the catalog's set: as far as the global set from the literature. Three runs each:
# of twelve sets whose framework the start had not seen, 9.0 % mean error on the others (LOCAL_SPREAD 9.6 %, half of
# this 10.6 %); of 33 groups of known sets 3.7 % (3.7 %, 3.8 %; 4.3 % without them).
REFINED_SPREAD = SPREAD
NOISE = 0.05  # run-to-run and version noise of a measured step, relative (repeat_spread of the observations)
HUBER = 2.0  # in units of NOISE
STEP = 1e-3
MAX_ITERATIONS = 12
CONVERGED = 0.01
MAX_MOVE = 1.0
END = 1e-4  # how close to 0 or 1 a fraction may start
LEAST_COST_S = 1e-9  # where a time that is stored as 0 starts
FEWEST_FOR_P90 = 5
# When a group is left out, the constants of all rows are moved as far as first order tells; what moves further than
# FAR, in fit units, is fitted again from there.
TANGENT_ROUNDS = 6
WARM_ITERATIONS = 2
FAR = 0.6
# Half-width where nothing at all could be held out: two frameworks are needed to predict one from the other.
UNJUDGED_P90 = 0.5
UNMEASURED = MemoryConstants(safe_factor=UNMEASURED_SAFE_FACTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A run predicted by constants fitted without its group.

    Args:
        id: of the run.
        group: left out.
        framework: our name.
        architecture: hardware generation.
        strategy: what kind of run, :attr:`ObservedRun.strategy`.
        error: predicted / measured − 1.
        is_moe: the model is a mixture of experts.
    """

    id: str
    group: str
    framework: str
    architecture: str
    strategy: str
    error: float
    is_moe: bool


def _to_unit(name: str, value: float) -> float:
    if name in FRACTIONS:  # 0.99996 is stored as 1: the ends of the range have no logit
        inside = min(max(value, END), 1.0 - END)
        return float(np.log(inside / (1.0 - inside)))
    return float(np.log(max(value, LEAST_COST_S)))


def _from_unit(name: str, theta: FloatArray) -> FloatArray:
    return 1.0 / (1.0 + np.exp(-theta)) if name in FRACTIONS else np.exp(theta)


def theta_of(constants: TimeConstants) -> FloatArray:
    """Constants as a vector in fit units."""
    return np.array([_to_unit(name, float(getattr(constants, name))) for name in FITTED])


def constants_of(theta: FloatArray, unfitted: TimeConstants | None = None) -> TimeConstants:
    """A vector in fit units as constants, rounded to what the fit can tell.

    Args:
        theta: the vector.
        unfitted: where the other constants come from; None for the literature.
    """
    fitted = {name: float(f"{float(_from_unit(name, theta[i])):.4g}") for i, name in enumerate(FITTED)}
    return replace(unfitted or TimeConstants(), **fitted)


class _Row:
    """One run, ready to be priced under many constants at once; those not fitted come from ``unfitted``."""

    def __init__(self, run: ObservedRun, unfitted: TimeConstants | None = None) -> None:
        self.run = run
        self._unfitted = unfitted or TimeConstants()
        self.log_measured = float(np.log(run.measured["iteration_s"]))
        self._batch = candidates_of(run.problem, run.config)
        self._recipe = recipe_named(run.framework).recipe

    def log_predicted(self, thetas: FloatArray) -> FloatArray:
        """Ln f under each row of ``thetas``, [K]."""
        constants = replace(self._unfitted, **{name: _from_unit(name, thetas[:, i]) for i, name in enumerate(FITTED)})
        calibration = Calibration(framework="", architecture="", time=constants, recipe=self._recipe)
        problem = self.run.problem
        step_s = estimate_training(problem.shape, problem.machine, problem.workload, self._batch, calibration).step_s
        return np.log(np.broadcast_to(step_s, (len(thetas),)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tangent:
    """The rows' predictions in first order about one set of constants.

    Args:
        theta: where, [J].
        residual: ln measured − ln predicted there, [n].
        slope: ∂ ln predicted/∂θ, [n, J].
        groups: of the rows.
    """

    theta: FloatArray
    residual: FloatArray
    slope: FloatArray
    groups: tuple[str, ...]

    @classmethod
    def at(cls, theta: FloatArray, rows: Sequence[_Row]) -> _Tangent:
        """Price the rows at ``theta`` and beside it."""
        moved = np.vstack([theta, theta + STEP * np.eye(len(theta))])
        logs = np.array([row.log_predicted(moved) for row in rows])
        measured = np.array([row.log_measured for row in rows])
        return cls(
            theta=theta,
            residual=measured - logs[:, 0],
            slope=(logs[:, 1:] - logs[:, :1]) / STEP,
            groups=tuple(row.run.group for row in rows),
        )

    def without(self, group: str) -> _Tangent:
        """The same without the rows of a group."""
        return self.of([index for index, own in enumerate(self.groups) if own != group])

    def of(self, kept: Sequence[int]) -> _Tangent:
        """The same with some of the rows."""
        groups = tuple(self.groups[index] for index in kept)
        return replace(self, residual=self.residual[kept], slope=self.slope[kept], groups=groups)

    def solved(self, prior: FloatArray, spread: FloatArray, *, rounds: int) -> FloatArray:
        """Minimum of the objective as far as first order tells, Huber's weights taken anew ``rounds`` times."""
        counts = Counter(self.groups)
        weights = np.array([1.0 / np.sqrt(counts[group]) for group in self.groups])
        theta = self.theta
        for _ in range(rounds):
            residual = self.residual - self.slope @ (theta - self.theta)
            weight = weights / np.maximum(1.0, np.abs(residual) / (HUBER * NOISE)) / NOISE**2
            normal = (self.slope * weight[:, None]).T @ self.slope + np.diag(1.0 / spread**2)
            gradient = (self.slope * weight[:, None]).T @ residual - (theta - prior) / spread**2
            theta = theta + np.clip(np.linalg.solve(normal, gradient), -MAX_MOVE, MAX_MOVE)
        return theta


def fit(
    rows: Sequence[_Row],
    prior: FloatArray,
    spread: FloatArray,
    *,
    start: FloatArray | None = None,
    iterations: int = MAX_ITERATIONS,
) -> FloatArray:
    """Most probable constants in fit units; the objective of the module docstring.

    Args:
        rows: measured runs.
        prior: θ⁰.
        spread: s.
        start: where the iteration begins; None for the prior.
        iterations: at most so many.
    """
    theta = (prior if start is None else start).copy()
    for _ in range(iterations):
        moved = _Tangent.at(theta, rows).solved(prior, spread, rounds=1)
        change = np.max(np.abs(moved - theta))
        theta = moved
        if change < CONVERGED:
            break
    return theta


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The result of a calibration.

    Args:
        calibrations: the global set first, then one for each framework on a generation.
        held_out: every run predicted without its group.
        unseen: every run predicted without its whole framework.
        memory: memory constants of the frameworks with measured peaks.
    """

    calibrations: tuple[Calibration, ...]
    held_out: tuple[HeldOut, ...]
    unseen: tuple[HeldOut, ...]
    memory: Mapping[str, MemoryFit]


Key = tuple[str, str]


def _key(run: ObservedRun) -> Key:
    return recipe_named(run.framework).calibrated_as, run.architecture


def calibrate(runs: Iterable[ObservedRun], *, source: str, date: str | None = None) -> Calibrated:
    """Fit all sets and their held-out errors.

    Args:
        runs: measured training runs; those without ``iteration_s`` serve the memory constants only.
        source: what the observations are, stored with every set.
        date: day of the fit, ISO 8601; None for today.
    """
    observed = list(runs)
    rows = [_Row(run) for run in observed if run.measured.get("iteration_s")]
    day = date or datetime.datetime.now(datetime.UTC).date().isoformat()
    literature = theta_of(TimeConstants())
    overall = fit(rows, literature, SPREAD)
    sets: dict[Key, list[_Row]] = defaultdict(list)
    for row in rows:
        sets[_key(row.run)].append(row)
    fitted = {key: fit(members, overall, LOCAL_SPREAD) for key, members in sorted(sets.items())}
    tangent = _Tangent.at(overall, rows)
    held_out = _held_out(rows, sets, fitted, tangent, literature)
    unseen = _unseen(rows, tangent, literature)
    memory = calibrate_memory(observed)

    def made(key: Key, theta: FloatArray, members: Sequence[_Row], own: Sequence[HeldOut]) -> Calibration:
        framework, architecture = key
        constants = memory[framework].constants if framework in memory else UNMEASURED
        return Calibration(
            framework=framework,
            architecture=architecture,
            time=constants_of(theta),
            memory=constants,
            recipe=recipe_named(framework).recipe,
            num_runs=len(members),
            source=source,
            date=day,
            time_error_p90=_p90(own, held_out, unseen, is_moe=False),
            moe_time_error_p90=_p90(own, held_out, unseen, is_moe=True),
        )

    local = [
        made(
            key,
            theta,
            sets[key],
            [item for item in held_out if (item.framework, item.architecture) == key],
        )
        for key, theta in fitted.items()
    ]
    everything = made(("any", "any"), overall, rows, unseen)
    return Calibrated(calibrations=(everything, *local), held_out=tuple(held_out), unseen=tuple(unseen), memory=memory)


def _p90(*samples: Sequence[HeldOut], is_moe: bool) -> float:
    """90th percentile of |error| in the first of the samples that has enough runs of the kind."""
    for sample in samples:
        errors = [abs(item.error) for item in sample if item.is_moe == is_moe]
        if len(errors) >= FEWEST_FOR_P90:
            return round(float(np.quantile(errors, 0.9)), 4)
    return UNJUDGED_P90


def _judge(row: _Row, key: Key, theta: FloatArray) -> HeldOut:
    error = float(np.exp(row.log_predicted(theta[None])[0] - row.log_measured) - 1.0)
    return HeldOut(
        id=row.run.id,
        group=row.run.group,
        framework=key[0],
        architecture=key[1],
        strategy=row.run.strategy,
        error=error,
        is_moe=row.run.problem.shape.moe is not None,
    )


def _held_out(
    rows: Sequence[_Row],
    sets: Mapping[Key, Sequence[_Row]],
    fitted: Mapping[Key, FloatArray],
    everything: _Tangent,
    literature: FloatArray,
) -> list[HeldOut]:
    """Each group predicted by a global set and a local set that were both fitted without it."""
    overall = everything.theta
    found = []
    for key, members in sets.items():
        whole = _Tangent.at(fitted[key], members)
        for group in sorted({row.run.group for row in members}):
            without = everything.without(group).solved(literature, SPREAD, rounds=TANGENT_ROUNDS)
            if np.max(np.abs(without - overall)) > FAR:
                kept = [row for row in rows if row.run.group != group]
                without = fit(kept, literature, SPREAD, start=overall, iterations=WARM_ITERATIONS)
            others = [row for row in members if row.run.group != group]
            theta = without
            if others:
                start = whole.without(group).solved(without, LOCAL_SPREAD, rounds=TANGENT_ROUNDS)
                theta = fit(others, without, LOCAL_SPREAD, start=start, iterations=WARM_ITERATIONS)
            found += [_judge(row, key, theta) for row in members if row.run.group == group]
    return found


def _unseen(rows: Sequence[_Row], everything: _Tangent, literature: FloatArray) -> list[HeldOut]:
    """Each framework predicted by the global set of all the others."""
    found = []
    frameworks = [_key(row.run)[0] for row in rows]
    for framework in sorted(set(frameworks)):
        kept = [index for index, own in enumerate(frameworks) if own != framework]
        theta = literature
        if kept:
            start = everything.of(kept).solved(literature, SPREAD, rounds=TANGENT_ROUNDS)
            theta = fit([rows[index] for index in kept], literature, SPREAD, start=start, iterations=WARM_ITERATIONS)
        found += [_judge(row, _key(row.run), theta) for row in rows if _key(row.run)[0] == framework]
    return found


def refine(
    runs: Iterable[ObservedRun],
    shipped: Callable[[str, str], Calibration],
    *,
    source: str,
    date: str | None = None,
) -> Calibrated:
    """Adapt the catalog's constants to a user's own runs, however few.

    Every set starts from the one in the catalog, which is also the prior, so three runs move what they can see and
    leave the rest. Held out: every run in turn.

    Args:
        runs: measured training runs of the user.
        shipped: (framework, architecture) → the catalog's set.
        source: what the runs are.
        date: day of the fit, ISO 8601; None for today.
    """
    observed = list(runs)
    day = date or datetime.datetime.now(datetime.UTC).date().isoformat()
    sets: dict[Key, list[_Row]] = defaultdict(list)
    for run in observed:
        if run.measured.get("iteration_s"):
            key = _key(run)
            sets[key].append(_Row(run, shipped(*key).time))
    memory = calibrate_memory(observed)
    made, held_out = [], []
    for key, members in sorted(sets.items()):
        prior = shipped(*key)
        start = theta_of(prior.time)
        found = []
        for row in members:
            others = [other for other in members if other is not row]
            found.append(_judge(row, key, fit(others, start, REFINED_SPREAD) if others else start))
        held_out += found
        made.append(
            replace(
                prior,
                framework=key[0],
                architecture=key[1],
                time=constants_of(fit(members, start, REFINED_SPREAD), prior.time),
                memory=memory[key[0]].constants if key[0] in memory else prior.memory,
                time_error_p90=_refined_p90(found, prior, is_moe=False),
                moe_time_error_p90=_refined_p90(found, prior, is_moe=True),
                num_runs=len(members),
                source=f"{source}; starting from: {prior.source}",
                date=day,
            )
        )
    return Calibrated(calibrations=tuple(made), held_out=tuple(held_out), unseen=(), memory=memory)


def _refined_p90(found: Sequence[HeldOut], prior: Calibration, *, is_moe: bool) -> float:
    """The user's own held-out error where there are enough runs; else never narrower than the catalog's."""
    errors = [abs(item.error) for item in found if item.is_moe == is_moe]
    own = round(float(np.quantile(errors, 0.9)), 4) if errors else 0.0
    return own if len(errors) >= FEWEST_FOR_P90 else max(own, prior.error_p90(is_moe=is_moe))
