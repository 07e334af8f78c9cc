"""States sharded at more than one level: where each level ends in a simpler one, what it costs by hand, rules."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, LATENT, MOE, configured, machine_with, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from training_constants import with_time

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.priced import Priced, candidates_of, price
from meshplan.planner.training.problem.frameworks.accelerate import ACCELERATE
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.deepspeed import DEEPSPEED
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN
from meshplan.planner.training.problem.problem import Phase, TrainingConfig, TrainingProblem

FEW = settings(max_examples=60, deadline=None)
TRANSFERS = "data-parallel communication"


def question(shape: ModelShape = DENSE, *, devices: int = 32, overlap: float = 0.0, **machine: Any) -> TrainingProblem:
    problem = problem_of(
        shape, num_devices=devices, global_batch_size=devices, machine=machine_with(devices, **machine)
    )
    # Transfers show in full, so that they can be compared.
    return replace(problem, calibration=with_time(problem.calibration, fully_sharded_overlap=overlap))


def sharded(problem: TrainingProblem, **choices: Any) -> TrainingConfig:
    return configured(problem, **{"zero_stage": 3, "data_parallel": 32, **choices})


def priced(problem: TrainingProblem, **choices: Any) -> Priced:
    return price(problem, sharded(problem, **choices))


def test_a_framework_that_hides_nothing_hides_no_shards_either() -> None:
    """Collectives in the stream of the kernels (Alpa) are exposed in full, whatever others hide."""
    apart = question(overlap=0.0)
    recipe = replace(apart.calibration.recipe, overlaps_data_parallel=False)
    hidden = question(overlap=0.9)
    in_stream = replace(hidden, calibration=replace(hidden.calibration, recipe=recipe))
    seconds = [priced(problem).breakdown_s[TRANSFERS] for problem in (apart, hidden, in_stream)]
    assert seconds[1] < seconds[0] == pytest.approx(seconds[2])


# --- a second copy (hpZ) ---


def test_a_second_copy_by_hand() -> None:
    """Gathers of the backward pass stay in the node; 2 bytes of every parameter over eight ranks more.

    Every layer waits for its ring: of 32 ranks on four hosts, or of the eight of one.
    """
    machine = {"scale_up_latency_s": 0.0, "scale_out_latency_s": 0.0}
    problem = question(**machine)
    time = problem.calibration.time
    plain, second = priced(problem), priced(problem, zero_hpz_partition_size=8)
    bytes_16 = 2.0 * DENSE.num_parameters
    far = (31 / 32) * bytes_16 / min(8 * 50e9 * time.network_efficiency, 450e9 * time.scale_up_efficiency)
    near = (7 / 8) * bytes_16 / (450e9 * time.scale_up_efficiency)
    rings = DENSE.num_hidden_layers * (28 * 3.4e-6 + 3 * 14e-6 - 7 * 3.4e-6)
    assert plain.breakdown_s[TRANSFERS] - second.breakdown_s[TRANSFERS] == pytest.approx(
        far - near + rings, rel=1e-4
    )  # the last norm is not counted
    moved = second.worst_stage.components["weights"] - plain.worst_stage.components["weights"]
    assert moved == pytest.approx(bytes_16 / 8, rel=1e-4)


@FEW
@given(
    shape=st.sampled_from((DENSE, MOE, LATENT)),
    tensor=st.sampled_from((1, 2, 4)),
    size=st.sampled_from((2, 4, 8)),
    slower=st.floats(1.0, 50.0),
    overlap=st.floats(0.0, 1.0),
)
def test_a_second_copy_in_the_node_is_never_slower_and_lies_between(
    shape: ModelShape, tensor: int, size: int, slower: float, overlap: float
) -> None:
    """Between full sharding over everybody and over these neighbours alone, in memory and in what is gathered."""
    problem = question(shape, devices=128, overlap=overlap, scale_out_bytes_per_s=50e9 / slower)
    size = max(size // tensor, 1) if size > 1 else size
    choices = {"tensor_parallel": tensor}
    whole, second = (priced(problem, zero_hpz_partition_size=hpz, **choices) for hpz in (1, size))
    assert second.step_s <= whole.step_s * (1 + 1e-12)
    assert whole.safe_bytes <= second.safe_bytes
    if size > 1:
        groups = priced(problem, data_parallel_shard=size, **choices)
        assert second.safe_bytes <= groups.safe_bytes * (1 + 1e-12)


@FEW
@given(shape=st.sampled_from((DENSE, MOE)), data=st.sampled_from((2, 4, 8, 32)), micro=st.sampled_from((1, 2)))
def test_a_second_copy_among_everybody_is_the_first(shape: ModelShape, data: int, micro: int) -> None:
    problem = question(shape, devices=64)
    choices = {"data_parallel": data, "data_parallel_shard": data, "micro_batch_size": micro}
    plain = price(problem, sharded(problem, **choices))
    again = price(problem, sharded(problem, zero_hpz_partition_size=data, **choices))
    assert again.step_s == pytest.approx(plain.step_s, rel=1e-12)
    assert again.safe_bytes == pytest.approx(plain.safe_bytes, rel=1e-12)


def test_experts_spread_over_the_neighbours_have_one_copy_there() -> None:
    """Eight experts-parallel ranks on eight neighbours: each keeps its experts whole and gathers none of them again."""
    problem = question(MOE)
    candidates = candidates_of(problem, sharded(problem, expert_parallel=8, zero_hpz_partition_size=8))
    memory = MemoryModel(shape=MOE, workload=problem.workload, candidates=candidates, calibration=problem.calibration)
    assert [ranks.tolist() for ranks in memory.states.second_copy_ranks()] == [[8], [1]]


# --- optimizer states over groups ---


@FEW
@given(shape=st.sampled_from((DENSE, MOE)), shard=st.sampled_from((2, 4, 8, 16)))
def test_optimizer_states_over_groups_are_a_third_level(shape: ModelShape, shard: int) -> None:
    """The device holds the optimizer's part of full sharding over everybody, and weights of the groups."""
    problem = question(shape)
    groups = priced(problem, data_parallel_shard=shard)
    whole = priced(problem)
    outer = priced(problem, data_parallel_shard=shard, outer_zero_stage=1)
    levels = outer.worst_stage.components
    assert levels["optimizer"] == pytest.approx(whole.worst_stage.components["optimizer"])
    assert levels["weights"] == groups.worst_stage.components["weights"]
    assert levels["gradients"] == groups.worst_stage.components["gradients"]
    assert whole.safe_bytes <= outer.safe_bytes <= groups.safe_bytes


def test_groups_scatter_and_gather_instead_of_reducing() -> None:
    """4-byte gradients scattered and 2-byte parameters gathered: three quarters of an all-reduce of gradients."""
    problem = question(scale_up_latency_s=0.0, scale_out_latency_s=0.0)
    recipe = replace(problem.calibration.recipe, overlaps_data_parallel=False)
    problem = replace(problem, calibration=replace(problem.calibration, recipe=recipe))
    inside = priced(problem, data_parallel=8).breakdown_s[TRANSFERS] / 4  # four times the micro-batches of 32 ranks
    groups, outer = (
        priced(problem, data_parallel_shard=8, outer_zero_stage=stage).breakdown_s[TRANSFERS] - inside
        for stage in (0, 1)
    )
    growth = problem.calibration.time.data_parallel_s_per_rank * 7 * (1 - 1 / 4)
    assert (outer - growth) / (groups - growth) == pytest.approx(0.75)


# --- layers that stay gathered ---


@FEW
@given(
    shape=st.sampled_from((DENSE, MOE, LATENT)),
    stages=st.sampled_from((1, 2)),
    expert=st.sampled_from((1, 4)),
    overlap=st.floats(0.0, 1.0),
)
def test_more_gathered_layers_take_less_time_and_more_memory(
    shape: ModelShape, stages: int, expert: int, overlap: float
) -> None:
    problem = question(shape, devices=64, overlap=overlap)
    choices = {"pipeline_parallel": stages, "expert_parallel": expert if shape.moe else 1}
    longest = shape.num_hidden_layers // stages
    row = [priced(problem, gathered_num_layers=layers, **choices) for layers in range(longest + 1)]
    for fewer, more in itertools.pairwise(row):
        assert more.step_s <= fewer.step_s * (1 + 1e-12)
        assert more.safe_bytes > fewer.safe_bytes


def test_a_gathered_model_gathers_once() -> None:
    """All layers gathered: only the embedding and the head are gathered a second time."""
    problem = question(scale_up_latency_s=0.0, scale_out_latency_s=0.0)
    plain, kept = priced(problem), priced(problem, gathered_num_layers=DENSE.num_hidden_layers)
    ends = 2 * DENSE.vocab_size * DENSE.hidden_size
    layers = (DENSE.num_parameters - ends - DENSE.hidden_size) / DENSE.num_parameters
    growth = problem.calibration.time.data_parallel_s_per_rank * 31
    rings = DENSE.num_hidden_layers * (28 * 3.4e-6 + 3 * 14e-6)
    # Two gathers of 2 bytes, one scatter of 4: a quarter of the bytes is one gather; each has a ring for every layer.
    gathers = (plain.breakdown_s[TRANSFERS] - growth - 3 * rings) / 4
    saved = plain.breakdown_s[TRANSFERS] - kept.breakdown_s[TRANSFERS]
    assert saved == pytest.approx(gathers * layers + rings, rel=1e-3)
    weights = kept.worst_stage.components["weights"] - plain.worst_stage.components["weights"]
    assert weights == pytest.approx(2.0 * DENSE.num_parameters * layers, rel=1e-3)


def test_what_stays_gathered_is_part_of_the_model() -> None:
    for shape in (DENSE, MOE):
        problem = question(shape)
        candidates = candidates_of(problem, sharded(problem, gathered_num_layers=shape.num_hidden_layers))
        memory = MemoryModel(
            shape=shape, workload=problem.workload, candidates=candidates, calibration=problem.calibration
        )
        stage = candidates.split.classes[0]
        dense, experts = memory.states.resharded_parameters(stage)
        ends = 2 * shape.vocab_size * shape.hidden_size
        assert ends <= dense[0] <= ends + 2 * shape.hidden_size
        assert np.allclose(experts, 0.0)


# --- rules ---

ASKED: list[dict[str, Any]] = [
    {"zero_hpz_partition_size": 8},
    {"data_parallel_shard": 8, "outer_zero_stage": 1},
    {"gathered_num_layers": 2},
]


@pytest.mark.parametrize("choices", ASKED, ids=str)
def test_only_full_sharding_has_levels(choices: dict[str, Any]) -> None:
    problem = question()
    assert not ANY_FRAMEWORK.broken(DENSE, sharded(problem, **choices))
    for stage in (1, 2):
        broken = ANY_FRAMEWORK.broken(DENSE, sharded(problem, zero_stage=stage, **choices))
        assert [rule.name for rule in broken] == ["hierarchies_need_full_sharding"]


def test_each_framework_has_its_own_level() -> None:
    problem = question()
    taken = {
        rules.name: [
            next(iter(choices.keys() - {"data_parallel_shard"}))
            for choices in ASKED
            if not any(
                rule.name.partition("_has_no_")[2] in choices
                for rule in rules.broken(DENSE, sharded(problem, **choices))
            )
        ]
        for rules in (MEGATRON, DEEPSPEED, TORCHTITAN, ACCELERATE)
    }
    assert taken == {
        "megatron": ["outer_zero_stage"],
        "deepspeed": ["zero_hpz_partition_size"],
        "torchtitan": [],
        "accelerate": [],
    }


@pytest.mark.parametrize(
    ("choices", "rule"),
    [
        ({"zero_hpz_partition_size": 32}, "second_copies_divide_the_first"),
        ({"zero_hpz_partition_size": 3}, "second_copies_divide_the_first"),
        ({"outer_zero_stage": 1}, "outer_sharding_needs_groups"),
    ],
)
def test_impossible_levels_are_refused(choices: dict[str, Any], rule: str) -> None:
    broken = ANY_FRAMEWORK.broken(DENSE, sharded(question(), **choices))
    assert [one.name for one in broken] == [rule]


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_gradients_are_reduced_over_data_and_context_parallelism_alike(zero_stage: int) -> None:
    """Four ranks that hold the same weights cost the same to synchronise, whether they split tokens or sequences."""
    problem = problem_of(DENSE, num_devices=8, global_batch_size=32)
    shared = {"tensor_parallel": 2, "zero_stage": zero_stage}
    data = price(problem, configured(problem, data_parallel=4, data_parallel_shard=4, **shared))
    context = price(problem, configured(problem, data_parallel=1, data_parallel_shard=1, context_parallel=4, **shared))
    assert context.gradient_reduce_s == pytest.approx(data.gradient_reduce_s)
    grown = problem.calibration.time.data_parallel_s_per_rank * 3
    for priced in (data, context):
        assert priced.breakdown_s["data-parallel communication"] >= grown


def test_replicated_experts_are_reduced_in_shards_of_their_own() -> None:
    """Experts over all 8 ranks of a sharding group are whole on each: copies reduce all of them, not an eighth."""
    problem = problem_of(MOE, num_devices=16, global_batch_size=32)
    config = replace(configured(problem, data_parallel=16, data_parallel_shard=8, zero_stage=1), expert_parallel=8)
    candidates = candidates_of(problem, config)
    states = MemoryModel(
        shape=MOE, workload=problem.workload, candidates=candidates, calibration=problem.calibration
    ).states
    links = CommunicationModel(
        machine=problem.machine, calibration=problem.calibration, world_size=candidates.world_size
    )
    dense, experts = states.trained_parameters(candidates.split.classes[0])
    width = problem.calibration.recipe.gradient_reduce_bytes
    one, two, eight = np.array([1]), np.array([2]), np.array([8])
    expected = links.gather_s(dense * width, eight, one) + links.all_reduce_s(dense * width / 8, two, eight)
    expected = expected + links.all_reduce_s(experts * width, two, eight)
    assert price(problem, config).gradient_reduce_s == pytest.approx(expected[0])


def test_adapters_are_synchronised_in_one_bucket() -> None:
    """No growth with the ranks: it comes from the many buckets of a whole model."""
    problem = problem_of(DENSE, num_devices=8, global_batch_size=32, phase=Phase.LORA)
    slow = replace(problem, calibration=with_time(problem.calibration, data_parallel_s_per_rank=1.0))
    config = configured(problem, data_parallel=8, data_parallel_shard=8, zero_stage=1)
    assert price(slow, config).step_s == pytest.approx(price(problem, config).step_s)
