"""Settings of published benchmarks: they name real fields and conditions, and reach only the runs they are about."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from meshplan.catalogs.constants.engine_recipes import EngineRecipe, engine_recipes
from meshplan.catalogs.constants.serving_benchmarks import (
    CONDITIONS,
    BenchmarkRun,
    BenchmarkServer,
    benchmark_servers,
    expert_parallel,
    num_waiting,
    router_in,
    settings_of,
    spreads_attention,
    started_as,
    warms_up,
)
from meshplan.planner.serving.problem.config import Role, Router

RUN = BenchmarkRun(
    title="a dump of InferenceX",
    device="b200-sxm-180gb",
    model="deepseek-ai/DeepSeek-R1",
    precision="nvfp4",
    input_length=1024,
    output_length=1024,
    concurrency=8,
    tensor_parallel=8,
    attention_data_parallel=1,
)


SOURCES = tuple(
    f"github.com/{name}"
    for name in (
        "SemiAnalysisAI/InferenceX",
        "ai-dynamo/aiconfigurator",
        "NVIDIA/srt-slurm",
        "NVIDIA/TensorRT-LLM",
        "ml-energy/benchmark",
    )
)


@pytest.mark.parametrize("server", benchmark_servers(), ids=lambda server: f"{server.engine}-{server.source[-40:]}")
def test_every_entry_names_an_engine_fields_and_conditions(server) -> None:
    assert server.engine in engine_recipes()
    assert server.settings or server.spreads_attention or server.expert_parallel or server.num_waiting
    assert server.role in {role.value for role in Role}
    assert set(server.settings) <= {item.name for item in fields(EngineRecipe)}
    assert set(server.when) <= set(CONDITIONS)
    assert server.source.startswith(SOURCES)


def test_later_entries_win() -> None:
    recipe = engine_recipes()["sglang"]
    assert started_as(recipe, RUN).receive_interval == 10
    assert started_as(recipe, replace(RUN, concurrency=16)).receive_interval == 30


def test_attention_ranks_wait_for_each_other_where_there_are_some() -> None:
    recipe = engine_recipes()["trtllm"]
    assert started_as(recipe, RUN).balance_wait_steps == 0
    assert started_as(recipe, replace(RUN, attention_data_parallel=8)).balance_wait_steps == 60


def test_scripts_set_how_many_tokens_vllm_captures() -> None:
    """gpt-oss: graphs of up to 2,048 tokens, prompts included; Llama-70B: of decodes alone, so prompts are launched."""
    recipe = engine_recipes()["vllm"]
    capturing = started_as(recipe, replace(RUN, model="openai/gpt-oss-120b"))
    assert (capturing.graphed_tokens, capturing.fixed_graphs) == (2048, True)
    assert started_as(recipe, replace(RUN, model="meta-llama/Llama-3.1-70B")).graphed_tokens == 0
    assert (recipe.graphed_tokens, recipe.fixed_graphs) == (512, False)


def test_vllm_captures_1024_tokens_for_gpt_oss_unless_a_script_says_more() -> None:
    recipe = engine_recipes()["vllm-0.15"]
    assert recipe.graphs_on("h100-sxm-80gb", "gpt_oss") == 1024
    assert recipe.fixes_graphs("gpt_oss")
    assert recipe.graphs_on("h100-sxm-80gb", "llama") == 512
    assert not recipe.fixes_graphs("llama")
    capturing = started_as(recipe, replace(RUN, model="openai/gpt-oss-120b"))
    assert capturing.graphs_on("b200-sxm-180gb", "gpt_oss") == 2048


def test_the_publishers_own_servers_take_one_prompt_and_a_margin_at_a_time() -> None:
    vendors = replace(RUN, title="aiconfigurator silicon_sample.csv (InferenceX DB dump)", is_vendors=True)
    for engine in ("vllm", "vllm-2025", "trtllm"):
        recipe = engine_recipes()[engine]
        assert started_as(recipe, vendors).token_budget(4096, 64) == 4096 + 128
        assert started_as(recipe, replace(vendors, is_vendors=False)).token_budget(4096, 64) == 8192


def test_scripts_change_with_the_day_of_the_run() -> None:
    """DeepSeek on TensorRT-LLM until 2025: one prompt besides the running requests, then at least 8,192 tokens."""
    recipe = engine_recipes()["trtllm"]
    run = replace(RUN, concurrency=128, measured_on="2025-11-02")
    for precision in ("nvfp4", "fp8"):
        assert started_as(recipe, replace(run, precision=precision)).token_budget(1024, 128) == 1024 + 64 + 128
    assert started_as(recipe, replace(run, measured_on="2026-02-03")).token_budget(1024, 128) == 8192
    assert started_as(recipe, replace(run, measured_on="")).token_budget(1024, 128) == 8192


def test_scripts_say_which_kernels_multiply_experts() -> None:
    recipe = engine_recipes()["trtllm"]
    assert started_as(recipe, replace(RUN, concurrency=255)).expert_kernels
    assert not started_as(recipe, replace(RUN, concurrency=256)).expert_kernels
    assert not started_as(recipe, replace(RUN, input_length=8192, concurrency=33)).expert_kernels
    assert started_as(recipe, replace(RUN, concurrency=256, measured_on="2026-02-03")).expert_kernels
    assert not started_as(recipe, replace(RUN, attention_data_parallel=8)).expert_kernels
    assert not started_as(recipe, replace(RUN, precision="fp8")).expert_kernels


def test_one_request_of_the_publishers_llama_8b_always_waits() -> None:
    recipe = engine_recipes()["trtllm"]
    run = replace(RUN, title="aiconfigurator silicon_sample.csv", device="h100-sxm-80gb", is_vendors=True)
    assert num_waiting(recipe, replace(run, model="meta-llama/Llama-3.1-8B-Instruct")) == 1
    assert num_waiting(recipe, replace(run, model="Qwen/Qwen3-32B")) == 0


@pytest.mark.parametrize(
    "change", [{"title": "another table"}, {"device": "h100-sxm-80gb"}, {"model": "Qwen/Qwen3-32B"}], ids=str
)
def test_other_runs_keep_the_defaults(change) -> None:
    for recipe in engine_recipes().values():
        assert started_as(recipe, replace(RUN, **change)) == recipe


def test_scripts_hold_for_every_release_that_shares_the_constants_of_their_engine() -> None:
    """An entry for what one release's kernel does takes nothing from what the scripts of its runs set."""
    known = engine_recipes()
    sharing = [recipe for recipe in known.values() if recipe.calibrated_as in known]
    assert {recipe.name for recipe in sharing} >= {"vllm-2025"}
    for recipe in sharing:
        for server in benchmark_servers():
            if server.engine == recipe.calibrated_as:
                assert started_with(recipe, server) == started_with(known[recipe.calibrated_as], server)


def started_with(recipe: EngineRecipe, server: BenchmarkServer) -> dict[str, object]:
    """What a run of an entry that meets no condition but its engine, source, device and model is started with."""
    run = replace(RUN, title=server.in_source, device=server.devices[0], model=server.model, role=server.role)
    return settings_of(recipe, replace(run, is_vendors=True))


def test_workers_with_a_role_of_their_own_are_started_apart() -> None:
    recipe = engine_recipes()["trtllm"]
    decode = replace(RUN, role="decode", concurrency=180)
    assert started_as(recipe, decode).max_num_seqs == 32
    assert started_as(recipe, replace(decode, concurrency=450)).max_num_seqs == 64
    assert started_as(recipe, replace(decode, input_length=8192, concurrency=100)).max_num_seqs == 16
    assert started_as(recipe, replace(decode, role="mixed")).max_num_seqs == recipe.max_num_seqs
    assert started_as(recipe, replace(decode, role="prefill", attention_data_parallel=8)).balance_wait_steps == 0


def test_vllm_ranks_that_the_table_calls_tensor_parallel() -> None:
    recipe = engine_recipes()["vllm"]
    run = replace(RUN, device="gb200", model="moonshotai/Kimi-K2.5", tensor_parallel=4, role="prefill")
    assert spreads_attention(recipe, run)
    assert not spreads_attention(recipe, replace(run, role="decode"))
    assert spreads_attention(recipe, replace(run, role="decode", tensor_parallel=16))
    assert not spreads_attention(recipe, replace(run, role="mixed"))


def test_experts_are_split_where_the_scripts_say_so_whatever_the_table_prints() -> None:
    recipe = engine_recipes()["trtllm"]
    run = replace(RUN, role="prefill", precision="fp8", input_length=8192, attention_data_parallel=8, concurrency=32)
    assert expert_parallel(recipe, run) == 1
    assert started_as(recipe, run).max_num_seqs == 1
    assert expert_parallel(recipe, replace(run, precision="nvfp4")) is None
    assert expert_parallel(recipe, replace(run, role="decode")) is None


def test_a_limit_that_equals_the_default_is_still_one_that_the_scripts_set() -> None:
    recipe = engine_recipes()["vllm"]
    decode = replace(RUN, device="gb200", model="moonshotai/Kimi-K2.5", tensor_parallel=4, role="decode")
    assert settings_of(recipe, decode)["max_num_seqs"] == recipe.max_num_seqs
    assert settings_of(recipe, replace(decode, input_length=8192))["max_num_seqs"] == 16
    assert "max_num_seqs" not in settings_of(recipe, replace(decode, tensor_parallel=16))


def test_tokens_are_sent_together_where_the_scripts_say_so() -> None:
    """All of the public benchmark's but vLLM's send several; its publisher's own servers send each token by itself."""
    recipes = engine_recipes()
    kimi = replace(RUN, device="gb200", model="moonshotai/Kimi-K2.5", tensor_parallel=4, role="decode")
    assert started_as(recipes["vllm"], kimi).stream_interval == 50
    assert started_as(recipes["trtllm"], RUN).stream_interval == 10
    assert started_as(recipes["trtllm"], replace(RUN, model="openai/gpt-oss-120b")).stream_interval == 20
    assert started_as(recipes["trtllm"], replace(RUN, is_vendors=True)).stream_interval == 1
    assert started_as(recipes["vllm"], replace(RUN, model="openai/gpt-oss-120b")).stream_interval == 1


def test_disaggregated_runs_of_the_public_benchmark_are_routed_in_turn() -> None:
    assert Router(router_in("silicon_sample.csv (InferenceX DB dump)")) is Router.ROUND_ROBIN
    assert router_in("Mooncake performance pages") is None


def test_the_public_benchmark_warms_servers_up_since_its_change_of_2026() -> None:
    title = "silicon_sample.csv (InferenceX DB dump)"
    assert [warms_up(title, day) for day in ("2025-11-10", "2026-03-25", "")] == [False, True, True]
    assert warms_up("somebody else's runs", "2025-11-10")
