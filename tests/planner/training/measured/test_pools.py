"""Measured runs on several types of devices, as questions: links that a row states are those of any two devices."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel
from meshplan.planner.training.measured.observations import ObservationReader
from meshplan.planner.training.measured.pools import pooled_run, validate_pooled
from meshplan.planner.training.mixed.estimator import price_mixed
from meshplan.planner.training.mixed.stages import MixedProblem

# NVLink 2 between a pair of V100, as a broadcast between two ranks attains it.
PAIR_BYTES_PER_S = 21.25e9


def row_of(framework: str = "Megatron-LM", **stated: float) -> dict[str, Any]:
    """Eight V100 on two nodes and four T4, with what the row states of the links between the V100."""
    stages = [
        {"devices": [["v100-sxm2-16gb", 8]], "num_layers": 12, "tensor_parallel": 1, "micro_batch_size": 1},
        {"devices": [["t4", 4]], "num_layers": 12, "tensor_parallel": 1, "micro_batch_size": 2},
    ]
    return {
        "id": "run",
        "task": "training",
        "model": {
            "name": "GPT-2",
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50257,
            "gated_mlp": False,
        },
        "hardware": {
            "device": "mixed",
            "pools": [
                {"device": "v100-sxm2-16gb", "num_nodes": 2, "devices_per_node": 4, **stated},
                {"device": "t4", "num_nodes": 1, "devices_per_node": 4},
            ],
        },
        "precision": "fp16",
        "framework": {"name": framework},
        "parallelism": {"global_batch_size": 32, "activation_recompute": "none", "stages": stages},
        "workload": {"sequence_length": 1024, "phase": "pretraining"},
        "measured": {"iteration_s": 1.0},
    }


def question(catalog: Catalog, **stated: float) -> MixedProblem:
    """The row as a question."""
    return pooled_run(ObservationReader(catalog), row_of(**stated), catalog)[0]


def pair_bytes_per_s(problem: MixedProblem) -> float:
    """Rate between two V100 of a node before any efficiency."""
    v100 = problem.pools[0]
    links = CommunicationModel(machine=v100.machine, calibration=v100.calibration)
    return float(links.pair_bytes_per_s / v100.calibration.time.scale_up_efficiency)


def test_a_stated_rate_is_that_of_a_pair(catalog: Catalog) -> None:
    """A pair of V100 has one link of six; a rate that was measured between two has that in it already."""
    assert pair_bytes_per_s(question(catalog)) == pytest.approx(150e9 / 6)
    stated = question(catalog, intra_node_bandwidth_bytes_per_s=PAIR_BYTES_PER_S)
    assert pair_bytes_per_s(stated) == pytest.approx(PAIR_BYTES_PER_S)


def test_a_stage_holds_the_micro_batches_that_its_row_states(catalog: Catalog) -> None:
    """HARP's schedule launches more of them than 1F1B, one layer of recomputed inputs each."""
    plain = row_of("HARP (Alpa, JAX)")
    plain["parallelism"] |= {"activation_recompute": "full", "num_microbatches": 64}
    stages = plain["parallelism"]["stages"]
    stated = plain | {
        "parallelism": plain["parallelism"] | {"stages": [stages[0] | {"warmup_micro_batches": 5}, stages[1]]}
    }
    held = []
    for row in (plain, stated):
        problem, plan, _ = pooled_run(ObservationReader(catalog), row, catalog)
        held.append(price_mixed(problem, plan).shares[0].memory.components["activations"][0])
    # Two inputs of a layer in 16 bits, of attention and of the MLP, and once what was embedded.
    inputs = (2 * 12 + 1) * 2.0 * 1024 * 1024
    factor = float(problem.pools[0].calibration.memory.activation_factor)
    assert held[1] - held[0] == pytest.approx((5 - 2) * inputs * factor)


def test_gradients_are_sharded_where_the_framework_shards_them(catalog: Catalog) -> None:
    """Alpa's benchmarks reduce-scatter (ZeRO-2), HARP's with them."""
    _, plan, _ = pooled_run(ObservationReader(catalog), row_of("HARP (Alpa, JAX)"), catalog)
    assert plan.zero_stage == 2
    _, plain, _ = pooled_run(ObservationReader(catalog), row_of(), catalog)
    assert plain.zero_stage < 2


def test_a_run_that_worked_says_how_its_plan_would_have_been_admitted(catalog: Catalog) -> None:
    """By the bound, by the expected peak, by neither; a run that failed says nothing."""
    row = row_of("DeepSpeed + Megatron-LM 1.1.5")
    assert validate_pooled(ObservationReader(catalog), row, catalog).admitted == "safe bound"
    for stage in row["parallelism"]["stages"]:
        stage["micro_batch_size"] *= 4
    large = validate_pooled(ObservationReader(catalog), row, catalog)
    assert (large.admitted, large.oom) == ("neither", True)
    failed = validate_pooled(ObservationReader(catalog), row | {"measured": {"failed": True}}, catalog)
    assert (failed.admitted, failed.oom) == ("", True)
