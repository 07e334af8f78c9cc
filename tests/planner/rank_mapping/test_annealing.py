"""The annealer by itself: temperatures, acceptance, and the best that each chain has seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.annealing import Best, anneal, metropolis
from meshplan.planner.rank_mapping.search import single_linkage_order


class Walkers:
    """Chains on the whole numbers, with |x − 7| as their energy; each move goes one to the right."""

    def __init__(self, places: list[int]) -> None:
        self.places = np.array(places)
        self.temperature_factor = np.ones(len(places))
        self.prepared: list[int] = []
        self.temperatures: list[float] = []

    @property
    def objective_s(self) -> FloatArray:
        return np.abs(self.places - 7.0)

    energy_s = objective_s

    @property
    def solutions(self) -> tuple[IntArray, ...]:
        return (self.places,)

    def prepare(self, step: int, best: Best) -> None:
        self.prepared.append(step)
        if step == 3:
            self.places = self.places[:1]
            self.temperature_factor = np.ones(1)


def right(chains: Walkers, temperature_s: FloatArray, rng: np.random.Generator) -> None:
    chains.places = chains.places + 1
    chains.temperatures.append(float(temperature_s[0]))


def test_cooling_is_geometric_and_the_best_survives_worse_steps_and_dropped_chains() -> None:
    chains: Any = Walkers([6, 0, 5])
    best = anneal(chains, [right] * 9, np.random.default_rng(0), steps=6, start_s=8.0, ratio=1 / 64)
    assert chains.prepared == list(range(6))
    assert best.objective_s.tolist() == [0.0]
    assert best.solutions[0].tolist() == [7]
    assert chains.places.tolist() == [12]
    assert chains.temperatures == pytest.approx([8.0, 4.0, 2.0, 1.0, 0.5, 0.25])


def test_metropolis_accepts_by_the_boltzmann_factor() -> None:
    """20,000 proposals; four standard deviations of a share are 0.014."""
    draws, rng = 20_000, np.random.default_rng(0)
    accepted = metropolis(np.full(draws, 1.0), np.full(draws, 1.4), np.full(draws, 0.5), rng)
    assert accepted.mean() == pytest.approx(np.exp(-0.4 / 0.5), abs=0.014)
    assert metropolis(np.ones(9), np.ones(9), np.zeros(9), rng).all()


def test_single_linkage_keeps_islands_together() -> None:
    island = np.array([0, 1, 0, 1, 2, 1, 2, 0])
    cost = np.where(island[:, None] == island, 1.0, 5.0) + np.abs(island[:, None] - island)
    order = single_linkage_order(cost)
    assert sorted(order.tolist()) == list(range(8))
    assert len([1 for a, b in zip(island[order], island[order][1:], strict=False) if a != b]) == 2
