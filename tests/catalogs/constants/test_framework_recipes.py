"""Which framework recipe a published measurement is read with: by name, release and mode."""

from __future__ import annotations

import pytest

from meshplan.catalogs.constants.framework_recipes import recipe_named, recipe_observed_as


@pytest.mark.parametrize(
    ("name", "mode", "framework"),
    [
        ("Megatron-Bridge", None, "megatron-bridge"),
        ("Megatron-Core", None, "megatron"),
        ("llm-foundry (Composer FSDP)", "PURE", "composer-pure"),
        ("llm-foundry (Composer FSDP)", "DEFAULT", "composer"),
        ("llm-foundry (Composer FSDP)", None, "composer"),
        ("DeepSpeed + Megatron-LM 1.1.5", None, "megatron-2020"),
        ("HARP (Alpa, JAX)", None, "harp"),
        ("somebody's own", "PURE", "somebody's own"),
    ],
)
def test_a_measurement_finds_its_recipe(name: str, mode: str | None, framework: str) -> None:
    assert recipe_observed_as(name, precision="bf16", mixed_precision_mode=mode).framework == framework


def test_megatron_bridge_reduces_gradients_in_16_bits_and_shares_its_constants() -> None:
    bridge, usual = recipe_named("megatron-bridge"), recipe_named("megatron")
    assert (bridge.recipe.gradient_reduce_bytes, usual.recipe.gradient_reduce_bytes) == (2, 4)
    assert bridge.calibrated_as == usual.calibrated_as == "megatron"


def test_pure_mode_reduces_gradients_in_16_bits_and_shares_its_constants() -> None:
    pure, usual = recipe_named("composer-pure"), recipe_named("composer")
    assert (pure.recipe.gradient_reduce_bytes, usual.recipe.gradient_reduce_bytes) == (2, 4)
    assert pure.calibrated_as == usual.calibrated_as == "composer"


@pytest.mark.parametrize(("precision", "framework"), [("fp16", "megatron-2022"), ("fp8", "megatron")])
def test_a_name_that_changed_its_behaviour_is_told_apart_by_what_only_the_later_one_can(
    precision: str, framework: str
) -> None:
    assert recipe_observed_as("Megatron-LM", precision=precision).framework == framework


@pytest.mark.parametrize(
    ("version", "framework"),
    [
        ("0.2.2", "torchtitan"),
        ("v0.3.0 (torch 2.13)", "torchtitan"),
        ("0.1.0", "torchtitan-2024"),
        ("2024-12 (torch nightly 2024/12/23)", "torchtitan-2024"),
        ("2025-06", "torchtitan-2024"),
        ("", "torchtitan-2024"),
    ],
)
def test_a_release_that_changed_its_behaviour_has_a_recipe_of_its_own(version: str, framework: str) -> None:
    assert recipe_observed_as("torchtitan", precision="bf16", version=version).framework == framework
