"""Reading measured serving runs: no row, however broken, raises anything but a reason."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.exchange.collectives import TRANSFER_START_S
from meshplan.planner.serving.measured.exclusions import exclusions
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.measured.workloads import recorded_traces
from meshplan.planner.serving.problem.config import Router
from meshplan.planner.serving.problem.requests import Sampling
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import MachineReader, read_rows

ROWS = list(read_rows(Path(__file__).parents[3] / "validation" / "serving-observations.jsonl"))
JUNK = (None, True, 0, 10**400, float("nan"), "x", [None], {"x": {}})


def rows_by_arrival() -> list[Mapping[str, Any]]:
    """The first row of every way in which requests arrive, and the first with pools of its own."""
    kinds = {(row["workload"]["arrival"], bool(row["workload"].get("disaggregated"))): row for row in reversed(ROWS)}
    return list(kinds.values())


def paths(value: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, item in value.items():
        yield (*above, key)
        if isinstance(item, Mapping):
            yield from paths(item, (*above, key))


def with_value(row: Mapping[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    changed = copy.deepcopy(dict(row))
    *above, last = path
    inner = changed
    for key in above:
        inner = inner[key]
    inner[last] = value
    return changed


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> MachineReader:
    return MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))


@pytest.mark.parametrize("row", rows_by_arrival(), ids=lambda row: row["id"])
def test_every_key_takes_every_kind_of_junk(row: Mapping[str, Any], reader: MachineReader, tmp_path: Path) -> None:
    extra = [("workload", key) for key in ("quantization", "trace_type", "sampling")]
    for path in [*paths(row), ("caveats",), *extra]:
        for value in JUNK:
            broken = with_value(row, path, value)
            exclusions([broken])
            recorded_traces([broken], tmp_path)
            with suppress(UnsupportedError):
                assert served_run(broken, reader).config.num_devices >= 1


@pytest.mark.parametrize("row", rows_by_arrival(), ids=lambda row: row["id"])
@pytest.mark.parametrize("key", ["tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"])
def test_a_degree_under_the_name_of_a_flag_does_not_count_as_1(
    row: Mapping[str, Any], key: str, reader: MachineReader
) -> None:
    meant = key.removeprefix("enable_").removesuffix("_size")
    part = ("parallelism", "decode") if row["workload"].get("disaggregated") else ("parallelism",)
    renamed = with_value(with_value(row, (*part, meant), None), (*part, key), 2)
    with pytest.raises(UnsupportedError, match=rf"{part[-1]}\.{key} is not read; did you mean '{meant}'\?"):
        served_run(renamed, reader)


@pytest.mark.parametrize("row", rows_by_arrival(), ids=lambda row: row["id"])
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tp", "tensor_parallel"),
        ("tp_size", "tensor_parallel"),
        ("TP", "tensor_parallel"),
        ("pp_size", "pipeline_parallel"),
        ("ep", "expert_parallel"),
        ("cp_size", "context_parallel"),
        ("dpa", "attention_data_parallel"),
    ],
)
def test_a_degree_under_a_short_name_does_not_count_as_1(
    row: Mapping[str, Any], key: str, meant: str, reader: MachineReader
) -> None:
    part = ("parallelism", "decode") if row["workload"].get("disaggregated") else ("parallelism",)
    renamed = with_value(with_value(row, (*part, meant), None), (*part, key), 2)
    with pytest.raises(UnsupportedError, match=rf"{part[-1]}\.{key} is not read; did you mean '{meant}'\?"):
        served_run(renamed, reader)


@pytest.mark.parametrize("key", ["tensor_parallel", "tp", "tp_size"])
def test_a_degree_in_another_section_does_not_count_as_1(key: str, reader: MachineReader) -> None:
    row = next(row for row in ROWS if row["workload"].get("concurrency") and not row["workload"].get("disaggregated"))
    moved = with_value(with_value(row, ("parallelism", "tensor_parallel"), None), ("workload", key), 2)
    with pytest.raises(
        UnsupportedError, match=rf"workload\.{key} is not read there; write parallelism\.tensor_parallel"
    ):
        served_run(moved, reader)


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("hardware", "world_size", "num_devices"),
        ("hardware", "gpus_per_node", "devices_per_node"),
        ("workload", "isl", "input_length"),
        ("workload", "max_concurrency", "concurrency"),
    ],
)
def test_a_key_that_is_missed_is_looked_for_under_its_other_names(
    section: str, key: str, meant: str, reader: MachineReader
) -> None:
    row = next(row for row in ROWS if row["workload"].get("concurrency") and row["workload"].get("input_length"))
    renamed = with_value(with_value(row, (section, meant), None), (section, key), 8)
    with pytest.raises(UnsupportedError, match=rf"{section}\..*'?{key}'? is not read|not read; did you mean '{meant}'"):
        served_run(renamed, reader)


def test_what_a_row_leaves_out_is_listed(reader: MachineReader) -> None:
    row = next(row for row in ROWS if row["workload"].get("concurrency"))
    assert {"max_num_seqs", "max_batched_tokens"} <= set(served_run(row, reader).filled)


def test_limits_that_a_row_states_are_those_that_are_simulated(reader: MachineReader) -> None:
    row = next(row for row in ROWS if row["workload"].get("concurrency") and not row["workload"].get("disaggregated"))
    stated = with_value(with_value(row, ("workload", "max_num_seqs"), 3), ("workload", "max_num_batched_tokens"), 512)
    run = served_run(stated, reader)
    limits = run.config.pools[0].limits
    assert (limits.max_num_seqs, limits.max_batched_tokens) == (3, 512)
    assert not {"max_num_seqs", "max_batched_tokens"} & set(run.filled)


def test_a_server_on_a_small_board_starts_with_fewer_tokens(reader: MachineReader) -> None:
    """vLLM's defaults since 0.10 ask how large the board is, and give no A100 more; what a row states holds."""
    row = next(row for row in ROWS if row["workload"]["arrival"] == "closed_loop")
    row = {**row, "framework": {"name": "vLLM", "version": "0.11.0"}, "source": {"title": "somebody's"}}
    row["workload"] = {**row["workload"], "max_num_seqs": 64}
    one = {"num_devices": 8, "devices_per_node": 8}
    row["parallelism"] = {"tensor_parallel": 8, "pipeline_parallel": 1}
    found = {
        device: served_run({**row, "hardware": {**one, "device": device}}, reader).config.pools[0].limits
        for device in ("a100-sxm-80gb", "h100-sxm-80gb", "l40s")
    }
    assert {device: limits.max_batched_tokens for device, limits in found.items()} == {
        "a100-sxm-80gb": 2048,
        "h100-sxm-80gb": 8192,
        "l40s": 2048,
    }
    assert {limits.max_num_seqs for limits in found.values()} == {64}


def test_a_closed_loop_is_as_long_as_its_row_says(reader: MachineReader) -> None:
    row = next(row for row in ROWS if row["workload"].get("concurrency") and not row["workload"].get("disaggregated"))
    assert served_run(with_value(row, ("workload", "num_requests"), 77), reader).workload.num_requests == 77


def test_the_memory_that_a_server_was_given_is_its_budget(reader: MachineReader) -> None:
    row = next(row for row in ROWS if row["workload"].get("concurrency") and not row["workload"].get("disaggregated"))
    given = served_run(with_value(row, ("workload", "gpu_memory_utilization"), 0.5), reader)
    assert given.config.pools[0].limits.memory_fraction == 0.5
    with pytest.raises(UnsupportedError, match="gpu_memory_utilization"):
        served_run(with_value(row, ("workload", "gpu_memory_utilization"), 92), reader)


def test_a_time_per_token_is_over_the_tokens_that_were_asked_for(reader: MachineReader) -> None:
    row = copy.deepcopy(dict(ROWS[0]))
    row["measured"], row["derived"] = {"tpot_s": 0.011, "ttft_s": 0.1}, {"tpot_s": 0.008}
    assert served_run(row, reader).measured["tpot_s"] == 0.011
    row["workload"] = {**row["workload"], "output_length_counted_mean": 195.0}
    assert served_run(row, reader).measured == {"tpot_s": 0.008, "ttft_s": 0.1}


def test_a_transfer_is_the_bytes_of_a_prompt_over_the_network_that_the_row_prints(reader: MachineReader) -> None:
    """Qwen3-8B holds 144 KiB a token; eight cards of a node, 200 GB/s together, attain 0.9 of that."""
    row = {
        "id": "split",
        "task": "serving",
        "model": {
            "name": "Qwen/Qwen3-8B",
            "num_hidden_layers": 36,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        "hardware": {
            "device": "h800-sxm-80gb",
            "num_devices": 16,
            "inter_node": "8 x ConnectX-7 RoCE a node, about 200 GB/s theoretical",
        },
        "precision": "bf16",
        "framework": {"name": "vLLM", "version": "0.11.2"},
        "parallelism": {role: {"tensor_parallel": 8, "num_workers": 1} for role in ("prefill", "decode")},
        "workload": {
            "input_length": 1000,
            "output_length": 8,
            "concurrency": 1,
            "arrival": "closed_loop",
            "disaggregated": True,
        },
        "measured": {"kv_transfer_bytes": 1.0, "kv_transfer_s": 1.0},
    }
    values = PreparedRun(served_run(row, reader)).predicted(ServingConstants())
    assert values["kv_transfer_bytes"] == 1000 * 144 * 1024
    assert values["kv_transfer_s"] == pytest.approx(TRANSFER_START_S + 1000 * 144 * 1024 / 180e9, rel=0.02)
    row["workload"], row["parallelism"] = {**row["workload"], "disaggregated": False}, {"tensor_parallel": 8}
    assert not PreparedRun(served_run(row, reader)).predicted(ServingConstants())


def test_how_tokens_are_drawn_is_the_rows_or_the_clients(reader: MachineReader) -> None:
    """ML.ENERGY's client penalises repetitions and keeps 95 % of the probability; others are greedy unless they say."""
    row = next(row for row in ROWS if row["workload"]["arrival"] == "closed_loop")
    assert served_run(row, reader).workload.sampling is None
    known = served_run(with_value(row, ("source", "title"), "The ML.ENERGY leaderboard v3.0"), reader).workload.sampling
    assert known == Sampling(top_p=0.95, penalties=True)
    own = served_run(with_value(row, ("workload", "sampling"), {"top_p": 0.8}), reader)
    assert own.workload.sampling == Sampling(top_p=0.8)
    with pytest.raises(UnsupportedError, match=r"sampling.top_p must be a number above 0, at most 1, is 2"):
        served_run(with_value(row, ("workload", "sampling"), {"top_p": 2}), reader)


def test_a_published_checkpoint_in_fp8_has_the_formats_of_its_config(reader: MachineReader) -> None:
    """Qwen's and MiniMax's are scaled in blocks, Meta's 405B keeps attention in 16 bits; another format comes first."""
    row = with_value(next(row for row in ROWS if row["workload"]["arrival"] == "closed_loop"), ("precision",), "fp8")
    row["workload"].pop("quantization", None)

    def formats(name: str, **workload: object) -> tuple[str, str]:
        run = served_run(
            {**row, "model": {**row["model"], "name": name}, "workload": row["workload"] | workload}, reader
        )
        found = run.config.pools[0].quantization
        return found.attention, found.mlp

    assert formats("Qwen/Qwen3-32B-FP8") == ("fp8_block", "fp8_block")
    assert formats("meta-llama/Llama-3.1-405B-Instruct-FP8") == ("bf16", "fp8")
    assert formats("MiniMaxAI/MiniMax-M2.5", quantization={"gemm": "fp8", "moe": "fp8"}) == ("fp8_block", "fp8_block")
    assert formats("Qwen/Qwen3.5-397B-A17B", quantization={"gemm": "fp8", "moe": "fp8_block"}) == (
        ("fp8_block", "fp8_block")
    )
    assert formats("Qwen/Qwen3-32B-FP8", quantization={"gemm": "mxfp8"}) == ("mxfp8", "mxfp8")
    assert formats("mine", quantization={"gemm": "fp8"}) == formats("mine") == ("fp8", "fp8")


def test_one_request_waits_where_the_publishers_server_had_no_slot_for_it(reader: MachineReader) -> None:
    row = copy.deepcopy(dict(next(row for row in ROWS if row["workload"]["arrival"] == "closed_loop")))
    row["source"] = {**row["source"], "title": "aiconfigurator"}
    row["caveats"], row["precision"] = ["vendor internal gap-analysis run; noisier than the others"], "bf16"
    row["framework"], row["parallelism"] = {"name": "TensorRT-LLM", "version": "1.0.0rc3"}, {"tensor_parallel": 1}
    row["hardware"] = {"device": "h100-sxm-80gb", "num_devices": 1}
    row["model"] = {**row["model"], "num_hidden_layers": 2}
    row["workload"] = {"arrival": "closed_loop", "input_length": 1024, "output_length": 128, "concurrency": 8}
    slots = {
        name: served_run({**row, "model": {**row["model"], "name": name}}, reader).config.pools[0].limits.max_num_seqs
        for name in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B")
    }
    assert list(slots.values()) == [7, 8]


def test_sglang_gathers_where_its_scripts_name_no_all_to_all(reader: MachineReader) -> None:
    """Decode workers, too, though the settings stand with prefill's; TensorRT-LLM's servers send tokens to experts."""
    name = "aicsil-dsr1_b200_trtllm_fp8_disagg_8192x1024_c128_cfg549"
    row = copy.deepcopy(dict(next(row for row in ROWS if row["id"] == name)))
    assert not served_run(row, reader).recipe.gathers_tokens
    row["framework"] = {**row["framework"], "name": "SGLang"}
    assert served_run(row, reader).recipe.gathers_tokens
    row["source"] = {"title": "another table"}
    assert not served_run(row, reader).recipe.gathers_tokens


def test_a_run_is_read_with_the_scripts_of_its_day(reader: MachineReader) -> None:
    """Until 2025 TensorRT-LLM's servers of DeepSeek took one prompt besides the 64 running requests and 64 tokens."""
    name = "aicsil-dsr1_b200_trtllm_fp8_disagg_8192x1024_c128_cfg549"
    row = copy.deepcopy(dict(next(row for row in ROWS if row["id"] == name)))
    row["parallelism"] = {"tensor_parallel": 8, "expert_parallel": 8}
    row["workload"] |= {"disaggregated": False, "input_length": 1024, "concurrency": 64}
    row["framework"]["version"] = "1.1.0rc2.post2"
    budgets = {}
    for day in ("2025-11-02", "2026-02-03"):
        row["source"]["section"] = f"db-dump/2026-04-27; measured={day}T00:00:00.000Z"
        budgets[day] = served_run(row, reader).config.pools[0].limits.max_batched_tokens
    assert budgets == {"2025-11-02": 1024 + 64 + 64, "2026-02-03": 8192}


def test_disaggregated_servers_are_read_with_the_flags_of_their_scripts(reader: MachineReader) -> None:
    """Slots, split experts and the router of a public run; other sources keep what the row prints."""
    name = "aicsil-dsr1_b200_trtllm_fp8_disagg_8192x1024_c128_cfg549"
    row = copy.deepcopy(dict(next(row for row in ROWS if row["id"] == name)))
    run = served_run(row, reader)
    prefill, decode = run.config.pools
    assert run.config.router is Router.ROUND_ROBIN
    assert (prefill.layout.expert_parallel, prefill.layout.expert_tensor_parallel) == (1, 8)
    assert (prefill.limits.max_num_seqs, prefill.limits.max_batched_tokens, decode.limits.max_num_seqs) == (
        8,
        8320,
        128,
    )
    row["source"] = {"title": "another table"}
    other = served_run(row, reader)
    assert (other.config.router, other.config.pools[0].layout.expert_parallel) == (Router.LEAST_LOADED, 8)


def test_vllm_of_2023_reaches_its_workers_by_ray(reader: MachineReader) -> None:
    """Where there are workers on other devices; releases since tell them by NCCL or in processes of their own."""
    row = next(row for row in ROWS if row["framework"]["name"] == "vLLM (Splitwise profiling)")
    alone = with_value(with_value(row, ("parallelism", "tensor_parallel"), 1), ("hardware", "num_devices"), 1)
    later = with_value(row, ("framework",), {"name": "vLLM", "version": "0.6.0"})
    several, one, newer = (PreparedRun(served_run(each, reader)).workers[0] for each in (row, alone, later))
    assert (several.remote_step_s, several.remote_s_per_seq) == (3.6e-3, 3.66e-4)
    assert {(worker.remote_step_s, worker.remote_s_per_seq) for worker in (one, newer)} == {(0.0, 0.0)}
    tokens = np.array([8.0])
    nccl = replace(newer, limits=replace(newer.limits, custom_all_reduce=False))
    assert several.all_reduce_s(tokens) == nccl.all_reduce_s(tokens) > newer.all_reduce_s(tokens)
