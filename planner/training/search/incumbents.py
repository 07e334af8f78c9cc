"""The best plans so far: what holds a batch of candidates against the limits, and keeps those that win.

*Notation.* As in :mod:`.degrees`: candidate c takes n_c devices and T(c) seconds a step, M(c) is the memory of its
worst rank, f(T, n) is minimised. The K incumbents are the candidates of least f; the K-th one's f is the *threshold*
that others must not exceed.

*Limits*, in this order: M(c) ≤ device memory; states on the host ≤ host memory; T(c) ≤ step time; T(c)·n_c·price ≤
money. Each candidate beyond one is counted under the first that it exceeds, and the nearest miss of each is remembered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.exchange.offload import USABLE_HOST_SHARE
from meshplan.planner.training.estimator.memory import StageMemory
from meshplan.planner.training.pipeline.closed_forms import least_bubble
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.report import ScoredConfig, SearchReport, config_of, order_of
from meshplan.planner.training.search.seen import PricedBatch, Seen

# Two candidates within this relative distance are equal to the estimator; the simpler one is taken.
TIE_RELATIVE = 1e-9


class Incumbents:
    """The K best candidates of a search.

    Args:
        problem: the question.
        objective: its f.
        report: where candidates beyond a limit are counted.
        keep: K.
        cutoff: objective of a plan that is known already: no other is kept.
    """

    def __init__(
        self,
        problem: TrainingProblem,
        objective: Objective,
        report: SearchReport,
        *,
        keep: int,
        cutoff: float = math.inf,
    ) -> None:
        self.problem = problem
        self.objective = objective
        self.report = report
        self.keep, self.cutoff = keep, cutoff
        self.best: list[ScoredConfig] = []
        self.seen = Seen()

    # --- what can still win -----------------------------------------------------------------------------------------

    @property
    def threshold(self) -> float:
        """Objective that a candidate must beat to be kept."""
        return min(self.best[-1].objective if len(self.best) >= self.keep else math.inf, self.cutoff)

    @property
    def limit(self) -> float:
        """Largest bound with which a candidate can still be kept."""
        return self.threshold * (1.0 + TIE_RELATIVE)

    @property
    def least_objective(self) -> float:
        """F of the best, or of the plan that is known already; infinite while there is none."""
        return min(self.best[0].objective if self.best else math.inf, self.cutoff)

    @property
    def found_nothing(self) -> bool:
        """Whether no candidate is known, and any would be kept."""
        return math.isinf(self.least_objective) and math.isinf(self.threshold)

    def device_range(self) -> tuple[float, float]:
        """Fewest and most devices with which a candidate can still be kept."""
        limits, machine = self.problem.limits, self.problem.machine
        most = float(limits.max_devices)
        if limits.max_usd_per_hour is not None and machine.usd_per_hour_per_device:
            # Prices are no binary numbers: 3 nodes at 3 × the price of a node must not come out as 2.999….
            most = min(most, (1.0 + TIE_RELATIVE) * limits.max_usd_per_hour / machine.usd_per_hour_per_device)
        least = float(limits.min_devices)
        if limits.max_step_s is not None:
            least = max(least, self.objective.work_s / limits.max_step_s)
        if math.isfinite(self.threshold):
            if self.problem.objective is TrainingObjective.THROUGHPUT:
                least = max(least, self.objective.work_s / self.threshold)
            elif self.problem.objective is TrainingObjective.NUM_DEVICES:
                most = min(most, self.threshold)
        return least, most

    def may_be_kept(self, batch: Candidates) -> BoolArray:
        """Candidates that a bound by arithmetic alone does not rule out, [n]."""
        p, m = batch.split.pipeline_parallel, batch.num_microbatches
        left = least_bubble(
            batch.split.schedule, pipeline_parallel=p, virtual_pipeline_stages=batch.split.virtual_pipeline_stages
        )
        work = np.where(batch.recompute == Recompute.FULL, self.objective.work_with_recompute_s, self.objective.work_s)
        return self.may_replace(batch, work / batch.world_size * (1.0 + left * (p - 1) / m))

    def wanted(self, batch: Candidates) -> Candidates:
        """Those that count, however fast they are."""
        return batch

    def may_replace(self, batch: Candidates, least_s: FloatArray) -> BoolArray:
        """Candidates that a step of ``least_s`` seconds would bring among the best, [n]."""
        return self.objective.of(least_s, batch.world_size) <= self.limit

    # --- limits -----------------------------------------------------------------------------------------------------

    def within(self, name: str, values: FloatArray, limit: float, batch: Candidates) -> BoolArray:
        """Which candidates stay within a limit; the others are counted, and the nearest miss remembered."""
        fits = values <= limit
        misses = int(np.count_nonzero(~fits))
        if misses:
            self.report.over_limit[name] += misses
            excess = np.where(fits, np.inf, values - limit)
            row = int(np.argmin(excess))
            nearest = self.report.nearest_miss.get(name)
            if nearest is None or excess[row] < nearest[0]:
                self.report.nearest_miss[name] = (float(excess[row]), config_of(batch, row, self.problem))
        return fits

    def within_memory(self, batch: Candidates, stages: Sequence[StageMemory], safe: FloatArray) -> BoolArray:
        """Candidates within the memory of device and host, [n].

        Args:
            batch: the candidates.
            stages: what each pipeline stage needs.
            safe: M of each candidate, bytes, [n].
        """
        keep = self.within("device memory", safe, self.problem.limits.memory_bytes, batch)
        limit = self._host_limit(batch)
        if limit is not None:
            states = np.maximum.reduce(
                [stage.components["weights"] + stage.components["optimizer"] + stage.host_bytes for stage in stages]
            )
            host = states * np.minimum(self.problem.machine.devices_per_host, batch.world_size)
            keep &= self.within("host memory", host, limit, batch)
        return keep

    def _host_limit(self, batch: Candidates) -> float | None:
        """Host memory that states may fill; what the machine has counts only where they lie there all the time."""
        asked, there = self.problem.limits.host_memory_bytes, self.problem.machine.host_memory_bytes
        off_devices = batch.offloads_states | batch.activation_offload | batch.offloads_layers
        if asked is not None or there is None or not off_devices.any():
            return asked
        return USABLE_HOST_SHARE * there

    def within_time_and_money(self, batch: Candidates, step_s: FloatArray) -> BoolArray:
        """Candidates within the limits on the step and on the cost of the run, [n]."""
        problem = self.problem
        keep: BoolArray = np.ones(len(batch), dtype=bool)
        if problem.limits.max_step_s is not None:
            keep &= self.within("step time", step_s, problem.limits.max_step_s, batch)
        if problem.limits.max_usd_per_run is not None:
            usd = problem.run_usd(step_s, batch.world_size)
            keep &= self.within("cost of the run", usd, problem.limits.max_usd_per_run, batch)
        if problem.limits.max_run_s is not None and problem.run is not None:
            run_s = step_s * (problem.num_steps or 0.0) * problem.stretch(batch.world_size)
            keep &= self.within("time of the run", run_s, problem.limits.max_run_s, batch)
        return keep

    # --- keeping ----------------------------------------------------------------------------------------------------

    def take(self, batch: PricedBatch) -> None:
        """Keep what is among the K best."""
        self.seen.batches.append(batch)
        rows = np.flatnonzero(batch.objective <= self.limit)
        rows = rows[np.argsort(batch.objective[rows], kind="stable")][: 4 * self.keep]
        self.best += [scored_row(self.problem, batch, int(row)) for row in rows]
        self.best.sort(key=lambda scored: order_of(scored, self.problem.objective))
        del self.best[self.keep :]


def scored_row(problem: TrainingProblem, batch: PricedBatch, row: int) -> ScoredConfig:
    """One candidate of a priced batch."""
    return ScoredConfig(
        config=config_of(batch.candidates, row, problem),
        objective=float(batch.objective[row]),
        step_s=float(batch.step_s[row]),
        safe_bytes=float(batch.safe_bytes[row]),
    )
