"""``meshplan experts``: from a plan or from devices by hand, with recordings, maps that read back, and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Command
from expert_map_reader import read_expert_map
from expert_referee import referee_balance

MOE = """\
kind: training
model: mixtral-8x7b
cluster: {nodes: [{type: dgx-h100, count: 2}]}
workload: {sequence_length: 4096, global_batch_size: 128, num_training_tokens: 1e9}
fixed: {expert_parallel: EP, tensor_parallel: 1, micro_batch_size: 1}
"""
LAYERS, EXPERTS = 32, 8
FEW = 8  # layers of a recording that belongs to no model
DOUBLE = 2


def counts(seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(100, 900, (LAYERS, EXPERTS))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "loads.csv"
    rows = [f"{layer},{expert},{count}" for (layer, expert), count in np.ndenumerate(counts(0))]
    path.write_text("\n".join(["layer,expert,count", *rows]))
    return path


def planned(meshplan: Command, folder: Path, spread: int) -> str:
    spec = folder / "moe.yaml"
    spec.write_text(MOE.replace("EP", str(spread)))
    return str(meshplan("plan", spec, "--format", "json").json["plan_id"])


def test_a_plan_and_a_recording_become_a_map(meshplan: Command, tmp_path: Path, recording: Path) -> None:
    plan, out, picture = planned(meshplan, tmp_path, 8), tmp_path / "out", tmp_path / "p.svg"
    call = ("experts", plan, recording, "--slots", 8, "--emit", "sglang", "--out", out, "--picture", picture)
    document = meshplan(*call, "--format", "json").json
    assert document["question"]["num_devices"] == 8
    rows = document["answer"]["physical_to_logical_map"]
    written = read_expert_map("sglang", (out / "expert_location.json").read_text())
    assert written.tolist() == rows
    assert document["new"]["balancedness"] == pytest.approx(referee_balance(counts(0), rows, 8, [1.0] * 8))
    contiguous = [list(range(EXPERTS))] * LAYERS
    assert document["today"]["balancedness"] == pytest.approx(referee_balance(counts(0), contiguous, 8, [1.0] * 8))
    assert picture.read_text().startswith("<svg")
    assert sorted(document["files"]) == sorted([str(out / "expert_location.json"), str(picture)])
    again = meshplan(*call)
    assert again.code == 6  # files are there already
    table = meshplan(*call, "--force").out
    assert "step time" in table
    assert "balancedness (1 is ideal)" in table


def test_the_step_scales_with_the_busiest_device(meshplan: Command, tmp_path: Path, recording: Path) -> None:
    plan = planned(meshplan, tmp_path, 8)
    stored = meshplan("plans", "show", plan, "--format", "json").json
    names = ("experts", "expert-parallel communication")
    expert_s = sum(row["seconds"] for row in stored["breakdown"] if row["name"] in names)
    step = meshplan("experts", plan, recording, "--format", "json").json["step_time"]
    balanced = stored["predicted"]["iteration_s"]["value"]
    assert step["balanced_s"] == pytest.approx(balanced)
    slowdown = [max(row) / (sum(row) / EXPERTS) for row in counts(0).tolist()]
    assert step["before_s"] == pytest.approx(balanced + expert_s * (sum(slowdown) / LAYERS - 1))
    assert step["time_ratio"] == pytest.approx(step["after_s"] / step["before_s"])


def test_prefill_and_decode_apart(meshplan: Command, tmp_path: Path) -> None:
    for name, seed in (("p", 1), ("d", 2)):
        np.savez(tmp_path / f"{name}.npz", load=counts(seed)[:FEW])
    arguments = (f"prefill={tmp_path / 'p.npz'}", f"decode={tmp_path / 'd.npz'}", "--devices", 4, "--slots", 8)
    document = meshplan("experts", *arguments, "--format", "json").json
    assert document["question"]["objective"] == "robust"
    assert document["answer"]["scenario_names"] == ["prefill", "decode"]
    rows = document["answer"]["physical_to_logical_map"]
    for item, seed in zip(document["scenarios"], (1, 2), strict=True):
        assert item["balancedness"] == pytest.approx(referee_balance(counts(seed)[:FEW], rows, 4, [1.0] * 4))
        assert item["regret"] >= 0
    assert "scenario prefill" in meshplan("experts", *arguments).out


def test_windows_are_scenarios(meshplan: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "day.npz", load=np.stack([counts(seed)[:FEW] for seed in range(3)]))
    call = ("experts", tmp_path / "day.npz", "--devices", 4, "--format", "json")
    assert meshplan(*call).json["question"]["objective"] == "balance"
    assert meshplan(*call, "--windows").json["answer"]["scenario_names"] == ["day 0", "day 1", "day 2"]


def test_few_moves_from_the_recorded_placement(meshplan: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "now.npz", load=counts(0)[:FEW], current=np.tile(np.arange(EXPERTS), (FEW, 1)))
    call = ("experts", tmp_path / "now.npz", "--devices", 4)
    document = meshplan(*call, "--max-moves", 10, "--format", "json").json
    assert document["answer"]["moved_experts"] <= 10
    assert document["today"]["balancedness"] < document["new"]["balancedness"]
    assert "experts to move" in meshplan(*call, "--max-moves", 10).out
    assert "Moved experts against balance" in meshplan(*call, "--advice").out


def test_traces_bring_traffic_and_visits(meshplan: Command, tmp_path: Path) -> None:
    """Tokens choose two experts of one hidden half; halves come to lie on one node each."""
    rng = np.random.default_rng(0)
    half = rng.integers(2, size=400)
    lines = []
    for layer in range(2):
        odd = np.sort(rng.permuted(np.tile([0, 2, 4, 6], (400, 1)), axis=1)[:, :2], axis=1) + half[:, None]
        lines.append(json.dumps({"step": 0, "layer": layer, "rank": 0, "num_tokens": 400, "top_indices": odd.tolist()}))
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text("\n".join(lines))
    call = ("experts", path, "--devices", 4, "--devices-per-node", 2)
    document = meshplan(*call, "--format", "json").json
    assert document["new"]["nodes_per_token"] <= document["today"]["nodes_per_token"]
    assert document["new"]["devices_per_token"] >= 1.0
    least = meshplan(*call, "--min-balance", 0.5, "--format", "json").json
    assert least["question"]["objective"] == "balance+affinity"
    assert least["new"]["cross_device_fraction"] <= document["new"]["cross_device_fraction"]
    distinct = meshplan(*call, "--min-balance", 0.5, "--dispatch", "distinct", "--format", "json").json
    assert distinct["new"]["devices_per_token"] <= document["new"]["devices_per_token"]
    assert distinct["answer"]["balancedness"] >= 0.5
    assert "Traffic against balance" in meshplan(*call, "--advice").out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("loads.csv",), 2, "--devices"),
        (("loads.csv", "--devices", 3), 2, "divided evenly over 3"),
        (("none.csv", "--devices", 4), 2, "does not exist"),
        (("loads.csv", "loads.csv", "--devices", 4), 2, "two recordings are called"),
        (("loads.csv", "--devices", 4, "--emit", "sglang"), 2, "--out go together"),
        (("loads.csv", "--devices", 4, "--min-balance", 0.9, "--max-moves", 3), 2, "two questions"),
        (("loads.csv", "--devices", 4, "--min-balance", 0.9), 2, "transitions"),
        (("loads.csv", "--devices", 4, "--max-moves", 3), 2, "current"),
        (("loads.csv", "--devices", 4, "--dispatch", "distinct"), 2, "needs --min-balance"),
        (("loads.csv", "--devices", 4, "--dispatch", "distinct", "--min-balance", 0.9), 2, "token traces"),
        (("loads.csv", "--devices", 4, "--from", "npz"), 2, "not an .npz"),
        (("loads.csv", "--devices", 8, "--slots", 8, "--emit", "megatron", "--out", "o"), 6, "redundant experts"),
    ],
)
def test_what_cannot_be_is_said(
    meshplan: Command,
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[Any, ...],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(recording.parent)
    outcome = meshplan("experts", *arguments)
    assert outcome.code == code
    assert says in " ".join(outcome.err.split())


def test_plans_without_spread_experts_are_refused(
    meshplan: Command, tmp_path: Path, recording: Path, spec: Path
) -> None:
    dense = meshplan("plan", spec, "--format", "json").json["plan_id"]
    assert "is a dense model" in meshplan("experts", dense, recording).err
    np.savez(tmp_path / "other.npz", load=np.ones((LAYERS, DOUBLE * EXPERTS)))
    plan = planned(meshplan, tmp_path, 8)
    assert "the plan's model has 8" in meshplan("experts", plan, tmp_path / "other.npz").err
    trace = tmp_path / "router_trace_rank0.jsonl"
    trace.write_text(json.dumps({"step": 0, "layer": 0, "num_tokens": 1, "top_indices": [[0, EXPERTS]]}))
    assert "expert ids outside 0..7" in meshplan("experts", plan, trace).err
    np.savez(tmp_path / "short.npz", load=np.ones((3, EXPERTS)))
    assert "32 MoE layers" in meshplan("experts", plan, tmp_path / "short.npz").err


SERVED = """\
kind: serving
model: MODEL
cluster:
  devices: {type: h100-sxm-80gb, per_node: 2, nodes: 2}
  links: {intra_node: {bandwidth: 450 GB/s, latency: 3 us}, inter_node: {bandwidth: 50 GB/s, latency: 5 us}}
workload: {input_length: 1024, output_length: 64, concurrency: 32, num_requests: 128}
constraints: {target: sglang}
fixed:
  {mode: aggregated, tensor_parallel: 1, attention_data_parallel: 4, expert_parallel: 4, num_workers: 1,
   max_batched_tokens: 2048, max_num_seqs: 32}
"""


def served(meshplan: Command, folder: Path, more: str = "", model: str = "mixtral-8x7b") -> dict[str, Any]:
    spec = folder / "served.yaml"
    spec.write_text(SERVED.replace("MODEL", model) + more)
    plan: dict[str, Any] = meshplan("plan", spec, "--format", "json").json
    return plan


def mean_s(plan: dict[str, Any], name: str) -> float:
    return float(plan["predicted"][name]["value"])


def test_a_serving_plan_moves_with_the_places_of_its_experts(
    meshplan: Command, tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan, place by recorded routing, plan again with the map: the second plan has what the placement promised."""
    monkeypatch.chdir(tmp_path)
    without, out = served(meshplan, tmp_path), tmp_path / "out"
    loaded = served(meshplan, tmp_path, "experts: {loads: loads.csv}\n")
    document = meshplan("experts", without["plan_id"], recording, "--format", "json").json
    current, new = document["served"]["current"], document["served"]["new"]
    assert new["load_factor"] < current["load_factor"]
    assert new["ttft_mean_s"] < current["ttft_mean_s"]
    assert new["tpot_mean_s"] < current["tpot_mean_s"]
    assert current["ttft_mean_s"] == pytest.approx(mean_s(loaded, "ttft_mean_s"))
    assert document["served"]["as planned"]["load_factor"] is None
    assert document["replacement"]["moved_experts"] > 0
    call = ("experts", loaded["plan_id"], recording, "--emit", "sglang", "--out", out)
    assert "TTFT −" in meshplan(*call).out
    placed = served(meshplan, tmp_path, "experts: {loads: loads.csv, placement: out/expert_location.json}\n")
    assert mean_s(placed, "ttft_mean_s") == pytest.approx(new["ttft_mean_s"])
    assert mean_s(placed, "tpot_mean_s") == pytest.approx(new["tpot_mean_s"])
    assert placed["config"]["expert_map"] == document["answer"]["physical_to_logical_map"]
    assert placed["answer"]["experts"][0]["load_factor"] == pytest.approx(new["load_factor"])
    again = meshplan("experts", placed["plan_id"], recording, "--format", "json").json
    assert again["served"]["current"]["ttft_mean_s"] == pytest.approx(new["ttft_mean_s"])
    refusal = meshplan("experts", placed["plan_id"], recording, "--slots", 4).err
    assert "map has 32 layers with 0 copies; asked are 32 with 4" in " ".join(refusal.split())
    assert "Experts of the mixed pool on 4 devices" in meshplan("plans", "show", placed["plan_id"]).out
    refused = meshplan("emit", placed["plan_id"], "--target", "sglang", "--out", tmp_path / "launch")
    assert "passes over it for Mixtral" in " ".join(refused.err.split())


def test_copies_of_experts_take_tokens_of_the_cache(meshplan: Command, tmp_path: Path, recording: Path) -> None:
    plan = served(meshplan, tmp_path)["plan_id"]
    document = meshplan("experts", plan, recording, "--slots", 4, "--format", "json").json
    current, new = document["served"]["current"], document["served"]["new"]
    if len(document["answer"]["physical_to_logical_map"][0]) > EXPERTS:  # else the copies cost more than they bring
        assert new["kv_capacity_tokens"] < current["kv_capacity_tokens"]
    assert new["ttft_mean_s"] <= current["ttft_mean_s"] or new["tpot_mean_s"] <= current["tpot_mean_s"]


def test_some_recorded_layers_stand_for_all_but_make_no_map(meshplan: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "three.npz", load=counts(3)[:3])
    plan = served(meshplan, tmp_path)["plan_id"]
    document = meshplan("experts", plan, tmp_path / "three.npz", "--format", "json").json
    assert document["is_sample"]
    outcome = meshplan("experts", plan, tmp_path / "three.npz", "--emit", "sglang", "--out", tmp_path / "o")
    assert "a map of 3 of the model's MoE layers" in outcome.err


def test_serving_plans_that_cannot_be_placed_are_refused(meshplan: Command, tmp_path: Path, recording: Path) -> None:
    whole = served(meshplan, tmp_path, "").copy()
    spec = tmp_path / "whole.yaml"
    spec.write_text(SERVED.replace("MODEL", "mixtral-8x7b").replace("expert_parallel: 4", "expert_parallel: 1"))
    made = meshplan("plan", spec, "--format", "json").json
    assert "has all experts on every device" in meshplan("experts", made["plan_id"], recording).err
    np.savez(tmp_path / "other.npz", load=np.ones((LAYERS, DOUBLE * EXPERTS)))
    said = " ".join(meshplan("experts", whole["plan_id"], tmp_path / "other.npz").err.split())
    assert "16 experts per layer, Mixtral 8x7B v0.1 has 8" in said


def test_routing_that_is_not_used_is_reported(meshplan: Command, tmp_path: Path) -> None:
    spec = tmp_path / "whole.yaml"
    one = SERVED.replace("MODEL", "mixtral-8x7b").replace("expert_parallel: 4", "expert_parallel: 1")
    spec.write_text(one + "experts: {zipf: 1}\n")
    made = meshplan("plan", spec, "--format", "json").json
    assert made["answer"]["experts"][0]["unused_because"]
    assert "is not used by the mixed pool" in " ".join(meshplan("plans", "show", made["plan_id"]).out.split())
    spec.write_text(one + "experts: {loads: none.csv}\n")
    assert "does not exist" in meshplan("plan", spec).err
    spec.write_text(one + "experts: {loads: none.csv, zipf: 1}\n")
    assert "give loads (a recording) or zipf" in " ".join(meshplan("plan", spec).err.split())
