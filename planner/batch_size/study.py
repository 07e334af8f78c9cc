"""A training question at several global batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.planner.batch_size.noise import NoiseScale, batches_around, tokens_needed
from meshplan.planner.batch_size.schedule import Option, Schedule, best_schedule
from meshplan.planner.core.plan import Plan

# Batches looked at beside the question's own: halves and doubles.
BELOW, ABOVE = 2, 4
# A change of batch restarts the job where the layout changes: detection apart, as in planner.goodput.
CHANGE_S = 600.0
# Choices that change with the batch while the job runs on.
_OF_THE_BATCH = ("num_microbatches", "global_batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBatch:
    """The plan at one batch.

    Args:
        batch: tokens of a global batch.
        plan: the best one; without a configuration where there is none.
        tokens: that the run needs at this batch.
        run_s: when the run has them, as the plan says: with its interruptions where the question describes them; None
            without a plan.
    """

    batch: int
    plan: Plan
    tokens: float
    run_s: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """While it trains; None without a plan."""
        return self.plan.predicted["tokens_per_s"].value if self.plan.config else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStudy:
    """Plans at every batch, and which batch trains soonest.

    Args:
        reference: the question's own batch, tokens.
        rows: by batch.
        schedule: over those with a plan; its options count these rows alone. None where there is no plan at all.
    """

    reference: float
    rows: tuple[AtBatch, ...]
    schedule: Schedule | None

    @property
    def planned(self) -> tuple[AtBatch, ...]:
        """Rows with a plan: the options of the schedule."""
        return tuple(row for row in self.rows if row.run_s is not None)


def study_batches(
    spec: Mapping[str, Any],
    workload: Any,
    noise: NoiseScale,
    answer: Callable[[Mapping[str, Any]], Plan],
    *,
    batches: Sequence[int] = (),
    unless_named: Sequence[int] = (),
    reference: float | None = None,
    change_s: float = CHANGE_S,
) -> BatchStudy:
    """Plan a question at several batches.

    Args:
        spec: the training question.
        workload: its ``workload``, read: sequence length, sequences and tokens.
        noise: gradient noise scale.
        answer: searches a plan for a question.
        batches: tokens of each global batch that the user names.
        unless_named: what is compared where the user names none, with halves and doubles of its ends until neither is
            the best; none: halves and doubles of the question's own. What the question's pins and limits refuse is left
            out, unless they refuse all.
        reference: batch at which the run takes its number of training tokens; None: the question's own.
        change_s: seconds that a change of the layout costs; another batch on the same layout costs nothing.

    Raises:
        SpecError: no number of training tokens, a batch that is no whole number of sequences, or one that was named and
            that the question refuses.
    """
    length, tokens = workload.sequence_length, workload.num_training_tokens
    if tokens is None:
        raise SpecError.at("workload.num_training_tokens", "is needed to compare batches")
    if reference is None:
        reference = workload.num_sequences * length
    sizes = sorted(set(batches or unless_named)) or batches_around(
        round(reference), sequence_length=length, below=BELOW, above=ABOVE
    )
    broken = [size for size in sizes if size % length or not size]
    if broken:
        raise SpecError.at("--batches", f"{broken[0]} tokens are no multiple of {length}")

    def at(size: int) -> AtBatch:
        needed = tokens_needed(size, reference=reference, tokens=tokens, noise=noise)
        found = answer(at_batch(spec, size, tokens=needed))
        run_s = found.predicted["run_time_s"].value if found.config else None
        return AtBatch(batch=size, plan=found, tokens=needed, run_s=run_s)

    rows = [at(size) for size in sizes] if batches else _not_refused(sizes, at)
    if unless_named and not batches:
        rows = _beyond_the_ends(rows, at, sequence_length=length)
    planned = [row for row in rows if row.run_s is not None]
    options = [Option(batch=row.batch, tokens_per_s=row.tokens / row.run_s) for row in planned if row.run_s is not None]
    schedule = None
    if options:
        layouts = [_layout(row.plan) for row in planned]
        costs = np.array([[change_s * (one != other) for other in layouts] for one in layouts])
        schedule = best_schedule(options, reference=reference, tokens=tokens, noise=noise, change_s=costs)
    return BatchStudy(reference=reference, rows=tuple(rows), schedule=schedule)


def _not_refused(sizes: Sequence[int], at: Callable[[int], AtBatch]) -> list[AtBatch]:
    """The batches without those that the question's pins and limits refuse.

    Raises:
        SpecError: they refuse all.
    """
    rows = []
    refused = None
    for size in sizes:
        try:
            rows.append(at(size))
        except SpecError as error:
            refused = error
    if refused is not None and not rows:
        raise refused
    return rows


def _beyond_the_ends(rows: Sequence[AtBatch], at: Callable[[int], AtBatch], *, sequence_length: int) -> list[AtBatch]:
    """Rows with halves and doubles beyond their ends, until neither end is the batch that trains soonest."""
    found = list(rows)
    for end, factor in ((0, 0.5), (-1, 2.0)):
        while found[end].run_s is not None and found[end] is _soonest(found):
            size = sequence_length * round(factor * found[end].batch / sequence_length)
            try:
                row = at(size) if size else None
            except SpecError:  # refused by a pin or a limit
                row = None
            if row is None:
                break
            found.insert(0 if end == 0 else len(found), row)
    return found


def _soonest(rows: Sequence[AtBatch]) -> AtBatch:
    return min(rows, key=lambda row: math.inf if row.run_s is None else row.run_s)


def seconds_of_a_change(run: Any) -> float:
    """What a change of the layout costs, seconds: a restart, as long as ``run`` of the question says."""
    return CHANGE_S if run is None or run.restart_time is None else float(run.restart_time)


def _layout(plan: Plan) -> dict[str, Any]:
    """What a restart is needed for: every choice but how often gradients are accumulated."""
    return {name: value for name, value in plan.config.items() if name not in _OF_THE_BATCH}


def at_batch(spec: Mapping[str, Any], batch: int, *, tokens: float) -> dict[str, Any]:
    """The question at one batch.

    Args:
        spec: the question.
        batch: tokens.
        tokens: that the run needs at it.
    """
    left_open = ("global_batch_size", "gradient_noise_scale")
    workload = {name: value for name, value in spec["workload"].items() if name not in left_open}
    stated = {"global_batch_tokens": batch, "num_training_tokens": float(round(tokens))}
    return {**spec, "workload": {**workload, **stated}}


def study_document(study: BatchStudy) -> dict[str, Any]:
    """The study as plain JSON."""
    schedule, planned = study.schedule, study.planned
    return {
        "reference_batch_tokens": study.reference,
        "rows": [
            {
                "batch_tokens": row.batch,
                "plan_id": row.plan.plan_id if row.run_s is not None else None,
                "config": dict(row.plan.config) or None,
                "tokens_per_s": row.tokens_per_s,
                "tokens": row.tokens,
                "run_s": row.run_s,
            }
            for row in study.rows
        ],
        "best_fixed_batch_tokens": None if schedule is None else planned[schedule.fixed].batch,
        "best_fixed_s": None if schedule is None else schedule.fixed_s,
        "schedule_s": None if schedule is None else schedule.seconds,
        "schedule": []
        if schedule is None
        else [
            {
                "batch_tokens": planned[part.option].batch,
                "from_progress": part.start,
                "to_progress": part.end,
                "tokens": part.tokens,
                "seconds": part.seconds,
            }
            for part in schedule.parts
        ],
    }
