"""What the scripts of published training benchmarks are known to have set, and for which runs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from meshplan.catalogs.constants.training_benchmarks import TrainingBenchmark, choices_of, practice_of
from meshplan.catalogs.seed import SEED_FOLDER
from meshplan.catalogs.yaml_reader import load_yaml
from meshplan.planner.training.problem.switches import Launches, TrainingPractice

RUN = TrainingBenchmark(
    observed_as="Megatron-Bridge",
    release="26.02.01",
    model="Qwen3_235B_a22B",
    device="gb200",
    precision="mxfp8",
    phase="pretraining",
)
PARTLY = {"launches": "partly-graphed", "fused_dispatch": True}


def test_a_preset_holds_from_its_release_on() -> None:
    assert practice_of(replace(RUN, release="25.09")) == {}
    assert practice_of(RUN) == PARTLY
    assert practice_of(replace(RUN, release="26.08")) == {
        "launches": "graphed",
        "fused_dispatch": True,
        "overlaps_experts": True,
    }


def test_a_preset_holds_for_its_devices_and_precisions_alone() -> None:
    assert practice_of(replace(RUN, device="b200-sxm-180gb")) == {}
    assert practice_of(replace(RUN, release="26.08", precision="bf16")) == PARTLY


def test_a_later_entry_takes_back_an_earlier_one() -> None:
    run = replace(RUN, model="LLAMA3_8B", release="25.11", precision="fp8")
    assert practice_of(run) == {"launches": "eager"}
    assert practice_of(replace(run, precision="mxfp8")) == {"launches": "graphed"}
    assert practice_of(replace(run, precision="mxfp8", phase="lora")) == {}


@pytest.mark.parametrize("change", [{"observed_as": "Megatron-Core"}, {"release": ""}, {"model": "another"}])
def test_nothing_is_said_of_other_runs(change: dict[str, str]) -> None:
    assert practice_of(replace(RUN, **change)) == {}


def test_choices_hold_where_no_release_is_asked_for() -> None:
    run = replace(RUN, observed_as="NeMo AutoModel (PyTorch FSDP2)", release="", model="GPT-OSS 120B")
    assert choices_of(run) == {"activation_recompute": "none", "expert_parallel": 64}
    nemo = replace(RUN, observed_as="NeMo / Megatron-Core", model="DeepSeekV3", precision="bf16")
    assert choices_of(replace(nemo, release="recipe 25.05.04")) == {
        "activation_recompute": "core_attn",
        "drops_tokens": True,
    }
    assert choices_of(replace(nemo, release="")) == {}  # these scripts began with a release


def test_choices_of_large_jobs_and_of_pipelines() -> None:
    jax = replace(RUN, observed_as="MaxText (JAX)", model="Llama-3-70B", release="recipe 25.04")
    saving = {"activation_recompute": "save_qkv_proj"}
    assert choices_of(replace(jax, num_devices=256)) == saving
    assert choices_of(replace(jax, num_devices=512)) == {**saving, "fsdp_group_size": 128}
    tuned = replace(RUN, observed_as="NeMo AutoModel (PyTorch FSDP2)", release="", model="Qwen2.5-32B", phase="lora")
    eager = {"torch_compile": False, "sequence_parallel": False}
    assert choices_of(tuned) == {"activation_recompute": "full"}
    assert choices_of(replace(tuned, pipeline_parallel=4)) == {"activation_recompute": "full", **eager}


def test_automodel_gathers_as_its_configurations_say() -> None:
    tuned = replace(RUN, observed_as="NeMo AutoModel (PyTorch FSDP2)", release="", device="h100-sxm-80gb")
    beside = {"overlaps_shared_experts": True}
    assert practice_of(replace(tuned, model="Nemotron_3_Super")) == beside
    assert practice_of(replace(tuned, model="Nemotron_3_Nano")) == {**beside, "gathers": "step"}
    assert practice_of(replace(tuned, model="GPT-OSS 20B")) == {"gathers": "micro-batch"}


def test_latent_attention_was_not_fused_on_blackwell_before_cudnn_could() -> None:
    run = replace(RUN, observed_as="NeMo / Megatron-Core", model="DeepSeekV3", release="recipe 25.05.04")
    assert practice_of(run) == {"flash_attention": False}
    assert practice_of(replace(run, device="h100-sxm-80gb")) == {}


def test_every_setting_is_a_switch_that_the_estimator_knows() -> None:
    known = {item.name for item in fields(TrainingPractice)}
    content = load_yaml((SEED_FOLDER / "training_benchmarks.yaml").read_bytes())
    for benchmark in content["benchmarks"]:
        for entry in benchmark["runs"]:
            settings = entry.get("settings", {})
            assert set(settings) <= known
            Launches(settings.get("launches", "eager"))
            assert entry["source"]
            assert settings or entry["choices"]
