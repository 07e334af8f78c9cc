"""The training estimate: sums, batches, monotony, and the bound that the search trusts."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import training_constants
from core_cases import DENSE, LATENT, MOE, assert_rows_see_no_other, configured, machine_with, problem_of, questions
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshplan.catalogs.constants.training import Calibration, FrameworkRecipe, TimeConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.estimator.priced import candidates_of, price, training_model
from meshplan.planner.training.problem.problem import Phase, TrainingConfig, TrainingProblem
from meshplan.planner.training.problem.switches import Launches, TrainingPractice
from meshplan.planner.training.search.objective import work_device_s
from meshplan.planner.training.simulated import simulated_step_s

Question = tuple[TrainingProblem, TrainingConfig]
# Larger is better for these constants, smaller for all others.
EFFICIENCIES = tuple(
    f.name for f in fields(TimeConstants) if f.name.endswith(("efficiency", "overlap", "inside", "window"))
)
COSTS = tuple(f.name for f in fields(TimeConstants) if f.name not in EFFICIENCIES)
ROUNDING = 1 + 1e-9


def step_s(problem: TrainingProblem, config: TrainingConfig) -> float:
    return price(problem, config).step_s


def with_time(problem: TrainingProblem, **constants: float) -> TrainingProblem:
    return replace(problem, calibration=training_constants.with_time(problem.calibration, **constants))


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_chunk_without_layers_costs_nothing_and_breaks_nothing(recompute: str) -> None:
    problem = problem_of(DENSE, num_devices=4, global_batch_size=8)
    choices = {"activation_recompute": recompute, "recompute_num_layers": int(recompute == "block")}
    steps = [
        step_s(
            problem, configured(problem, pipeline_parallel=4, virtual_pipeline_stages=2, layers_per_chunk=n, **choices)
        )
        for n in ((1, 1, 1, 0, 1, 1, 1, 0), (0, 2, 1, 1, 1, 1, 0, 0))
    ]
    assert all(map(math.isfinite, steps))
    assert steps[0] < steps[1]


@settings(deadline=None)
@given(question=questions())
def test_the_parts_sum_to_the_step(question: Question) -> None:
    priced = price(*question)
    assert math.fsum(priced.breakdown_s.values()) == pytest.approx(priced.step_s, rel=1e-9)
    assert all(seconds >= -1e-12 * priced.step_s for seconds in priced.breakdown_s.values())
    numbers = [priced.step_s, priced.gradient_reduce_s, priced.model_flops, priced.safe_bytes, priced.typical_bytes]
    assert all(math.isfinite(number) and number >= 0.0 for number in numbers)


@settings(deadline=None)
@given(question=questions())
def test_no_plan_beats_the_bound(question: Question) -> None:
    problem, config = question
    work = work_device_s(problem.shape, problem.machine, problem.workload, problem.calibration)
    assert 0.0 < work <= step_s(problem, config) * config.world_size


@pytest.mark.parametrize("shape", [LLAMA_70B, MIXTRAL, DEEPSEEK_V3, DENSE, MOE, LATENT], ids=lambda shape: shape.slug)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
def test_the_bound_holds_under_ideal_constants(shape: Any, precision: str, phase: Phase) -> None:
    """Nothing but arithmetic: no latency, no host, endless bandwidth, everything hidden."""
    ideal = TimeConstants(
        **{name: 1.0 for name in EFFICIENCIES if name.endswith(("overlap", "inside", "window"))},
        **dict.fromkeys(COSTS, 0.0),
        gemm_efficiency=1.0,
        expert_gemm_efficiency=1.0,
        attention_kernel_efficiency=1.0,
        low_precision_efficiency=1.0,
    )
    for flash in (True, False):
        calibration = Calibration(
            framework="any", architecture="any", time=ideal, recipe=FrameworkRecipe(flash_attention=flash)
        )
        device = replace(machine_with(1).device, memory_bandwidth_bytes_per_s=1e18, gemm_curves={})
        machine = machine_with(8, device=device, scale_up_bytes_per_s=1e18, scale_up_latency_s=0.0)
        problem = problem_of(
            shape, machine=machine, precision=precision, phase=phase, calibration=calibration, sequence_length=8192
        )
        work = work_device_s(shape, machine, problem.workload, calibration)
        taken = step_s(problem, configured(problem, micro_batch_size=16))
        assert work <= taken
        if flash:  # the bound leaves unfused attention out
            assert taken <= 1.8 * work, "a bound far below what is possible prunes nothing"


def test_the_bound_holds_for_every_shipped_calibration(catalog: Catalog) -> None:
    for slug in ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b"):
        shape = catalog.model_shape(slug)
        for node in ("dgx-h100", "dgx-b200"):
            machine = replace(machine_with(8), device=catalog.node_type(node).device)
            for architecture in ("any", "hopper", "blackwell"):
                document = catalog.calibration("any" if architecture == "any" else "megatron", architecture)
                if document is None:
                    continue
                problem = problem_of(shape, machine=machine, calibration=Calibration.from_document(document))
                work = work_device_s(shape, machine, problem.workload, problem.calibration)
                for micro in (1, 16):
                    assert work <= step_s(problem, configured(problem, micro_batch_size=micro)), slug


def test_the_bound_holds_where_a_device_has_a_single_expert(catalog: Catalog) -> None:
    """Its products are those of an MLP, quicker than grouped ones: more than a third of Mixtral's work."""
    shape, document = catalog.model_shape("mixtral-8x7b"), catalog.calibration("megatron", "hopper")
    assert document is not None
    machine = replace(machine_with(8), device=catalog.node_type("dgx-h100").device)
    constants = Calibration.from_document(document)
    problem = problem_of(shape, machine=machine, calibration=constants, sequence_length=4096, global_batch_size=256)
    work = work_device_s(shape, machine, problem.workload, problem.calibration)
    alone = configured(problem, data_parallel=8, expert_parallel=8, micro_batch_size=2)
    assert work <= step_s(problem, alone) * alone.world_size


@settings(deadline=None)
@given(question=questions(), drops=st.booleans())
def test_no_switch_makes_a_step_slower(question: Question, drops: bool) -> None:
    """Graphs take host time away, fused dispatch moves fewer bytes, overlap hides some of them."""
    problem, config = question

    def taken(**switches: Any) -> float:
        workload = replace(problem.workload, practice=TrainingPractice(**switches), drops_tokens=drops)
        return step_s(replace(problem, workload=workload), config)

    eager = taken()
    partly, graphed = taken(launches=Launches.PARTLY_GRAPHED), taken(launches=Launches.GRAPHED)
    assert graphed <= partly * ROUNDING <= eager * ROUNDING**2
    assert taken(fused_dispatch=True) <= eager * ROUNDING
    assert taken(overlaps_experts=True) <= eager * ROUNDING
    assert taken(overlaps_shared_experts=True) <= eager * ROUNDING
    if problem.shape.moe is None:
        assert taken(fused_dispatch=True, overlaps_experts=True, overlaps_shared_experts=True) == eager


@settings(deadline=None)
@given(question=questions(), fused=st.booleans())
def test_a_token_that_may_visit_fewer_groups_travels_less_by_a_fused_dispatcher(
    question: Question, fused: bool
) -> None:
    """An all-to-all sends one copy for each expert wherever they are; who limits nothing is as before, bit for bit."""
    problem, config = question
    moe = problem.shape.moe
    assume(moe is not None)

    def taken(groups: int, chosen: int) -> float:
        limited = replace(moe, num_expert_groups=groups, num_groups_per_token=chosen)
        workload = replace(problem.workload, practice=TrainingPractice(fused_dispatch=fused))
        return step_s(replace(problem, shape=replace(problem.shape, moe=limited), workload=workload), config)

    free = taken(1, 1)
    assert taken(4, 4) == free
    one, two = taken(4, 1), taken(4, 2)
    assert one <= two * ROUNDING <= free * ROUNDING**2 if fused else one == two == free


def test_a_batch_is_many_batches_of_one() -> None:
    """The estimator has no scalar twin: rows must not see each other."""
    problem = problem_of(LATENT, num_devices=64, global_batch_size=64)
    choices = [
        {"tensor_parallel": 1, "data_parallel": 4, "zero_stage": 3},
        {"tensor_parallel": 2, "data_parallel": 8, "expert_parallel": 8, "micro_batch_size": 4},
        {"tensor_parallel": 8, "activation_recompute": "full", "zero_stage": 0},
        {"context_parallel": 4, "data_parallel": 2, "activation_recompute": "selective", "expert_parallel": 2},
        {"data_parallel": 16, "data_parallel_shard": 4, "expert_parallel": 4, "expert_tensor_parallel": 2},
    ]
    for stages in (1, 2):
        assert_rows_see_no_other(
            problem, [configured(problem, pipeline_parallel=stages, **choice) for choice in choices]
        )


@settings(deadline=None)
@given(
    question=questions(),
    field=st.sampled_from(("scale_up_bytes_per_s", "scale_out_bytes_per_s", "peak", "memory")),
    factor=st.floats(1.0, 8.0),
)
def test_faster_hardware_is_never_slower(question: Question, field: str, factor: float) -> None:
    problem, config = question
    machine, device = problem.machine, problem.machine.device
    if field == "peak":
        peaks = {name: factor * peak for name, peak in device.peak_flops_per_s.items()}
        better = replace(machine, device=replace(device, peak_flops_per_s=peaks))
    elif field == "memory":
        bandwidth = factor * device.memory_bandwidth_bytes_per_s
        better = replace(machine, device=replace(device, memory_bandwidth_bytes_per_s=bandwidth))
    else:
        better = replace(machine, **{field: factor * getattr(machine, field)})
    assert step_s(replace(problem, machine=better), config) <= step_s(problem, config) * ROUNDING


@settings(deadline=None)
@given(question=questions(), name=st.sampled_from(EFFICIENCIES), share=st.floats(0.1, 1.0))
def test_a_smaller_loss_is_never_slower(question: Question, name: str, share: float) -> None:
    problem, config = question
    value = float(getattr(problem.calibration.time, name))
    better = with_time(problem, **{name: 1.0 - share * (1.0 - value)})
    assert step_s(better, config) <= step_s(problem, config) * ROUNDING


@settings(deadline=None)
@given(question=questions(), name=st.sampled_from(COSTS), factor=st.floats(1.0, 20.0))
def test_a_larger_cost_is_never_faster(question: Question, name: str, factor: float) -> None:
    problem, config = question
    worse = with_time(problem, **{name: factor * float(getattr(problem.calibration.time, name))})
    assert step_s(problem, config) <= step_s(worse, config) * ROUNDING


@settings(deadline=None)
@given(question=questions())
def test_twice_the_batch_takes_longer_but_not_more_than_twice_as_long(question: Question) -> None:
    """The same plan with twice the micro-batches: bubble, optimizer and overhead are paid once.

    With several stages the second half may fill gaps that the first one left: a stage that waits for the later ones
    works on the next micro-batch meanwhile. Then no more than "not faster" is sure.
    """
    problem, config = question
    batch = 2 * config.global_batch_size
    larger = replace(problem, workload=replace(problem.workload, global_batch_size=batch))
    twice = replace(config, num_microbatches=2 * config.num_microbatches, global_batch_size=batch)
    once = step_s(problem, config)
    busy = price(problem, config).breakdown_s
    outside = busy["pipeline bubble"] + busy["optimizer step"] + busy["step overhead"]
    least = once
    if config.pipeline_parallel == 1:
        least = 2 * once - outside - busy["data-parallel communication"] - busy["stage-to-stage messages"]
    assert least <= step_s(larger, twice) * ROUNDING
    assert step_s(larger, twice) <= 2 * once * ROUNDING


@settings(deadline=None)
@given(question=questions())
def test_recompute_takes_time(question: Question) -> None:
    problem, config = question
    none, selective, full = (
        step_s(problem, replace(config, activation_recompute=mode)) for mode in ("none", "selective", "full")
    )
    assert none <= selective * ROUNDING <= full * ROUNDING**2


@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_adapters_take_less_than_all_weights_where_matrices_are_large(tensor_parallel: int) -> None:
    """Not where they are small: to read what an adapter reads may take longer than the weight gradient saved."""

    def step(phase: Phase, rank: int) -> float:
        problem = problem_of(LLAMA_70B)
        problem = replace(problem, workload=replace(problem.workload, phase=phase, lora_rank=rank))
        return step_s(problem, configured(problem, tensor_parallel=tensor_parallel))

    assert step(Phase.LORA, 16) < step(Phase.FINE_TUNING, 0)


def test_one_device_communicates_nothing() -> None:
    for shape in (DENSE, MOE, LATENT):
        problem = problem_of(shape, num_devices=1)
        parts = price(problem, configured(problem)).breakdown_s
        assert all(parts[name] == 0.0 for name in parts if "communication" in name or "messages" in name)
        assert parts["pipeline bubble"] == 0.0
        assert parts["recompute"] == 0.0


def test_a_pipeline_of_equal_stages_has_the_textbook_bubble() -> None:
    """(p − 1)/m of the busy time, (p − 1)/(v·m) interleaved, when the ends cost nothing."""
    shape = replace(DENSE, num_hidden_layers=8, vocab_size=1)
    problem = problem_of(shape, global_batch_size=32)
    for stages, chunks in ((2, 1), (4, 1), (4, 2)):
        config = configured(problem, pipeline_parallel=stages, virtual_pipeline_stages=chunks)
        parts = price(problem, config).breakdown_s
        named = ("step overhead", "optimizer step", "stage-to-stage messages", "pipeline bubble")
        busy = sum(seconds for name, seconds in parts.items() if name not in named)
        # The embedding makes the first stage a little slower; forwards that run ahead hide that much of the bubble.
        bubble, textbook = parts["pipeline bubble"] / busy, (stages - 1) / (chunks * 32)
        assert 0.85 * textbook < bubble < 1.01 * textbook
        assert simulated_step_s(problem, config) == pytest.approx(price(problem, config).step_s, rel=1e-3)


def test_copies_of_sharded_states_meet_over_the_network() -> None:
    problem = problem_of(num_devices=32, global_batch_size=32)
    slow = replace(problem, machine=replace(problem.machine, scale_out_bytes_per_s=1e7))
    inside = configured(problem, data_parallel=32, data_parallel_shard=8, zero_stage=3)
    assert price(slow, inside).step_s > 10 * price(problem, inside).step_s


@pytest.mark.parametrize("stages", [2, 4])
def test_no_schedule_hides_more_messages_than_its_work(stages: int) -> None:
    """Interleaved stages on nodes of a slow network wait for their bytes: two messages for each chunk and direction."""
    rate = 1e8
    machine = machine_with(8 * stages, scale_out_bytes_per_s=rate)
    problem = problem_of(replace(DENSE, num_hidden_layers=8), num_devices=8 * stages, machine=machine)
    config = configured(
        problem, data_parallel=8, pipeline_parallel=stages, virtual_pipeline_stages=2, micro_batch_size=1
    )
    assert config.pipeline_schedule == "interleaved"
    priced = price(problem, config)
    message_bytes = 2.0 * problem.workload.sequence_length * DENSE.hidden_size
    waits = 2 * config.num_microbatches - 1
    efficiency = problem.calibration.time.network_efficiency
    assert priced.step_s >= waits * 2.0 * message_bytes / (rate * efficiency)
    quick = price(replace(problem, machine=machine_with(8 * stages)), config)
    assert quick.breakdown_s["stage-to-stage messages"] < 0.2 * quick.step_s


@settings(max_examples=40, deadline=None)
@given(question=questions(), block=st.integers(0, 2))
def test_classes_of_stages_held_as_one_are_what_each_is_alone(question: Question, block: int) -> None:
    problem, config = question
    if block:
        config = replace(config, activation_recompute="block", recompute_num_layers=block)
    batch = candidates_of(problem, config)
    model = training_model(problem, batch)
    classes = batch.split.classes
    for stage, figures, memory in zip(classes, model.figures(classes), model.memory.stages(), strict=True):
        (alone,), own = model.figures([stage]), model.memory.stage(stage)
        for name in ("seconds", "forward_share", "exposed_s", "reduce_s", "optimizer_s"):
            assert getattr(figures, name).tolist() == getattr(alone, name).tolist()
        assert {name: part.tolist() for name, part in figures.parts.items()} == {
            name: part.tolist() for name, part in alone.parts.items()
        }
        assert memory.stage == stage
        assert memory.safe_bytes.tolist() == own.safe_bytes.tolist()
        assert memory.host_bytes.tolist() == own.host_bytes.tolist()
        assert {name: held.tolist() for name, held in memory.components.items()} == {
            name: held.tolist() for name, held in own.components.items()
        }
