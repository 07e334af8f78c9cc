"""One serving question that tests change: a 70B model on a node of H100 within two promises."""

from __future__ import annotations

from typing import Any

SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-70b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"input_length": 2000, "output_length": 300, "request_rate_per_s": 2, "num_requests": 300},
    "slo": {"ttft_p99_s": 3.0, "tpot_p95_s": 0.06},
}


def spec(**changes: Any) -> dict[str, Any]:
    return {**SPEC, **changes}


def load(**workload: Any) -> dict[str, Any]:
    lengths = {key: SPEC["workload"][key] for key in ("input_length", "output_length", "num_requests")}
    return {**lengths, **workload}


def small(device: str, **changes: Any) -> dict[str, Any]:
    devices = {"devices": {"type": device, "per_node": 4, "nodes": 1}}
    links = {"links": {"intra_node": {"bandwidth": "31 GB/s", "latency": "5 us"}}}
    return spec(cluster={**devices, **links}, objective="num_devices", **changes)
