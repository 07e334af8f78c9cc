"""Recordings of five frameworks, written here in their formats; malformed ones are refused with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.problem.recordings import read_recording


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def write_safetensors(path: Path, arrays: dict[str, np.ndarray], dtype: str = "I64") -> None:
    header, data = {}, b""
    for name, array in arrays.items():
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_sglangs_counts_are_summed_over_its_windows(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps({"logical_count": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]}))
    recording = read_recording(path, "sglang")
    assert recording.load.shape == (2, 2, 2)
    document = recording.to_document(num_devices=2)
    assert document["load"].tolist() == [[6, 8], [10, 12]]
    assert ExpertPlacementProblem.from_document(document, tmp_path).num_layers == 2


def test_windows_become_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps({"logical_count": [[[1, 2]], [[5, 6]]]}))
    document = read_recording(path, "sglang").to_document(num_devices=2, objective="robust")
    assert ExpertPlacementProblem.from_document(document, tmp_path).load_cases.shape == (2, 1, 2)


def test_vllms_loads_are_those_of_experts_not_of_slots(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "stats.jsonl",
        {"record_type": "eplb_load_meta", "version": 1},
        {"record_type": "eplb_load_stats", "step": 1, "expert_load": [[4, 2, 1, 3]], "p2l_map": [[0, 1, 2, 0]]},
        {"record_type": "eplb_load_stats", "step": 2, "expert_load": [[1, 1, 1, 1]], "p2l_map": [[2, 1, 2, 0]]},
    )
    recording = read_recording(path, "vllm")
    assert recording.load.tolist() == [[[7, 2, 1]], [[1, 1, 2]]]
    assert recording.current is not None
    assert recording.current.tolist() == [[2, 1, 2, 0]]
    assert "current" in recording.to_document(num_devices=2, num_redundant_experts=1)
    assert "current" not in recording.to_document(num_devices=3)


def test_trtllm_counts_and_raw_records(tmp_path: Path) -> None:
    (tmp_path / "meta_info.json").write_text(json.dumps({"num_experts": 3, "num_experts_per_token": 2}))
    write_safetensors(tmp_path / "rank0.safetensors", {"50_3": np.array([1, 2, 3]), "51_3": np.array([1, 0, 0])})
    write_safetensors(tmp_path / "rank1.safetensors", {"50_3": np.array([0, 0, 4]), "50_4": np.array([5, 5, 5])})
    write_safetensors(tmp_path / "rank0_raw.safetensors", {"50_3": np.array([[9, 9]])})
    recording = read_recording(tmp_path, "trtllm")
    assert recording.layer_ids == (3, 4)
    assert recording.load.tolist() == [[[2, 2, 7], [5, 5, 5]]]


def test_trtllm_token_records(tmp_path: Path) -> None:
    (tmp_path / "meta_info.json").write_text(json.dumps({"num_experts": 3}))
    tokens = np.array([[0, 2], [1, 2]], dtype=np.int32)
    write_safetensors(tmp_path / "rank0_raw.safetensors", {"50_0": tokens}, "I32")
    assert read_recording(tmp_path, "trtllm").load.tolist() == [[[1, 1, 2]]]


def test_megatron_loads_transitions_and_traces(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "router_trace_rank0.jsonl",
        {"step": 0, "layer": 1, "rank": 0, "num_tokens": 2, "topk": 1, "top_indices": [[0], [1]]},
        {"step": 0, "layer": 3, "rank": 0, "num_tokens": 2, "topk": 1, "top_indices": [[2], [2]]},
        {"step": 0, "layer": 3, "rank": 0, "num_tokens": 2, "topk": 1, "top_indices": [[1], [1]], "mtp_idx": 0},
    )
    write_lines(
        tmp_path / "router_trace_rank1.jsonl",
        {"step": 0, "layer": 1, "rank": 1, "num_tokens": 1, "topk": 1, "top_indices": [[0]]},
    )
    recording = read_recording(tmp_path, "megatron", num_experts=4)
    assert recording.layer_ids == (1, 3)
    assert recording.load.tolist() == [[[2, 1, 0, 0], [0, 0, 2, 0]]]
    assert recording.transitions is not None
    assert recording.transitions[0].tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [0] * 4, [0] * 4]
    assert recording.token_experts is not None
    assert recording.token_experts[:, :, 0].tolist() == [[0, 1, 0], [2, 2, -1]]


def test_npz_and_csv_agree(tmp_path: Path) -> None:
    np.savez(tmp_path / "counts.npz", load=np.array([[1, 2, 0], [4, 5, 6]]))
    cells = [(0, 0, 1), (0, 1, 2), (1, 0, 4), (1, 1, 5), (1, 2, 6)]
    (tmp_path / "counts.csv").write_text(
        "layer,expert,count\n" + "".join(f"{layer},{expert},{count}\n" for layer, expert, count in cells)
    )
    one, two = read_recording(tmp_path / "counts.npz", "npz"), read_recording(tmp_path / "counts.csv", "csv")
    assert one.load.tolist() == two.load.tolist()


@pytest.mark.parametrize(
    ("name", "kind", "text", "says"),
    [
        ("a.pt", "sglang", "x", "pickle"),
        ("a.json", "sglang", "{", "not JSON"),
        ("a.json", "sglang", "[]", "not a JSON object"),
        ("a.json", "sglang", '{"logical_counts": [[1]]}', "did you mean 'logical_counts'"),
        ("a.json", "sglang", '{"logical_count": [[1, 2], [3]]}', "not an array"),
        ("a.json", "sglang", '{"logical_count": [[-1, 2]]}', "finite number >= 0"),
        ("a.json", "sglang", '{"logical_count": [[NaN, 2]]}', "NaN is not a number"),
        ("a.jsonl", "vllm", '{"record_type": "other"}', "eplb_load_stats"),
        ("a.jsonl", "vllm", '{"record_type": "eplb_load_stats", "expert_load": [[1, 2]], "p2l_map": [[0]]}', "shape"),
        ("a.jsonl", "vllm", '{"record_type": "eplb_load_stats", "expert_load": [[1, 2]], "p2l_map": [[0, 5]]}', "0..1"),
        ("a.jsonl", "megatron", '{"step": 0, "layer": 0, "top_indices": [[0, 9]]}', "0..3"),
        ("a.jsonl", "megatron", '{"step": 0, "layer": 0, "top_indices": [[0], [-1]]}', "0..3"),
        ("a.jsonl", "megatron", '{"step": 0, "layer": 0, "num_tokens": 3, "top_indices": [[0]]}', "num_tokens"),
        ("a.jsonl", "megatron", '{"step": "0", "layer": 0, "top_indices": [[0]]}', "whole numbers"),
        ("a.jsonl", "megatron", '{"step": 0, "top_indices": [[0]]}', "lacks 'layer'"),
        ("a.jsonl", "megatron", "{]", "a.jsonl:1: the line is not JSON"),
        ("a.jsonl", "megatron", "", "no records"),
        ("a.npz", "npz", "text", "not an .npz"),
        ("a.csv", "csv", "layer,expert,count\n0,0,x\n", "a.csv:2"),
        ("a.csv", "csv", "layer,expert,count\n0,0,1\n0,0,1\n", "repeats"),
        ("a.csv", "csv", "layer,expert,count\n0,7,1\n", "out of range"),
        ("a.csv", "csv", "layer,expert\n", "no rows"),
        ("a.csv", "csvv", "x", "did you mean 'csv'"),
    ],
)
def test_malformed_recordings_are_refused(tmp_path: Path, name: str, kind: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_recording(path, kind, num_experts=4)
    assert says in str(caught.value)


def test_malformed_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="meta_info"):
        read_recording(tmp_path, "trtllm")
    (tmp_path / "meta_info.json").write_text(json.dumps({"num_experts": 3}))
    with pytest.raises(SpecError, match="no rank"):
        read_recording(tmp_path, "trtllm")
    for content in (b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"{]"):
        (tmp_path / "rank0.safetensors").write_bytes(content)
        with pytest.raises(SpecError, match=r"rank0\.safetensors"):
            read_recording(tmp_path, "trtllm")
    for arrays in ({"50_0": np.array([1, 2])}, {"load": np.array([1, 2, 3])}, {"50_0": np.array([[0, 3]])}):
        write_safetensors(tmp_path / "rank0.safetensors", arrays)
        with pytest.raises(SpecError, match=r"rank0\.safetensors"):
            read_recording(tmp_path, "trtllm")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        read_recording(tmp_path / "none.json", "sglang")
