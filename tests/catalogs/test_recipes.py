"""Which framework recipe a published measurement is read with: by name, release and mode."""

from __future__ import annotations

import pytest

from meshplan.catalogs.recipes import recipe_named, recipe_observed_as


@pytest.mark.parametrize(
    ("name", "release", "mode", "framework"),
    [
        ("Megatron-Bridge", "26.02", None, "megatron-2025"),
        ("Megatron-Bridge", "26.06", None, "megatron"),
        ("Megatron-Bridge", None, None, "megatron"),
        ("llm-foundry (Composer FSDP)", None, "PURE", "composer-pure"),
        ("llm-foundry (Composer FSDP)", None, "DEFAULT", "composer"),
        ("llm-foundry (Composer FSDP)", None, None, "composer"),
        ("somebody's own", None, "PURE", "somebody's own"),
    ],
)
def test_a_measurement_finds_its_recipe(name: str, release: str | None, mode: str | None, framework: str) -> None:
    assert recipe_observed_as(name, release, mode).framework == framework


def test_pure_mode_reduces_gradients_in_16_bits_and_shares_its_constants() -> None:
    pure, usual = recipe_named("composer-pure"), recipe_named("composer")
    assert (pure.recipe.gradient_reduce_bytes, usual.recipe.gradient_reduce_bytes) == (2, 4)
    assert pure.calibrated_as == usual.calibrated_as == "composer"
