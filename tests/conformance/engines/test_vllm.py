"""vLLM's own parser and engine configuration over the arguments that we emit. On demand: ``make test-launchers``."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import yaml
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL, QWEN3_4B
from serving_cases import aggregated, disaggregated, layout, pool, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.config import shape_from_config
from meshplan.planner.emit.serving import vllm as emitter
from meshplan.planner.emit.serving.job import PoolProgram
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.serving.tiers.kv_stores import VLLM_CONNECTORS
from meshplan.planner.serving.problem.config import EngineLimits, KvTier, Role, Speculation
from meshplan.planner.serving.problem.engines.table import VLLM
from meshplan.planner.serving.problem.quantization import Quantization

sys.path.insert(0, str(Path(__file__).parent))
from commands import command_of, random_jobs

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500
SEED_MODELS = Path(__file__).parents[3] / "catalogs" / "seed" / "models.yaml"
SHAPES = (LLAMA_70B, MIXTRAL, DEEPSEEK_V3, QWEN3_4B)


def check(vllm, program: PoolProgram, request: ServingRequest) -> None:
    """Every node's command is accepted, and means the plan's degrees and devices."""
    of, limits = program.pool.layout, program.pool.limits
    for node_rank in {0, program.num_nodes - 1}:
        words = command_of(program, node_rank)
        assert {word for word in words if word.startswith("--")} <= vllm.option_strings
        config = vllm.config(words[2:])
        parallel = config.parallel_config
        assert parallel.world_size * parallel.data_parallel_size == of.num_devices
        assert parallel.tensor_parallel_size == of.tensor_parallel * of.context_parallel
        assert parallel.decode_context_parallel_size == of.context_parallel
        assert parallel.pipeline_parallel_size == of.pipeline_parallel
        assert parallel.data_parallel_size == of.attention_data_parallel
        assert parallel.enable_expert_parallel == (of.expert_parallel > 1)
        assert parallel.nnodes == program.num_nodes
        assert config.scheduler_config.max_num_seqs * of.attention_data_parallel == limits.max_num_seqs
        assert config.scheduler_config.max_num_batched_tokens == limits.max_batched_tokens
        assert config.cache_config.gpu_memory_utilization == limits.memory_fraction
        assert config.cache_config.enable_prefix_caching == limits.prefix_caching
        assert config.model_config.enforce_eager != limits.cuda_graphs
        assert (config.kv_transfer_config is not None) == (program.pool.role is not Role.MIXED)
        speculation = request.config.speculation
        said = None if speculation is None else speculation.num_draft_tokens
        assert (config.speculative_config and config.speculative_config.num_speculative_tokens) == said


def test_version_is_the_one_that_the_files_name() -> None:
    assert importlib.metadata.version("vllm") == emitter.VERIFIED.version


@pytest.mark.parametrize(
    ("shape", "of"),
    [
        (LLAMA_70B, layout(8)),
        (LLAMA_70B, layout(8, context=2)),
        (LLAMA_70B, layout(8, 2)),
        (MIXTRAL, layout(2, data=4, expert=8)),
        (DEEPSEEK_V3, layout(1, context=8, expert=8)),
        (DEEPSEEK_V3, layout(1, data=16, expert=16)),
        (QWEN3_4B, layout(1)),
    ],
    ids=lambda value: getattr(value, "slug", ""),
)
def test_usual_plans_are_accepted(vllm, checkpoints, shape, of) -> None:
    request = serving_request(
        shape, aggregated("vllm", of), model_path=checkpoints[shape.slug], quantized_checkpoint=False
    )
    for program in emitter.job(request).programs:
        check(vllm, program, request)


@pytest.mark.parametrize("running", [512, 900, 1024])
def test_every_batch_of_decodes_has_a_graph(vllm, checkpoints, running: int) -> None:
    limits = EngineLimits(max_num_seqs=running, prefix_caching=True)
    request = serving_request(
        LLAMA_70B, aggregated("vllm", layout(8), limits=limits), model_path=checkpoints[LLAMA_70B.slug]
    )
    (program,) = emitter.job(request).programs
    check(vllm, program, request)
    graphs = vllm.config(command_of(program)[2:]).compilation_config
    assert graphs.max_cudagraph_capture_size >= running
    assert max(graphs.cudagraph_capture_sizes) >= running


def test_a_model_that_sees_is_served_for_text_alone(vllm, checkpoints) -> None:
    seeds = yaml.safe_load(SEED_MODELS.read_text(encoding="utf-8"))["models"]
    tower = shape_from_config(seeds["gemma-3-27b"]["config"], slug="gemma-3-27b", source="seed").vision
    assert tower is not None
    request = serving_request(
        replace(LLAMA_70B, vision=tower), aggregated("vllm", layout(8)), model_path=checkpoints[LLAMA_70B.slug]
    )
    (program,) = emitter.job(request).programs
    words = command_of(program)
    assert "--language-model-only" in words
    check(vllm, program, request)


def test_an_encoder_of_sound_neither_cuts_prompts_nor_caches_prefixes(vllm, tmp_path) -> None:
    entry = yaml.safe_load(SEED_MODELS.read_text(encoding="utf-8"))["models"]["whisper-large-v3-turbo"]
    config = {**entry["config"], "architectures": ["WhisperForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = shape_from_config(entry["config"], slug="whisper-large-v3-turbo", source=entry["source"])
    whole = EngineLimits(max_num_seqs=64, max_batched_tokens=8192, chunked_prefill=False, prefix_caching=False)
    request = serving_request(
        shape,
        aggregated("vllm", layout(2), limits=whole),
        model_path=str(tmp_path),
        max_sequence_length=shape.max_sequence_length,
        quantized_checkpoint=False,
    )
    (program,) = emitter.job(request).programs
    check(vllm, program, request)
    made = vllm.config(command_of(program)[2:])
    assert made.model_config.is_encoder_decoder
    assert not made.scheduler_config.enable_chunked_prefill


def test_random_plans_are_accepted_with_their_number_of_devices(vllm, checkpoints) -> None:
    accepted: Counter[str] = Counter()
    for request, job in islice(random_jobs(VLLM, emitter.job, SHAPES, checkpoints), NUM_RANDOM_PLANS):
        for program in job.programs:
            check(vllm, program, request)
        accepted[request.shape.slug] += 1
    assert len(accepted) == len(SHAPES)  # every model among them


def accepted_arguments(checkpoints, *, of=None, shape=LLAMA_70B) -> list[str]:
    config = disaggregated("vllm", pool(of or layout(8), Role.PREFILL), pool(layout(8), Role.DECODE))
    request = serving_request(shape, config, model_path=checkpoints[shape.slug])
    return command_of(emitter.job(request).programs[0])[2:]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--tensor-parallel-size", "5"),
        ("--tensor-parallel-size", "0"),
        ("--pipeline-parallel-size", "two"),
        ("--max-num-batched-tokens", "8"),
        ("--gpu-memory-utilization", "1.7"),
        ("--kv-cache-dtype", "fp7"),
        ("--dtype", "bfloat17"),
        ("--kv-transfer-config", '{"kv_connector":"NixlConnector"}'),
        ("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_giver"}'),
        ("--kv-transfer-config", "NixlConnector"),
    ],
)
def test_mutations_are_refused(vllm, checkpoints, flag: str, value: str) -> None:
    words = accepted_arguments(checkpoints)
    assert vllm.refusal(words) is None
    words[words.index(flag) + 1] = value
    assert vllm.refusal(words) is not None


@pytest.mark.parametrize(
    "further",
    [
        ("--tensor-parallel-sizes", "8"),
        ("--data-parallel-size", "0"),
        ("--decode-context-parallel-size", "3"),
        ("--decode-context-parallel-size", "8"),  # 8 KV heads are not copied over 8 ranks
        ("--quantization", "fp9"),
        ("--nnodes", "3"),
        ("--enable-eplb",),
        ("--speculative-config", '{"method":"mtp","num_speculative_tokens":2}'),  # Llama has no prediction layers
    ],
)
def test_wrong_additions_are_refused(vllm, checkpoints, further: tuple[str, ...]) -> None:
    assert vllm.refusal([*accepted_arguments(checkpoints), *further]) is not None


def test_holes_of_the_parser_are_closed_by_our_rules(vllm, checkpoints) -> None:
    """The parser takes more stages than layers; the emitter does not. If this fails, a hole is closed upstream."""
    words = [checkpoints["mixtral-8x7b"], "--pipeline-parallel-size", "64", "--nnodes", "8", "--max-model-len", "4096"]
    assert vllm.refusal(words) is None
    with pytest.raises(CannotExpressError, match="must not exceed the layers"):
        emitter.job(serving_request(MIXTRAL, aggregated("vllm", layout(1, 64))))
    abbreviated = [checkpoints["mixtral-8x7b"], "--tensor-parallel-si", "8"]
    assert vllm.refusal(abbreviated) is None
    assert "--tensor-parallel-si" not in vllm.option_strings


@pytest.mark.parametrize("scheme", VLLM.online)
def test_formats_made_from_16_bits_have_names_that_vllm_knows(vllm, checkpoints, scheme: str) -> None:
    formats = Quantization.uniform(scheme, kv_cache="fp8")
    request = serving_request(
        LLAMA_70B, aggregated("vllm", layout(8), quantization=formats), model_path=checkpoints[LLAMA_70B.slug]
    )
    config = vllm.config(command_of(emitter.job(request).programs[0])[2:])
    assert config.quant_config is not None
    assert config.cache_config.cache_dtype == "fp8"


def test_the_parser_accepts_a_draft_model(vllm, checkpoints) -> None:
    guesses = Speculation(num_draft_tokens=3, acceptance=0.7)
    request = serving_request(
        LLAMA_70B,
        aggregated("vllm", layout(8), speculation=guesses),
        model_path=checkpoints[LLAMA_70B.slug],
        draft_model=checkpoints[LLAMA_70B.slug],
    )
    for program in emitter.job(request).programs:
        check(vllm, program, request)


def test_a_tier_of_kv_cache_is_what_the_plan_says(vllm, checkpoints) -> None:
    tier = KvTier(store="host", bytes_per_device=100 * 2.0**30, bytes_per_s_per_device=5e10)
    limits = EngineLimits(max_num_seqs=64, prefix_caching=True)
    config = aggregated("vllm", layout(4, 2), limits=limits, kv_tier=tier)
    request = serving_request(LLAMA_70B, config, model_path=checkpoints[LLAMA_70B.slug], quantized_checkpoint=False)
    (program,) = emitter.job(request).programs
    words = command_of(program)
    assert {word for word in words if word.startswith("--")} <= vllm.option_strings
    cache = vllm.config(words[2:]).cache_config
    assert cache.kv_offloading_size * 2**30 == 8 * tier.bytes_per_device
    assert cache.kv_offloading_backend == "native"


@pytest.mark.parametrize(("store", "connector"), VLLM_CONNECTORS.items())
def test_a_store_of_prefixes_is_a_connector_that_it_knows(vllm, checkpoints, store, connector) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    tier = KvTier(store=store, bytes_per_device=100 * 2.0**30, bytes_per_s_per_device=5e9)
    limits = EngineLimits(max_num_seqs=64, prefix_caching=True)
    config = aggregated("vllm", layout(4, 2), limits=limits, kv_tier=tier)
    request = serving_request(LLAMA_70B, config, model_path=checkpoints[LLAMA_70B.slug], quantized_checkpoint=False)
    (program,) = emitter.job(request).programs
    transfer = vllm.config(command_of(program)[2:]).kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == (connector, "kv_both")
    assert connector in KVConnectorFactory._registry


def test_no_flag_loads_a_map_of_experts(vllm) -> None:
    """Its EPLB counts by itself; if this fails, the emitter may give it the plan's map."""
    from vllm.config.parallel import EPLBConfig

    assert not [name for name in vars(EPLBConfig()) if "map" in name or "path" in name or "file" in name]
    assert not [flag for flag in vllm.option_strings if "expert" in flag and ("map" in flag or "location" in flag)]
