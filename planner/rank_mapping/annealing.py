"""Simulated annealing of several solutions at once, whatever they are: rank mappings here, placements in training.

*Chains* are K solutions side by side, so that one pass of NumPy serves all of them. Each has a smooth energy that moves
are judged by, and the objective that is wanted. The temperature falls geometrically,

    T(t) = T₀ · (T_end / T₀)^(t / steps),

and every chain's best objective is remembered. Energies replace a maximum by a p-norm (Σ xᵖ)^(1/p), which also falls
when the second largest value does, so that a search can walk where the maximum itself is flat.

Each move decides on acceptance: :func:`heat_bath` draws from a whole neighbourhood, :func:`metropolis` accepts or
rejects one proposal. Work is counted in steps, never in seconds, so that one seed gives one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.core.budget import Budget

CLOCK_CHECK_STEPS = 32
TINY = 1e-300  # keeps logarithms finite, and differences of rounded sums positive before a root is taken


class Chains(Protocol):
    """K solutions that are annealed together."""

    energy_s: FloatArray
    objective_s: FloatArray

    @property
    def solutions(self) -> tuple[IntArray, ...]:
        """Arrays [K, …] that make up the solutions."""

    @property
    def temperature_factor(self) -> FloatArray:
        """[K] by which each chain's temperature differs from the schedule's."""

    def prepare(self, step: int, best: Best) -> None:
        """Before each step: restart bad chains, drop some, sharpen the energy."""


ChainsT = TypeVar("ChainsT", bound=Chains)


class Best:
    """The best solution that each chain has seen; of chains that were dropped, those among the K best.

    [K] objectives, and arrays [K, …] of solutions.
    """

    def __init__(self, chains: Chains) -> None:
        self.objective_s = chains.objective_s.copy()
        self.solutions = tuple(part.copy() for part in chains.solutions)

    def see(self, chains: Chains) -> None:
        """Remember what is better than before."""
        if len(chains.objective_s) < len(self.objective_s):
            kept = np.argsort(self.objective_s, kind="stable")[: len(chains.objective_s)]
            self.objective_s = self.objective_s[kept]
            self.solutions = tuple(part[kept] for part in self.solutions)
        better = np.flatnonzero(chains.objective_s < self.objective_s)
        if better.size:
            self.objective_s[better] = chains.objective_s[better]
            for best, now in zip(self.solutions, chains.solutions, strict=True):
                best[better] = now[better]


def anneal(
    chains: ChainsT,
    moves: Iterable[Callable[[ChainsT, FloatArray, np.random.Generator], None]],
    rng: np.random.Generator,
    *,
    steps: int,
    start_s: float,
    ratio: float,
    budget: Budget | None = None,
) -> Best:
    """The best solution of every chain.

    Args:
        chains: where to start; changed in place.
        moves: one for each step. Each changes chains at temperatures [K], or leaves them.
        rng: for the moves.
        steps: moves of every chain.
        start_s: first temperature, in units of the energy.
        ratio: last temperature / first temperature.
        budget: once it is spent the search stops; None for the whole work.
    """
    best = Best(chains)
    for step, move in zip(range(steps), moves, strict=False):
        if budget is not None and step % CLOCK_CHECK_STEPS == 0 and budget.stopped:
            break
        chains.prepare(step, best)
        move(chains, start_s * ratio ** (step / steps) * chains.temperature_factor, rng)
        best.see(chains)
    return best


def heat_bath(
    staying_s: FloatArray, energies_s: FloatArray, temperature_s: FloatArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Chains that move, and the candidate that each of them takes with probability ∝ exp(−E/T).

    The least of E + T·ln(e), e exponentially distributed, is such a draw.

    Args:
        staying_s: [K] energies of the chains as they are.
        energies_s: [K, M] of the candidates.
        temperature_s: [K].
        rng: for the draw.
    """
    exponential = rng.standard_exponential((len(staying_s), energies_s.shape[1] + 1))
    noise_s = temperature_s[:, None] * np.log(np.maximum(exponential, TINY))
    drawn = energies_s + noise_s[:, 1:]
    taken = drawn.argmin(axis=1)
    chains = np.flatnonzero(drawn.min(axis=1) < staying_s + noise_s[:, 0])
    return chains, taken[chains]


def metropolis(
    staying_s: FloatArray, proposed_s: FloatArray, temperature_s: FloatArray, rng: np.random.Generator
) -> BoolArray:
    """[K] whether each chain accepts its one proposal: with probability min(1, exp(−(E′ − E)/T))."""
    return np.asarray(proposed_s <= staying_s + temperature_s * rng.exponential(size=len(staying_s)))


def raised(values: FloatArray, doublings: int) -> FloatArray:
    """Each value to the power of 2^doublings."""
    for _ in range(doublings):
        values = values * values
    return values


def rooted(values: FloatArray, doublings: int) -> FloatArray:
    """The 2^doublings-th root of each value."""
    for _ in range(doublings):
        values = np.sqrt(values)
    return values
