"""Memory of a rank by moments of a step: what single operators keep, what is freed, gathered or loaded meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, configured, problem_of

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import Phase, TrainingProblem
from meshplan.planner.training.problem.switches import NARROW


def test_eager_operators_keep_more_and_a_compiled_layer_keeps_what_it_kept() -> None:
    """An eager RMSNorm keeps fp32 inputs and 16-bit outputs, a gated MLP its activation: 4h for each norm and 2w."""
    problem = problem_of(DENSE, num_devices=1)
    config = configured(problem)
    eager = replace(problem, workload=replace(problem.workload, is_eager=True))
    fused_bytes, eager_bytes = (price(one, config).stages[0].components["activations"] for one in (problem, eager))
    tokens = config.micro_batch_size * config.sequence_length
    more = 2 * 4.0 * DENSE.hidden_size + 2.0 * DENSE.intermediate_size
    factor = problem.calibration.memory.activation_factor
    assert eager_bytes - fused_bytes == pytest.approx(DENSE.num_hidden_layers * tokens * more * factor)


def test_freed_gradients_and_logits_are_never_held_at_once() -> None:
    """With one micro-batch a step the peak is the larger of both; with several they add."""
    one = problem_of(DENSE, num_devices=1, global_batch_size=2)
    frees = replace(one.calibration, recipe=replace(one.calibration.recipe, frees_gradients=True))
    together = configured(one, micro_batch_size=2)
    in_turn = configured(one, micro_batch_size=1)
    kept = price(one, together).stages[0]
    freed = price(replace(one, calibration=frees), together).stages[0]
    work = kept.components["activations"] + kept.components["logits"]
    least = min(work, kept.components["gradients"])
    assert kept.typical_bytes - freed.typical_bytes == pytest.approx(least)
    assert least > 0.0
    assert price(replace(one, calibration=frees), in_turn).typical_bytes == price(one, in_turn).typical_bytes


def test_states_of_other_optimizers() -> None:
    """Of 12 bytes a parameter Adafactor keeps the fp32 copy, 8-bit AdamW that and two bytes, 16-bit AdamW 4 alone."""
    problem = problem_of(DENSE, num_devices=1)
    config = configured(problem, zero_stage=0)

    def held(optimizer: str) -> float:
        practice = replace(problem.workload.practice, optimizer=optimizer)
        asked = replace(problem, workload=replace(problem.workload, practice=practice))
        return price(asked, config).stages[0].components["optimizer"]

    own = held("default")
    assert held("adafactor") == pytest.approx(own * 4.0 / 12.0)
    assert held("adamw-8bit") == pytest.approx(own * (4.0 + 2.03125) / 12.0)
    assert held("adamw-16bit") == pytest.approx(own * (4.0 + 2.0) / 12.0)  # 2 of them its step's


def test_a_whole_checkpoint_is_beside_the_shard_while_it_is_loaded() -> None:
    problem = problem_of(DENSE, num_devices=8, phase=Phase.LORA)
    whole = replace(problem.calibration, recipe=replace(problem.calibration.recipe, loads_whole=True))
    config = configured(problem, data_parallel=8, zero_stage=3, activation_recompute="full")
    stage = price(replace(problem, calibration=whole), config).stages[0]
    # The last norm is no part of a stage's states.
    loading = 2.0 * (DENSE.num_parameters - DENSE.norm_parameters) * (1.0 + 1.0 / 8.0)
    assert stage.typical_bytes >= loading + stage.components["fixed"]
    assert stage.typical_bytes >= price(problem, config).typical_bytes


def test_one_device_gathers_nothing_and_talks_to_nobody() -> None:
    problem = problem_of(DENSE, num_devices=1)
    stage = price(problem, configured(problem, zero_stage=3)).stages[0]
    assert stage.components["weights"] == pytest.approx(2.0 * DENSE.num_parameters, rel=1e-4)
    talks = replace(problem.calibration.memory, communication_bytes=1e9)
    alone = replace(problem, calibration=replace(problem.calibration, memory=talks))
    assert price(alone, configured(alone, zero_stage=3)).typical_bytes == stage.typical_bytes


def of_layout(problem: TrainingProblem, **layout: Any) -> TrainingProblem:
    """The same question under another layout of the framework."""
    recipe = replace(problem.calibration.recipe, **layout)
    return replace(problem, calibration=replace(problem.calibration, recipe=recipe))


def test_fsdp_keeps_its_root_unit_gathered() -> None:
    """What no layer has stays whole on every rank: the LM head, and the embedding unless it is a unit of its own."""
    problem = problem_of(DENSE, num_devices=8)
    config = configured(problem, data_parallel=8, zero_stage=3)
    root, head, layers = (
        price(of_layout(problem, is_fsdp=fsdp, shards_embedding=apart), config).stages[0].components["weights"]
        for fsdp, apart in ((True, False), (True, True), (False, False))
    )
    each = problem.calibration.recipe.parameter_gather_bytes
    assert root - head == pytest.approx(each * DENSE.embedding_parameters)
    spread = DENSE.embedding_parameters + DENSE.lm_head_parameters
    more = each * spread - (2.0 * each + problem.calibration.recipe.gradient_reduce_bytes) * spread / 6
    assert root - layers == pytest.approx(more)


@pytest.mark.parametrize("phase", [Phase.LORA, Phase.QLORA])
def test_adapters_on_the_mlp_take_more_than_those_of_attention_alone(phase: Phase) -> None:
    asked = problem_of(DENSE, num_devices=1, phase=phase)
    problem = replace(asked, workload=replace(asked.workload, lora_rank=8, is_eager=True))
    config = configured(problem)
    every = replace(problem, workload=replace(problem.workload, adapts_mlp=True))
    few, many = (price(asked, config).stages[0].components for asked in (problem, every))
    for name in ("gradients", "optimizer", "activations"):
        assert many[name] > few[name], name
    again = of_layout(every, keeps_last_graph=True)
    held = price(again, config).stages[0].components["activations"]
    assert (held > many["activations"]) == (phase is Phase.QLORA)


def test_a_loss_in_16_bits_holds_two_thirds_of_the_logits() -> None:
    problem = problem_of(DENSE, num_devices=1)
    practice = replace(problem.workload.practice, loss=NARROW)
    narrow = replace(problem, workload=replace(problem.workload, practice=practice))
    usual, less = (price(asked, configured(problem)).stages[0].components["logits"] for asked in (problem, narrow))
    assert less == pytest.approx(usual * 8.0 / 12.0)


@pytest.mark.parametrize(("num_microbatches", "bytes_per_logit"), [(1, 10.0), (2, 14.0), (8, 14.0)])
def test_a_pipeline_that_keeps_its_outputs_holds_earlier_logits(num_microbatches: int, bytes_per_logit: float) -> None:
    """While a micro-batch's 16-bit logits are copied to fp32 (2 + 4): the copies in each of two buffers, of the step
    before where it has one micro-batch, and none of the loss itself, which works in place.
    """
    recipe = recipe_named("megatron-2020").recipe
    problem = problem_of(
        DENSE,
        global_batch_size=3 * num_microbatches,
        precision="fp16",
        calibration=Calibration(framework="megatron-2020", architecture="any", recipe=recipe),
    )
    first, last = price(problem, configured(problem, pipeline_parallel=2, micro_batch_size=3, zero_stage=0)).stages
    assert first.components["logits"] == 0.0
    tokens = 3 * problem.workload.sequence_length
    assert last.components["logits"] == pytest.approx(bytes_per_logit * tokens * DENSE.vocab_size)


@pytest.mark.parametrize("phase", [Phase.FINE_TUNING, Phase.LORA])
def test_gradients_are_whole_until_fsdp_synchronises(phase: Phase) -> None:
    """Those of a whole stage, frozen or not, where several micro-batches are a step; a shard of them where one is."""
    problem = of_layout(problem_of(DENSE, num_devices=8, phase=phase), is_fsdp=True, frees_gradients=True)
    waits = of_layout(problem, accumulates_whole=True)
    for num_microbatches in (1, 2):
        config = configured(problem, data_parallel=8, zero_stage=3, num_microbatches=num_microbatches)
        synced, whole = (price(asked, config).stages[0] for asked in (problem, waits))
        more = whole.typical_bytes - synced.typical_bytes
        if num_microbatches == 1:
            assert more == 0.0
        else:
            each = problem.calibration.recipe.gradient_bytes
            assert more == pytest.approx(
                each * DENSE.num_parameters * (1.0 if phase is Phase.LORA else 7 / 8), rel=0.02
            )


@pytest.mark.parametrize(("eager", "each"), [(False, 2.0), (True, 6.0)])
def test_norms_behind_blocks_are_kept(eager: bool, each: float) -> None:
    """Two more in a layer: each keeps its input, one by one in fp32, and what it made of it."""
    problem = problem_of(DENSE, num_devices=1)
    problem = replace(problem, workload=replace(problem.workload, is_eager=eager))
    four = replace(problem, shape=replace(problem.shape, norms_per_layer=4))
    config = configured(problem)
    two_bytes, four_bytes = (price(one, config).stages[0].components["activations"] for one in (problem, four))
    tokens = config.micro_batch_size * config.sequence_length
    factor = problem.calibration.memory.activation_factor
    more = 2 * each * DENSE.hidden_size * DENSE.num_hidden_layers * tokens * factor
    assert four_bytes - two_bytes == pytest.approx(more)
