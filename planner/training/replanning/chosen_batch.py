"""``global_batch_size: auto``: the plan at the batch that trains soonest, and the schedule that is faster still."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshplan.planner.batch_size.noise import NoiseScale, batches_for, read_noise
from meshplan.planner.batch_size.study import (
    BatchStudy,
    at_batch,
    seconds_of_a_change,
    study_batches,
    study_document,
)
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.training.problem.spec import read_training_spec
from meshplan.planner.training.resolve import Resolved

# A batch far below every noise scale: its tokens count in full.
SMALL_BATCH = 1.0


def plan_with_batch(
    question: Question, plan: Callable[[Question], Plan], look_up: Callable[[Mapping[str, Any]], Resolved]
) -> Plan:
    """The plan at the best fixed batch; its question states that batch, and its answer the others and the schedule.

    Without a plan at any batch it is the answer at the smallest, which says why.

    Args:
        question: leaves its batch open.
        plan: answers a question whose batch is stated.
        look_up: resolves such a question.

    Raises:
        SpecError: the question is malformed.
    """
    asked = read_training_spec(question.document).workload.gradient_noise_scale
    if asked is None:
        raise AssertionError("an open batch comes with a noise scale: the spec was validated")
    noise = read_noise(asked.tokens, "workload.gradient_noise_scale.tokens")
    study = batch_study(question.document, noise, lambda each: plan(replace(question, document=each)), look_up)
    if study.schedule is None:
        return study.rows[0].plan
    best = study.planned[study.schedule.fixed]
    return replace(best.plan, answer={"batches": study_document(study)})


def batch_study(
    document: Mapping[str, Any],
    noise: NoiseScale,
    answer: Callable[[Mapping[str, Any]], Plan],
    look_up: Callable[[Mapping[str, Any]], Resolved],
    *,
    batches: Sequence[int] = (),
) -> BatchStudy:
    """Plans at several batches: around the one that the question states, or around the noise where it is open.

    Args:
        document: the training question.
        noise: gradient noise scale.
        answer: searches a plan for a question whose batch is stated.
        look_up: resolves such a question.
        batches: tokens of each global batch that is compared; none: those that an open batch names, or that follow.

    Raises:
        SpecError: the question is malformed, or refuses a batch that was named.
    """
    spec = read_training_spec(document)
    workload, asked = spec.workload, spec.workload.gradient_noise_scale
    change_s = seconds_of_a_change(spec.run)
    if asked is None:
        return study_batches(document, workload, noise, answer, batches=batches, change_s=change_s)
    length = workload.sequence_length
    # One sequence, which pins need not divide: only the machine is asked for.
    unpinned = {name: value for name, value in document.items() if name != "fixed"}
    machine = look_up(at_batch(unpinned, length, tokens=float(length))).problem.machine
    return study_batches(
        document,
        workload,
        noise,
        answer,
        batches=batches or asked.batches,
        unless_named=batches_for(noise, sequence_length=length, devices=machine.num_devices),
        reference=float(asked.reference_batch or SMALL_BATCH),
        change_s=change_s,
    )
