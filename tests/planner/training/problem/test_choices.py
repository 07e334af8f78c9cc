"""One table of choices: every other list of them agrees with it, so that a new choice is a row and what prices it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_args

import numpy as np
import pytest
from core_cases import configured, problem_of
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.core.reading.spec_reader import spec_schema
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.problem.choice import (
    CONTEXT_PARALLEL_STYLES,
    RECOMPUTE_MODES,
    Choice,
    ContextStyle,
    Recompute,
)
from meshplan.planner.training.problem.choices import (
    BY_NAME,
    BY_SIMPLICITY,
    CHOICES,
    COLUMNS,
    PINNABLE,
    SEARCHABLE,
    SPLIT,
    abbreviations_of,
    full_name,
    plain_defaults,
)
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.problem import OFFLOADS, TrainingConfig
from meshplan.planner.training.problem.spec import ConstraintsSpec, FixedSpec, TrainingSpec, WorkloadSpec
from meshplan.planner.training.search.report import config_of, simplicity
from meshplan.planner.training.search.templates import make_templates, rule_view

NAMES = [choice.name for choice in CHOICES]
TYPES = {int: "int", bool: "bool", float: "float", tuple: "tuple[int, ...]"}


def test_a_configuration_has_exactly_the_choices_of_the_table_with_their_types_and_defaults() -> None:
    written = {item.name: item for item in fields(TrainingConfig)}
    assert sorted(written) == sorted(NAMES)
    for choice in CHOICES:
        one_of_names = choice.values and choice.kind is not tuple
        of_names = "tuple[str, ...]" if choice.values else TYPES[choice.kind]
        assert written[choice.name].type == ("str" if one_of_names else of_names), choice.name
        default = written[choice.name].default
        assert (default is not MISSING) == choice.is_optional, choice.name
        assert default is MISSING or default == choice.default, choice.name


def test_a_batch_of_candidates_has_exactly_the_columns_of_the_table() -> None:
    arrays = {item.name: item.type for item in fields(Candidates) if item.name != "split"}
    assert arrays == {one.column: "BoolArray" if one.dtype is np.bool_ else "IntArray" for one in COLUMNS}
    assert {choice.split for choice in SPLIT} <= {item.name for item in fields(PipelineSplit)}


def test_every_choice_is_a_column_or_shared_by_the_split_or_settled_by_the_question() -> None:
    settled = {choice.name for choice in CHOICES if not choice.column and not choice.split}
    assert settled == problem_of().settled.keys()


def test_templates_choose_the_columns_that_plans_always_state() -> None:
    stated = {choice.column for choice in COLUMNS if not choice.is_optional}
    assert make_templates(problem_of()).columns.keys() == stated - {
        "num_microbatches",
        "data_parallel_shard",
        "zero_stage",
        "recompute",
    }


def test_spec_fields_are_the_pinnable_choices_with_their_bounds() -> None:
    # Whole stages are pinned for several node types, and are no choice of a uniform plan.
    assert list(FixedSpec.model_fields) == [*(choice.name for choice in PINNABLE), "stages"]
    schema = spec_schema(TrainingSpec)["$defs"]["FixedSpec"]["properties"]
    for choice in PINNABLE:
        said = schema[choice.name]
        assert said["description"] == choice.about
        form = said["anyOf"][0]
        named = form["items"] if choice.values and choice.kind is tuple else form
        assert named.get("enum", []) == list(choice.values)
        if choice.kind is int and not choice.values:
            assert (form["minimum"], form.get("maximum")) == (choice.least, choice.most)


@pytest.mark.parametrize("choice", [one for one in CHOICES if one.section in {"workload", "constraints"}])
def test_choices_of_other_sections_are_fields_there(choice: Choice) -> None:
    section = {"workload": WorkloadSpec, "constraints": ConstraintsSpec}[choice.section]
    written = section.model_fields[choice.name]
    if choice.values:
        assert get_args(written.annotation) == choice.values
        assert written.default == choice.default


def test_what_a_spec_may_search_over_is_what_the_table_marks() -> None:
    assert get_args(get_args(ConstraintsSpec.model_fields["search_over"].annotation)[0]) == SEARCHABLE


def test_codes_are_positions_of_the_names() -> None:
    assert [mode.name.lower() for mode in Recompute] == list(RECOMPUTE_MODES)
    assert len(ContextStyle) == len(CONTEXT_PARALLEL_STYLES)
    assert CONTEXT_PARALLEL_STYLES[ContextStyle.ALL_TO_ALL_AND_RING] == "all-to-all+ring"
    assert BY_NAME["precision"].values == PRECISIONS
    assert set(OFFLOADS.values()) == {name for name in NAMES if name.endswith("_offload")}


def test_frameworks_name_modes_and_precisions_of_the_table() -> None:
    for rules in FRAMEWORKS.values():
        assert set(rules.recompute_modes) <= set(RECOMPUTE_MODES)
        assert set(rules.precisions) <= set(PRECISIONS)
        for rule in rules.rules:
            assert {BY_NAME[name].is_optional for name in rule.about} <= {True}, rule.name


ONE_OF_EACH = st.fixed_dictionaries(
    {
        "activation_recompute": st.sampled_from(RECOMPUTE_MODES),
        "context_parallel_style": st.sampled_from(CONTEXT_PARALLEL_STYLES),
        "zero_stage": st.integers(min_value=0, max_value=3),
        "optimizer_offload": st.booleans(),
        "activation_offload": st.booleans(),
        "activation_offload_num_layers": st.integers(min_value=0, max_value=8),
        "vocabulary_parallel": st.booleans(),
        "zero_hpz_partition_size": st.integers(min_value=1, max_value=8),
    }
)


@given(chosen=ONE_OF_EACH, on_nvme=st.booleans())
def test_a_configuration_survives_being_a_candidate(chosen: dict[str, Any], *, on_nvme: bool) -> None:
    if on_nvme and (chosen["optimizer_offload"] or chosen["activation_offload_num_layers"]):
        chosen["offload_to"] = "nvme"
    problem = problem_of()
    config = configured(problem, **chosen)
    batch = candidates_of(problem, config)
    assert config_of(batch, 0, problem) == config
    view = rule_view(problem, batch)
    assert set(vars(view)) == set(NAMES)
    for name in NAMES:
        assert np.ravel(getattr(view, name)).tolist() == np.ravel(getattr(config, name)).tolist(), name


def test_each_departure_from_plain_counts_in_the_order_among_equals() -> None:
    problem = problem_of()
    plain = configured(problem)
    for earlier in BY_SIMPLICITY:
        for later in BY_SIMPLICITY:
            if earlier.simplicity < later.simplicity:
                first, second = (configured(problem, **_less_simple(plain, one)) for one in (earlier, later))
                if first.world_size == second.world_size and len(first.offloaded) == len(second.offloaded):
                    assert simplicity(first) > simplicity(second) > simplicity(plain), (earlier.name, later.name)
    assert len({choice.simplicity for choice in BY_SIMPLICITY}) == len(BY_SIMPLICITY)


def _less_simple(plain: TrainingConfig, choice: Choice) -> dict[str, Any]:
    value = getattr(plain, choice.name)
    if choice.values:
        return {choice.name: choice.values[-1]}
    if choice.kind is bool:
        return {choice.name: True}
    return {choice.name: value - 1 if choice.larger_is_simpler else value + 1}


def test_defaults_are_the_values_of_the_table() -> None:
    assert plain_defaults().keys() == {choice.name for choice in CHOICES if choice.default is not None}
    for choice in CHOICES:
        several = choice.default if isinstance(choice.default, tuple) else (choice.default,)
        assert choice.default is None or not choice.values or set(several) <= set(choice.values)
        assert choice.about
        assert not choice.about.endswith(".")


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("tp", "tensor_parallel"),
        ("pp", "pipeline_parallel"),
        ("vpp", "virtual_pipeline_stages"),
        ("dp", "data_parallel"),
        ("cp", "context_parallel"),
        ("ep", "expert_parallel"),
        ("etp", "expert_tensor_parallel"),
        ("mbs", "micro_batch_size"),
        ("zero", "zero_stage"),
        ("TP", "tensor_parallel"),
        ("zero_stage", "zero_stage"),
    ],
)
def test_usual_abbreviations_mean_the_choice(short: str, name: str) -> None:
    assert full_name(short, NAMES) == name


def test_abbreviations_are_unique_and_mean_known_choices_only() -> None:
    shorts = [short for choice in CHOICES for short in choice.abbreviations]
    assert len(shorts) == len(set(shorts))
    assert not set(shorts) & set(NAMES)
    assert full_name("tp", ["zero_stage"]) is None
    assert abbreviations_of(["zero_stage"]) == {"zero": "zero_stage"}
