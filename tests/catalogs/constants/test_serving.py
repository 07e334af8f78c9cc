"""Stored sets of serving constants, also those of a release that had fewer of them."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL

from meshplan.catalogs.constants.serving import ServingCalibration, ServingConstants
from meshplan.planner.serving.estimator.iteration import layers_launch_s

FITTED = asdict(
    ServingConstants(launch_s_per_layer=0.4e-3, launch_s_per_latent_layer=0.7e-3, launch_s_of_experts=0.1e-3)
)


def stored(*, without: tuple[str, ...]) -> ServingConstants:
    """What a set becomes that was written before some constants existed; of a model of its own, too."""
    constants = {name: value for name, value in FITTED.items() if name not in without}
    document = {"engine": "vllm", "architecture": "hopper@ours", "constants": constants, "num_runs": 3}
    read = ServingCalibration.from_document({**document, "model_constants": {"mixtral-8x7b": constants}})
    assert read.model_constants["mixtral-8x7b"] == read.constants
    return read.constants


@pytest.mark.parametrize("shape", [DEEPSEEK_V3, MIXTRAL, LLAMA_70B], ids=lambda shape: shape.slug)
def test_a_set_from_before_a_launch_had_its_own_constant_prices_as_it_was_fitted(shape) -> None:
    own = "launch_s_per_layer" if shape.latent is None else "launch_s_per_latent_layer"
    later = ("launch_s_of_experts", "launch_s_per_prompt_kernel")
    before_experts = stored(without=later)
    launched = layers_launch_s(before_experts, shape, has_prompts=True)
    assert launched == pytest.approx(FITTED[own] * shape.num_hidden_layers)
    one = stored(without=(*later, "launch_s_per_latent_layer"))
    launched = layers_launch_s(one, shape, has_prompts=True)
    assert launched == pytest.approx(FITTED["launch_s_per_layer"] * shape.num_hidden_layers)


def test_what_a_set_states_and_what_nobody_fitted_stay() -> None:
    assert stored(without=()) == ServingConstants(**FITTED)
    assert ServingCalibration.from_document({"engine": "any", "architecture": "any"}).constants == ServingConstants()
    other = {"engine": "any", "architecture": "any", "constants": {"decode_factor": 1.1}}
    assert ServingCalibration.from_document(other).constants == ServingConstants(decode_factor=1.1)
