"""``global_batch_size: auto``: the plan at the batch that trains soonest, and the schedule that is faster still."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meshplan.planner.batch_size.noise import batches_for, read_noise
from meshplan.planner.batch_size.study import at_batch, seconds_of_a_change, study_batches, study_document
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
    spec = read_training_spec(question.document)
    workload, asked = spec.workload, spec.workload.gradient_noise_scale
    if asked is None:
        raise AssertionError("an open batch comes with a noise scale: the spec was validated")
    noise = read_noise(asked.tokens, "workload.gradient_noise_scale.tokens")
    length = workload.sequence_length
    machine = look_up(at_batch(question.document, length, tokens=float(length))).problem.machine
    study = study_batches(
        question.document,
        workload,
        noise,
        lambda document: plan(replace(question, document=document)),
        batches=asked.batches or batches_for(noise, sequence_length=length, devices=machine.num_devices),
        reference=float(asked.reference_batch or SMALL_BATCH),
        change_s=seconds_of_a_change(spec.run),
    )
    if study.schedule is None:
        return study.rows[0].plan
    best = study.planned[study.schedule.fixed]
    return replace(best.plan, answer={"batches": study_document(study)})
