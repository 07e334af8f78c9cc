"""SGLang's own parser, resolution and checks over the arguments that we emit. On demand: ``make test-launchers``."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL, QWEN3_4B
from serving_cases import aggregated, disaggregated, layout, pool, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.serving import sglang as emitter
from meshplan.planner.emit.serving.job import PoolProgram
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.serving.tiers.kv_stores import SGLANG_BACKENDS
from meshplan.planner.serving.problem.config import EngineLimits, KvTier, Role
from meshplan.planner.serving.problem.engines.table import SGLANG

sys.path.insert(0, str(Path(__file__).parent))
from commands import command_of, random_jobs

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500
SHAPES = (LLAMA_70B, MIXTRAL, DEEPSEEK_V3, QWEN3_4B)


def check(sglang, program: PoolProgram, request: ServingRequest) -> None:
    """Every node's command is accepted, and resolves to the plan's degrees and devices."""
    from sglang.srt.arg_groups.overrides import resolved_view

    of, limits = program.pool.layout, program.pool.limits
    for node_rank in {0, program.num_nodes - 1}:
        words = command_of(program, node_rank)
        assert {word for word in words if word.startswith("--")} <= sglang.option_strings
        view = resolved_view(sglang.resolved(words[3:]))
        assert view.tp_size * view.pp_size * view.dp_size == of.num_devices
        assert view.tp_size == of.devices_per_stage
        assert view.attn_dp_size == of.attention_data_parallel
        assert view.dcp_size == of.context_parallel
        assert view.ep_size == of.expert_parallel
        assert (view.nnodes, view.node_rank) == (program.num_nodes, node_rank)
        assert view.max_running_requests == limits.max_num_seqs
        assert view.chunked_prefill_size == limits.max_batched_tokens  # of one attention-data rank, after division
        assert view.disable_radix_cache != limits.prefix_caching
        role = program.pool.role
        assert view.disaggregation_mode == ("null" if role is Role.MIXED else role.value)
        assert (view.speculative_algorithm is None) == (request.config.speculation is None)


def test_version_is_the_one_that_the_files_name() -> None:
    assert importlib.metadata.version("sglang") == emitter.VERIFIED.version


@pytest.mark.parametrize(
    ("shape", "of"),
    [
        (LLAMA_70B, layout(8)),
        (LLAMA_70B, layout(8, 2)),
        (MIXTRAL, layout(2, data=4, expert=8)),
        (MIXTRAL, layout(8, expert=4)),
        (DEEPSEEK_V3, layout(8, expert=8)),
        (DEEPSEEK_V3, layout(1, data=16, expert=16)),
        (DEEPSEEK_V3, layout(1, context=8, expert=8)),
        (QWEN3_4B, layout(1)),
    ],
    ids=lambda value: getattr(value, "slug", ""),
)
def test_usual_plans_are_accepted(sglang, checkpoints, shape, of) -> None:
    request = serving_request(
        shape, aggregated("sglang", of), model_path=checkpoints[shape.slug], quantized_checkpoint=False
    )
    for program in emitter.job(request).programs:
        check(sglang, program, request)


def test_random_plans_are_accepted_with_their_number_of_devices(sglang, checkpoints) -> None:
    accepted: Counter[str] = Counter()
    for request, job in islice(random_jobs(SGLANG, emitter.job, SHAPES, checkpoints), NUM_RANDOM_PLANS):
        for program in job.programs:
            check(sglang, program, request)
        accepted[request.shape.slug] += 1
    assert len(accepted) == len(SHAPES)  # every model among them


def accepted_arguments(checkpoints, shape=DEEPSEEK_V3) -> list[str]:
    of = layout(1, data=8, expert=8)
    config = disaggregated("sglang", pool(of, Role.PREFILL), pool(of, Role.DECODE))
    request = serving_request(shape, config, model_path=checkpoints[shape.slug], quantized_checkpoint=True)
    return command_of(emitter.job(request).programs[0])[3:]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--attn-dp-size", "3"),
        ("--attn-dp-size", "0"),
        ("--tp-size", "eight"),
        ("--moe-dense-tp-size", "3"),
        ("--kv-cache-dtype", "fp7"),
        ("--dtype", "bfloat17"),
        ("--moe-a2a-backend", "deeper"),
        ("--disaggregation-mode", "prefil"),
        ("--disaggregation-transfer-backend", "pigeon"),
    ],
)
def test_mutations_are_refused(sglang, checkpoints, flag: str, value: str) -> None:
    words = accepted_arguments(checkpoints)
    assert sglang.refusal(words) is None
    words[words.index(flag) + 1] = value
    assert sglang.refusal(words) is not None


@pytest.mark.parametrize(
    "further",
    [
        ("--tp-sizes", "8"),
        ("--nnodes", "3"),
        ("--dp-size", "2"),
        ("--dcp-size", "0"),
        ("--quantization", "fp9"),
        ("--speculative-algorithm", "PSYCHIC"),
    ],
)
def test_wrong_additions_are_refused(sglang, checkpoints, further: tuple[str, ...]) -> None:
    assert sglang.refusal([*accepted_arguments(checkpoints), *further]) is not None


def test_holes_of_the_parser_are_closed_by_our_rules(sglang, checkpoints) -> None:
    """The parser takes these; the emitter does not. If this fails, a hole is closed upstream."""
    llama, mixtral = (["--model-path", checkpoints[shape.slug]] for shape in (LLAMA_70B, MIXTRAL))
    assert sglang.refusal([*llama, "--tp-size", "5"]) is None
    assert sglang.refusal([*mixtral, "--tp-size", "8", "--ep-size", "3"]) is None
    assert sglang.refusal([*llama, "--mem-fraction-static", "1.7"]) is None
    assert sglang.refusal([*llama, "--tensor-parallel-si", "8"]) is None
    assert "--tensor-parallel-si" not in sglang.option_strings
    for shape, of in ((LLAMA_70B, layout(5)), (MIXTRAL, layout(9, expert=3))):
        with pytest.raises(CannotExpressError):
            emitter.job(serving_request(shape, aggregated("sglang", of)))


def test_a_tier_of_kv_cache_is_what_the_plan_says(sglang, checkpoints) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    tier = KvTier(store="host", bytes_per_device=100e9, bytes_per_s_per_device=5e10)
    limits = EngineLimits(max_num_seqs=64, prefix_caching=True)
    config = aggregated("sglang", layout(8), limits=limits, kv_tier=tier)
    request = serving_request(LLAMA_70B, config, model_path=checkpoints[LLAMA_70B.slug], quantized_checkpoint=False)
    (program,) = emitter.job(request).programs
    words = command_of(program)
    assert {word for word in words if word.startswith("--")} <= sglang.option_strings
    view = resolved_view(sglang.resolved(words[3:]))
    assert view.enable_hierarchical_cache
    assert view.hicache_size * 1e9 == tier.bytes_per_device


@pytest.mark.parametrize(("store", "backend"), SGLANG_BACKENDS.items())
def test_a_store_of_prefixes_is_a_backend_that_it_knows(sglang, checkpoints, store, backend) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    tier = KvTier(store=store, bytes_per_device=100e9, bytes_per_s_per_device=5e9)
    config = aggregated("sglang", layout(8), limits=EngineLimits(max_num_seqs=64, prefix_caching=True), kv_tier=tier)
    request = serving_request(LLAMA_70B, config, model_path=checkpoints[LLAMA_70B.slug], quantized_checkpoint=False)
    (program,) = emitter.job(request).programs
    words = command_of(program)
    assert {word for word in words if word.startswith("--")} <= sglang.option_strings
    view = resolved_view(sglang.resolved(words[3:]))
    assert view.enable_hierarchical_cache
    assert view.hicache_storage_backend == backend


def test_a_map_of_experts_is_taken_with_its_copies(sglang, checkpoints) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    copies = 16
    lies = ((*range(256), *range(copies)),) * 58
    config = replace(aggregated("sglang", layout(1, data=16, expert=16)), expert_map=lies)
    request = serving_request(DEEPSEEK_V3, config, model_path=checkpoints[DEEPSEEK_V3.slug], quantized_checkpoint=False)
    job = emitter.job(request)
    (program,) = job.programs
    for node_rank in (0, 1):
        words = command_of(program, node_rank)
        assert {word for word in words if word.startswith("--")} <= sglang.option_strings
        view = resolved_view(sglang.resolved(words[3:]))
        assert view.ep_num_redundant_experts == copies
        assert view.init_expert_location == f"/files/{job.files[0].path}"
        assert view.ep_dispatch_algorithm == "static"


def test_families_whose_map_is_read_are_those_that_the_engine_asks(sglang) -> None:
    """The engine places experts of models whose class has get_model_config_for_expert_location, and of no others."""
    import sglang as package

    models = Path(package.__file__).parent / "srt" / "models"
    asked = "get_model_config_for_expert_location"
    files = {"deepseek_v3": "deepseek_v2", "kimi_k2": "deepseek_v2"}  # models of one class
    for family in emitter.MAPPED_FAMILIES:
        assert asked in (models / f"{files.get(family, family)}.py").read_text()
    for family in ("mixtral", "olmoe"):
        assert asked not in (models / f"{family}.py").read_text()
