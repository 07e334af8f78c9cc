"""What a plan's choices become in the flags and the environment of its servers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from emit_cases import H100, LLAMA_70B, MIXTRAL
from golden_variants import texts
from serving_cases import (
    NODE,
    aggregated,
    disaggregated,
    layout,
    pool,
    serving_plan,
    serving_request,
)

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.vision import VisionTower
from meshplan.planner.emit.serving import sglang, trtllm, vllm
from meshplan.planner.emit.serving.request import HostType, WorkerMemory
from meshplan.planner.launch.registry import emit_serving, engine_names
from meshplan.planner.launch.support import support_matrix
from meshplan.planner.serving.problem.config import EngineLimits, KvConnector, KvTier, Role
from meshplan.planner.serving.problem.engines.table import ENGINES
from meshplan.planner.serving.problem.quantization import Quantization

MOONCAKE = KvConnector.MOONCAKE


def read_arguments(text: str) -> list[str]:
    """The arguments in an argument file, as ``launch.sh`` reads them."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [part for line in lines for part in line.split(" ", maxsplit=1)]


def test_memory_is_written_in_each_engine_s_own_share() -> None:
    memory = {"mixed": WorkerMemory(weights_bytes=20e9, activations_bytes=4e9)}
    limits = EngineLimits(memory_fraction=0.9)

    def flag(engine: str, name: str) -> float:
        request = serving_request(LLAMA_70B, aggregated(engine, layout(8), limits=limits), memory=memory)
        files = {str(file.path): file.content for file in emit_serving(engine, request).artifacts}
        words = read_arguments(files["mixed_args.txt"])
        return float(words[words.index(name) + 1])

    total = H100.memory_bytes
    cache = 0.9 * total - 24e9  # the bytes that every engine ends up with
    assert flag("vllm", "--gpu-memory-utilization") * total - 24e9 == pytest.approx(cache)
    assert flag("sglang", "--mem-fraction-static") * total - 20e9 == pytest.approx(cache, rel=1e-3)
    left = total - 24e9
    assert flag("trtllm", "--kv_cache_free_gpu_memory_fraction") * left == pytest.approx(cache, rel=1e-3)


@pytest.mark.parametrize(("running", "captured"), [(64, "64"), (2048, "512")])
def test_decodes_run_from_graphs_as_planned(running: int, captured: str) -> None:
    """By itself SGLang captures 32 requests on an L40S; TensorRT-LLM powers of two, so that 300 are computed as 512."""
    limits = EngineLimits(max_num_seqs=running)
    request = serving_request(LLAMA_70B, aggregated("sglang", layout(8), limits=limits))
    files = {str(file.path): file.content for file in emit_serving("sglang", request).artifacts}
    words = read_arguments(files["mixed_args.txt"])
    assert words[words.index("--cuda-graph-max-bs-decode") + 1] == captured
    graphs = trtllm.options(request, request.config.pools[0])["cuda_graph_config"]
    assert graphs["max_batch_size"] == running
    sizes = graphs.get("batch_sizes", [])
    assert not sizes if running == 64 else (sizes[-1], max(b - a for a, b in pairwise(sizes))) == (running, 64)


@pytest.mark.parametrize(
    ("running", "ranks", "captured"),
    [(512, 1, None), (520, 1, "528"), (4096, 8, None), (4800, 8, "608"), (8192, 1, "1024")],
)
def test_vllm_is_told_to_capture_what_it_would_launch_without_graphs(
    running: int, ranks: int, captured: str | None
) -> None:
    """By itself vLLM captures decodes of 512 requests of a rank on Hopper, though 1,024 may run."""
    limits = EngineLimits(max_num_seqs=running)
    degrees = layout(8 // ranks, data=ranks, expert=ranks)
    request = serving_request(MIXTRAL, aggregated("vllm", degrees, limits=limits))
    for asked, expected in ((request, captured), (replace(request, framework_version="0.20.0"), None)):
        flags = {flag[0]: flag[-1] for flag in vllm.ENGINE.arguments(asked, request.config.pools[0])}
        assert flags.get("--max-cudagraph-capture-size") == expected


@pytest.mark.parametrize(("running", "room"), [(1024, None), (2048, "256"), (4096, "512")])
def test_deepep_has_room_for_the_tokens_that_a_rank_decodes(running: int, room: str | None) -> None:
    """By itself SGLang gives it 128 tokens, and one more stops the server."""
    config = aggregated("sglang", layout(1, data=8, expert=8), limits=EngineLimits(max_num_seqs=running))
    request = serving_request(MIXTRAL, config)
    (program,) = sglang.job(request).programs
    assert program.environment.get("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK") == room
    gathered = aggregated("sglang", layout(1, data=8), limits=EngineLimits(max_num_seqs=running))
    assert (
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
        not in sglang.job(serving_request(MIXTRAL, gathered)).programs[0].environment
    )


def test_more_tokens_of_a_rank_than_deepep_can_send_are_refused() -> None:
    config = aggregated("sglang", layout(1, data=8, expert=8), limits=EngineLimits(max_num_seqs=16_384))
    with pytest.raises(CannotExpressError, match="max_num_seqs 16384 must be at most 8192"):
        sglang.job(serving_request(MIXTRAL, config))


@pytest.mark.parametrize(
    ("engine", "flag"), [("vllm", "--max-model-len"), ("sglang", "--context-length"), ("trtllm", "--max_seq_len")]
)
def test_the_longest_request_that_is_taken_is_said_where_it_is_written(engine: str, flag: str) -> None:
    request = serving_request(LLAMA_70B, aggregated(engine, layout(8)))
    for longest in (2304, None):
        files = {
            str(file.path): file.content
            for file in emit_serving(engine, replace(request, max_sequence_length=longest)).artifacts
        }
        words = read_arguments(files["mixed_args.txt"])
        assert (flag in words and words[words.index(flag) + 1] == "2304") is (longest is not None)
        assert (f"more than 2,304 tokens, prompt and answer together, is refused ({flag})" in files["README.md"]) is (
            longest is not None
        )


@pytest.mark.parametrize(
    ("engine", "flag"),
    [("vllm", "--trust-remote-code"), ("sglang", "--trust-remote-code"), ("trtllm", "--trust_remote_code")],
)
def test_a_tokenizer_that_is_code_is_allowed_to_run_and_the_reader_is_told(
    catalog: Catalog, engine: str, flag: str
) -> None:
    """``vllm serve moonshotai/Kimi-K2-Instruct`` stops without: its tokenizer is tokenization_kimi.py."""
    for name, brings in (("kimi-k2", True), ("deepseek-v3", False)):
        request = serving_request(catalog.model_shape(name), aggregated(engine, layout(8)))
        request = replace(request, quantized_checkpoint=True)
        files = {str(file.path): file.content for file in emit_serving(engine, request).artifacts}
        assert (flag in read_arguments(files["mixed_args.txt"])) is brings
        assert ("Python files, which the servers run" in files["README.md"]) is brings


def test_support_matrix_covers_every_field() -> None:
    rows = support_matrix()
    for engine in engine_names():
        said = {row["feature"] for row in rows if row["target"] == engine}
        limits = set(EngineLimits.__dataclass_fields__) - {"admission"}  # of measured servers only
        assert said >= limits | {"tensor_parallel", "pipeline_parallel", "expert_parallel", "attention_data_parallel"}


@pytest.mark.parametrize(
    ("engine", "word"), [("vllm", "--disable-custom-all-reduce"), ("trtllm", "allreduce_strategy")]
)
def test_an_all_reduce_of_nccl_is_written(engine: str, word: str) -> None:
    for own in (True, False):
        config = aggregated(engine, layout(8), limits=EngineLimits(custom_all_reduce=own))
        emitted = emit_serving(engine, serving_request(LLAMA_70B, config))
        assert any(word in artifact.content for artifact in emitted.artifacts) is not own


TIER = KvTier(store="host", bytes_per_device=100 * 2.0**30, bytes_per_s_per_device=5e10)


def test_each_engine_says_where_prefixes_go() -> None:
    limits = EngineLimits(max_num_seqs=64, prefix_caching=True)
    said = {}
    for engine, arguments in (("vllm", vllm.arguments), ("sglang", sglang.arguments), ("trtllm", trtllm.arguments)):
        chunks = replace(limits, chunked_prefill=engine == "vllm")
        config = aggregated(engine, layout(4, 2), limits=chunks, kv_tier=TIER)
        request = serving_request(LLAMA_70B, config)
        said[engine] = {flag: value for flag, *value in arguments(request, config.pools[0])}
        plain = aggregated(engine, layout(4, 2), limits=chunks)
        without = {flag for flag, *_ in arguments(serving_request(LLAMA_70B, plain), plain.pools[0])}
        assert not [flag for flag in without if "offload" in flag or "hi" in flag.split("-")]
    # GiB over the eight devices of a worker; whole GB of one rank; bytes of one rank.
    assert said["vllm"]["--kv-offloading-size"] == ["800"]
    assert said["vllm"]["--kv-offloading-backend"] == ["native"]
    assert said["sglang"]["--hicache-size"] == ["107"]
    assert "--enable-hierarchical-cache" in said["sglang"]
    assert trtllm.options(request, config.pools[0])["kv_cache_config"]["host_cache_size"] == 100 * 2**30


def test_vllm_keeps_no_room_for_images_that_no_request_has() -> None:
    """Gemma 3 sees; planned for text it would be started with an encoder's cache that the plan does not count."""
    tower = VisionTower(
        num_layers=27, hidden_size=1152, intermediate_size=4304, gated_mlp=False, parameters=4e8, merger_parameters=1e7,
        patch_size=14, merged=4, image_size=896,
    )  # fmt: skip
    config = aggregated("vllm", layout(4))
    for shape, flags in (
        (LLAMA_70B, set()),
        (replace(LLAMA_70B, vision=tower), {("--language-model-only",)}),
    ):
        request = serving_request(shape, config)
        written = set(vllm.arguments(request, config.pools[0]))
        assert {flag for flag in written if flag[0] in ("--language-model-only", "--limit-mm-per-prompt")} == flags
    older = vllm.arguments(replace(request, framework_version="0.16.0"), config.pools[0])
    assert ("--limit-mm-per-prompt", '{"image":0}') in older


def test_vllm_keeps_room_for_the_images_of_a_request() -> None:
    config = aggregated("vllm", layout(4))
    plan = serving_plan(LLAMA_70B, config)
    workload = {**plan.spec.get("workload", {}), "images": {"per_request": 3, "width": 640, "height": 480}}
    seeing = replace(plan, spec={**plan.spec, "workload": workload})
    scripts = [
        "".join(one.content for one in emit_serving("vllm", serving_request(LLAMA_70B, config, plan=made)).artifacts)
        for made in (plan, seeing)
    ]
    assert "--limit-mm-per-prompt" not in scripts[0]
    assert '--limit-mm-per-prompt {"image":3}' in scripts[1]


def test_a_tier_that_an_engine_has_no_flag_for_is_refused() -> None:
    limits = EngineLimits(max_num_seqs=64, prefix_caching=True)
    on_nvme = pool(layout(4), limits=limits, kv_tier=replace(TIER, store="nvme"))
    assert any("no flag for a KV tier on nvme" in text for text in ENGINES["trtllm"].broken_pool(LLAMA_70B, on_nvme))
    for wrong, reason in (
        ({"limits": replace(limits, prefix_caching=False)}, "needs prefix_caching"),
        ({"kv_tier": replace(TIER, bytes_per_s_per_device=0.0)}, "must be above 0"),
        ({"role": Role.PREFILL}, "of mixed workers only"),
    ):
        tried = pool(layout(4), **{"limits": limits, "kv_tier": TIER, **wrong})
        assert any(reason in text for text in ENGINES["vllm"].broken_pool(LLAMA_70B, tried))


def test_mooncake_s_workers_meet_at_the_prefill_server() -> None:
    """Its port is in the prefill servers' environment and in the router's words, and no channel of NIXL is opened."""
    config = disaggregated(
        "vllm", pool(layout(8), Role.PREFILL, num_workers=2), pool(layout(8), Role.DECODE), kv_connector=MOONCAKE
    )
    written = texts(emit_serving("vllm", serving_request(LLAMA_70B, config)).artifacts)
    prefill, decode = (written[f"{role}_args.txt"] for role in ("prefill", "decode"))
    assert '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}' in prefill
    assert '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}' in decode
    assert written["launch.sh"].count('VLLM_MOONCAKE_BOOTSTRAP_PORT="$((internal_port + 390))"') == 1
    assert "NIXL" not in written["launch.sh"]
    assert "--kv-connector mooncake" in written["router.sh"]
    assert written["router.sh"].count('--prefill "http') == written["router.sh"].count('" "20') == 2
    assert "install mooncake-transfer-engine" in written["README.md"]


def test_sglang_s_backend_is_the_plans() -> None:
    config = disaggregated("sglang", pool(layout(8), Role.PREFILL), pool(layout(8), Role.DECODE), kv_connector=MOONCAKE)
    written = texts(emit_serving("sglang", serving_request(LLAMA_70B, config)).artifacts)
    assert "--disaggregation-transfer-backend mooncake" in written["prefill_args.txt"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("formats", ["bf16", "fp16"])
def test_devices_without_bf16_serve_in_fp16(catalog: Catalog, engine: str, formats: str) -> None:
    """A T4 was told bfloat16, which engines refuse below compute capability 8.0; fp16 beside it had no words."""
    hosts = {NODE: HostType(devices_per_host=8, device=catalog.device("t4"))}
    config = aggregated(engine, layout(8), quantization=Quantization.uniform(formats))
    written = texts(emit_serving(engine, serving_request(LLAMA_70B, config, host_types=hosts)).artifacts)
    flags = written["mixed_args.txt"]
    assert "--dtype float16" in flags
    assert "--kv-cache-dtype auto" in flags


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_tokens_are_sent_together_where_the_plan_says_so(engine: str) -> None:
    def files(tokens: int) -> dict[str, str]:
        config = aggregated(engine, layout(8), limits=EngineLimits(stream_interval=tokens))
        return {
            str(file.path): file.content
            for file in emit_serving(engine, serving_request(LLAMA_70B, config)).artifacts
            if file.path.suffix in (".txt", ".yaml", ".yml")
        }

    written = [line for text in files(10).values() for line in text.splitlines() if "stream" in line]
    assert written == (["stream_interval: 10"] if engine == "trtllm" else ["--stream-interval 10"])
    assert not any("stream" in text for text in files(1).values())


def test_llama_cpp_sends_every_token_by_itself() -> None:
    together = replace(pool(layout(1)), limits=EngineLimits(stream_interval=10))
    assert any("stream_interval" in text for text in ENGINES["llama.cpp"].broken_pool(LLAMA_70B, together))
    assert not any("stream_interval" in text for text in ENGINES["vllm"].broken_pool(LLAMA_70B, together))


def test_api_servers_are_written_where_a_plan_has_others_than_the_engine() -> None:
    several = EngineLimits(api_servers=4)
    for limits, written in ((several, True), (EngineLimits(), False)):
        request = serving_request(LLAMA_70B, aggregated("vllm", layout(8), limits=limits))
        files = {str(file.path): file.content for file in emit_serving("vllm", request).artifacts}
        assert ("--api-server-count 4" in files["mixed_args.txt"]) == written
    one = replace(pool(layout(1)), limits=several)
    refused = [any("api_servers" in text for text in rules.broken_pool(LLAMA_70B, one)) for rules in ENGINES.values()]
    assert refused == [False, True, True, True]
