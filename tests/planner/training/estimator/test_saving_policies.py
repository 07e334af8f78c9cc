"""JAX's checkpoint policies, which name what is saved, and its collectives that are scheduled by measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, configured, problem_of
from training_constants import with_time

from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.problem.switches import SAVING_POLICIES

TOKENS, BYTES = 1024, 2  # of a micro-batch of problem_of, of an activation
# Few logits: memory is fullest while the backward pass of a layer runs.
SHAPE = replace(DENSE, vocab_size=8)


def on_jax(**recipe: bool) -> TrainingProblem:
    problem = problem_of(SHAPE)
    calibration = with_time(problem.calibration, data_parallel_s_per_rank=0.0)
    laid_out = replace(calibration.recipe, recomputes_only_needed=True, **recipe)
    return replace(problem, calibration=replace(calibration, recipe=laid_out))


def under(policy: str, **choices: object) -> Priced:
    problem, mode = on_jax(), policy
    if policy in SAVING_POLICIES:
        mode, modules = "selective", SAVING_POLICIES[policy]
        problem = replace(problem, workload=replace(problem.workload, recompute_modules=modules))
    return price(problem, configured(problem, data_parallel=8, activation_recompute=mode, **choices))


def more_than(less: str, policy: str) -> float:
    """Elements of a token that a layer keeps under one policy and not under the other, while another layer runs."""
    held, least = (under(name).stages[0].components["activations"] for name in (policy, less))
    return (held - least) / (SHAPE.num_hidden_layers - 1) / TOKENS / BYTES


def test_what_a_policy_names_is_what_a_layer_keeps() -> None:
    """Beside the layer's input: queries, keys and values; the output projection; all products that are read again."""
    heads = SHAPE.num_attention_heads + 2 * SHAPE.num_key_value_heads
    assert more_than("full", "save_qkv_proj") == pytest.approx(heads * SHAPE.head_dim)
    assert more_than("save_qkv_proj", "save_qkv_out_proj") == pytest.approx(SHAPE.hidden_size)
    inputs = (SHAPE.mlp_matrices - 1) * SHAPE.intermediate_size
    assert more_than("save_qkv_out_proj", "save_dot_only") == pytest.approx(inputs)


def test_the_less_is_saved_the_more_is_computed_again() -> None:
    order = ("none", "save_dot_only", "save_qkv_out_proj", "save_qkv_proj", "full")
    again = [under(policy).breakdown_s["recompute"] for policy in order]
    assert again == sorted(again)
    assert len(set(again)) == len(again)


@pytest.mark.parametrize("gigabytes_per_s", [10_000.0, 0.01])
def test_measured_times_hide_what_the_work_can_hide(gigabytes_per_s: float) -> None:
    """On fast links all but the first and last collective, on slow ones no more than the work is long."""
    parts = []
    for recipe in ({"overlaps_data_parallel": False}, {"schedules_by_profile": True}):
        problem = on_jax(**recipe)
        machine = replace(problem.machine, scale_up_bytes_per_s=gigabytes_per_s * 1e9, mesh=None)
        problem = replace(problem, machine=machine)
        parts.append(price(problem, configured(problem, data_parallel=8, zero_stage=3)))
    whole, exposed = (one.breakdown_s["data-parallel communication"] for one in parts)
    work = parts[0].step_s - whole
    hidden = (1.0 - UNHIDDEN_SHARE) * min(whole, work)
    assert exposed == pytest.approx(whole - hidden, rel=0.02)
