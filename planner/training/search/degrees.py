"""The best parallel degrees: every legal candidate, priced or ruled out by a bound.

*Notation.* A candidate c uses n_c devices and takes T(c) seconds a step under the estimator; M(c) is the safe bound of
its worst rank.

*Objective.* min f(T, n): T for throughput; n·T for money and energy; n, then T, for fewest devices.

*Constraints.* M(c) ≤ device memory; n_c ≤ max_devices; the rules of the model and of the framework; limits on money,
host memory and step time.

*Bound.* No step can be shorter than its matrix products and attention at the full rate of all its devices,
T(c) ≥ W/n_c with W from :func:`work_device_s`. Candidates are visited by devices, most first; those with f(W/n_c, n_c)
no better than the K-th best incumbent are not priced. Nor are those that a sharper bound rules out one by one: full
recompute repeats the forward pass, and p stages with m micro-batches leave T(c) ≥ W/n_c·(1 + β'(p − 1)/m) with β' from
:func:`~meshplan.planner.training.pipeline.closed_forms.least_bubble`. What is left is priced completely, so the
incumbent is optimal under the estimator and the gap is 0; a search that is cut short reports the best bound of what it
did not visit.

*Candidates beyond the memory* are tried with a block of recomputed layers and with offload, where the limits allow it
(:mod:`~meshplan.planner.training.search.memory_savers`). The bound of the candidate itself holds for them too.

*Choices on request* (``search_over``) multiply the candidates, one copy for each value
(:mod:`~meshplan.planner.training.search.variants`); none of the values does less work, so that the bounds hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from meshplan.catalogs.errors import SolverError
from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.solution import OnProgress, Progress, Solution, Status, relative_gap, status_of
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit, joined
from meshplan.planner.training.estimator.memory import MemoryModel, StageMemory
from meshplan.planner.training.estimator.offload import USABLE_HOST_SHARE
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.pipeline.closed_forms import least_bubble
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.layers import mix
from meshplan.planner.training.search.layers.open_splits import MOST_PRICED, OpenSplits
from meshplan.planner.training.search.memory_savers import offloaded, takes_blocks, takes_blocks_only, with_blocks
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.report import TIE_WIDTH, ScoredConfig, SearchReport, config_of, order_of
from meshplan.planner.training.search.templates import (
    Templates,
    legal_candidates,
    make_templates,
    pipeline_splits,
    template_candidates,
    tries_smaller_groups,
)
from meshplan.planner.training.search.variants import COMMUNICATION, smaller_groups, variants, without_communication_s

# Candidates kept besides the best: what the table of alternatives is made of.
KEEP = 24
# Rows priced at once: small enough for the processor's cache and the memory limit, large enough to amortise NumPy.
CHUNK_ROWS = 16_384
# Two candidates within this relative distance are equal to the estimator; the simpler one is taken.
TIE_RELATIVE = 1e-9
SOLVER_NAME = "enumeration with bounds"


class DegreeSearch:
    """One search with its incumbents and its report.

    Args:
        problem: the question.
        keep: incumbents to keep.
    """

    def __init__(self, problem: TrainingProblem, *, keep: int = KEEP) -> None:
        self.problem = problem
        self.keep = keep
        self.report = SearchReport()
        self.best: list[ScoredConfig] = []
        self.objective = Objective(problem)
        self.open_splits = OpenSplits(problem, self.objective)
        self._is_closing = False

    @property
    def threshold(self) -> float:
        """Objective that a candidate must beat to be kept."""
        return self.best[-1].objective if len(self.best) >= self.keep else math.inf

    def _device_range(self) -> tuple[float, float]:
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

    # --- search -----------------------------------------------------------------------------------------------------

    def run(
        self, *, time_limit_s: float | None = None, on_progress: OnProgress | None = None
    ) -> Solution[ScoredConfig]:
        """Visit every candidate; Ctrl-C or the time limit keeps the incumbent and its proven gap.

        Raises:
            SolverError: the time limit passed before any plan was found; nothing is proven then.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        templates = make_templates(self.problem)
        self.report.illegal = templates.illegal
        splits = pipeline_splits(self.problem)
        open_splits: list[PipelineSplit] = list(splits)
        try:
            while open_splits:
                self._visit(open_splits[0], templates)
                open_splits.pop(0)
                if on_progress is not None:
                    on_progress(self._progress(len(splits) - len(open_splits), len(splits)))
                if time_limit_s is not None and time.perf_counter() - wall > time_limit_s:
                    break
        except KeyboardInterrupt:
            if not self.best:
                raise
        self._close_splits(is_whole=not open_splits)
        if open_splits and not self.best:
            raise SolverError(
                f"no plan found within the time limit of {time_limit_s} s, after {len(splits) - len(open_splits)} of "
                f"{len(splits)} pipeline splits: allow more time"
            )
        return self._solution(open_splits, templates, wall, cpu)

    def _progress(self, done: int, total: int) -> Progress:
        incumbent = self.best[0].objective if self.best else None
        bound = float(self.objective.bound(np.asarray(float(self.problem.limits.max_devices))))
        return Progress(incumbent=incumbent, bound=bound, note=f"pipeline splits {done}/{total}")

    def _visit(self, split: PipelineSplit, templates: Templates) -> None:
        p = split.pipeline_parallel
        fits = templates.between(1, self.problem.limits.max_devices / p)
        stop = fits.stop
        while stop > fits.start:
            least, most = self._device_range()
            window = templates.between(least / p, most / p)
            upper = min(stop, window.stop)
            lower = max(window.start, upper - CHUNK_ROWS, fits.start)
            skipped = (stop - upper) + (0 if lower > window.start else max(window.start - fits.start, 0))
            if upper <= window.start:
                self._rule_out(stop - fits.start)
                return
            self._rule_out(skipped)
            self._price(split, templates, slice(lower, upper))
            stop = lower if lower > window.start else fits.start

    def _rule_out(self, count: int) -> None:
        self.report.considered += count
        self.report.ruled_out += count

    def _price(self, split: PipelineSplit, templates: Templates, rows: slice) -> None:
        everything = template_candidates(self.problem, templates, rows, split)
        hopeful = everything.take(self._may_be_kept(everything))
        self._rule_out(len(everything) - len(hopeful))
        for variant in variants(self.problem, hopeful):
            if variant is hopeful:
                self._price_legal(hopeful)
                continue
            still = variant.take(self._may_be_kept(variant))
            self._rule_out(len(variant) - len(still))
            self._price_legal(still)

    def _price_legal(self, asked: Candidates) -> None:
        """Price the candidates that the rules allow, and what more they allow of those beyond the memory."""
        batch = legal_candidates(self.problem, asked, self.report.refused)
        if not len(batch):
            return
        stages = self._memory(batch).stages()
        if not mix.is_pinned(self.problem):
            self._price_with_blocks(batch, stages)
        for mixed in mix.gathered_mixes(self.problem, batch, self._may_replace):
            self._price_more(mixed)
        safe = np.maximum.reduce([stage.safe_bytes for stage in stages])
        for moved in offloaded(self.problem, batch.take(safe > self.problem.limits.memory_bytes)):
            self._price_more(moved)

    def _price_more(self, asked: Candidates) -> None:
        """Price variants of legal candidates, of which the rules may refuse some."""
        batch = legal_candidates(self.problem, asked, self.report.refused)
        if len(batch):
            self._price_with_blocks(batch, self._memory(batch).stages())

    def _price_with_blocks(self, batch: Candidates, stages: Sequence[StageMemory]) -> None:
        """Price a batch, and its candidates that a block of recomputed layers brings within memory."""
        if not self._is_closing:
            self.open_splits.note(batch, self.best[0].objective if self.best else math.inf)
        if takes_blocks(self.problem):
            blocks = with_blocks(self.problem, self._memory(batch), stages)
            self._price_within(blocks, self._memory(blocks).stages())
        if not takes_blocks_only(self.problem):
            self._price_within(batch, stages)

    def _memory(self, batch: Candidates) -> MemoryModel:
        problem = self.problem
        return MemoryModel(
            shape=problem.shape, workload=problem.workload, candidates=batch, calibration=problem.calibration
        )

    def _price_within(self, batch: Candidates, stages: Sequence[StageMemory]) -> None:
        """Hold a batch with its memory against the limits; price and keep what is left."""
        self.report.considered += len(batch)
        self.report.priced += len(batch)
        if not len(batch):
            return
        problem = self.problem
        safe = np.maximum.reduce([stage.safe_bytes for stage in stages])
        keep = self._within("device memory", safe, problem.limits.memory_bytes, batch)
        limit = self._host_limit(batch)
        if limit is not None:
            states = np.maximum.reduce(
                [stage.components["weights"] + stage.components["optimizer"] + stage.host_bytes for stage in stages]
            )
            host = states * np.minimum(problem.machine.devices_per_host, batch.world_size)
            keep &= self._within("host memory", host, limit, batch)
        batch, safe = batch.take(keep), safe[keep]
        if not len(batch):
            return
        estimate = estimate_training(problem.shape, problem.machine, problem.workload, batch, problem.calibration)
        step_s = estimate.step_s
        keep = np.ones(len(batch), dtype=bool)
        if problem.limits.max_step_s is not None:
            keep &= self._within("step time", step_s, problem.limits.max_step_s, batch)
        if problem.limits.max_usd_per_run is not None:
            rate = (problem.machine.usd_per_hour_per_device or 0.0) / SECONDS_PER_HOUR * (problem.num_steps or 0.0)
            keep &= self._within(
                "cost of the run", step_s * batch.world_size * rate, problem.limits.max_usd_per_run, batch
            )
        self._keep_best(batch.take(keep), step_s[keep], safe[keep])
        self._price_smaller_groups(batch, step_s, estimate.breakdown_s[COMMUNICATION])

    def _price_smaller_groups(self, batch: Candidates, step_s: FloatArray, exposed_s: FloatArray) -> None:
        """Price candidates with smaller sharding groups, where these may win."""
        if self._is_closing or not tries_smaller_groups(self.problem):
            return
        least_s = without_communication_s(batch, step_s, exposed_s)
        hopeful = np.isfinite(least_s) & self._may_replace(batch, least_s)
        if hopeful.any():
            self._price_more(smaller_groups(batch.take(hopeful)))

    def _every_group(self, batch: Candidates) -> Candidates:
        """Legal candidates with every size of sharding group."""
        if not tries_smaller_groups(self.problem):
            return batch
        whole = batch.take(batch.data_parallel_shard == batch.data_parallel)
        return joined([batch, legal_candidates(self.problem, smaller_groups(whole), self.report.refused)])

    def _close_splits(self, *, is_whole: bool) -> None:
        """Price other splits of the layers where they may win; of a search that was cut short take the bound alone."""
        self._is_closing = True
        self.open_splits.close(
            lambda: self.best[0].objective if self.best else math.inf,
            self._every_group,
            lambda batch: self._price_with_blocks(batch, self._memory(batch).stages()),
            budget=MOST_PRICED if is_whole else 0,
        )

    def _host_limit(self, batch: Candidates) -> float | None:
        """Host memory that states may fill; what the machine has counts only where they lie there all the time."""
        asked, there = self.problem.limits.host_memory_bytes, self.problem.machine.host_memory_bytes
        if asked is not None or there is None or not (batch.offloads_states | batch.activation_offload).any():
            return asked
        return USABLE_HOST_SHARE * there

    def _may_be_kept(self, batch: Candidates) -> FloatArray:
        """Candidates that the sharper bound of the module docstring does not rule out, [n] booleans."""
        p, m = batch.split.pipeline_parallel, batch.num_microbatches
        left = least_bubble(
            batch.split.schedule, pipeline_parallel=p, virtual_pipeline_stages=batch.split.virtual_pipeline_stages
        )
        work = np.where(batch.recompute == Recompute.FULL, self.objective.work_with_recompute_s, self.objective.work_s)
        devices = batch.world_size
        least = self.objective.of(work / devices * (1.0 + left * (p - 1) / m), devices)
        return least <= self.threshold * (1.0 + TIE_RELATIVE)

    def _may_replace(self, batch: Candidates, least_s: FloatArray) -> FloatArray:
        """Candidates that a step of ``least_s`` seconds would bring among the best, [n] booleans."""
        return self.objective.of(least_s, batch.world_size) <= self.threshold * (1.0 + TIE_RELATIVE)

    def _within(self, name: str, values: FloatArray, limit: float, batch: Candidates) -> FloatArray:
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

    def _keep_best(self, batch: Candidates, step_s: FloatArray, safe: FloatArray) -> None:
        objective = self.objective.of(step_s, batch.world_size)
        limit = self.threshold * (1.0 + TIE_RELATIVE)
        rows = np.flatnonzero(objective <= limit)
        rows = rows[np.argsort(objective[rows], kind="stable")][: 4 * self.keep]
        for row in rows:
            self.best.append(
                ScoredConfig(
                    config=config_of(batch, int(row), self.problem),
                    objective=float(objective[row]),
                    step_s=float(step_s[row]),
                    safe_bytes=float(safe[row]),
                )
            )
        self.best.sort(key=lambda scored: order_of(scored, self.problem.objective))
        del self.best[self.keep :]

    def _solution(
        self, left: list[PipelineSplit], templates: Templates, wall: float, cpu: float
    ) -> Solution[ScoredConfig]:
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        if not self.best:
            return Solution(
                status=Status.INFEASIBLE,
                assignment=None,
                objective=None,
                bound=None,
                gap=None,
                wall_s=wall_s,
                cpu_s=cpu_s,
                solver=SOLVER_NAME,
            )
        best = self.best[0]
        bound = min([best.objective, self.open_splits.bound, *(self._best_bound(split, templates) for split in left)])
        return Solution(
            status=status_of(best.objective, bound, tolerance=TIE_WIDTH),
            assignment=best,
            objective=best.objective,
            bound=bound,
            gap=relative_gap(best.objective, bound),
            wall_s=wall_s,
            cpu_s=cpu_s,
            solver=SOLVER_NAME,
        )

    def _best_bound(self, split: PipelineSplit, templates: Templates) -> float:
        """No candidate of an unvisited split can be better than this."""
        rows = templates.between(1, self.problem.limits.max_devices / split.pipeline_parallel)
        if rows.stop <= rows.start:
            return math.inf
        return float(np.min(self.objective.bound(templates.stage_devices[rows] * split.pipeline_parallel)))


def search_degrees(
    problem: TrainingProblem,
    *,
    keep: int = KEEP,
    time_limit_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Solution[ScoredConfig], DegreeSearch]:
    """Find the best configuration; see the module docstring.

    Returns:
        The solution, and the search with its incumbents (``best``) and its ``report``.
    """
    search = DegreeSearch(problem, keep=keep)
    return search.run(time_limit_s=time_limit_s, on_progress=on_progress), search
