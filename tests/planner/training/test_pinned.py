"""One pinned configuration: defaults, and every misfit named at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, MOE, configured, problem_of

from meshplan.catalogs.errors import SpecError
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.pinned import fixed_config
from meshplan.planner.training.problem.frameworks.accelerate import ACCELERATE
from meshplan.planner.training.problem.frameworks.deepspeed import DEEPSPEED
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN


def messages(**question: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        fixed_config(problem_of(**question))
    assert all(problem.path == "fixed" for problem in caught.value.problems)
    return [problem.message for problem in caught.value.problems]


def test_nothing_pinned_is_plain_data_parallelism() -> None:
    problem = problem_of(DENSE, num_devices=8, global_batch_size=16)
    config = fixed_config(problem)
    assert config == configured(problem, data_parallel=8)
    assert (config.zero_stage, config.data_parallel_shard, config.num_microbatches) == (1, 8, 2)


@pytest.mark.parametrize(("rules", "devices"), [(TORCHTITAN, 8), (TORCHTITAN, 1), (ACCELERATE, 8), (DEEPSPEED, 8)])
def test_the_plain_stage_is_one_that_the_framework_has(rules: FrameworkRules, devices: int) -> None:
    """FSDP shards gradients or nothing: what nobody pinned is no reason to refuse a question."""
    shape = replace(DENSE, slug="qwen3-0.6b")  # TorchTitan has a list of models
    config = fixed_config(problem_of(shape, num_devices=devices, global_batch_size=16, rules=rules))
    assert not rules.broken(shape, config)
    assert config.zero_stage == (1 if rules is DEEPSPEED else 3)


def test_what_is_pinned_is_taken_and_the_rest_follows() -> None:
    fixed = {"tensor_parallel": 2, "pipeline_parallel": 3, "virtual_pipeline_stages": 2, "zero_stage": 0}
    config = fixed_config(problem_of(DENSE, num_devices=24, global_batch_size=12, fixed=fixed))
    assert (config.data_parallel, config.data_parallel_shard, config.sequence_parallel) == (4, 1, True)
    assert config.pipeline_schedule == "interleaved"
    assert config.layers_per_chunk == (1,) * 6
    assert config.world_size == 24


def test_too_many_devices_an_odd_batch_and_too_many_chunks_at_once() -> None:
    fixed = {"tensor_parallel": 4, "pipeline_parallel": 8, "data_parallel": 3, "micro_batch_size": 3}
    found = messages(shape=DENSE, num_devices=8, global_batch_size=16, fixed=fixed)
    assert found == [
        "the degrees need 96 devices, there are 8",
        "micro_batch_size × data_parallel = 9 does not divide 16",
        "8 model chunks, but the model has 6 layers",
    ]


def test_every_broken_rule_is_named() -> None:
    fixed = {"tensor_parallel": 3, "virtual_pipeline_stages": 2, "data_parallel": 2}
    found = messages(shape=DENSE, num_devices=8, global_batch_size=16, rules=MEGATRON, fixed=fixed)
    assert len(found) >= 3
    assert any("num_attention_heads" in message for message in found)
    assert any("virtual_pipeline_stages" in message for message in found)
    assert all(message.startswith("megatron: ") for message in found)


def test_experts_must_divide() -> None:
    (message,) = messages(
        shape=MOE, num_devices=8, fixed={"expert_parallel": 3, "data_parallel": 6}, global_batch_size=6
    )[:1]
    assert "num_experts" in message


def test_what_is_returned_keeps_the_rules() -> None:
    for rules in (MEGATRON, problem_of().rules):
        for fixed in ({"tensor_parallel": 2}, {"pipeline_parallel": 2, "expert_parallel": 4}, {"context_parallel": 4}):
            problem = problem_of(MOE, num_devices=16, rules=rules, fixed=fixed)
            assert not rules.broken(MOE, fixed_config(problem))


def test_a_schedule_is_taken_where_the_framework_can_run_it() -> None:
    split = {"pipeline_parallel": 2, "tensor_parallel": 2}
    for schedule in ("1f1b", "gpipe", "zb-h1", "zb-1p", "zb-2p"):
        config = fixed_config(problem_of(DENSE, num_devices=8, fixed={**split, "pipeline_schedule": schedule}))
        assert config.pipeline_schedule == schedule
    with pytest.raises(SpecError, match="megatron runs 2 stages of 1 chunks as '1f1b', not as 'zb-2p'"):
        fixed_config(problem_of(DENSE, num_devices=8, rules=MEGATRON, fixed={**split, "pipeline_schedule": "zb-2p"}))
    with pytest.raises(SpecError, match="as 'interleaved' or 'zb-v', not as '1f1b'"):
        fixed_config(
            problem_of(
                DENSE,
                num_devices=8,
                fixed={**split, "virtual_pipeline_stages": 2, "pipeline_schedule": "1f1b"},
            )
        )


# --- schedules without measured runs, and layers that the user deals -------------------------------------------------


@pytest.mark.parametrize(("schedule", "chunks"), [("v-half", 2), ("v-min", 2), ("dualpipe-v", 2), ("hanayo", 4)])
def test_schedules_without_a_framework_are_priced(schedule: str, chunks: int) -> None:
    split = {"pipeline_parallel": 2, "virtual_pipeline_stages": chunks, "tensor_parallel": 2}
    problem = problem_of(
        replace(DENSE, num_hidden_layers=8), num_devices=8, fixed={**split, "pipeline_schedule": schedule}
    )
    config = fixed_config(problem)
    assert config.pipeline_schedule == schedule
    assert price(problem, config).step_s > 0.0


def test_a_v_has_two_chunks_unless_said_otherwise() -> None:
    shape = replace(DENSE, num_hidden_layers=8)
    config = fixed_config(problem_of(shape, num_devices=8, fixed={"pipeline_parallel": 4, "pipeline_schedule": "zb-v"}))
    assert config.virtual_pipeline_stages == 2
    assert len(config.layers_per_chunk) == 8


def test_dualpipe_v_needs_enough_micro_batches() -> None:
    fixed = {"pipeline_parallel": 4, "pipeline_schedule": "dualpipe-v", "data_parallel": 2}
    shape = replace(DENSE, num_hidden_layers=8)
    with pytest.raises(SpecError, match="dualpipe-v needs num_microbatches of 2 × pipeline_parallel or more"):
        fixed_config(problem_of(shape, num_devices=8, global_batch_size=14, fixed=fixed))


def test_waves_need_an_even_number_of_chunks() -> None:
    fixed = {"pipeline_parallel": 2, "virtual_pipeline_stages": 3, "pipeline_schedule": "hanayo"}
    with pytest.raises(SpecError, match="2 stages of 3 chunks as 'interleaved', not as 'hanayo'"):
        fixed_config(problem_of(replace(DENSE, num_hidden_layers=6), num_devices=8, fixed=fixed))


def test_layers_may_be_dealt_by_the_user() -> None:
    shape = replace(DENSE, num_hidden_layers=8)
    config = fixed_config(problem_of(shape, num_devices=8, fixed={"layers_per_chunk": (1, 3, 3, 1)}))
    assert config.pipeline_parallel == 4
    assert config.layers_per_chunk == (1, 3, 3, 1)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"layers_per_chunk": (3, 3)}, "3 \\+ 3 = 6 layers, the model has 8: add 2"),
        ({"layers_per_chunk": (5, 5)}, "the model has 8: remove 2"),
        ({"layers_per_chunk": (4, 4), "pipeline_parallel": 4}, "2 numbers for 4 stages × 1 chunks: give 4"),
    ],
)
def test_layers_that_do_not_add_up_are_refused(fixed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fixed_config(problem_of(replace(DENSE, num_hidden_layers=8), num_devices=8, fixed=fixed))
