"""Parameters, activations and NVMe: what leaves the device is elsewhere, takes time, and is asked for only in need."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, configured, machine_with, problem_of, questions
from emit_cases import LLAMA_70B, config_for, request_for
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch.registry import emit
from meshplan.planner.service import make_plan
from meshplan.planner.training.estimator.exchange.offload import (
    DEFAULT_NVME_BYTES_PER_S,
    HOST_ADAM_BYTES_PER_S,
    HOST_LINK_EFFICIENCY,
    NVME_BUFFER_BYTES,
    PCIE_5,
    activation_offload_s,
    fetch_s,
    host_optimizer_s,
)
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import OFFLOADS, TrainingConfig, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.unvalidated import unconfirmed

Question = tuple[TrainingProblem, TrainingConfig]
FEW = settings(max_examples=40, deadline=None)
LINK = HOST_LINK_EFFICIENCY * PCIE_5
TIB = 2.0**40
ON, OFF = np.array([True]), np.array([False])
BYTES = {"gradient_bytes": 4.0, "weight_bytes": 2.0, "adam_bytes": 30.0, "state_bytes": 12.0}


def with_offload(question: Question, *names: str, to: str = "host") -> tuple[Priced, Priced]:
    """A configuration as it is, and with some of it elsewhere."""
    problem, config = question
    changes: dict[str, Any] = {OFFLOADS[name]: True for name in names}
    return price(problem, config), price(problem, replace(config, offload_to=to, **changes))


# --- arithmetic, by hand ---


def test_shards_cross_every_link_at_once_and_share_the_drives() -> None:
    """Ten GB of a rank, two passes: 0.42 s over PCI Express 5.0; eight ranks read 80 GB from 25.6 GB/s of NVMe."""
    machine, passes = machine_with(8), np.array([2.0])
    args = (np.array([10e9]), machine, np.array([8]))
    assert fetch_s(*args, on_nvme=OFF, passes=passes)[0] == pytest.approx(2 * 10e9 / LINK)
    assert fetch_s(*args, on_nvme=ON, passes=passes)[0] == pytest.approx(2 * 80e9 / DEFAULT_NVME_BYTES_PER_S)
    fast = replace(machine, nvme_bytes_per_s=1e13)
    assert fetch_s(args[0], fast, args[2], on_nvme=ON, passes=passes)[0] == pytest.approx(2 * 10e9 / LINK)


def test_states_on_nvme_are_read_and_written_beside_the_host() -> None:
    args = (np.array([1e9]), machine_with(8), np.array([8]))
    copied, updated = 6e9 / LINK, 8 * 30e9 / HOST_ADAM_BYTES_PER_S
    stored = 8 * 2 * 12e9 / DEFAULT_NVME_BYTES_PER_S
    assert host_optimizer_s(*args, on_nvme=OFF, **BYTES)[0] == pytest.approx(copied + updated)
    assert host_optimizer_s(*args, on_nvme=ON, **BYTES)[0] == pytest.approx(copied + max(updated, stored))
    assert stored > updated


def test_activations_go_and_come_back() -> None:
    assert activation_offload_s(np.array([LINK]), machine_with(1).device)[0] == pytest.approx(2.0)


# --- memory and time ---


@FEW
@given(question=questions(), to=st.sampled_from(("host", "nvme")), count=st.integers(1, 2))
def test_states_leave_the_device_and_nothing_gets_faster(question: Question, to: str, count: int) -> None:
    problem, config = question
    config = replace(config, zero_stage=3, data_parallel_shard=config.data_parallel)
    names = ("parameters", "optimizer")[:count]
    device, away = with_offload((problem, config), *names, to=to)
    assert away.step_s >= device.step_s
    for before, after in zip(device.stages, away.stages, strict=True):
        assert after.safe_bytes < before.safe_bytes
        left = sum(before.components[name] - after.components[name] for name in ("weights", "optimizer"))
        assert left > 0
        kept = after.host_bytes if to == "host" else after.nvme_bytes
        assert kept >= left * (1 - 1e-9)
        if to == "nvme" and count == 1:
            assert after.host_bytes == NVME_BUFFER_BYTES
        assert (after.nvme_bytes > 0) == (to == "nvme")
        unmoved = {"activations", "logits", "fixed"}
        assert {name: before.components[name] for name in unmoved} == {name: after.components[name] for name in unmoved}


@FEW
@given(question=questions())
def test_checkpointed_inputs_leave_the_device(question: Question) -> None:
    problem, config = question
    config = replace(config, activation_recompute="full")
    device, away = with_offload((problem, config), "activations")
    assert away.step_s >= device.step_s
    moved = 0.0
    for before, after in zip(device.stages, away.stages, strict=True):
        gone = before.components["activations"] - after.components["activations"]
        assert gone >= 0
        assert after.host_bytes * problem.calibration.memory.activation_factor >= gone * (1 - 1e-9)
        moved += after.host_bytes
    assert moved > 0
    assert away.breakdown_s["activation offload"] > 0
    assert "activation offload" not in device.breakdown_s


@FEW
@given(question=questions(), drives=st.tuples(st.floats(1e9, 1e12), st.floats(1e9, 1e12)))
def test_faster_drives_are_never_slower(question: Question, drives: tuple[float, float]) -> None:
    problem, config = question
    config = replace(config, zero_stage=3, data_parallel_shard=config.data_parallel)
    slow, fast = (
        with_offload(
            (replace(problem, machine=replace(problem.machine, nvme_bytes_per_s=rate)), config),
            "optimizer",
            "parameters",
            to="nvme",
        )[1]
        for rate in sorted(drives)
    )
    assert fast.step_s <= slow.step_s * (1 + 1e-12)
    assert slow.safe_bytes == fast.safe_bytes


def test_everything_away_is_said_with_its_share() -> None:
    problem = problem_of(DENSE)
    config = configured(problem, data_parallel=8, zero_stage=3, activation_recompute="full")
    away = {**dict.fromkeys(OFFLOADS.values(), True), "offload_to": "nvme"}
    found = unconfirmed(problem, price(problem, replace(config, **away)))
    assert [entry.share > 0 for entry in found] == [True, True, True]
    assert "NVMe at 25.6 GB/s a host (assumed)" in found[0].what
    given_rate = replace(problem, machine=replace(problem.machine, nvme_bytes_per_s=12e9))
    assert "12.0 GB/s a host (yours)" in unconfirmed(given_rate, price(problem, replace(config, **away)))[0].what


# --- search ---

NARROW = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "micro_batch_size": 1}


def question(memory_bytes: float, offload: tuple[str, ...], **fixed: Any) -> TrainingProblem:
    limits = {"memory_bytes": memory_bytes, "offload": offload}
    machine = machine_with(2, host_memory_bytes=int(TIB))
    chosen = {**NARROW, **fixed}
    return problem_of(DENSE, num_devices=2, global_batch_size=4, machine=machine, limits=limits, fixed=chosen)


@pytest.mark.parametrize("memory_bytes", [6.2e9, 7e9, 8e9])
def test_agrees_with_pinning_every_set(memory_bytes: float) -> None:
    """All three allowed is the best of all eight sets pinned: no set is left out, and the bound loses nothing. A share
    of the optimizer states only adds to them.
    """
    solution, _ = search_degrees(question(memory_bytes, tuple(OFFLOADS), optimizer_offload_percent=100))
    shared, _ = search_degrees(question(memory_bytes, tuple(OFFLOADS)))
    sets = [chosen for count in range(4) for chosen in combinations(OFFLOADS.values(), count)]
    found = []
    for chosen in sets:
        pinned = {choice: choice in chosen for choice in OFFLOADS.values()}
        answer, _ = search_degrees(question(memory_bytes, (), **pinned))
        found += [] if answer.objective is None else [answer.objective]
    assert found
    assert solution.objective == pytest.approx(min(found), rel=1e-9)
    assert shared.objective <= solution.objective


def test_what_is_not_allowed_is_not_taken_and_what_fits_needs_none() -> None:
    tight, search = search_degrees(question(7e9, ("parameters",)))
    assert {scored.config.offloaded for scored in search.best} <= {(), ("parameters",)}
    roomy, search = search_degrees(question(80e9, tuple(OFFLOADS)))
    assert roomy.assignment is not None
    assert {scored.config.offloaded for scored in search.best} == {()}
    assert tight.assignment is None or tight.assignment.config.zero_stage == 3


# --- rules and files ---


def asked(target: str, config: TrainingConfig) -> TrainingRequest:
    script = "" if target in {"megatron", "torchtitan"} else "train.py"
    return replace(request_for(LLAMA_70B, config), script=script)


@pytest.mark.parametrize(
    ("target", "choices", "rule"),
    [
        ("any", {"parameter_offload": True}, "parameter_offload_needs_zero_3"),
        ("any", {"activation_offload": True}, "activation_offload_needs_full_recompute"),
        ("megatron", {"parameter_offload": True, "zero_stage": 3}, "megatron_has_no_parameter_offload"),
        ("megatron", {"optimizer_offload": True, "offload_to": "nvme"}, "megatron_has_no_nvme"),
        ("torchtitan", {"optimizer_offload": True, "zero_stage": 3}, "torchtitan_offloads_all_states"),
        ("accelerate", {"parameter_offload": True, "zero_stage": 3}, "accelerate_offloads_all_states"),
        ("deepspeed", {"optimizer_offload": True, "offload_to": "nvme", "zero_stage": 2}, "nvme_needs_zero_3"),
    ],
)
def test_frameworks_refuse_states_that_they_cannot_offload(target: str, choices: dict[str, Any], rule: str) -> None:
    config = config_for(LLAMA_70B, data_parallel=8, **choices)
    assert rule in {broken.name for broken in FRAMEWORKS[target].broken(LLAMA_70B, config)}
    if target != "any":
        with pytest.raises(CannotExpressError):
            emit(target, asked(target, config))


AWAY = {"optimizer_offload": True, "parameter_offload": True, "zero_stage": 3, "data_parallel": 8}


def files(target: str, **choices: Any) -> dict[str, str]:
    config = config_for(LLAMA_70B, **{**AWAY, **choices})
    return {file.path.name: file.content for file in emit(target, asked(target, config)).artifacts}


def test_every_framework_is_told() -> None:
    full = {"activation_recompute": "full", "activation_offload": True}
    assert "--training.enable-cpu-offload" in files("torchtitan")["torchtitan_args.txt"]
    yaml = files("accelerate", **full)["accelerate_config.yaml"]
    assert "fsdp_offload_params: true" in yaml
    assert "fsdp_activation_checkpointing_offload: true" in yaml
    said = files("deepspeed", offload_to="nvme", **full)
    document = json.loads(said["deepspeed_config.json"])
    assert document["zero_optimization"]["offload_param"] == {
        "device": "nvme",
        "pin_memory": True,
        "nvme_path": "/local_nvme",
    }
    assert document["zero_optimization"]["offload_optimizer"]["pipeline_write"] is True
    assert document["activation_checkpointing"] == {"cpu_checkpointing": True}
    assert "/local_nvme" in said["README.md"]
    assert "deepspeed.checkpointing.configure" in said["README.md"]


SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-70b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 2048, "global_batch_size": 8},
}


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
def test_a_model_that_fits_no_other_way_is_planned(catalog: Catalog, target: str) -> None:
    """70 billion parameters with all their states need 1.1 TB; eight H100 have 0.6."""
    constraints: dict[str, Any] = {"target": target}
    none = make_plan({**SPEC, "constraints": constraints}, catalog)
    assert none.solution["status"] == "infeasible"
    assert "offload" in {change["constraint"] for change in none.solution["least_change"]}
    plan = make_plan({**SPEC, "constraints": {**constraints, "offload": ["optimizer", "parameters"]}}, catalog)
    assert plan.solution["status"] == "optimal"
    assert plan.config["optimizer_offload"]
    worst = plan.memory["worst"]
    assert worst["host_bytes"] * 8 <= 0.8 * 2 * TIB
    assert "no measured run" in " ".join(plan.provenance["not_validated"])
    step = plan.predicted["iteration_s"]
    assert step.high / step.value > 1.2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"constraints": {"offload": ["optimizer"], "offload_to": "tape"}}, "must be one of host, nvme"),
        ({"constraints": {"offload": ["activations"], "offload_to": "nvme"}}, "add optimizer or parameters"),
        ({"fixed": {"activation_offload": True, "activation_recompute": "none"}}, "must be full"),
    ],
)
def test_what_makes_no_sense_is_refused(catalog: Catalog, change: dict[str, Any], words: str) -> None:
    from meshplan.planner.service import estimate_plan

    with pytest.raises(SpecError, match=words):
        estimate_plan({**SPEC, **change}, catalog)


@FEW
@given(question=questions())
def test_the_default_is_on_the_device(question: Question) -> None:
    problem, config = question
    assume(config.offloaded == ())
    priced = price(problem, config)
    assert all(stage.host_bytes == stage.nvme_bytes == 0.0 for stage in priced.stages)
    assert "offload_to" not in config.choices
