"""A question of a model that is larger than its devices."""

from __future__ import annotations

from typing import Any


def question(model: str, device: str, per_node: int, scheme: str, **changes: Any) -> dict[str, Any]:
    """One request at a time on a host with two sockets and 512 GB."""
    return {
        "kind": "serving",
        "model": model,
        "cluster": {
            "devices": {"type": device, "per_node": per_node, "nodes": 1},
            "links": {"intra_node": {"bandwidth": "25 GB/s", "latency": "10 us"}},
            "host_memory": "512 GB",
            "host_processor": "xeon-gold-6454s",
            "host_sockets": 2,
        },
        "workload": {"input_length": 500, "output_length": 50, "concurrency": 1, "num_requests": 8},
        "quantization": [scheme],
        **changes,
    }
