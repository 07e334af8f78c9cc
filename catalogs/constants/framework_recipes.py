"""How each training framework lays out a step: the documented behaviour behind the calibrations.

Recipes ship as ``seed/recipes.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from meshplan.catalogs.constants.entries import read_entry, seed_content
from meshplan.catalogs.constants.releases import release_numbers
from meshplan.catalogs.constants.training import FrameworkRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstated:
    """Choices of a measured run that does not state them.

    Args:
        zero_stage: 0 to 3.
        activation_recompute: ``none``, ``selective`` or ``full``.
        sequence_parallel: with tensor parallelism.
        deals_evenly: layers are split over stages without regard to the embedding and the LM head, the remainder to
            the last stages; otherwise as Megatron-LM's recipes do.
        peak_is_allocated: a peak is what tensors held (torch's ``max_memory_allocated``); otherwise what the device
            had in use, context and caches included.
        peak_has_cache: a peak counts what the allocator keeps, of sequences of one length.
        peak_is_reserved: a peak counts what the allocator keeps of batches that were padded to other lengths.
        splits_experts: experts are split over tensor-parallel ranks as layers are (Megatron-Core's default of
            ``expert_tensor_parallel_size``); otherwise whole.
        unties_head: the LM head has weights of its own even where the model shares the embedding's.
        is_eager: memory-bound operators run one by one unless ``torch.compile`` is named; otherwise they are fused.
    """

    zero_stage: int = 1
    activation_recompute: str = "none"
    sequence_parallel: bool = True
    deals_evenly: bool = False
    peak_is_allocated: bool = False
    peak_has_cache: bool = False
    peak_is_reserved: bool = False
    splits_experts: bool = False
    unties_head: bool = False
    is_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One framework.

    Args:
        framework: our name.
        observed_as: names in published measurements.
        mixed_precision_mode: the mode of this behaviour, where the framework has a switch; empty where it has none.
        precisions: those of this behaviour, where a later one has the same name and more; empty for all.
        since: first release of this behaviour where an earlier one has the same name; empty: no release is known.
        calibrated_as: the framework whose constants it has: another one where it shares them.
        relatives: whose constants to take on hardware where the framework itself was not measured, best first.
        bounded_by: frameworks of the same memory layout, whose measured peaks say what its estimate may miss where it
            has none itself; empty: all.
        unstated: see :class:`Unstated`.
        recipe: its layout of a step.
    """

    framework: str
    observed_as: tuple[str, ...]
    calibrated_as: str
    mixed_precision_mode: str = ""
    precisions: tuple[str, ...] = ()
    since: str = ""
    relatives: tuple[str, ...] = ()
    bounded_by: tuple[str, ...] = ()
    unstated: Unstated = field(default_factory=Unstated)
    recipe: FrameworkRecipe = field(default_factory=FrameworkRecipe)


@cache
def recipes() -> Mapping[str, Recipe]:
    """Every known framework by our name."""
    return {
        name: read_entry(
            Recipe,
            {"calibrated_as": name} | {key: value for key, value in entry.items() if key != "source"},
            framework=name,
            unstated=Unstated(**entry["unstated"]),
            recipe=FrameworkRecipe(**entry["recipe"], source=entry["source"]),
        )
        for name, entry in seed_content("recipes.yaml")["frameworks"].items()
    }


def recipe_named(framework: str) -> Recipe:
    """The framework with our name; an unknown one gets Megatron's layout under its own name."""
    found = recipes().get(framework)
    if found is not None:
        return found
    usual = recipes()["megatron"]
    return Recipe(framework=framework, observed_as=(framework,), calibrated_as=framework, bounded_by=usual.bounded_by)


def recipe_observed_as(
    name: str, *, precision: str, version: str = "", mixed_precision_mode: str | None = None
) -> Recipe:
    """The framework that a measurement calls ``name``.

    Args:
        name: as published.
        precision: of the run; it tells behaviours apart that have the same name.
        version: as published; it does likewise. One that is no number of a release, such as a date, is an early one.
        mixed_precision_mode: of frameworks that have such a switch; None where it is not stated.
    """
    named = [recipe for recipe in recipes().values() if name in recipe.observed_as]
    found = sorted(
        (recipe for recipe in named if _is_precision_of(recipe, precision) and _is_release_of(recipe, version)),
        key=lambda recipe: (not recipe.since, not recipe.precisions),
    )
    for recipe in found:
        if recipe.mixed_precision_mode and recipe.mixed_precision_mode == mixed_precision_mode:
            return recipe
    usual = (recipe for recipe in found if not recipe.mixed_precision_mode)
    return next(usual, recipe_named(name))


def _is_precision_of(recipe: Recipe, precision: str) -> bool:
    return not recipe.precisions or precision in recipe.precisions


def _is_release_of(recipe: Recipe, version: str) -> bool:
    if not recipe.since:
        return True
    release = re.match(r"v?(\d+(?:\.\d+)+)", version)
    return release is not None and release_numbers(release[1]) >= release_numbers(recipe.since)
