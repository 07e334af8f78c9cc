"""Values on a lattice of sizes from scattered measurements, by kriging.

The surface f on the lattice is a Gaussian process whose covariance is a product over the axes; positions are
logarithms, in octaves::

    cov(f(x), f(x′)) = Π_a (exp(−|x_a − x′_a|/ℓ_a) + g_a·[x_a = x′_a])

The exponential says that near sizes take near times; g_a is the share of what a single size has of its own (a kernel
chosen, or a tile wasted, at exactly this n), which still is shared along the other axes. Measurements y = A·f + noise,
where A interpolates linearly, have the variance s relative to the surface's. The posterior mean solves ::

    (K⁻¹ + Aᵀ·W·A/s)·f = Aᵀ·W·y/s

by conjugate gradients in the basis of the eigenvectors of K, a Kronecker product: a step costs as much as
multiplying the lattice by one small matrix per axis. W are Huber's weights of the residuals of the pass before, so that
single shapes that ran a badly chosen kernel do not pull the others along.

Source: Krige, J. Chem. Metall. Min. Soc. S. Afr. 52 (1951) 119; Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, ch. 2; Saatçi, Scalable Inference for Structured Gaussian Process Models, 2011, ch. 5 (Kronecker).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.surfaces.grid import FloatArray, Knots, grid_value, interpolation
from meshplan.catalogs.surfaces.time_tables import Points

# Residuals beyond 3 % count linearly: twice what two neighbours of a quiet table differ by.
HUBER_THRESHOLD = 0.03
PASSES = 4
MAX_STEPS = 100
# Preconditioned residual at which the conjugate gradients stop: a thousandth of log(time) corrections of order 1.
_CONVERGED = 1e-3
# Eigenvalues below are rounding; positions that coincide would give zeros.
_LEAST_EIGENVALUE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is assumed of a surface before it is measured, one number per axis where there are several.

    Args:
        lengths: ℓ, octaves over which the surface forgets itself.
        own_shares: g, variance that single positions have of their own.
        noise: s, variance of a measurement over that of the surface.
    """

    lengths: tuple[float, ...]
    own_shares: tuple[float, ...]
    noise: float


def krige(knots: Knots, points: Points, residuals: FloatArray, prior: Prior) -> FloatArray:
    """Posterior mean at the knots, the shape of the lattice.

    Args:
        knots: positions of the lattice, one rising array per axis.
        points: measured positions, one flat array per axis, [n].
        residuals: measured values there, [n].
        prior: see :class:`Prior`.
    """
    shape = tuple(len(positions) for positions in knots)
    corners, weights = interpolation(knots, points)
    # A point on the lattice has one corner that counts.
    used = weights.ravel() > 0
    index, weight = corners.ravel()[used], weights.ravel()[used]
    point = np.broadcast_to(np.arange(len(residuals)), corners.shape).ravel()[used]

    def to_points(values: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(point, values.ravel()[index] * weight, minlength=len(residuals)), dtype=float)

    def to_lattice(values: FloatArray) -> FloatArray:
        summed = np.bincount(index, values[point] * weight, minlength=int(np.prod(shape)))
        return np.asarray(summed, dtype=float).reshape(shape)

    basis = _Basis(knots, prior)
    trust = np.ones(len(residuals))
    for _ in range(PASSES):

        def normal(scaled: FloatArray, trust: FloatArray = trust) -> FloatArray:
            return scaled + basis.back(to_lattice(trust * to_points(basis.surface(scaled)))) / prior.noise

        target = basis.back(to_lattice(trust * residuals)) / prior.noise
        values = basis.surface(_conjugate_gradients(normal, target, 1.0 / (1.0 + basis.variances / prior.noise)))
        rest = np.abs(residuals - grid_value(knots, values, points))
        trust = HUBER_THRESHOLD / np.maximum(rest, HUBER_THRESHOLD)
    return values


class _Basis:
    """Eigenvectors of the prior's covariance: ``surface`` = K^½ of independent numbers h, ``back`` its transpose."""

    def __init__(self, knots: Knots, prior: Prior) -> None:
        self._vectors = []
        self.variances = np.ones(())
        for positions, length, own_share in zip(knots, prior.lengths, prior.own_shares, strict=True):
            distance = np.abs(np.log2(positions)[:, None] - np.log2(positions))
            values, vectors = np.linalg.eigh(np.exp(-distance / length) + own_share * np.eye(len(positions)))
            self._vectors.append(vectors)
            self.variances = np.multiply.outer(self.variances, np.maximum(values, _LEAST_EIGENVALUE))
        self._deviations = np.sqrt(self.variances)

    def surface(self, scaled: FloatArray) -> FloatArray:
        return _along_axes(self._vectors, self._deviations * scaled)

    def back(self, values: FloatArray) -> FloatArray:
        return self._deviations * _along_axes([vectors.T for vectors in self._vectors], values)


def _along_axes(matrices: list[FloatArray], values: FloatArray) -> FloatArray:
    """``values`` multiplied by one matrix per axis. Each product moves its axis to the end: after all, all are back."""
    for matrix in matrices:
        values = np.tensordot(values, matrix, axes=(0, 1))
    return values


def _conjugate_gradients(
    matrix: Callable[[FloatArray], FloatArray], target: FloatArray, preconditioner: FloatArray
) -> FloatArray:
    """Solution of a positive definite system, preconditioned by a diagonal (Hestenes and Stiefel, 1952)."""
    solution = np.zeros_like(target)
    residual = target
    scaled = preconditioner * residual
    direction, size = scaled, float((residual * scaled).sum())
    enough = _CONVERGED**2 * size
    for _ in range(MAX_STEPS):
        if size <= enough:
            break
        product = matrix(direction)
        step = size / float((direction * product).sum())
        solution, residual = solution + step * direction, residual - step * product
        scaled = preconditioner * residual
        before, size = size, float((residual * scaled).sum())
        direction = scaled + (size / before) * direction
    return solution
