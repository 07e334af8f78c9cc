"""The most probable constants under a prior, for predictions that are nearly linear in them.

*Objective.* Constants θ predict measurements. About a point θ₀ row i has the residual r_i = measured − predicted, the
slope S_i = ∂ predicted/∂θ, the noise σ_i and the weight w_i; the prior has the mean μ_j and the standard deviation s_j:

    Σ_i w_i ρ((r_i − S_i·(θ − θ₀))/σ_i) + Σ_j ((θ_j − μ_j)/s_j)²

The prior keeps a constant that no row depends on where it was expected. Where constants are expected to move together
by u besides, its last term is (θ − μ)ᵀ(diag(s²) + u·uᵀ)⁻¹(θ − μ). ρ is Huber's loss, optionally followed by
Cauchy's ln(1 + x²), which ignores rows that no constants explain.

*Method.* Iteratively reweighted least squares within one linearisation (:func:`most_probable`); linearising again where
that led is a Gauss–Newton iteration (:func:`gauss_newton`). Where the constants of a set of rows are sums of parts that
other sets share, the normal equations are added up set by set (:func:`most_probable_parts`).

Sources: Huber, Robust Estimation of a Location Parameter, Ann. Math. Stat. 35 (1964) 73; Holland and Welsch, Robust
Regression Using Iteratively Reweighted Least-Squares, Comm. Stat. A 6 (1977) 813.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

Owner = TypeVar("Owner")
NEAREST_TO_END = 1e-4  # how close to 0 or 1 a fraction may start: the ends of the range have no logit
LEAST = 1e-9  # where a constant that is stored as 0 starts, in its own unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Named constants as a vector θ: logarithms, and logits of fractions, so that no fit leaves their range.

    Args:
        names: in the order of the vector.
        fractions: names of the constants that stay inside (0, 1).
    """

    names: tuple[str, ...]
    fractions: frozenset[str] = frozenset()

    def vector(self, constants: object) -> FloatArray:
        """θ of an object that has the constants as attributes."""
        return np.array([self._to_unit(name, float(getattr(constants, name))) for name in self.names])

    def values(self, theta: FloatArray) -> dict[str, FloatArray]:
        """Name → value in its own unit; the last axis of ``theta`` runs over the constants."""
        return {name: self._from_unit(name, theta[..., index]) for index, name in enumerate(self.names)}

    def replaced(self, constants: Owner, theta: FloatArray) -> Owner:
        """The object with the constants of ``theta``, to four digits: more than a fit can tell."""
        fitted = {name: float(f"{float(value):.4g}") for name, value in self.values(theta).items()}
        return cast("Owner", replace(cast("Any", constants), **fitted))

    def _to_unit(self, name: str, value: float) -> float:
        if name in self.fractions:
            inside = min(max(value, NEAREST_TO_END), 1.0 - NEAREST_TO_END)
            return float(np.log(inside / (1.0 - inside)))
        return float(np.log(max(value, LEAST)))

    def _from_unit(self, name: str, theta: FloatArray) -> FloatArray:
        return 1.0 / (1.0 + np.exp(-theta)) if name in self.fractions else np.exp(theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Where the constants are expected.

    Args:
        mean: μ, [J].
        spread: standard deviations s, [J].
        together: what all constants move by at once, u, in standard deviations, [J]; None: each moves by itself.
    """

    mean: FloatArray
    spread: FloatArray
    together: FloatArray | None = None

    @property
    def precision(self) -> FloatArray:
        """Inverse of the covariance diag(s²) + u·uᵀ, [J, J], by the formula of Sherman and Morrison."""
        alone = np.diag(1.0 / self.spread**2)
        if self.together is None:
            return alone
        pull = self.together / self.spread**2
        return np.asarray(alone - np.outer(pull, pull) / (1.0 + float(pull @ self.together)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Robust loss of a residual in units of its noise.

    Args:
        huber: residuals beyond count linearly; infinity for plain least squares.
        cauchy: scale of Cauchy's loss, which replaces Huber's in the second half of the reweightings; None for never.
    """

    huber: float
    cauchy: float | None = None

    def divisor(self, size: FloatArray, *, is_second_half: bool) -> FloatArray:
        """What the weight of a residual is divided by, at least 1.

        >>> Loss(huber=2.0).divisor(np.array([1.0, 4.0]), is_second_half=False).tolist()
        [1.0, 2.0]
        """
        if self.cauchy is not None and is_second_half:
            return 1.0 + (size / self.cauchy) ** 2
        return np.maximum(1.0, size / self.huber)


LEAST_SQUARES = Loss(huber=np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Rows that are linear in the constants about a point.

    Args:
        at: the point θ₀, [J].
        residual: measured − predicted there, [n].
        slope: ∂ predicted/∂θ, [n, J].
        noise: σ, [n].
        weight: w, [n].
    """

    at: FloatArray
    residual: FloatArray
    slope: FloatArray
    noise: FloatArray
    weight: FloatArray

    def only(self, rows: Sequence[int]) -> Linear:
        """The rows with these indices."""
        by_row = ("residual", "slope", "noise", "weight")
        return replace(self, **{name: getattr(self, name)[list(rows)] for name in by_row})

    def given(self, known: BoolArray, theta: FloatArray) -> Linear:
        """The rows with some constants known: these leave the slopes and are counted in the residuals.

        Args:
            known: [n, J] which.
            theta: [n, J] their values; others are not read.
        """
        silent = np.where(known, self.slope, 0.0)
        by_known = np.sum(silent * (np.where(known, theta, self.at) - self.at), axis=1)
        return replace(self, residual=self.residual - by_known, slope=self.slope - silent)


def most_probable(
    linear: Linear,
    prior: Prior,
    loss: Loss,
    *,
    rounds: int,
    start: FloatArray | None = None,
    max_step: float = np.inf,
) -> FloatArray:
    """What the rounds lead to: the minimum of the objective in their limit, and near it after a few, [J].

    Args:
        linear: the measurements.
        prior: of the constants.
        loss: ρ.
        rounds: how often the weights are taken anew.
        start: where the first weights are taken; None for the point of linearisation.
        max_step: by how much one round may change a constant.
    """
    theta, precision = linear.at if start is None else start, prior.precision
    for count in range(rounds):
        residual = linear.residual - linear.slope @ (theta - linear.at)
        divisor = loss.divisor(np.abs(residual) / linear.noise, is_second_half=count >= rounds // 2)
        weighted = linear.slope * (linear.weight / divisor / linear.noise**2)[:, None]
        normal = weighted.T @ linear.slope + precision
        gradient = weighted.T @ residual - precision @ (theta - prior.mean)
        theta = theta + np.clip(np.linalg.solve(normal, gradient), -max_step, max_step)
    return theta


def most_probable_non_negative(linear: Linear, prior: Prior) -> FloatArray:
    """The minimum of the objective by least squares among constants of which none is below 0, [J].

    Constants that the rows would have below 0 are 0, and the others are then solved for without them: to cut a solution
    off at 0 moves what is predicted and leaves it there. Which constants are 0 is tried out, 2^J small systems.
    """
    scaled = linear.slope * (np.sqrt(linear.weight) / linear.noise)[:, None]
    wanted = (linear.residual + linear.slope @ linear.at) * np.sqrt(linear.weight) / linear.noise
    rows = np.vstack([scaled, np.diag(1.0 / prior.spread)])
    wanted = np.append(wanted, prior.mean / prior.spread)
    best, least = np.zeros_like(prior.mean), float(wanted @ wanted)
    for free in itertools.product((False, True), repeat=len(prior.mean)):
        used = rows[:, np.array(free)] * prior.spread[np.array(free)]
        found = np.linalg.solve(used.T @ used, used.T @ wanted)
        error = float(np.sum((wanted - used @ found) ** 2))
        if error < least and (found >= 0.0).all():
            best, least = np.zeros_like(prior.mean), error
            best[np.array(free)] = found * prior.spread[np.array(free)]
    return best


def most_probable_parts(
    linear: Linear, prior: Prior, loss: Loss, *, set_of: IntArray, has: BoolArray, rounds: int
) -> FloatArray:
    """The minimum of the objective over parts whose sums are the constants of sets of rows, [P, J].

    The constants of set k are θ_k = Σ_p x_kp φ_p, x_kp being 1 where it has part p and 0 elsewhere. That is
    :func:`most_probable` for the P·J constants φ with the slopes x_kp·S_i, but these are never written out: as all rows
    of a set have the same x, the normal matrix is

        Σ_k x_k x_kᵀ ⊗ (Σ_{i ∈ k} w_i S_iᵀ S_i) + diag(1/s²),

    which takes n·J² + K·P²·J² multiplications instead of n·P²·J².

    Args:
        linear: the measurements, linearised at θ = 0; slopes [n, J].
        prior: of the parts, mean and spread [P, J].
        loss: ρ.
        set_of: the set of each row, [n], from 0 to K − 1.
        has: x, [K, P].
        rounds: how often the weights are taken anew; the first are those at the prior's mean.
    """
    (num_sets, num_parts), size = has.shape, prior.mean.shape[1]
    members = [np.flatnonzero(set_of == number) for number in range(num_sets)]
    belongs = has.astype(float)
    pairs = (belongs[:, :, None] * belongs[:, None, :]).reshape(num_sets, num_parts**2)
    parts = prior.mean
    for count in range(rounds):
        theta = belongs @ parts
        residual = linear.residual - np.einsum("ij,ij->i", linear.slope, theta[set_of])
        divisor = loss.divisor(np.abs(residual) / linear.noise, is_second_half=count >= rounds // 2)
        weighted = linear.slope * (linear.weight / divisor / linear.noise**2)[:, None]
        of_set = np.array([weighted[rows].T @ linear.slope[rows] for rows in members]).reshape(num_sets, size**2)
        pull = np.array([weighted[rows].T @ residual[rows] for rows in members]).reshape(num_sets, size)
        blocks = (pairs.T @ of_set).reshape(num_parts, num_parts, size, size)
        normal = blocks.transpose(0, 2, 1, 3).reshape(num_parts * size, -1) + np.diag(prior.spread.ravel() ** -2.0)
        gradient = belongs.T @ pull - (parts - prior.mean) / prior.spread**2
        parts = parts + np.linalg.solve(normal, gradient.ravel()).reshape(num_parts, size)
    return parts


def gauss_newton(
    step: Callable[[FloatArray], FloatArray], start: FloatArray, *, iterations: int, converged: float = 0.0
) -> FloatArray:
    """Linearise and solve until the constants stay where they are.

    Args:
        step: θ → the solution of the problem linearised there.
        start: the first θ.
        iterations: at most so many.
        converged: an iteration that changes no constant by as much is the last.
    """
    theta = start
    for _ in range(iterations):
        moved = step(theta)
        change = np.max(np.abs(moved - theta))
        theta = moved
        if change < converged:
            break
    return theta


def limited(old: FloatArray, new: FloatArray, most: float) -> FloatArray:
    """``new``, no constant farther than ``most`` from ``old``."""
    return old + np.clip(new - old, -most, most)
