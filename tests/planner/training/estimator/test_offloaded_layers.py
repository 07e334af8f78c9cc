"""Activations of layers off the device, without recompute: what leaves, what stays, and what its copies take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from core_cases import DENSE, configured, machine_with, problem_of, questions
from emit_cases import LLAMA_70B, config_for, request_for
from finetuning_cases import tuning
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.cli.reports.configuration import config_text
from meshplan.planner.imports.command import import_command
from meshplan.planner.imports.spec import Answers
from meshplan.planner.launch.registry import emit
from meshplan.planner.service import estimate_plan
from meshplan.planner.training.estimator.exchange.offload import (
    ACTIVATION_BUFFERS,
    DEFAULT_NVME_BYTES_PER_S,
    HOST_LINK_EFFICIENCY,
    PCIE_5,
    away_bytes_per_s,
    layers_offload_s,
)
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.unvalidated import UNMEASURED_COPIES, unconfirmed

FEW = settings(max_examples=40, deadline=None)
TIB = 2.0**40
GIVEN_UP = 1.0 + 1e-9


# --- time ---


def passes_s(layers: int, away: int, forward: float, backward: float, copy: float) -> float:
    """Both passes, layer by layer, as Transformer Engine orders the copies (pytorch/cpu_offload.py, 2025): layer i has
    left before layer L − n + i starts, and starts to come back once that layer's backward pass is done.
    """
    room, computed, copied = layers - away, [0.0], [0.0]
    for layer in range(layers):
        ready = copied[layer - room + 1] if layer >= room else 0.0
        computed.append(max(computed[-1], ready) + forward)
        if layer < away:
            copied.append(max(copied[-1], computed[-1]) + copy)
    done = {layers: 0.0}
    returned = {away: 0.0}
    for layer in reversed(range(layers)):
        if 0 <= (back := layer - room + 1) < away:
            returned[back] = max(returned[back + 1], done[layer + 1]) + copy
        done[layer] = max(done[layer + 1], returned.get(layer, 0.0)) + backward
    return computed[-1] + done[0]


@FEW
@given(
    layers=st.integers(4, 80),
    share=st.floats(0.02, 1.0),
    forward=st.floats(0.1, 10.0),
    copy=st.floats(0.01, 50.0),
)
def test_what_layers_do_not_hide_is_what_a_simulation_adds(
    layers: int, share: float, forward: float, copy: float
) -> None:
    away = max(1, int(share * (layers - ACTIVATION_BUFFERS)))
    plain = layers * 3.0 * forward
    exposed = layers_offload_s(
        np.array([away * copy]), np.array([plain]), layers, np.array([1 / 3]), bytes_per_s=np.array([1.0])
    )[0]
    assert plain + exposed == pytest.approx(passes_s(layers, away, forward, 2.0 * forward, copy), rel=1e-9)


def test_drives_are_shared_by_the_ranks_of_a_host() -> None:
    machine, ranks = machine_with(8), np.array([8, 1])
    link = HOST_LINK_EFFICIENCY * PCIE_5
    host = away_bytes_per_s(machine, ranks, on_nvme=np.array([False, False]))
    drives = away_bytes_per_s(machine, ranks, on_nvme=np.array([True, True]))
    assert host.tolist() == [link, link]
    assert drives.tolist() == [DEFAULT_NVME_BYTES_PER_S / 8, DEFAULT_NVME_BYTES_PER_S]


# --- memory ---


@settings(max_examples=20, deadline=None)
@given(question=questions(), more=st.integers(1, 6), to=st.sampled_from(("host", "nvme")))
def test_what_leaves_the_device_is_elsewhere(
    question: tuple[TrainingProblem, TrainingConfig], more: int, to: str
) -> None:
    """All that n layers keep, less what two of them take while they move; a further layer frees no less."""
    problem, drawn = question
    degrees = ("tensor_parallel", "context_parallel", "data_parallel", "expert_parallel", "zero_stage")
    config = configured(problem, **{name: getattr(drawn, name) for name in degrees})
    layers = problem.shape.num_hidden_layers
    one, other = (
        price(problem, replace(config, activation_offload_num_layers=count, offload_to=to if count else "host"))
        for count in (min(more, layers) - 1, min(more, layers))
    )
    plain = price(problem, config)
    here, there = plain.worst_stage, other.worst_stage
    away = there.host_bytes if to == "host" else there.nvme_bytes
    freed = here.components["activations"] - there.components["activations"]
    assert 0.0 <= freed <= away * problem.calibration.memory.activation_factor * GIVEN_UP
    assert there.safe_bytes <= one.worst_stage.safe_bytes * GIVEN_UP
    assert plain.step_s <= one.step_s * GIVEN_UP <= other.step_s * GIVEN_UP**2
    unmoved = here.components.keys() - {"activations"}
    assert all(here.components[name] == there.components[name] for name in unmoved)


def test_two_layers_stay_by_hand() -> None:
    """Six equal layers, four of them away: two stay, and two are on their way."""
    problem = problem_of(DENSE, num_devices=1, global_batch_size=1, machine=machine_with(1))
    config = configured(problem, data_parallel=1)
    held = {
        count: price(problem, replace(config, activation_offload_num_layers=count)).worst_stage for count in (0, 2, 4)
    }
    layer = held[4].host_bytes / 4
    factor = problem.calibration.memory.activation_factor
    assert held[0].components["activations"] == held[2].components["activations"]
    freed = held[0].components["activations"] - held[4].components["activations"]
    assert freed == pytest.approx(2 * layer * factor)


# --- search ---

NARROW = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "micro_batch_size": 1}


def question(memory_bytes: float, offload: tuple[str, ...], **fixed: Any) -> TrainingProblem:
    limits = {"memory_bytes": memory_bytes, "offload": offload}
    return problem_of(
        DENSE,
        num_devices=2,
        global_batch_size=4,
        sequence_length=8192,
        machine=machine_with(2, host_memory_bytes=int(TIB)),
        limits=limits,
        fixed={**NARROW, **fixed},
    )


@pytest.mark.parametrize(
    ("memory_bytes", "recompute"),
    [
        (12.5e9, {"activation_recompute": "none"}),
        (15.5e9, {"activation_recompute": "none"}),
        (14.8e9, {}),
        (16.6e9, {}),
    ],
)
def test_the_least_number_of_layers_is_the_best_of_all(memory_bytes: float, recompute: dict[str, str]) -> None:
    """Every number pinned, with the states on the device and on the host, with recompute of inputs and without. A share
    of the states only adds to them.
    """
    allowed = ("optimizer", "activations")
    solution, _ = search_degrees(question(memory_bytes, allowed, optimizer_offload_percent=100, **recompute))
    shared, _ = search_degrees(question(memory_bytes, allowed, **recompute))
    found = []
    for states in (False, True):
        for pins in (
            *({"activation_offload_num_layers": count, "activation_offload": False} for count in range(7)),
            {"activation_offload_num_layers": 0, "activation_offload": True},
        ):
            answer, _ = search_degrees(question(memory_bytes, (), optimizer_offload=states, **pins, **recompute))
            found += [] if answer.objective is None else [answer.objective]
    assert found
    assert solution.objective == pytest.approx(min(found), rel=1e-9)
    assert solution.bound <= min(found) * GIVEN_UP
    assert shared.objective <= solution.objective
    assert not recompute or solution.assignment.config.activation_offload_num_layers


def test_layers_move_only_where_memory_asks_and_the_limits_allow() -> None:
    for memory_bytes, offload in ((80e9, ("activations",)), (16e9, ("parameters",)), (16e9, ())):
        _, search = search_degrees(question(memory_bytes, offload))
        assert all(scored.config.activation_offload_num_layers == 0 for scored in search.best)
    _, search = search_degrees(question(16e9, ("activations",)))
    assert any(scored.config.activation_offload_num_layers for scored in search.best)


def test_a_small_host_refuses() -> None:
    asked = question(16e9, ("activations",), activation_recompute="none", zero_stage=1)
    assert search_degrees(asked)[0].assignment is not None
    small = replace(asked, machine=machine_with(2, host_memory_bytes=int(1e9)))
    solution, search = search_degrees(small)
    assert solution.assignment is None
    assert "host memory" in search.report.nearest_miss


def test_it_is_said_with_its_share() -> None:
    problem = problem_of(DENSE)
    config = configured(problem, data_parallel=8, activation_offload_num_layers=3)
    (said,) = unconfirmed(problem, price(problem, config))
    assert "activations of 3 layers in host memory" in said.what
    assert said.share >= UNMEASURED_COPIES
    assert "activations of 3 layers on host" in config_text(config.choices)


# --- rules and files ---


@pytest.mark.parametrize(
    ("target", "choices", "rule"),
    [
        ("any", {"activation_recompute": "full"}, "offloaded_layers_are_kept"),
        ("any", {"pipeline_parallel": 2}, "offloaded_layers_are_kept"),
        ("any", {"activation_offload_num_layers": 81}, "offloaded_layers_are_kept"),
        ("megatron", {"zero_stage": 3}, "megatron_offloads_layers"),
        ("megatron", {"activation_offload_num_layers": 79}, "megatron_offloads_layers"),
        ("megatron", {"offload_to": "nvme"}, "megatron_has_no_nvme"),
        ("deepspeed", {}, "deepspeed_has_no_activation_offload_num_layers"),
        ("torchtitan", {}, "torchtitan_has_no_activation_offload_num_layers"),
        ("axolotl", {"zero_stage": 0}, "axolotl_offloads_all_layers"),
    ],
)
def test_frameworks_refuse_layers_that_they_cannot_offload(target: str, choices: dict[str, Any], rule: str) -> None:
    config = config_for(LLAMA_70B, **{"data_parallel": 8, "activation_offload_num_layers": 4, **choices})
    assert rule in {broken.name for broken in FRAMEWORKS[target].broken(LLAMA_70B, config)}


def test_megatron_gets_the_number_of_offloaded_layers_and_no_recompute() -> None:
    config = config_for(LLAMA_70B, data_parallel=8, activation_offload_num_layers=78)
    emitted = emit("megatron", request_for(LLAMA_70B, config))
    said = next(file.content for file in emitted.artifacts if file.path.name == "megatron_args.txt")
    assert "--cpu-offloading-num-layers 78" in said
    assert "--recompute" not in said


EVERY = config_for(LLAMA_70B, data_parallel=8, zero_stage=0, activation_offload_num_layers=80)


def test_axolotl_offloads_what_adapters_keep_and_is_read_back(catalog: Catalog, tmp_path: Path) -> None:
    """All layers of adapters without recompute; hidden states, or every weight, are recomputed."""
    with pytest.raises(CannotExpressError, match="unless it trains adapters"):
        emit("axolotl", tuning(EVERY, phase="sft", lora_rank=None))
    emitted = emit("axolotl", tuning(EVERY))
    written = next(file.content for file in emitted.artifacts if file.path.name == "axolotl.yaml")
    document = yaml.safe_load(written)
    assert (document["gradient_checkpointing"], document["activation_offloading"]) == (True, True)
    for change, expected in (
        ({}, {"activation_recompute": "none", "activation_offload_num_layers": 80}),
        ({"activation_offloading": "hidden_states"}, {"activation_recompute": "full", "activation_offload": True}),
        ({"adapter": None}, {"activation_recompute": "full", "activation_offload": True}),
    ):
        path = tmp_path / "axolotl.yaml"
        path.write_text(yaml.safe_dump({**document, **change}))
        answers = Answers(model="llama-3.1-70b", node_type="dgx-h100", nodes=1)
        fixed = import_command([str(path)], catalog, answers).spec["fixed"]
        assert {name: fixed[name] for name in expected} == expected
        assert "activation_offload_num_layers" in expected or "activation_offload_num_layers" not in fixed


SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 2048, "global_batch_size": 8},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fixed": {"activation_offload_num_layers": 4, "activation_recompute": "full"}}, "recompute: none"),
        ({"fixed": {"activation_offload_num_layers": 33, "pipeline_parallel": 1}}, "at most the model's"),
        ({"constraints": {"offload": ["activations"], "offload_to": "nvme"}}, "target any alone"),
    ],
)
def test_what_makes_no_sense_is_refused(catalog: Catalog, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        estimate_plan({**SPEC, **change}, catalog)


# --- published ---

# torchtune's README, section "Optimization flags": Llama-3.2-3B, one A100 of 80 GB, two packed sequences of 4,096
# tokens; tokens/s and peak before and with activation offloading, nothing else changed.
BEFORE, WITH = (7309, 24.80344e9), (7301, 23.40757e9)
ALL_FLAGS = {"activation_recompute": "full", "optimizer_in_backward": True, "loss": "chunked", "micro_batch_size": 2}


def test_torchtune_hides_its_copies_and_frees_the_inputs(catalog: Catalog) -> None:
    plans = [
        estimate_plan(
            {
                "kind": "training",
                "model": "llama-3.2-3b",
                "cluster": {
                    "devices": {"type": "a100-sxm-80gb", "per_node": 1, "nodes": 1},
                    "host_memory": "1 TiB",
                },
                "workload": {"sequence_length": 4096, "global_batch_size": 2, "phase": "sft"},
                "constraints": {"target": "torchtune"},
                "fixed": {**ALL_FLAGS, "activation_offload": moved},
            },
            catalog,
        )
        for moved in (False, True)
    ]
    steps, peaks = ([plan.predicted[name].value for plan in plans] for name in ("iteration_s", "peak_memory_bytes"))
    assert steps[1] / steps[0] == pytest.approx(BEFORE[0] / WITH[0], abs=0.01)
    assert peaks[0] - peaks[1] == pytest.approx(BEFORE[1] - WITH[1], rel=0.15)
