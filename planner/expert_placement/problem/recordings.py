"""What serving and training frameworks record of their routing, read into loads, transitions and token traces.

==========  ==========================================================================================================
format      what is read
==========  ==========================================================================================================
sglang      JSON with ``logical_count`` [layers][experts] or [windows][layers][experts] (the expert distribution
            recorder's dump, converted from its .pt file, which is a pickle and is not opened)
vllm        JSONL with records ``eplb_load_stats``: step, expert_load [layers][slots], p2l_map [layers][slots]
trtllm      folder of ``EXPERT_STATISTIC_PATH``: meta_info.json and rank*.safetensors, arrays named ``ITERATION_LAYER``
megatron    ``router_trace_rank*.jsonl`` of ``--moe-routing-trace-path``: step, layer, rank, top_indices
npz         arrays ``load`` [layers][experts] (or [windows][layers][experts]), and ``transitions``, ``current`` if there
csv         columns layer, expert, count and, if there, window
==========  ==========================================================================================================

Sources: vLLM ``eplb_load_stats`` as in its static-mapping tool (vllm-project/vllm pull request 41141), TensorRT-LLM
``examples/ep_load_balancer``, Megatron-LM ``tools/moe_routing`` (all read 2026-11).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.errors import SpecError, closest_names, did_you_mean
from meshplan.catalogs.untrusted.documents import DocumentError, parse, read_text
from meshplan.catalogs.untrusted.limits import MAX_ARRAYS_BYTES, MAX_JSON_BYTES
from meshplan.catalogs.untrusted.streams import csv_rows, long_lines, read_arrays
from meshplan.planner.core.arrays import FloatArray, IntArray

LARGEST_SAFETENSORS_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
SAFETENSORS_TYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "F32": "<f4", "F64": "<f8"}
MOST_EXPERTS = 100_000  # of a layer; the largest published model has thousands
BYTES_PER_COUNT = 8
TOKEN_AXES = 2  # raw records are [tokens, top_k], counts are [experts]
WINDOWED_AXES = 3  # [windows, layers, experts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRecording:
    """Recorded routing.

    Args:
        load: [N, L, E] tokens of each expert in each time window.
        layer_ids: number of each of the L layers in the model.
        transitions: [L − 1, E, E] tokens by (expert in a layer, expert in the next recorded layer), or None.
        current: [L, S] physical_to_logical_map that was in force at the end, or None.
        token_experts: [L, tokens, top_k] experts of each token, or None; −1 in layers that lack the token.
    """

    load: FloatArray
    layer_ids: tuple[int, ...]
    transitions: FloatArray | None = None
    current: IntArray | None = None
    token_experts: IntArray | None = None

    def to_document(self, *, num_devices: int, num_redundant_experts: int = 0, **other: Any) -> dict[str, Any]:
        """An instance for ``ExpertPlacementProblem.from_document``; ``other`` holds further keys (``objective`` …).

        For ``robust`` the windows are the scenarios, otherwise their sum is the load.
        """
        document: dict[str, Any] = {
            "kind": "expert-placement",
            "num_layers": self.load.shape[1],
            "num_experts": self.load.shape[2],
            "num_devices": num_devices,
            "num_redundant_experts": num_redundant_experts,
            **other,
        }
        if other.get("objective") == "robust":
            document["scenarios"] = self.load
        else:
            document["load"] = self.load.sum(axis=0)
        if self.transitions is not None:
            document["transitions"] = self.transitions
        if self.current is not None and self.current.shape[1] == self.load.shape[2] + num_redundant_experts:
            document["current"] = self.current
        return document


def read_recording(path: Path, recording_format: str, *, num_experts: int | None = None) -> ExpertRecording:
    """Read a recording.

    Args:
        path: file or folder, see the module docstring.
        recording_format: ``sglang``, ``vllm``, ``trtllm``, ``megatron``, ``npz`` or ``csv``.
        num_experts: experts of a layer, for formats without it (megatron, csv); default: the largest id + 1.

    Raises:
        SpecError: malformed input, with the place.
    """
    if recording_format not in _READERS:
        near = did_you_mean(closest_names(recording_format, _READERS))
        raise _error("format", f"{recording_format!r} is unknown; known are {', '.join(_READERS)}{near}")
    if not path.exists():
        raise _error(str(path), "does not exist")
    return _READERS[recording_format](path, num_experts)


def _error(where: str, message: str) -> SpecError:
    return SpecError.at(where, message)


def _require_small(where: str, num_counts: int) -> None:
    """Refuse tables that a short file would blow up to gigabytes."""
    if num_counts * BYTES_PER_COUNT > MAX_ARRAYS_BYTES:
        raise _error(where, f"makes a table of {num_counts} counts; at most {MAX_ARRAYS_BYTES // BYTES_PER_COUNT}")


def _counts(where: str, value: Any) -> FloatArray:
    """[N, L, E] counts from [L][E] or [N][L][E]."""
    try:
        counts = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise _error(where, f"is not an array of numbers: {error}") from error
    if counts.ndim == WINDOWED_AXES - 1:
        counts = counts[None]
    if counts.ndim != WINDOWED_AXES or counts.size == 0:
        raise _error(where, f"has shape {list(counts.shape)}, expected [layers, experts] or [windows, layers, experts]")
    if not np.all(np.isfinite(counts) & (counts >= 0)):
        first = [int(index) for index in np.argwhere(~(np.isfinite(counts) & (counts >= 0)))[0]]
        raise _error(where, f"holds {counts[tuple(first)]} at {first}; a count is a finite number >= 0")
    return counts


def _ids(where: str, value: Any, num_experts: int) -> IntArray:
    """Expert ids of any shape."""
    try:
        ids = np.asarray(value)
    except ValueError as error:
        raise _error(where, f"has rows of different lengths: {error}") from error
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= num_experts):
        raise _error(where, f"holds expert ids outside 0..{num_experts - 1}")
    return ids.astype(np.int64)


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, record) of each line that is not empty."""
    where = path.name
    try:
        for number, line in enumerate(long_lines(path), start=1):
            if not line.strip():
                continue
            where = f"{path.name}:{number}"
            record = parse(line, is_json=True, name="the line")
            if not isinstance(record, dict):
                raise _error(where, "is not a JSON object")
            yield where, record
    except (OSError, DocumentError) as error:
        raise _error(where, str(error)) from error


def _json_file(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file."""
    try:
        document = parse(read_text(path, MAX_JSON_BYTES), is_json=True, name="it")
    except (OSError, DocumentError) as error:
        raise _error(path.name, str(error)) from error
    if not isinstance(document, dict):
        raise _error(path.name, "is not a JSON object")
    return document


def _field(where: str, record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise _error(where, f"lacks {key!r}{did_you_mean(closest_names(key, record))}")
    return record[key]


def _read_sglang(path: Path, _: int | None) -> ExpertRecording:
    if path.suffix != ".json":
        raise _error(
            path.name,
            "is not JSON. A .pt dump is a pickle, which could run code when opened; convert it where it was written: "
            "json.dump({'logical_count': torch.load(FILE)['logical_count'].tolist()}, …)",
        )
    document = _json_file(path)
    load = _counts(f"{path.name}: logical_count", _field(path.name, document, "logical_count"))
    return ExpertRecording(load=load, layer_ids=tuple(range(load.shape[1])))


def _read_vllm(path: Path, _: int | None) -> ExpertRecording:
    windows: list[FloatArray] = []
    current: IntArray | None = None
    for where, record in _json_lines(path):
        if record.get("record_type") != "eplb_load_stats":
            continue
        slots = _counts(f"{where}: expert_load", _field(where, record, "expert_load"))[0]
        raw_map = np.asarray(_field(where, record, "p2l_map"))
        if raw_map.shape != slots.shape:
            raise _error(where, f"p2l_map has shape {list(raw_map.shape)}, expert_load {list(slots.shape)}")
        current = _ids(f"{where}: p2l_map", raw_map, slots.shape[1])
        _require_small(where, slots.shape[0] * (int(current.max()) + 1))
        load = np.zeros((slots.shape[0], int(current.max()) + 1))
        np.add.at(load, (np.arange(slots.shape[0])[:, None], current), slots)
        if windows and windows[0].shape != load.shape:
            raise _error(where, f"has {list(load.shape)} layers and experts, earlier records {list(windows[0].shape)}")
        windows.append(load)
    if not windows:
        raise _error(path.name, "holds no record of type 'eplb_load_stats'")
    return ExpertRecording(load=np.stack(windows), layer_ids=tuple(range(windows[0].shape[0])), current=current)


def _read_trtllm(path: Path, _: int | None) -> ExpertRecording:
    meta_path = path / "meta_info.json"
    if not meta_path.is_file():
        raise _error(str(path), "has no meta_info.json; give the folder named by EXPERT_STATISTIC_PATH")
    num_experts = _field(meta_path.name, _json_file(meta_path), "num_experts")
    if not isinstance(num_experts, int) or not 1 <= num_experts <= MOST_EXPERTS:
        raise _error(meta_path.name, f"num_experts is {num_experts!r}, not a whole number within 1 and {MOST_EXPERTS}")
    total: dict[int, FloatArray] = {}
    files = sorted(path.glob("rank*.safetensors"))
    # A newer recorder writes the same routing twice: as counts (rank0) and token by token (rank0_raw).
    for file in [file for file in files if not file.stem.endswith("_raw")] or files:
        for name, raw in _safetensors(file):
            where = f"{file.name}: {name}"
            iteration, layer = name.split("_") if name.count("_") == 1 else ("", "")
            if not (iteration.isdigit() and layer.isdigit()):
                raise _error(where, "is not named ITERATION_LAYER")
            array = raw
            if raw.ndim == TOKEN_AXES:
                array = np.bincount(_ids(where, raw, num_experts).ravel(), minlength=num_experts)
            if array.shape != (num_experts,):
                raise _error(where, f"has shape {list(array.shape)}, expected [{num_experts}]")
            total[int(layer)] = total.get(int(layer), np.zeros(num_experts)) + _counts(where, array[None])[0, 0]
    if not total:
        raise _error(str(path), "holds no rank*.safetensors with records")
    layers = sorted(total)
    return ExpertRecording(load=np.stack([total[layer] for layer in layers])[None], layer_ids=tuple(layers))


def _safetensors(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """(name, array) of each tensor: 8 bytes of length, a JSON header, then the data."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ARRAYS_BYTES + 1)
    except OSError as error:
        raise _error(path.name, f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_ARRAYS_BYTES:
        raise _error(path.name, f"has more than {MAX_ARRAYS_BYTES} bytes; at most that are read")
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 + size or size > LARGEST_SAFETENSORS_HEADER_BYTES:
        raise _error(path.name, "is not a safetensors file, or is cut short")
    try:
        header = json.loads(data[8 : 8 + size])
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in SAFETENSORS_TYPES:
                raise _error(f"{path.name}: {name}", f"has dtype {entry['dtype']}; counts are integers or floats")
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(data):
                raise _error(f"{path.name}: {name}", f"lies at {begin} to {end} of {len(data)} bytes")
            flat = np.frombuffer(data[8 + size + begin : 8 + size + end], dtype=SAFETENSORS_TYPES[entry["dtype"]])
            yield name, flat.reshape(entry["shape"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _error(path.name, f"is not a safetensors file: {error}") from error


def _read_megatron(path: Path, num_experts: int | None) -> ExpertRecording:
    files = sorted(path.glob("router_trace_rank*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise _error(str(path), "holds no router_trace_rank*.jsonl")
    records: dict[tuple[str, int], dict[int, IntArray]] = {}
    for file in files:
        for where, record in _json_lines(file):
            if "mtp_idx" in record:  # multi-token prediction heads share layer numbers with the decoder
                continue
            raw = _ids(where, _field(where, record, "top_indices"), num_experts or np.iinfo(np.int64).max)
            if raw.ndim != TOKEN_AXES or raw.shape[0] != record.get("num_tokens", raw.shape[0]):
                raise _error(where, f"top_indices has shape {list(raw.shape)}, expected [num_tokens, topk]")
            step, layer = _field(where, record, "step"), _field(where, record, "layer")
            if not isinstance(step, int) or not isinstance(layer, int):
                raise _error(where, "step and layer must be whole numbers")
            records.setdefault((file.name, step), {})[layer] = raw
    if not records:
        raise _error(str(path), "holds no records")
    return _from_token_records(list(records.values()), num_experts)


def _from_token_records(steps: list[dict[int, IntArray]], num_experts: int | None) -> ExpertRecording:
    """Loads, transitions and traces from {layer: [tokens, top_k]} of each step and rank."""
    layers = sorted({layer for step in steps for layer in step})
    experts = num_experts or 1 + max(int(ids.max(initial=0)) for step in steps for ids in step.values())
    if experts > MOST_EXPERTS:
        raise _error("top_indices", f"holds the expert {experts - 1}; at most {MOST_EXPERTS} experts are read")
    widest = sum(max(ids.shape[0] * ids.shape[1] for ids in step.values()) for step in steps)
    _require_small("the records", len(layers) * (experts * experts + widest))
    load = np.zeros((len(layers), experts))
    transitions = np.zeros((len(layers) - 1, experts, experts))
    traces = []
    for step in steps:
        tokens = max(ids.shape[0] for ids in step.values())
        width = max(ids.shape[1] for ids in step.values())
        trace = np.full((len(layers), tokens, width), -1, dtype=np.int64)
        for index, layer in enumerate(layers):
            if layer not in step:
                continue
            load[index] += np.bincount(step[layer].ravel(), minlength=experts)
            trace[index, : step[layer].shape[0], : step[layer].shape[1]] = step[layer]
            after = layers[index + 1] if index + 1 < len(layers) else None
            # Only steps that kept the order of the tokens from one layer to the next can be paired.
            if after in step and step[after].shape[0] == step[layer].shape[0]:
                np.add.at(transitions[index], (step[layer][:, :, None], step[after][:, None, :]), 1.0)
        traces.append(trace)
    width = max(trace.shape[2] for trace in traces)
    padded = [np.pad(trace, ((0, 0), (0, 0), (0, width - trace.shape[2])), constant_values=-1) for trace in traces]
    return ExpertRecording(
        load=load[None],
        layer_ids=tuple(layers),
        transitions=transitions,
        token_experts=np.concatenate(padded, axis=1),
    )


def _read_npz(path: Path, _: int | None) -> ExpertRecording:
    try:
        arrays = read_arrays(path)
    except (OSError, DocumentError) as error:
        raise _error(path.name, str(error)) from error
    load = _counts(f"{path.name}: load", _field(path.name, arrays, "load"))
    _, layers, experts = load.shape
    transitions = current = None
    if "transitions" in arrays:
        transitions = _counts(f"{path.name}: transitions", arrays["transitions"])
        if transitions.shape != (layers - 1, experts, experts):
            expected = [layers - 1, experts, experts]
            raise _error(f"{path.name}: transitions", f"has shape {list(transitions.shape)}, expected {expected}")
    if "current" in arrays:
        current = _ids(f"{path.name}: current", arrays["current"], experts)
    return ExpertRecording(load=load, layer_ids=tuple(range(layers)), transitions=transitions, current=current)


def _read_csv(path: Path, num_experts: int | None) -> ExpertRecording:
    cells: dict[tuple[int, int, int], float] = {}
    try:
        rows = csv_rows(path)
        header = next(rows, [])
        for number, values in enumerate(rows, start=2):
            where = f"{path.name}:{number}"
            row = dict(zip(header, values, strict=False))
            try:
                layer, expert = int(_field(where, row, "layer")), int(_field(where, row, "expert"))
                window, count = int(row.get("window") or 0), float(_field(where, row, "count"))
            except (TypeError, ValueError) as error:
                raise _error(where, f"is malformed: {error}") from error
            if min(window, layer, expert) < 0 or expert >= (num_experts or MOST_EXPERTS):
                raise _error(where, f"window {window}, layer {layer} or expert {expert} is out of range")
            if (window, layer, expert) in cells:
                raise _error(where, f"repeats window {window}, layer {layer}, expert {expert}")
            cells[window, layer, expert] = count
    except (OSError, DocumentError) as error:
        raise _error(path.name, str(error)) from error
    if not cells:
        raise _error(path.name, "holds no rows; expected columns layer, expert, count")
    windows, layers = sorted({cell[0] for cell in cells}), sorted({cell[1] for cell in cells})
    experts = num_experts or 1 + max(cell[2] for cell in cells)
    _require_small(path.name, len(windows) * len(layers) * experts)
    load = np.zeros((len(windows), len(layers), experts))
    window_at = {window: place for place, window in enumerate(windows)}
    layer_at = {layer: place for place, layer in enumerate(layers)}
    for (window, layer, expert), count in cells.items():
        load[window_at[window], layer_at[layer], expert] = count
    return ExpertRecording(load=_counts(path.name, load), layer_ids=tuple(layers))


_READERS: dict[str, Callable[[Path, int | None], ExpertRecording]] = {
    "sglang": _read_sglang,
    "vllm": _read_vllm,
    "trtllm": _read_trtllm,
    "megatron": _read_megatron,
    "npz": _read_npz,
    "csv": _read_csv,
}
