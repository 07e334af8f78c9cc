"""Optimizer states in host memory: what the device no longer holds the host does, and it is never faster."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, MOE, configured, machine_with, problem_of, questions
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.estimator.exchange.offload import (
    HOST_ADAM_BYTES_PER_S,
    HOST_COPY_BYTES_PER_PARAMETER,
    HOST_LINK_EFFICIENCY,
    PCIE_4,
    PCIE_5,
    host_link_bytes_per_s,
    host_optimizer_s,
)
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.infeasible import explain_infeasible
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingObjective, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees

Question = tuple[TrainingProblem, TrainingConfig]
FEW = settings(max_examples=60, deadline=None)
TIB = 2.0**40
BYTES = {"gradient_bytes": 4.0, "weight_bytes": 2.0, "adam_bytes": 30.0, "state_bytes": 12.0}


def both(problem: TrainingProblem, config: TrainingConfig) -> tuple[Priced, Priced]:
    return tuple(price(problem, replace(config, optimizer_offload=there)) for there in (False, True))


@FEW
@given(question=questions())
def test_states_move_from_the_device_to_the_host(question: Question) -> None:
    problem, config = question
    device, host = both(problem, config)
    recipe, extra = problem.calibration.recipe, problem.calibration.memory.extra_bytes_per_parameter
    assert host.step_s >= device.step_s
    for before, after in zip(device.stages, host.stages, strict=True):
        assert before.host_bytes == 0.0
        parameters = before.components["optimizer"] / (recipe.optimizer_bytes + extra)
        moved = before.components["optimizer"] - after.components["optimizer"]
        assert moved == pytest.approx(parameters * recipe.optimizer_bytes)
        assert after.host_bytes == pytest.approx(parameters * (recipe.optimizer_bytes + HOST_COPY_BYTES_PER_PARAMETER))
        assert after.host_bytes >= moved
        assert after.safe_bytes < before.safe_bytes
        unmoved = set(before.components) - {"optimizer"}
        assert {name: before.components[name] for name in unmoved} == {name: after.components[name] for name in unmoved}
    unlike = {name for name in device.breakdown_s if device.breakdown_s[name] != host.breakdown_s[name]}
    assert unlike == {"optimizer step"}


def test_the_step_on_the_host_by_hand() -> None:
    """A billion parameters of one of eight ranks on PCI Express 5.0: 6 bytes over the link, eight ranks' Adam."""
    machine = machine_with(8)
    seconds = host_optimizer_s(np.array([1e9]), machine, np.array([8]), on_nvme=np.array([False]), **BYTES)
    expected = 6e9 / (HOST_LINK_EFFICIENCY * PCIE_5) + 8 * 30e9 / HOST_ADAM_BYTES_PER_S
    assert seconds[0] == pytest.approx(expected)


@pytest.mark.parametrize(("architecture", "link"), [("ampere", PCIE_4), ("hopper", PCIE_5), ("unheard-of", PCIE_5)])
def test_the_link_is_that_of_the_generation(architecture: str, link: float) -> None:
    device = replace(machine_with(1).device, architecture=architecture)
    assert host_link_bytes_per_s(device) == HOST_LINK_EFFICIENCY * link


@given(ranks=st.integers(1, 16), parameters=st.floats(1e6, 1e11))
def test_more_ranks_on_a_host_are_slower(ranks: int, parameters: float) -> None:
    def seconds(count: int) -> float:
        arrays = (np.array([parameters]), machine_with(1), np.array([count]))
        return float(host_optimizer_s(*arrays, on_nvme=np.array([False]), **BYTES)[0])

    assert seconds(ranks) < seconds(ranks + 1)


# --- search ---

NARROW = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "zero_stage": 1, "micro_batch_size": 1}


def question(host_bytes: float | None, *, allowed: bool = True, **more: object) -> TrainingProblem:
    machine = machine_with(2, host_memory_bytes=None if host_bytes is None else int(host_bytes))
    limits = {"memory_bytes": 9e9, "offload": ("optimizer",) if allowed else (), **more}
    return problem_of(DENSE, num_devices=2, machine=machine, rules=MEGATRON, limits=limits, fixed=NARROW)


def test_offload_is_taken_where_nothing_else_fits_and_only_if_allowed() -> None:
    none, _ = search_degrees(question(TIB, allowed=False))
    assert none.assignment is None
    solution, _ = search_degrees(question(TIB))
    assert solution.assignment is not None
    assert solution.assignment.config.optimizer_offload
    roomy, search = search_degrees(question(TIB, memory_bytes=80e9))
    assert roomy.assignment is not None
    assert not any(scored.config.optimizer_offload for scored in search.best)


def test_an_infeasible_question_hears_of_it_where_it_would_help() -> None:
    def changes(problem: TrainingProblem) -> dict[str, str]:
        _, search = search_degrees(problem)
        found = explain_infeasible(problem, search.report)["least_change"]
        return {change["constraint"]: change["change"] for change in found}

    assert "cluster.host_memory" not in changes(question(TIB, allowed=False))["offload"]
    unknown = changes(question(None, allowed=False))["offload"]
    assert re.search(r"takes [\d.]+ GiB of each host: give cluster.host_memory", unknown)
    assert "offload" not in changes(question(TIB, allowed=False, memory_bytes=6e9))


def test_a_small_host_refuses_and_the_nearest_miss_says_so() -> None:
    solution, search = search_degrees(question(4e9))
    assert solution.assignment is None
    assert "host memory" in search.report.nearest_miss
    asked, _ = search_degrees(question(TIB, host_memory_bytes=4e9))
    assert asked.assignment is None


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=lambda shape: shape.slug)
@pytest.mark.parametrize("objective", [TrainingObjective.THROUGHPUT, TrainingObjective.NUM_DEVICES])
@pytest.mark.parametrize("memory_bytes", [6.4e9])
def test_agrees_with_asking_twice(shape: object, objective: TrainingObjective, memory_bytes: float) -> None:
    """Allowed is the best of pinned off, and of pinned on with any share: the bound loses nothing."""
    machine = machine_with(4, host_memory_bytes=int(TIB))
    base: dict[str, object] = {"num_devices": 4, "global_batch_size": 4, "machine": machine, "objective": objective}
    free = {"limits": {"memory_bytes": memory_bytes, "offload": ("optimizer",)}}
    solution, _ = search_degrees(problem_of(shape, **base, **free))
    assert solution.assignment is not None
    assert solution.bound is not None
    share = max(solution.assignment.config.optimizer_offload_percent - 1, 1)

    def pinned(**pins: object) -> float:
        found, _ = search_degrees(problem_of(shape, **base, **free, fixed=pins))
        return float("inf") if found.objective is None else found.objective

    whole = min(pinned(optimizer_offload=False), pinned(optimizer_offload=True, optimizer_offload_percent=100))
    best = min(whole, pinned(optimizer_offload=True, optimizer_offload_percent=share))
    assert solution.bound <= best
    assert solution.objective <= whole * (1.0 + 1e-9)


def test_a_share_lies_on_the_line_between_none_and_all() -> None:
    """Memory of the device and of the host, and the time of the step, by hand: 30 of 100."""
    problem = problem_of(DENSE, num_devices=2, machine=machine_with(2, host_memory_bytes=int(TIB)), rules=MEGATRON)
    config = configured(problem, **NARROW)
    none, every = both(problem, config)
    part = price(problem, replace(config, optimizer_offload=True, optimizer_offload_percent=30))
    assert part.step_s == pytest.approx(0.7 * none.step_s + 0.3 * every.step_s)
    for before, between, after in zip(none.stages, part.stages, every.stages, strict=True):
        for name in ("safe_bytes", "host_bytes"):
            ends = getattr(before, name), getattr(after, name)
            assert getattr(between, name) == pytest.approx(0.7 * ends[0] + 0.3 * ends[1])


@pytest.mark.parametrize("memory_bytes", [6e9, 8e9, 9e9, 11e9])
def test_no_more_moves_than_must(memory_bytes: float) -> None:
    solution, _ = search_degrees(question(TIB, memory_bytes=memory_bytes))
    if solution.assignment is None:
        return
    config, limit = solution.assignment.config, memory_bytes
    problem = question(TIB, memory_bytes=memory_bytes)
    fits = [
        max(stage.safe_bytes for stage in price(problem, replace(config, optimizer_offload_percent=part)).stages)
        <= limit
        for part in (config.optimizer_offload_percent, config.optimizer_offload_percent - 1)
    ]
    assert fits == [True, False]
    assert config.optimizer_offload_percent < 100


def test_a_pinned_offload_obeys_the_framework() -> None:
    """Megatron-LM moves the states of its distributed optimizer: ZeRO 1, no other stage."""
    problem = problem_of(DENSE, num_devices=4, rules=MEGATRON, fixed={"optimizer_offload": True})
    _, search = search_degrees(problem)
    assert {scored.config.zero_stage for scored in search.best} == {1}
    assert all(scored.config.optimizer_offload for scored in search.best)
    broken = MEGATRON.broken(DENSE, configured(problem, zero_stage=0, optimizer_offload=True))
    assert [rule.name for rule in broken] == ["megatron_optimizer_offload"]
