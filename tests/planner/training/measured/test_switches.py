"""What a measured run says about its switches, in its own words, and what nobody may guess for it."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.planner.training.measured.switches import (
    observed_benchmark,
    observed_modules,
    observed_practice,
    with_published_choices,
)
from meshplan.planner.training.problem.problem import Phase
from meshplan.planner.training.problem.switches import Launches, TrainingPractice
from meshplan.planner.validation.fields import Section, UnsupportedError


def row(**fields: Any) -> dict[str, Any]:
    return {
        "model": {"name": "m"},
        "hardware": {"device": "h100-sxm-80gb"},
        "framework": {"name": "Somebody's trainer"},
        "parallelism": {},
        **fields,
    }


def practice_in(observed: dict[str, Any]) -> tuple[TrainingPractice, tuple[str, ...]]:
    benchmark = observed_benchmark(observed, "bf16", Phase.PRETRAINING)
    return observed_practice(observed, Section(observed, "parallelism"), benchmark)


@pytest.mark.parametrize(
    ("stated", "modules"),
    [
        (None, ("core_attn",)),
        ("none", ("core_attn",)),
        ("selective (attention)", ("core_attn",)),
        ("selective (norm, act)", ("layernorm", "moe_act")),
        ("selective (layernorm, moe)", ("layernorm", "moe")),
        ("selective (norm, act, shared_expert)", ("layernorm", "moe_act", "shared_experts")),
        ("mlp, mla_up_proj, moe_act, layernorm", ("layernorm", "mla_up_proj", "mlp", "moe_act")),
        ("selective per-op", ("core_attn",)),
    ],
)
def test_modules_by_the_words_of_published_tables(stated: str | None, modules: tuple[str, ...]) -> None:
    observed = row(parallelism={} if stated is None else {"activation_recompute": stated})
    assert observed_modules(Section(observed, "parallelism")) == modules


@pytest.mark.parametrize(
    ("caveats", "fused", "overlaps"),
    [
        ([], False, False),
        (["dispatcher DeepEP", "+1f1b overlap"], True, True),
        (["kernels: TE + DeepEP + FlexAttn"], True, False),
        (["dispatcher A2A"], False, False),
    ],
)
def test_switches_that_a_caveat_states(caveats: list[str], fused: bool, overlaps: bool) -> None:
    observed = row(caveats=caveats)
    practice, unstated = practice_in(observed)
    assert (practice.fused_dispatch, practice.overlaps_experts) == (fused, overlaps)
    assert practice.launches is Launches.EAGER
    assert unstated == ()


def test_a_stated_key_overrules_a_caveat() -> None:
    observed = row(caveats=["dispatcher DeepEP"], parallelism={"expert_dispatcher": "alltoall", "cuda_graphs": "full"})
    practice, _ = practice_in(observed)
    assert not practice.fused_dispatch
    assert practice.launches is Launches.GRAPHED


@pytest.mark.parametrize(
    ("caveat", "settings"),
    [
        ("each step adds to the one above: packed", {"loss": "whole"}),
        ("each step adds to the one above: packed, compile, chunked cross entropy", {"loss": "chunked"}),
        (
            "… chunked cross entropy, optimizer in backward, 8-bit AdamW",
            {"loss": "chunked", "optimizer_in_backward": True, "optimizer": "adamw-8bit"},
        ),
        ("without optimizer in backward and 8-bit AdamW", {"optimizer_in_backward": False, "optimizer": "default"}),
        ("FlashAttention off (attention matrix kept)", {"flash_attention": False}),
        ("mock data, balanced gate, no gradient clipping", {"experts_in_turn": True}),
    ],
)
def test_what_saves_memory_by_the_words_of_published_tables(caveat: str, settings: dict[str, Any]) -> None:
    observed = row(caveats=[caveat])
    practice, _ = practice_in(observed)
    assert {name: getattr(practice, name) for name in settings} == settings


def test_a_stated_optimizer_that_nobody_knows_is_refused() -> None:
    observed = row(parallelism={"optimizer": "lion"})
    with pytest.raises(UnsupportedError, match="optimizer"):
        practice_in(observed)


def test_scripts_fill_what_a_row_leaves_out_and_nothing_else() -> None:
    observed = row(
        framework={"name": "NeMo AutoModel (PyTorch FSDP2)"},
        model={"name": "GPT-OSS 120B"},
        parallelism={"activation_recompute": "full"},
    )
    choices, filled = with_published_choices(observed, observed_benchmark(observed, "bf16", Phase.PRETRAINING))
    assert choices.values == {"activation_recompute": "full", "expert_parallel": 64}
    assert filled == ("expert_parallel",)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tp", "tensor_parallel"),
        ("tp_size", "tensor_parallel"),
        ("PP", "pipeline_parallel"),
        ("cp_size", "context_parallel"),
        ("ep", "expert_parallel"),
        ("dp_size", "data_parallel"),
        ("vpp", "virtual_pipeline_stages"),
        ("mbs", "micro_batch_size"),
        ("gbs", "global_batch_size"),
        ("zero", "zero_stage"),
    ],
)
@pytest.mark.parametrize("section", ["parallelism", "workload"])
def test_a_choice_under_a_short_name_does_not_count_as_unstated(key: str, meant: str, section: str) -> None:
    observed = {**row(), "parallelism": {}}
    observed[section] = {key: 8}
    benchmark = observed_benchmark(observed, "bf16", Phase.PRETRAINING)
    fix = f"is not read there; write parallelism.{meant}"
    expected = f"is not read; did you mean {meant!r}?" if section == "parallelism" else fix
    with pytest.raises(UnsupportedError) as refused:
        with_published_choices(observed, benchmark)
    assert str(refused.value) == f"{section}.{key} {expected}"


@pytest.mark.parametrize("key", ["tensor_model_parallel_size", "tensor_parallel_degree", "tensor_parallel_size"])
def test_a_degree_under_the_name_of_a_flag_does_not_count_as_1(key: str) -> None:
    observed = row(parallelism={key: 8})
    benchmark = observed_benchmark(observed, "bf16", Phase.PRETRAINING)
    with pytest.raises(UnsupportedError, match=rf"parallelism.{key} is not read; did you mean 'tensor_parallel'\?"):
        with_published_choices(observed, benchmark)
    both = row(parallelism={key: 8, "tensor_parallel": 8})
    assert with_published_choices(both, benchmark)[0].whole("tensor_parallel") == 8
