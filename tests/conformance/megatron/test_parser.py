"""Megatron-LM's parser, configuration and process groups over what we emit, and what they make of it.

On demand: ``make test-launchers``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from emit_cases import (
    DEEPSEEK_V3,
    LLAMA_70B,
    LLAMA_70B_ON_64,
    MIXTRAL,
    MIXTRAL_ON_64,
    SHAPES,
    config_for,
    plan_for,
    request_for,
)
from megatron_plans import environment, random_plans, refusal, words
from rank_layout import rank_coordinates
from read_back_cases import differences, num_devices, read_back

from meshplan.catalogs.models.config import shape_from_config
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training.megatron import job as emitter
from meshplan.planner.emit.training.megatron.documents import group_flags
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit
from meshplan.planner.lengths.packing import CONCATENATE, SPLIT, TRUNCATE, WHOLE
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingConfig

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500
SEED = importlib.resources.files("meshplan.catalogs.seed") / "models.yaml"


def test_version_is_the_one_that_the_rules_name() -> None:
    assert importlib.metadata.version("megatron-core") == MEGATRON.version == emitter.VERIFIED.version


def test_llama_70b_on_8_dgx_h100_is_accepted(megatron: Any) -> None:
    parsed, config = megatron.config(
        words(LLAMA_70B_ON_64, LLAMA_70B), world_size=64, environment=environment(LLAMA_70B_ON_64, LLAMA_70B)
    )
    assert (parsed.tensor_model_parallel_size, parsed.pipeline_model_parallel_size) == (8, 4)
    assert (parsed.data_parallel_size, parsed.global_batch_size, parsed.seq_length) == (2, 512, 8192)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (80, 8192, 28672)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (64, 8, 128)
    assert config.gated_linear_unit
    assert not config.add_bias_linear
    assert config.sequence_parallel


def test_flags_of_documents_and_of_groups_by_length_are_accepted(megatron: Any) -> None:
    config = config_for(LLAMA_70B, tensor_parallel=8, data_parallel=8, zero_stage=1)
    spec = {"workload": {"sequence_lengths": {}}}
    told = {"packing": CONCATENATE, "mean": 700.0, "longest": 9000, "longer": SPLIT}
    lengths = {"documents": told, "groups": {"most_tokens": 4096}}
    request = request_for(LLAMA_70B, config, plan=plan_for(LLAMA_70B, config, spec=spec, lengths=lengths))
    flags = [word for flag in (*emitter.arguments(request), *group_flags(request)) for word in flag]
    parsed, built = megatron.config(flags, world_size=64, environment=environment(config, LLAMA_70B))
    assert parsed.dataloader_inter_document_masking
    assert not parsed.create_attention_mask_in_dataloader
    assert (built.hybrid_context_parallel, built.max_seqlen_per_dp_cp_rank) == (True, 4096)


def test_flags_of_conversations_are_accepted(megatron: Any) -> None:
    config = config_for(LLAMA_70B, tensor_parallel=8, context_parallel=2, data_parallel=4, zero_stage=1)
    spec = {"workload": {"phase": "sft", "sequence_lengths": {}}}
    told = {"packing": WHOLE, "mean": 700.0, "longest": 9000, "longer": TRUNCATE}
    request = request_for(LLAMA_70B, config, plan=plan_for(LLAMA_70B, config, spec=spec, lengths={"documents": told}))
    own = ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "meta", "--sft-tokenizer-prompt-format", "default"]
    flags = [word for flag in emitter.arguments(request) for word in flag]
    parsed, built = megatron.config([*flags, *own], world_size=64, environment=environment(config, LLAMA_70B))
    assert parsed.sft
    assert not parsed.create_attention_mask_in_dataloader
    assert built.context_parallel_size == 2


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.slug)
def test_every_model_is_accepted_and_counted_alike(megatron: Any, shape: ModelShape) -> None:
    config = config_for(shape, data_parallel=8, expert_parallel=8 if shape.moe else 1)
    parsed, transformer = megatron.config(words(config, shape), world_size=8, environment=environment(config, shape))
    assert parsed.untie_embeddings_and_output_weights is not shape.tie_word_embeddings
    assert transformer.num_layers == shape.num_hidden_layers
    assert transformer.add_bias_linear == shape.attention_output_bias
    assert (transformer.normalization == "LayerNorm") == shape.norm_bias
    if shape.moe is not None:
        assert transformer.num_moe_experts == shape.moe.num_experts
        assert transformer.moe_ffn_hidden_size == shape.moe.expert_intermediate_size
        frequency = transformer.moe_layer_freq
        pattern = [True] * shape.num_hidden_layers if frequency == 1 else [bool(mark) for mark in frequency]
        assert tuple(pattern) == shape.moe.moe_layers
    if shape.sliding_windows:
        marks = tuple(128 if mark else None for mark in transformer.window_attn_skip_freq)
        assert marks == shape.sliding_windows


def test_flags_are_written_out(megatron: Any) -> None:
    known = megatron.option_strings
    said = {word for shape, config in random_plans(legal=True, seed=3, count=60) for word in words(config, shape)}
    flags = {word for word in said if word.startswith("--")}
    assert flags
    assert flags <= known


def test_legal_plans_are_accepted_and_read_back(megatron: Any, tmp_path: Path) -> None:
    refused = []
    for shape, config in random_plans(legal=True, seed=1, count=NUM_RANDOM_PLANS):
        emitted = emit("megatron", request_for(shape, config))
        try:
            parsed, _ = megatron.config(
                words(config, shape), world_size=config.world_size, environment=environment(config, shape)
            )
        except megatron.REFUSALS as reason:
            refused.append(f"{shape.slug} {config}: {reason}")
            continue
        assert num_devices(emitted) == config.world_size == parsed.world_size
        reading = read_back("megatron", emitted, tmp_path)
        assert reading.problems == []
        assert differences(reading, config) == {}
        assert parsed.data_parallel_size == config.data_parallel
        assert parsed.tensor_model_parallel_size == config.tensor_parallel
        assert parsed.context_parallel_size == config.context_parallel
        assert parsed.pipeline_model_parallel_size == config.pipeline_parallel
        assert (parsed.virtual_pipeline_model_parallel_size or 1) == config.virtual_pipeline_stages
        assert parsed.expert_model_parallel_size == config.expert_parallel
        assert parsed.sequence_parallel == config.sequence_parallel
        assert parsed.global_batch_size == config.global_batch_size
        assert parsed.use_distributed_optimizer == (config.zero_stage > 0)
        assert parsed.use_megatron_fsdp == (config.zero_stage > 1)
        assert parsed.optimizer_cpu_offload is config.optimizer_offload
        assert parsed.optimizer_offload_fraction == pytest.approx(config.optimizer_offload_percent / 100)
        assert (parsed.moe_expert_capacity_factor or 0.0) == config.expert_capacity_factor
        assert parsed.moe_pad_expert_input_to_capacity is (config.expert_capacity_factor > 0)
        if shape.moe is not None:
            assert parsed.moe_token_dispatcher_type == (
                "alltoall" if config.expert_dispatcher == "alltoall" else "flex"
            )
            assert config.expert_dispatcher in ("alltoall", parsed.moe_flex_dispatcher_backend)
        assert parsed.overlap_moe_expert_parallel_comm is config.expert_parallel_overlap
        assert parsed.cpu_offloading_num_layers == config.activation_offload_num_layers
        assert getattr(parsed, "cpu_offloading", False) is (config.activation_offload_num_layers > 0)
        block = config.activation_recompute == "block"
        assert (parsed.recompute_method == "block") is block
        assert not block or parsed.recompute_num_layers == config.recompute_num_layers
    assert refused == []


def test_layers_are_built_where_the_plan_puts_them(megatron: Any) -> None:
    checked = 0
    for shape, config in random_plans(legal=True, seed=2, count=40):
        if config.pipeline_parallel == 1:
            continue
        built = megatron.layers_per_chunk(
            words(config, shape), world_size=config.world_size, environment=environment(config, shape)
        )
        assert built == config.layers_per_chunk
        checked += 1
    assert checked > 10


def test_ranks_sit_where_we_say(megatron: Any) -> None:
    order = MEGATRON.rank_orders[0]
    for shape, config in random_plans(legal=True, seed=4, count=30):
        parsed, _ = megatron.config(
            words(config, shape), world_size=config.world_size, environment=environment(config, shape)
        )
        sizes = [getattr(config, f"{dimension}_parallel") for dimension in order]
        stage = config.world_size // config.pipeline_parallel
        experts = (config.expert_tensor_parallel, config.expert_parallel, config.expert_data_parallel)
        for rank in {0, 1, config.world_size // 2, config.world_size - 1}:
            if rank >= config.world_size:
                continue
            found = megatron.coordinates(parsed, rank)
            assert {name: found[name] for name in order} == rank_coordinates(order, sizes, rank)
            if shape.moe is not None:
                expected = rank_coordinates(("expert_tensor", "expert", "expert_data"), experts, rank % stage)
                assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("context_parallel", "fits"), [(1, True), (2, False)])
def test_second_rank_order(megatron: Any, context_parallel: int, fits: bool) -> None:
    """Its process groups want as many replicas of the experts as of the rest, even in a dense model."""
    config = config_for(
        LLAMA_70B, tensor_parallel=2, pipeline_parallel=4, context_parallel=context_parallel, data_parallel=3
    )
    parsed, _ = megatron.config(
        [*words(config, LLAMA_70B), "--use-tp-pp-dp-mapping"],
        world_size=config.world_size,
        environment=environment(config, LLAMA_70B),
    )
    if not fits:
        with pytest.raises(AssertionError, match="data parallel size of the attention and moe layers"):
            megatron.coordinates(parsed, 0)
        return
    order = MEGATRON.rank_orders[1]
    sizes = [getattr(config, f"{dimension}_parallel") for dimension in order]
    for rank in range(0, config.world_size, 5):
        found = megatron.coordinates(parsed, rank)
        assert {name: found[name] for name in order} == rank_coordinates(order, sizes, rank)


def test_padded_vocabulary(megatron: Any) -> None:
    for tensor_parallel in (1, 2, 8):
        config = config_for(LLAMA_70B, tensor_parallel=tensor_parallel)
        parsed, _ = megatron.config(
            words(config, LLAMA_70B), world_size=tensor_parallel, environment=environment(config, LLAMA_70B)
        )
        assert megatron.padded_vocab_size(parsed, 128256) == MEGATRON.padded_vocab_size(128256, tensor_parallel)


@pytest.mark.parametrize(
    ("shape", "config"), [(LLAMA_70B, LLAMA_70B_ON_64), (MIXTRAL, MIXTRAL_ON_64)], ids=["dense", "experts"]
)
def test_scripts_end_to_end(megatron: Any, tmp_path: Path, shape: ModelShape, config: TrainingConfig) -> None:
    """The arguments and the environment of the launch script, through torchrun's parser too."""
    write_artifacts(emit("megatron", request_for(shape, config)).artifacts, tmp_path)
    (tmp_path / "pretrain_gpt.py").write_text("")
    spy = tmp_path / "spy"
    spy.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" "${CUDA_DEVICE_MAX_CONNECTIONS-}" > "$NOTES"\n')
    spy.chmod(0o755)
    variables = {
        "PATH": os.environ["PATH"],
        "TORCHRUN": str(spy),
        "NOTES": str(tmp_path / "notes"),
        "MEGATRON_LM": str(tmp_path),
        "MESHPLAN_SKIP_CHECKS": "1",
    }
    subprocess.run([str(tmp_path / "launch_host_007.sh")], env=variables, check=True)
    *argv, connections = (tmp_path / "notes").read_text().removesuffix("\0").split("\0")
    launch = megatron.torchrun_arguments(argv)
    assert (launch.nnodes, launch.node_rank, launch.nproc_per_node) == ("8", 7, "8")
    assert (launch.rdzv_backend, launch.master_addr, launch.master_port) == ("static", "node-0", 29500)
    assert {word for word in argv if word.startswith("--")} <= megatron.option_strings | megatron.torchrun_options
    parsed, _ = megatron.config(
        launch.training_script_args,
        world_size=config.world_size,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": connections},
    )
    assert parsed.data_parallel_size == config.data_parallel
    assert parsed.vocab_size == shape.vocab_size
    assert parsed.mock_data


def test_chunks_without_layers_are_accepted(megatron: Any) -> None:
    config = config_for(LLAMA_70B, pipeline_parallel=4, layers_per_chunk=(0, 40, 40, 0))
    arguments, world_size = words(config, LLAMA_70B), config.world_size
    assert megatron.layers_per_chunk(arguments, world_size=world_size, environment={}) == (0, 40, 40, 0)


HYBRIDS = {
    # model: flags of the configuration that Megatron makes → keys of the published config.json
    "nemotron-nano-9b-v2": {"mamba_num_heads": "mamba_num_heads", "mamba_head_dim": "mamba_head_dim"},
    "granite-4.0-h-small": {"mamba_num_heads": "mamba_n_heads", "mamba_state_dim": "mamba_d_state"},
    "qwen3-next-80b-a3b": {
        "linear_num_value_heads": "linear_num_value_heads",
        "linear_key_head_dim": "linear_key_head_dim",
        "linear_value_head_dim": "linear_value_head_dim",
    },
}


@pytest.mark.parametrize("slug", sorted(HYBRIDS))
@pytest.mark.parametrize(("stages", "virtual", "context"), [(1, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_hybrids(megatron: Any, slug: str, stages: int, virtual: int, context: int) -> None:
    """Sizes and stages arrive; a stage may hold more layers than another; sequences are split, too."""
    entry = yaml.safe_load(SEED.read_text(encoding="utf-8"))["models"][slug]["config"]
    shape = shape_from_config(entry, slug=slug)
    chunks = stages * virtual
    layers = [shape.num_hidden_layers // chunks] * chunks
    layers[0] += shape.num_hidden_layers - sum(layers)
    choices: dict[str, Any] = {"expert_parallel": 4} if shape.moe else {}
    config = config_for(
        shape,
        context_parallel=context,
        data_parallel=4 // context,
        pipeline_parallel=stages,
        virtual_pipeline_stages=virtual,
        num_microbatches=4,
        layers_per_chunk=tuple(layers),
        **choices,
    )
    assert MEGATRON.broken(shape, config) == ()
    parsed, transformer = megatron.config(
        words(config, shape), world_size=config.world_size, environment=environment(config, shape)
    )
    assert {name: getattr(transformer, name) for name in HYBRIDS[slug]} == {
        name: entry[key] for name, key in HYBRIDS[slug].items()
    }
    assert (parsed.virtual_pipeline_model_parallel_size or 1) == virtual
    assert transformer.context_parallel_size == context
    if parsed.hybrid_layer_pattern is None:
        assert transformer.experimental_attention_variant == "gated_delta_net"
        assert transformer.linear_attention_freq == [
            int(shape.has_recurrent(n)) for n in range(len(shape.blocks.mixers))
        ]
        return
    parts = parsed.hybrid_layer_pattern.split("|")
    assert len(parts) == chunks
    assert sum(map(len, parts)) == transformer.num_layers == shape.num_blocks
    assert "".join(parts).count("M") == shape.num_recurrent_layers
    assert "".join(parts).count("*") == shape.num_attention_layers
    assert "".join(parts).count("E") == shape.num_moe_layers


def test_uneven_latent_model_with_a_token_predictor(megatron: Any) -> None:
    config = config_for(
        DEEPSEEK_V3,
        pipeline_parallel=16,
        data_parallel=8,
        expert_parallel=8,
        num_microbatches=16,
        layers_per_chunk=(4, *(4,) * 14, 1),
    )
    assert refusal(megatron, DEEPSEEK_V3, config) is None


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("fp8", {"fp8": "hybrid", "fp8_recipe": "delayed", "fp4": None}),
        ("mxfp8", {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp4": None}),
    ],
)
def test_fp8_recipes_reach_the_configuration(megatron: Any, precision: str, expected: dict[str, Any]) -> None:
    config = config_for(LLAMA_70B, tensor_parallel=8, precision=precision)
    _, transformer = megatron.config(
        words(config, LLAMA_70B), world_size=config.world_size, environment=environment(config, LLAMA_70B)
    )
    assert {name: getattr(transformer, name) for name in expected} == expected
    assert transformer.bf16
