"""First tokens and KV-cache transfers of a disaggregated server, under each reading of what its source leaves open.

    python tests/benchmarks/cache_transfer.py serving-mooncake-pd.jsonl

The rows (Mooncake, docs/source/performance/vllm/vllm-v1-pd-performance.md) print launch commands and bytes, not how a
NIC reads device memory, nor what the servers and the proxy take beside the devices. So every reading is printed, and
none is fitted:

- *rate* of a NIC: the planner's for Mooncake or for NIXL; or 15 GB/s, which Mooncake states for device memory without
  relaxed ordering (docs/source/performance/gpu-rdma-bandwidth-optimization.md), for which its engine does not ask
  unless MC_IB_PCI_RELAXED_ORDERING is set, and the commands do not set it; or the 87 of 100 GB/s over four NICs of
  200 Gb/s that the engine's README attained with 40 GB.
- *start* of a transfer: none, or the planner's for NIXL or for Mooncake (with a time for each layer's keys or values).
- *bytes*: those that the rows state, the chat template's 15 tokens and whole blocks in them; the planner knows neither.
- *second tokenizing* of the prompt, in the decode server: none; a tokenizer alone (charlesxu.io/parallel-tokenizer);
  the planner's, of a decode server under load (``TOKENIZE_S_PER_TOKEN``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.exchange.collectives import TRANSFER_START_S
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.problem.config import KvConnector
from meshplan.planner.serving.resolve import serving_calibration
from meshplan.planner.serving.search.deployment import TOKENIZE_S_PER_TOKEN, kv_link
from meshplan.planner.serving.simulation.cluster import KvLink
from meshplan.planner.validation.machines import MachineReader

MOONCAKE, NIXL = KvConnector.MOONCAKE, KvConnector.NIXL
STRICT_ORDERING_BYTES_PER_S = 15e9  # a NIC, device memory
README_SHARE = 87 / 100  # of the nominal rate
TOKENIZER_S_PER_TOKEN = 1.1e-6


def transfer_s(link: KvLink, size_bytes: float) -> float:
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s


def readings(prepared: PreparedRun) -> dict[str, KvLink]:
    """The link between the two workers under each reading of rate and start."""
    run = prepared.run
    mooncake, nixl = (kv_link(prepared.site, replace(run.config, kv_connector=one)) for one in (MOONCAKE, NIXL))
    at_once = replace(nixl, latency_s=nixl.latency_s - TRANSFER_START_S)
    devices = run.config.pools[0].layout.num_devices
    strict = {"bandwidth_bytes_per_s": devices * STRICT_ORDERING_BYTES_PER_S}
    nominal = devices * run.machine.scale_out_bytes_per_s
    return {
        "Mooncake (planner)": mooncake,
        "NIXL (planner)": nixl,
        "NIXL, no start": at_once,
        "strict ordering, no start": replace(at_once, **strict),
        "strict ordering, start of NIXL": replace(nixl, **strict),
        "share of the engine's README, start of NIXL": replace(nixl, bandwidth_bytes_per_s=README_SHARE * nominal),
        "rate of Mooncake, start of NIXL": replace(mooncake, latency_s=nixl.latency_s),
    }


def main(path: Path) -> None:
    catalog = Catalog(open_database())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    runs = [PreparedRun(served_run(row, MachineReader(catalog), {})) for row in rows]
    tokens = np.array([run.run.workload.input_length for run in runs], dtype=float)
    print("prompt tokens: " + ", ".join(f"{one:,.0f}" for one in tokens))

    measured = np.array([row["measured"]["kv_transfer_s"] for row in rows])
    print("\ntransfer, ms: measured " + ", ".join(f"{1e3 * one:.2f}" for one in measured))
    sent = np.array([row["measured"]["kv_transfer_bytes"] for row in rows])
    rates = ", ".join(f"{rate / 1e9:.0f}" for rate in np.diff(sent) / np.diff(measured))
    print(f"  rate from row to row, GB/s: {rates}")
    for connector in KvConnector:
        links = [kv_link(run.site, replace(run.run.config, kv_connector=connector)) for run in runs]
        planned = [transfer_s(link, link.kv_bytes_per_token * at) for link, at in zip(links, tokens, strict=True)]
        show(f"{connector.value} (planner), by the planner's own bytes", planned, measured)
    for name in readings(runs[0]):
        show(name, [transfer_s(readings(run)[name], at) for run, at in zip(runs, sent, strict=True)], measured)

    measured = np.array([row["measured"]["ttft_s"] for row in rows])
    predicted = np.array([run.predicted(serving_calibration(catalog, *run.key).constants)["ttft_s"] for run in runs])
    once = predicted - np.array([kv_link(run.site, run.run.config).reads_prompt_s_per_token for run in runs]) * tokens
    print("\ntime to first token, ms: measured " + ", ".join(f"{1e3 * one:.1f}" for one in measured))
    show("no second tokenizing", once, measured)
    show("tokenizer alone", once + TOKENIZER_S_PER_TOKEN * tokens, measured)
    show("decode server under load (planner)", once + TOKENIZE_S_PER_TOKEN * tokens, measured)


def show(name: str, predicted: list[float] | np.ndarray, measured: np.ndarray) -> None:
    error = np.asarray(predicted) / measured - 1.0
    values = ", ".join(f"{1e3 * value:.2f} ({off:+.0%})" for value, off in zip(predicted, error, strict=True))
    print(f"  {name}: {values}; median error {np.median(np.abs(error)):.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
