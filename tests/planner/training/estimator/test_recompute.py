"""Recompute by module, bf16 gradients and CUDA graphs: bytes by hand, and what each may and may not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, LATENT, MOE, SMALL_SHAPES, configured, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.constants.training import TimeConstants
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.problem import Phase, TrainingProblem
from meshplan.planner.training.problem.switches import RECOMPUTE_MODULES, in_order

MODULES = st.sets(st.sampled_from(RECOMPUTE_MODULES), min_size=1).map(in_order)
TOKENS = 1024  # a micro-batch of problem_of
BYTES = 2  # of an activation


def priced_with(problem: TrainingProblem, *, recompute: str = "selective", **pins: Any) -> Priced:
    """One configuration of four devices that split experts and data."""
    pinned = problem.with_fixed(pins)
    experts = 4 if problem.shape.moe is not None else 1
    chosen = {"data_parallel": 4, "expert_parallel": experts, "activation_recompute": recompute, **pinned.settled}
    return price(pinned, configured(pinned, **chosen))


def kept(shape: ModelShape, *modules: str) -> float:
    """Bytes of activations of the one stage, with the working set of the layer that is computed again: with so few
    logits memory is fullest while that runs.
    """
    problem = problem_of(replace(shape, vocab_size=8))
    selected = priced_with(problem, recompute_modules=modules) if modules else priced_with(problem, recompute="none")
    (stage,) = selected.stages
    return stage.components["activations"]


def each_layer_drops(shape: ModelShape, module: str) -> float:
    """Bytes that one layer with the module no longer keeps.

    Of n such layers n are dropped while held, and one comes back as the working set.
    """
    layers = {
        "layernorm": shape.num_hidden_layers,
        "mla_up_proj": shape.num_hidden_layers + shape.num_nextn_predict_layers,
        "mlp": sum(not shape.is_moe_layer(layer) for layer in range(shape.num_hidden_layers)),
    }.get(module, sum(shape.is_moe_layer(layer) for layer in range(shape.num_hidden_layers)))
    return (kept(shape) - kept(shape, module)) / (layers - 1)


def test_what_each_module_keeps_by_hand() -> None:
    moe, latent = MOE.moe, LATENT.latent
    assert moe is not None
    assert latent is not None
    copies = moe.num_experts_per_token
    assert each_layer_drops(DENSE, "layernorm") == pytest.approx(2 * BYTES * DENSE.hidden_size * TOKENS)
    assert each_layer_drops(DENSE, "mlp") == pytest.approx(3 * BYTES * DENSE.intermediate_size * TOKENS)
    assert each_layer_drops(MOE, "moe_act") == pytest.approx(copies * BYTES * moe.expert_intermediate_size * TOKENS)
    assert each_layer_drops(MOE, "shared_experts") == pytest.approx(3 * BYTES * moe.shared_intermediate_size * TOKENS)
    a_copy = 2 * MOE.hidden_size + 3 * moe.expert_intermediate_size
    both = copies * a_copy + 3 * moe.shared_intermediate_size
    assert each_layer_drops(MOE, "moe") == pytest.approx(BYTES * both * TOKENS)
    heads = LATENT.num_attention_heads * (2 * (128 + 64) + 128)
    assert each_layer_drops(LATENT, "mla_up_proj") == pytest.approx(BYTES * heads * TOKENS)


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(SMALL_SHAPES), modules=MODULES, more=MODULES)
def test_more_modules_keep_less_and_take_longer(
    shape: ModelShape, modules: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Recompute of everything a layer has takes the least memory and the most time."""
    problem = problem_of(shape)
    plain = priced_with(problem, recompute="none")
    few = priced_with(problem, recompute_modules=modules)
    many = priced_with(problem, recompute_modules=in_order({*modules, *more}))
    whole = priced_with(problem, recompute="full")
    memory = [item.typical_bytes for item in (plain, few, many, whole)]
    assert memory == sorted(memory, reverse=True)
    steps = [item.step_s for item in (plain, few, many)]
    assert steps == sorted(steps)


def test_experts_that_run_again_exchange_their_tokens_again() -> None:
    def exchange(**pins: Any) -> float:
        return priced_with(problem_of(MOE), **pins).breakdown_s["expert-parallel communication"]

    assert exchange(recompute_modules=("moe_act",)) == exchange()
    assert exchange(recompute_modules=("moe",)) == pytest.approx(1.5 * exchange())


def test_gradients_in_bf16_take_half_the_bytes_and_half_the_wire() -> None:
    whole = priced_with(problem_of(), recompute="none")
    half = priced_with(problem_of(), recompute="none", gradient_precision="bf16")
    assert half.stages[0].components["gradients"] == whole.stages[0].components["gradients"] / 2
    assert half.gradient_reduce_s < whole.gradient_reduce_s
    assert half.step_s < whole.step_s


def test_the_frameworks_own_gradients_are_those_that_it_keeps() -> None:
    own = priced_with(problem_of(), recompute="none")
    stated = priced_with(problem_of(), recompute="none", gradient_precision="fp32")  # as Megatron-LM keeps them
    assert (stated.step_s, stated.stages) == (own.step_s, own.stages)


@pytest.mark.parametrize("shape", [DENSE, MOE])
def test_graphs_take_launches_off_the_host(shape: ModelShape) -> None:
    slow_host = TimeConstants(host_s_per_layer=5e-3, host_s_per_moe_layer=9e-3)
    problem = problem_of(shape)
    problem = replace(problem, calibration=replace(problem.calibration, time=slow_host))
    steps = [priced_with(problem, cuda_graphs=graphs).step_s for graphs in ("none", "partial", "full")]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 3


def test_a_chunked_loss_and_gradients_that_are_used_at_once_take_less_memory_and_the_same_time() -> None:
    whole, chunked = (priced_with(problem_of(), loss=loss) for loss in ("whole", "chunked"))
    freed = priced_with(problem_of(), loss="chunked", optimizer_in_backward=True)
    peaks = [max(stage.typical_bytes for stage in one.stages) for one in (whole, chunked, freed)]
    assert peaks == sorted(set(peaks), reverse=True)
    assert whole.step_s == chunked.step_s == freed.step_s


def test_smaller_states_of_the_optimizer_take_their_bytes_less() -> None:
    """Of 12 bytes a parameter Megatron-LM keeps 4 in fp32 weights; moments in bf16 leave 8, in 8 bits 6.03."""
    names = ("default", "adamw-bf16-moments", "adamw-8bit", "sgd")
    states = [priced_with(problem_of(), optimizer=name).stages[0].components["optimizer"] for name in names]
    assert [one / states[0] for one in states] == pytest.approx([1.0, 8 / 12, (4 + 2 * 65 / 64) / 12, 4 / 12])


def test_a_pin_that_is_taken_back_leaves_nothing_behind() -> None:
    problem = problem_of(MOE)
    pins = {"gradient_precision": "bf16", "cuda_graphs": "partial", "recompute_modules": ("moe_act",)}
    pins |= {"loss": "chunked", "optimizer": "adamw-8bit", "optimizer_in_backward": True}
    assert problem.with_fixed(pins).with_fixed({}) == problem.with_fixed({})


def test_adapters_of_an_eager_framework_are_launched_too() -> None:
    """More kernels a layer; fused ones are not counted again."""
    slow_host = TimeConstants(host_s_per_layer=9e-3)

    def step(*, is_eager: bool, phase: Phase) -> float:
        problem = problem_of(phase=phase)
        problem = replace(
            problem,
            calibration=replace(problem.calibration, time=slow_host),
            workload=replace(problem.workload, is_eager=is_eager),
        )
        return price(problem, configured(problem, data_parallel=4)).breakdown_s["kernel-launch overhead"]

    eager = {phase: step(is_eager=True, phase=phase) for phase in (Phase.FINE_TUNING, Phase.LORA)}
    fused = {phase: step(is_eager=False, phase=phase) for phase in (Phase.FINE_TUNING, Phase.LORA)}
    assert eager[Phase.LORA] > 1.3 * eager[Phase.FINE_TUNING]
    assert fused[Phase.LORA] < 1.3 * fused[Phase.FINE_TUNING]
