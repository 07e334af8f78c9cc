"""The Megatron-LM emitter: goldens, mapping, refusals. Its flags meet the real parser in tests/conformance."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace

import pytest
from emit_cases import (
    B200,
    DEEPSEEK_V3,
    GPT2_XL,
    GPT_OSS_20B,
    LLAMA_70B,
    LLAMA_70B_ON_64,
    MIXTRAL,
    MIXTRAL_ON_64,
    QWEN3_4B,
    config_for,
    plan_for,
    request_for,
)
from finetuning_cases import tuning
from golden_variants import difference, texts

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training.megatron import job as megatron
from meshplan.planner.emit.training.megatron import terms as megatron_terms
from meshplan.planner.launch.registry import emit, target_names
from meshplan.planner.launch.support import support_matrix
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import TrainingConfig

GOLDENS = {
    "llama-3.1-70b": (LLAMA_70B, LLAMA_70B_ON_64),
    "mixtral-8x7b": (MIXTRAL, MIXTRAL_ON_64),
}


def flags(shape: ModelShape, **choices: object) -> dict[str, str]:
    found = megatron.arguments(request_for(shape, config_for(shape, **choices)))
    assert len({flag[0] for flag in found}) == len(found), "a flag is said twice"
    return {flag[0]: " ".join(flag[1:]) for flag in found}


def test_golden(golden) -> None:
    llama, mixtral = (texts(emit("megatron", request_for(*GOLDENS[name])).artifacts) for name in GOLDENS)
    for name, text in llama.items():
        golden(f"emit/megatron/llama-3.1-70b/{name}", text)
    golden("emit/megatron/mixtral-8x7b.diff", difference(mixtral, llama))


@pytest.mark.parametrize("name", GOLDENS)
def test_every_file_carries_the_digest(name: str) -> None:
    request = request_for(*GOLDENS[name])
    emitted = emit("megatron", request)
    assert emitted.parser_verified is not None
    for artifact in emitted.artifacts:
        assert request.plan.digest in artifact.content, artifact.path
        assert f"{emitted.parser_verified.framework} {emitted.parser_verified.version}" in artifact.content or (
            f'"version": "{emitted.parser_verified.version}"' in artifact.content
        )


def test_argument_file_reads_back_as_arguments() -> None:
    request = request_for(DEEPSEEK_V3, config_for(DEEPSEEK_V3, data_parallel=8, expert_parallel=8))
    artifact = next(file for file in emit("megatron", request).artifacts if file.path.name == "megatron_args.txt")
    words = [word for flag in megatron.arguments(request) for word in flag]
    assert shlex.split(artifact.content, comments=True) == words


def test_every_choice_of_a_plan_is_written_or_derived() -> None:
    derived = {"virtual_pipeline_stages", "pipeline_schedule", "num_microbatches", "data_parallel"}
    derived |= {"zero_hpz_partition_size", "gathered_num_layers", "vocabulary_parallel"}  # refused
    derived |= {"decoder_sequence_length"}  # refused with the encoder in front
    derived |= {"recompute_num_layers", "context_parallel_heads"}  # written with mode and style
    refused = {"parameter_offload": True, "activation_offload": True, "offload_to": "nvme", "quantised_weights": True}
    refused |= {"loss": "chunked", "optimizer_in_backward": True}
    for name, value in refused.items():
        assert MEGATRON.broken(LLAMA_70B, config_for(LLAMA_70B, **{name: value}))
    assert MEGATRON.broken(LLAMA_70B, config_for(LLAMA_70B, optimizer="adafactor"))
    said = {term.name for term in megatron_terms.TERMS}
    assert not said & refused.keys()
    assert said | derived | refused.keys() == {field.name for field in fields(TrainingConfig)}


def test_support_matrix_comes_from_the_code() -> None:
    rows = support_matrix()
    assert {row["target"] for row in rows} == set(target_names())
    own = {row["feature"]: row for row in rows if row["target"] == "megatron"}
    assert {term.name for term in megatron_terms.TERMS} | {"rank_table"} <= own.keys()
    assert all(row["verified_by"] for row in rows)
    assert own["zero_stage"]["takes"] == "0, 1, 3"
    assert "issue 6314" in own["zero_stage"]["refuses"]
    assert own["layers_per_chunk"]["takes"] == "even, uneven"
    assert own["rank_table"]["parser_verified"]["version"] == megatron.VERIFIED.version
    slurm = next(row for row in rows if (row["target"], row["feature"]) == ("slurm", "rank_table"))
    assert "any order" in slurm["takes"]


def test_what_a_framework_says_it_runs_is_what_its_emitter_takes() -> None:
    """Two independent sources: the rules that the search obeys, and the probes that the emitter takes."""
    rows = {(row["target"], row["feature"]): row["takes"].split(", ") for row in support_matrix()}
    for name, rules in FRAMEWORKS.items():
        if name == "any":
            continue
        assert set(rows[name, "precision"]) == set(rules.precisions)
        assert set(rows[name, "activation_recompute"]) == set(rules.recompute_modes)
        assert set(rows[name, "pipeline_schedule"]) - {""} == set(rules.pipeline_schedules) - {"none"}
        assert ("uneven" in rows[name, "layers_per_chunk"]) is (rules.layer_splits is None)


def test_unknown_target_offers_the_known_ones() -> None:
    with pytest.raises(EmitError, match=r"unknown emit target 'megatorn'; did you mean 'megatron'"):
        emit("megatorn", request_for(LLAMA_70B, LLAMA_70B_ON_64))


@pytest.mark.parametrize(
    ("chunks", "layout"),
    [
        ((19, 21, 21, 19), "Et*19|t*21|t*21|t*19L"),
        ((1, 39, 39, 1), "Et|t*39|t*39|tL"),
    ],
)
def test_uneven_stages_become_a_layout(chunks: tuple[int, ...], layout: str) -> None:
    said = flags(LLAMA_70B, tensor_parallel=8, pipeline_parallel=4, layers_per_chunk=chunks)
    assert said["--pipeline-model-parallel-layout"] == layout
    assert "--num-virtual-stages-per-pipeline-rank" not in said


def test_even_interleaving_is_written_as_a_number() -> None:
    said = flags(LLAMA_70B, tensor_parallel=8, pipeline_parallel=4, virtual_pipeline_stages=5)
    assert said["--num-virtual-stages-per-pipeline-rank"] == "5"
    assert "--pipeline-model-parallel-layout" not in said


def test_multi_token_prediction_sits_before_the_loss() -> None:
    said = flags(DEEPSEEK_V3, pipeline_parallel=2, layers_per_chunk=(31, 30))
    assert said["--pipeline-model-parallel-layout"] == "Et*31|t*30mL"
    assert said["--mtp-num-layers"] == "1"
    assert said["--moe-layer-freq"] == "([0]*3+[1]*58)"


def test_a_router_is_limited_to_groups_where_the_model_is() -> None:
    """Models of DeepSeek-V3's family need not be: Moonlight's config.json says n_group 1."""
    limits = {"--moe-router-num-groups": "8", "--moe-router-group-topk": "4"}
    assert limits.items() <= flags(DEEPSEEK_V3).items()
    assert DEEPSEEK_V3.moe is not None
    free = replace(DEEPSEEK_V3, moe=replace(DEEPSEEK_V3.moe, num_expert_groups=1, num_groups_per_token=1))
    assert not limits.keys() & flags(free).keys()


def test_sliding_windows_count_the_tokens_before() -> None:
    said = flags(GPT_OSS_20B)
    assert said["--window-size"] == "127,0"
    assert said["--window-attn-skip-freq"].startswith("([1]*1+[0]*1+[1]*1")


def test_shards_in_groups() -> None:
    said = flags(LLAMA_70B, tensor_parallel=8, data_parallel=8, data_parallel_shard=2)
    assert said["--num-distributed-optimizer-instances"] == "4"


def test_learned_positions_have_a_length_and_no_rotary_base() -> None:
    said = flags(GPT2_XL)
    assert (said["--position-embedding-type"], said["--max-position-embeddings"]) == ("learned_absolute", "1024")
    assert "--rotary-base" not in said


@pytest.mark.parametrize(
    ("choices", "architecture_is_blackwell", "expected"),
    [
        ({"tensor_parallel": 8}, False, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"context_parallel": 2}, False, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"tensor_parallel": 8}, True, {}),
        ({"pipeline_parallel": 4}, False, {}),
        ({"tensor_parallel": 8, "zero_stage": 3}, False, {"CUDA_DEVICE_MAX_CONNECTIONS": None}),
    ],
)
def test_hardware_queues_are_limited_where_order_matters(
    choices: dict[str, int], architecture_is_blackwell: bool, expected: dict[str, str | None]
) -> None:
    request = request_for(LLAMA_70B, config_for(LLAMA_70B, **choices))
    if architecture_is_blackwell:
        request = replace(request, device=B200)
    assert megatron.environment(request) == expected


@pytest.mark.parametrize(
    ("shape", "choices", "what"),
    [
        (LLAMA_70B, {"tensor_parallel": 3}, "num_attention_heads must be a multiple"),
        (LLAMA_70B, {"pipeline_parallel": 4, "zero_stage": 3}, "pipeline_parallel = 1"),
        (LLAMA_70B, {"context_parallel": 2, "sequence_length": 4098}, "2 × context_parallel"),
        (MIXTRAL, {"tensor_parallel": 2, "sequence_parallel": False}, "only with sequence_parallel"),
        (MIXTRAL, {"data_parallel": 4, "expert_parallel": 8}, "must divide the devices of one pipeline stage"),
        (
            LLAMA_70B,
            {"pipeline_parallel": 4, "virtual_pipeline_stages": 2, "num_microbatches": 6},
            "multiple of pipeline_parallel",
        ),
        (GPT_OSS_20B, {"data_parallel": 4, "expert_parallel": 2, "expert_tensor_parallel": 2}, "biases"),
        (GPT_OSS_20B, {"context_parallel": 2}, "sliding windows"),
        (replace(QWEN3_4B, norms_per_layer=4), {}, "4 norms"),
        (replace(QWEN3_4B, family="falcon"), {}, "parallel attention-MLP"),
        (replace(QWEN3_4B, attention_output_bias=True), {}, "biases"),
        (replace(QWEN3_4B, sliding_windows=(128, 256) * 18), {}, "sliding windows of 2 sizes"),
        (GPT2_XL, {"sequence_length": 2048}, "1024 learned positions"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_the_nearest_that_can(
    shape: ModelShape, choices: dict[str, object], what: str
) -> None:
    with pytest.raises(CannotExpressError, match=r"Nearest it can: \w") as refusal:
        flags(shape, **choices)
    assert what in str(refusal.value)


@pytest.mark.parametrize(
    ("shape", "choices", "nearest"),
    [
        (LLAMA_70B, {"pipeline_parallel": 4, "zero_stage": 3}, "the same plan with zero_stage = 1"),
        (MIXTRAL, {"tensor_parallel": 2, "sequence_parallel": False}, "the same plan with sequence_parallel = True"),
        (LLAMA_70B, {"sequence_parallel": True}, "the same plan with sequence_parallel = False"),
        (MIXTRAL, {"data_parallel": 4, "expert_parallel": 8}, "the same plan with expert_parallel = 4"),
        (LLAMA_70B, {"data_parallel": 6, "data_parallel_shard": 4}, "constraints.target: megatron"),
        (QWEN3_4B, {"precision": "fp4"}, "one of bf16, fp16, fp8"),
        (QWEN3_4B, {"activation_recompute": "some"}, "one of none, selective, block, full"),
        (QWEN3_4B, {"pipeline_parallel": 2, "pipeline_schedule": "zb-h1"}, "one of none, 1f1b, interleaved"),
    ],
)
def test_nearest_plan_is_one_change_away(shape: ModelShape, choices: dict[str, object], nearest: str) -> None:
    with pytest.raises(CannotExpressError) as refusal:
        flags(shape, **choices)
    assert nearest in refusal.value.nearest


def test_layers_that_do_not_add_up() -> None:
    with pytest.raises(EmitError, match=r"4 chunks and 79 layers; the plan has 4 chunks and the model 80 layers"):
        flags(LLAMA_70B, pipeline_parallel=4, layers_per_chunk=(20, 20, 20, 19))


def test_infeasible_plan_has_nothing_to_launch() -> None:
    plan = replace(plan_for(LLAMA_70B, LLAMA_70B_ON_64), config={}, solution={"status": "infeasible"})
    with pytest.raises(EmitError, match=r"no complete configuration to launch \(status infeasible"):
        emit("megatron", request_for(LLAMA_70B, LLAMA_70B_ON_64, plan=plan))


def test_other_kinds_have_no_training_launcher() -> None:
    plan = plan_for(LLAMA_70B, LLAMA_70B_ON_64, kind="gpu-allocation")
    with pytest.raises(EmitError, match="of the kind 'gpu-allocation'"):
        emit("megatron", request_for(LLAMA_70B, LLAMA_70B_ON_64, plan=plan))


@pytest.mark.parametrize("table", [None, ((0, 0), (0, 1))])
def test_rank_table_must_fit(table: tuple[tuple[int, int], ...] | None) -> None:
    plan = plan_for(LLAMA_70B, LLAMA_70B_ON_64, rank_table=table)
    with pytest.raises(EmitError, match="rank table"):
        emit("megatron", request_for(LLAMA_70B, LLAMA_70B_ON_64, plan=plan))


def test_stored_plan_emits_the_same_files() -> None:
    request = request_for(MIXTRAL, MIXTRAL_ON_64)
    stored = type(request.plan).from_document(request.plan.to_document())
    assert emit("megatron", replace(request, plan=stored)) == emit("megatron", request)


@pytest.mark.parametrize(
    ("slug", "phase", "factor"),
    [
        ("llama-3.1-70b", "sft", "8.0"),
        ("llama-3.2-3b", "sft", "32.0"),
        ("llama-3-70b", "sft", None),
        ("llama-3.1-70b", "pretraining", None),
    ],
)
def test_a_known_checkpoint_keeps_its_stretched_positions(slug: str, phase: str, factor: str | None) -> None:
    """Without them Llama 3.1 would be fine-tuned with positions that it was not trained with; a note said so."""
    config, shape = config_for(LLAMA_70B, tensor_parallel=8), replace(LLAMA_70B, slug=slug)
    request = tuning(config, shape=shape, phase=phase, lora_rank=None)
    values = dict(flag for flag in megatron.arguments(request) if len(flag) == 2)
    assert values.get("--rope-scaling-factor") == factor
    assert (("--use-rope-scaling",) in megatron.arguments(request)) is (factor is not None)
    said = any("no RoPE scaling" in note for note in megatron.job(request).notes)
    assert said is (factor is None)
