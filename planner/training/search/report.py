"""What a search of degrees keeps and reports: candidates as configurations, their order, and what was rejected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.problem.choices import BY_SIMPLICITY
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingObjective, TrainingProblem

# Names of the limits, in the order in which candidates are held against them.
STEP_TIME = "step time"
LIMITS = ("device memory", "host memory", STEP_TIME, "cost of the run")

# Relative difference of two predicted steps below which their order says nothing. Measured 2026-11-22 over 205 pairs of
# published runs of the same question (rows of the training sources that the constants were fitted to, `meshplan
# validate`): pairs that are predicted within 3 % of each other are in the measured order 17 times of 32, those between
# 3 and 6 % 32 times of 33.
TIE_WIDTH = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredConfig:
    """One priced candidate.

    Args:
        config: its choices.
        objective: f(T, n), smaller is better.
        step_s: T.
        safe_bytes: M.
    """

    config: TrainingConfig
    objective: float
    step_s: float
    safe_bytes: float


@dataclass(slots=True, kw_only=True)
class SearchReport:
    """What a search saw.

    Args:
        considered: candidates, priced or ruled out by the bound; of the latter the rules were not asked.
        priced: of those, completely priced.
        ruled_out: not priced because their bound is no better than the incumbents.
        refused: reason → candidates refused by a rule.
        over_limit: limit → candidates beyond it.
        nearest_miss: limit → the candidate that exceeds it least, and by how much (in the limit's unit).
        illegal: reason → single values that no candidate may take.
    """

    considered: int = 0
    priced: int = 0
    ruled_out: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    over_limit: Counter[str] = field(default_factory=Counter)
    nearest_miss: dict[str, tuple[float, TrainingConfig]] = field(default_factory=dict)
    illegal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, other: SearchReport) -> None:
        """What another search of the same question saw."""
        self.considered += other.considered
        self.priced += other.priced
        self.ruled_out += other.ruled_out
        self.refused.update(other.refused)
        self.over_limit.update(other.over_limit)
        for limit, miss in other.nearest_miss.items():
            if limit not in self.nearest_miss or miss[0] < self.nearest_miss[limit][0]:
                self.nearest_miss[limit] = miss


def config_of(candidates: Candidates, row: int, problem: TrainingProblem) -> TrainingConfig:
    """One row of a batch as a configuration."""
    return TrainingConfig(**problem.settled, **candidates.choices(row))


@lru_cache(maxsize=1024)  # the best so far are put in order again with every batch
def simplicity(config: TrainingConfig) -> tuple[int, ...]:
    """Order among equals: fewer devices, then fewer and smaller departures from plain data parallelism."""
    ranks = (choice.rank(getattr(config, choice.name)) for choice in BY_SIMPLICITY)
    return (config.world_size, len(config.offloaded), *ranks)


def order_of(scored: ScoredConfig, objective: TrainingObjective) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Best first, equals by simplicity. Devices + T/(1 + T) in one number has too few digits for a long T."""
    values: tuple[float, ...] = (scored.objective,)
    if objective is TrainingObjective.NUM_DEVICES:
        values = (scored.config.world_size, scored.step_s)
    return tuple(float(f"{value:.9e}") for value in values), simplicity(scored.config)
