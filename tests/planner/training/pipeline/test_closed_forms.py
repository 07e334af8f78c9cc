"""Pipeline schedules: the closed forms against a small event simulation of each schedule, written here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.pipeline.closed_forms import CLOSED_FORMS, in_flight, pipeline_s, staged_pipeline_s

# (kind, chunk, micro-batch); kind F or B.
Op = tuple[str, int, int]
FORWARD, BACKWARD = "F", "B"
# A backward pass takes twice a forward pass.
FORWARD_SHARE = 1 / 3


def gpipe_order(m: int) -> list[Op]:
    return [(FORWARD, 0, i) for i in range(m)] + [(BACKWARD, 0, i) for i in range(m)]


def one_f_one_b_order(p: int, m: int, stage: int) -> list[Op]:
    """Warm-up of p − stage − 1 forward passes, then one forward, one backward (Narayanan et al., arXiv:2006.09503)."""
    return alternate([(FORWARD, 0, i) for i in range(m)], [(BACKWARD, 0, i) for i in range(m)], p - stage - 1)


def interleaved_order(p: int, v: int, m: int, stage: int) -> list[Op]:
    """Groups of p micro-batches through each chunk in turn; warm-up 2(p − stage − 1) + (v − 1)p (arXiv:2104.04473)."""
    forward = [(FORWARD, c, i) for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
    backward = [(BACKWARD, v - 1 - c, i) for _, c, i in forward]
    return alternate(forward, backward, 2 * (p - stage - 1) + (v - 1) * p)


def alternate(forward: list[Op], backward: list[Op], warm_up: int) -> list[Op]:
    warm_up = min(warm_up, len(forward))
    order = forward[:warm_up]
    for i, op in enumerate(forward[warm_up:]):
        order += [op, backward[i]]
    return order + backward[len(forward) - warm_up :]


def simulate(orders: list[list[Op]], chunk_s: list[float], v: int) -> tuple[float, list[float]]:
    """Runs each stage's operations in their order, each when what it needs is there.

    Args:
        orders: operations of each stage.
        chunk_s: forward and backward seconds of one chunk on each stage.
        v: chunks a stage.

    Returns:
        Seconds until the last operation, and the most micro-batches in flight on each stage (whole-stage activations).
    """
    p = len(orders)
    done: dict[tuple[str, int, int], float] = {}  # (kind, place of the chunk in the model, micro-batch) → end
    clock, position, held, most = [0.0] * p, [0] * p, [0] * p, [0] * p
    while any(position[stage] < len(orders[stage]) for stage in range(p)):
        moved = False
        for stage in range(p):
            while position[stage] < len(orders[stage]):
                kind, chunk, micro = orders[stage][position[stage]]
                place = chunk * p + stage
                needs = [(FORWARD, place - 1, micro)] if kind == FORWARD and place > 0 else []
                if kind == BACKWARD:
                    needs = [(BACKWARD, place + 1, micro)] if place < p * v - 1 else [(FORWARD, place, micro)]
                if any(need not in done for need in needs):
                    break
                share = FORWARD_SHARE if kind == FORWARD else 1 - FORWARD_SHARE
                start = max([clock[stage], *(done[need] for need in needs)])
                clock[stage] = done[kind, place, micro] = start + share * chunk_s[stage]
                held[stage] += 1 if kind == FORWARD else -1
                most[stage] = max(most[stage], held[stage])
                position[stage] += 1
                moved = True
        assert moved, "the schedule is stuck"
    return max(clock), [count / v for count in most]


def orders_of(schedule: str, p: int, v: int, m: int) -> list[list[Op]]:
    if schedule == "gpipe":
        return [gpipe_order(m) for _ in range(p)]
    if schedule == "1f1b":
        return [one_f_one_b_order(p, m, stage) for stage in range(p)]
    return [interleaved_order(p, v, m, stage) for stage in range(p)]


def closed_form(schedule: str, v: int, m: int, stage_s: list[float]) -> float:
    return float(
        pipeline_s(
            schedule,
            pipeline_parallel=len(stage_s),
            virtual_pipeline_stages=v,
            num_microbatches=np.array([m]),
            slowest_stage_s=np.array([max(stage_s)]),
            sum_of_stages_s=np.array([sum(stage_s)]),
        )[0]
    )


SIZES = [
    *(("gpipe", p, 1, m) for p, m in ((2, 2), (4, 8), (8, 32))),
    *(("1f1b", p, 1, m) for p, m in ((2, 1), (2, 8), (4, 4), (4, 3), (8, 64))),
    *(("interleaved", p, v, m) for p, v, m in ((2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 64), (4, 2, 4))),
]


@pytest.mark.parametrize(("schedule", "p", "v", "m"), SIZES)
def test_a_step_of_equal_stages_takes_what_the_simulation_takes(schedule: str, p: int, v: int, m: int) -> None:
    simulated, _ = simulate(orders_of(schedule, p, v, m), [1.0 / v] * p, v)
    assert closed_form(schedule, v, m, [1.0] * p) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(("schedule", "p", "v", "m"), SIZES)
def test_in_flight_is_what_the_simulation_holds(schedule: str, p: int, v: int, m: int) -> None:
    _, most = simulate(orders_of(schedule, p, v, m), [1.0 / v] * p, v)
    counts = [
        float(
            in_flight(
                schedule, pipeline_parallel=p, virtual_pipeline_stages=v, stage=stage, num_microbatches=np.array([m])
            )[0]
        )
        for stage in range(p)
    ]
    assert counts == pytest.approx(most)


@settings(deadline=None, max_examples=60)
@given(times=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), m=st.integers(6, 24))
def test_unequal_stages(times: list[float], m: int) -> None:
    """m·max + Σ − max is exact for GPipe and never below 1F1B, whose fill and drain overlap a little."""
    gpipe, _ = simulate(orders_of("gpipe", len(times), 1, m), times, 1)
    assert closed_form("gpipe", 1, m, times) == pytest.approx(gpipe)
    one_f_one_b, _ = simulate(orders_of("1f1b", len(times), 1, m), times, 1)
    assert one_f_one_b * (1 - 1e-9) <= closed_form("1f1b", 1, m, times) <= 1.3 * one_f_one_b


@given(p=st.integers(2, 16), v=st.integers(1, 4), stage=st.integers(0, 15), m=st.integers(1, 200))
def test_no_stage_holds_more_than_the_first_or_than_all(p: int, v: int, stage: int, m: int) -> None:
    for name in CLOSED_FORMS:
        if name == "none" or stage >= p:
            continue
        args = {"pipeline_parallel": p, "virtual_pipeline_stages": v, "num_microbatches": np.array([m])}
        here, first = in_flight(name, stage=stage, **args), in_flight(name, stage=0, **args)
        assert 0 < here <= first <= m


def test_bubbles_are_ordered_as_their_papers_say() -> None:
    steps = {name: closed_form(name, 2, 32, [1.0] * 8) for name in CLOSED_FORMS}
    assert steps["zb-2p"] <= steps["zb-v"] < steps["zb-1p"] < steps["interleaved"] < steps["1f1b"] == steps["gpipe"]
    assert steps["1f1b"] == 32 + 7
    assert steps["interleaved"] == 32 + 7 / 2


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_a_longer_pass_of_any_stage_is_never_faster(schedule: str, v: int) -> None:
    """Bounds of splits rest on it: stages at their least take no more than any stages."""
    rng = np.random.default_rng(0)
    for case in range(60):
        p, groups = int(rng.integers(2, 17)), int(rng.integers(1, 9))
        passes = rng.uniform(0.1, 2.0, (2, p, 1)) * np.ones(2 * p)
        if case % 2:  # a last stage that is the slowest has a form of its own
            passes[:] = passes[:1] * np.array([1.0, 2.0])[:, None, None]
            passes[:, -1] = passes.max(axis=1)
        longer = passes.copy()
        longer.reshape(2 * p, 2 * p)[np.diag_indices(2 * p)] += rng.exponential(1.0, 2 * p)
        before, after = (
            staged_pipeline_s(
                schedule,
                virtual_pipeline_stages=v,
                num_microbatches=np.full(2 * p, groups * p),
                stages_s=forward + backward,
                forward_share=forward / (forward + backward),
            )
            for forward, backward in (passes, longer)
        )
        assert np.all(after >= before * (1.0 - 1e-12))
