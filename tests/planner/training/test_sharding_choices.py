"""Ways to shard sequences and states from the spec to the plan: what may be written, and what the plan admits."""

from __future__ import annotations

from typing import Any

import pytest
from core_cases import problem_of

from meshplan.catalogs.errors import SpecError
from meshplan.planner.training.pinned import fixed_config
from meshplan.planner.training.plan import time_interval
from meshplan.planner.training.problem.spec import read_training_spec
from meshplan.planner.training.unvalidated import unmeasured_sharding

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 8192, "global_batch_size": 8},
}


@pytest.mark.parametrize(
    ("section", "path", "words"),
    [
        ({"fixed": {"context_parallel_heads": 2}}, "fixed", "context_parallel_style: all-to-all"),
        ({"fixed": {"context_parallel_style": "ulysses"}}, "fixed.context_parallel_style", "all-to-all"),
        ({"fixed": {"outer_zero_stage": 2}}, "fixed.outer_zero_stage", "1"),
        ({"constraints": {"search_over": ["zero_stage"]}}, "constraints.search_over", "gathered_num_layers"),
    ],
)
def test_bad_choices_are_named(section: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_training_spec({**SPEC, **section})
    assert path in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fixed", "style", "heads"),
    [
        ({"context_parallel_style": "all-to-all"}, "ring", 1),  # no sequence is split
        ({"context_parallel_style": "all-to-all", "context_parallel": 4}, "all-to-all", 1),
        ({"context_parallel_style": "all-to-all+ring", "context_parallel": 4}, "all-to-all+ring", 2),
    ],
)
def test_one_configuration_takes_the_pinned_style(fixed: dict[str, Any], style: str, heads: int) -> None:
    config = fixed_config(problem_of(fixed=fixed))
    assert (config.context_parallel_style, config.context_parallel_heads) == (style, heads)


def test_one_configuration_names_the_rule_that_it_breaks() -> None:
    with pytest.raises(SpecError, match="need zero_stage 3"):
        fixed_config(problem_of(fixed={"zero_hpz_partition_size": 4, "zero_stage": 1}))


def test_a_plan_admits_what_nobody_measured() -> None:
    plain = fixed_config(problem_of(fixed={"zero_stage": 3, "context_parallel": 2}))
    assert not list(unmeasured_sharding(plain))
    asked = {"zero_stage": 3, "zero_hpz_partition_size": 2, "gathered_num_layers": 1, "data_parallel_shard": 4}
    problem = problem_of(fixed={**asked, "outer_zero_stage": 1, "data_parallel": 8})
    assert len(list(unmeasured_sharding(fixed_config(problem)))) == 3
    narrow, wide = (time_interval(problem, 1.0, config=plain, unmeasured_share=share) for share in (0.0, 0.3))
    assert wide.low < narrow.low < 1.0 < narrow.high < wide.high
