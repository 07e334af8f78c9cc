"""Windows that reach PyTorch's attention as masks: time against published timings, and the masks that are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, WINDOWED, compute_model_of, configured, problem_of

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, FrameworkRecipe, TimeConstants
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.candidates import LayerKind
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.estimator.priced import price

BY_KERNEL = FrameworkRecipe(attention_library="flash-attention-2")
AS_MASK = replace(BY_KERNEL, masks_windows=True)
LENGTH = 4096


def model_of(
    recipe: FrameworkRecipe, shape: ModelShape = DENSE, *, length: int = LENGTH, **choices: Any
) -> ComputeModel:
    time = TimeConstants(attention_kernel_efficiency=1.0)
    calibration = Calibration(framework="any", architecture="any", recipe=recipe, time=time)
    problem = problem_of(shape, sequence_length=length, calibration=calibration)
    return compute_model_of(problem, **choices)


def windowed(window: int | None) -> LayerKind:
    return LayerKind(is_moe=False, window=window)


def test_a_mask_takes_what_was_timed() -> None:
    """pytorch/pytorch pull request 137036: H100, 4 × 16,384 tokens, 16 heads of 64, a sliding window as a mask.

    Of that table the kernel's rates are those without a mask; what reading the mask adds is not taken from it.
    """
    shape = replace(DENSE, num_attention_heads=16, num_key_value_heads=16, head_dim=64)
    cost = model_of(AS_MASK, shape, length=16384, micro_batch_size=4).attention_core(windowed(1024))
    assert cost.forward_s[0] == pytest.approx(47.66e-3, rel=0.06)
    assert cost.backward_s[0] == pytest.approx(116.76e-3, rel=0.06)


def test_a_mask_takes_the_same_for_every_window_and_nothing_beyond_the_sequence() -> None:
    def seconds(recipe: FrameworkRecipe, window: int | None) -> float:
        return float(model_of(recipe).attention_core(windowed(window)).total_s[0])

    assert seconds(AS_MASK, 512) == seconds(AS_MASK, LENGTH) > seconds(AS_MASK, LENGTH + 1) == seconds(AS_MASK, None)
    assert seconds(BY_KERNEL, 512) < seconds(BY_KERNEL, LENGTH) == seconds(BY_KERNEL, LENGTH + 1)


@pytest.mark.parametrize(("recompute", "masks"), [("none", 3), ("full", 1)])
def test_each_layer_with_a_window_keeps_its_mask(recompute: str, masks: int) -> None:
    """Three of six layers have windows; of recomputed layers the running one alone."""

    def held(recipe: FrameworkRecipe, length: int) -> float:
        calibration = Calibration(framework="any", architecture="any", recipe=recipe)
        problem = problem_of(replace(WINDOWED, vocab_size=512), sequence_length=length, calibration=calibration)
        config = configured(problem, micro_batch_size=2, activation_recompute=recompute)
        return price(problem, config).stages[0].components["activations"]

    assert held(AS_MASK, LENGTH) - held(BY_KERNEL, LENGTH) == pytest.approx(masks * 2.0 * 2 * LENGTH**2)
    assert held(AS_MASK, 256) == held(BY_KERNEL, 256)


def test_frameworks_on_transformers_mask_and_those_with_windows_in_the_kernel_do_not() -> None:
    assert [
        name
        for name in ("accelerate", "deepspeed", "axolotl", "megatron", "torchtitan")
        if recipe_named(name).recipe.masks_windows
    ] == ["accelerate", "deepspeed"]
