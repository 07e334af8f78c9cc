"""A small serving question for the pages, and how a browser is started for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Small enough to be answered in about two seconds.
SERVING: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"input_length": 1000, "output_length": 200, "request_rate_per_s": 4, "num_requests": 256},
    "slo": {"ttft_p99_s": 2.0, "tpot_p95_s": 0.05},
    "constraints": {"max_devices": 4},
}
# No sandbox and no GPU in a container; nothing is asked of the network.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
