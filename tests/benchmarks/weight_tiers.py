"""Experts on the host against published runs: KTransformers' table by the share of experts on GPUs, and single figures.

    python tests/benchmarks/weight_tiers.py serving-ktransformers.jsonl

The table (Qwen3-Next-80B in fp8, four RTX 4090, Xeon Gold 6454S) prints no concurrency, no lengths and no sockets; one
request at a time and two sockets are taken, as in the publisher's other tests. From its cells with GPU shares of 0, 20,
… 100 % four numbers are solved for: the factor on device time, the share of the host's bandwidth, the wait of a layer
and the skew of the routing (for ``frequency`` only). The other cells are held out. All are compared relative to the
all-on-host cell of their strategy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshplan.catalogs.constants.machines.host_processors import host_processors
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import Layout, Pool, Role
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.weight_tiers import Way, WeightTiers
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.tiers.host import READ_SHARE, ROUND_TRIP_S, Host
from meshplan.planner.serving.tiers.popularity import even, zipf
from meshplan.planner.serving.tiers.worker import HostExperts

CORES = "xeon-gold-6454s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published decode rate of a single request. Source: doc/en/DeepseekR1_V3_tutorial.md of KTransformers."""

    what: str
    sockets: int
    prompt: int
    top_k: int
    tokens_per_s: float


# DeepSeek-V3 as Q4_K_M (4.85 bits a weight are taken: w4a16's 4.16 are scaled up), one RTX 4090 or 4090 D, two
# sockets of eight DDR5-4800 each or one of them.
PUBLISHED = (
    Published(what="V0.2, one socket", sockets=1, prompt=500, top_k=8, tokens_per_s=8.73),
    Published(what="V0.2, one socket, 6 experts", sockets=1, prompt=500, top_k=6, tokens_per_s=10.303),
    Published(what="V0.2, two sockets", sockets=2, prompt=500, top_k=8, tokens_per_s=12.208),
    Published(what="V0.2, two sockets, 6 experts", sockets=2, prompt=500, top_k=6, tokens_per_s=13.69),
    Published(what="V0.2.1, 1K", sockets=2, prompt=969, top_k=8, tokens_per_s=13.5),
    Published(what="V0.2.1, 2K", sockets=2, prompt=1930, top_k=8, tokens_per_s=13.4),
    Published(what="V0.2.1, 4K", sockets=2, prompt=3846, top_k=8, tokens_per_s=13.2),
    Published(what="V0.2.1, 8K", sockets=2, prompt=7678, top_k=8, tokens_per_s=12.4),
    Published(what="V0.2.1, 1K, 6 experts", sockets=2, prompt=969, top_k=6, tokens_per_s=15.9),
)
Q4_K_M_BITS, W4A16_BITS = 4.85, 8.0 * (0.5 + 2.5 / 128.0)


def worker_of(model: str, devices: int, scheme: str, prompt: int) -> Worker:
    """A worker of SGLang with all weights on its devices, whether or not they fit."""
    spec = {
        "kind": "serving",
        "model": model,
        "cluster": {
            "devices": {"type": "rtx-4090", "per_node": devices, "nodes": 1},
            "links": {"intra_node": {"bandwidth": "25 GB/s", "latency": "10 us"}},
        },
        "workload": {"input_length": prompt, "output_length": 300, "concurrency": 1},
        "quantization": [scheme],
        "constraints": {"target": "sglang"},
    }
    problem = resolve_serving(read_serving_spec(spec), Catalog(open_database()), Path()).problem
    layout = Layout(tensor_parallel=devices, expert_tensor_parallel=devices)
    node_type, machine = next(iter(problem.machines.items()))
    pool = Pool(
        role=Role.MIXED,
        layout=layout,
        num_workers=1,
        limits=replace(problem.rules.default_limits(machine.device), max_num_seqs=1),
        quantization=problem.quantizations[0],
        node_type=node_type,
    )
    return pool_worker(problem.site, pool, problem.workload)


def step_s(worker: Worker, context: float) -> float:
    """One decode iteration of one request."""
    cost = worker.step_cost()
    return cost.decode_s(1) + cost.decode_context_s[1] * context


def on_host(worker: Worker, host: Host, kept: int, skew: float | None) -> HostExperts:
    """The worker with experts on the host; ``skew``: the most popular stay, None: any."""
    moe = worker.shape.moe
    if moe is None:
        raise SystemExit("not a mixture of experts")
    given = {name: getattr(worker, name) for name in Worker.__dataclass_fields__}
    popularity = (
        even(moe.num_experts, moe.num_experts_per_token)
        if skew is None
        else zipf(moe.num_experts, moe.num_experts_per_token, skew)
    )
    tiers = WeightTiers(
        kernel="FP8", way=Way.EXPERTS_ON_HOST, host_bytes=0.0, device_experts=kept, by_popularity=skew is not None
    )
    return HostExperts(**given, host=host, popularity=popularity, tiers=tiers)


def host_of(sockets: int, read_share: float = READ_SHARE, round_trip_s: float = ROUND_TRIP_S) -> Host:
    processor = host_processors()[CORES]
    return Host(
        memory_bytes=512e9,
        processor=processor,
        sockets=sockets,
        bandwidth_bytes_per_s=sockets * processor.memory_bandwidth_bytes_per_s,
        read_share=read_share,
        round_trip_s=round_trip_s,
    )


def gauss_newton(errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray, steps: int = 40) -> np.ndarray:
    """Least squares by damped steps with numeric derivatives."""
    at, damping = start, 1e-2
    for _ in range(steps):
        now = errors(at)
        slopes = np.stack([(errors(at + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(len(at))], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(at)), -slopes.T @ now)
        better = float(np.square(errors(at + step)).sum()) < float(np.square(now).sum())
        at, damping = (at + step, damping / 3.0) if better else (at, damping * 5.0)
    return at


def table(path: Path) -> None:
    """The table by GPU share."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cells = []
    for row in rows:
        offload = row["parallelism"]["expert_offload"]
        cells.append((offload["gpu_experts_ratio"], offload["strategy"], row["measured"]["output_tokens_per_s"]))
    worker = worker_of("qwen3-next-80b-a3b", 4, "fp8", 300)
    moe = worker.shape.moe
    if moe is None:
        raise SystemExit("not a mixture of experts")
    device_s, experts = step_s(worker, 450.0), moe.num_experts

    def times(parameters: np.ndarray, share: float, strategy: str) -> float:
        factor, read_share, round_trip_s, skew = np.exp(parameters)
        host = host_of(2, float(read_share), float(round_trip_s))
        popular = float(skew) if strategy == "frequency" else None
        kept = on_host(worker, host, round(share * experts), popular)
        one = np.array([1.0])
        routed = kept.routed_s(one) - worker.routed_s(one)
        more = worker.shape.num_moe_layers * float((worker.scale(one) * routed)[0])
        return float(factor) * device_s + more

    known = [cell for cell in cells if round(10 * cell[0]) % 2 == 0]
    start = np.log([1.0, 0.5, 3e-5, 0.5])
    solved = gauss_newton(lambda x: np.array([np.log(times(x, g, s) * rate) for g, s, rate in known]), start)
    print("solved from GPU shares 0, 20, … 100 %:", end=" ")
    print(
        "device factor {:.2f}, read share {:.3f}, round trip {:.1f} us, skew {:.2f}".format(
            *(np.exp(solved) * [1, 1, 1e6, 1])
        )
    )
    shipped = np.array([0.0, np.log(READ_SHARE), np.log(ROUND_TRIP_S), solved[3]])
    for name, parameters in (("solved", solved), ("shipped, device time as planned", shipped)):
        judge(name, cells, lambda g, s, p=parameters: times(p, g, s))


def judge(name: str, cells: list[tuple[float, str, float]], times: Callable[[float, str], float]) -> None:
    """Errors relative to the all-on-host cell of the strategy, and the order of the cells."""
    at_zero = {s: rate for g, s, rate in cells if g == 0.0}
    held = [cell for cell in cells if round(10 * cell[0]) % 2 == 1]
    for group, chosen in (("held out", held), ("all", cells)):
        errors = [times(0.0, s) / times(g, s) / (rate / at_zero[s]) - 1.0 for g, s, rate in chosen if g > 0.0]
        size = np.abs(errors)
        print(f"{name}, {group}: {len(size)} cells, {np.median(size):.1%} median, {size.max():.1%} most")
    right = pairs = 0
    for i, (g, s, rate) in enumerate(cells):
        for other_g, other_s, other_rate in cells[:i]:
            if s != other_s or abs(np.log(rate / other_rate)) < np.log(1.03):  # the publisher's noise
                continue
            pairs += 1
            right += (times(g, s) < times(other_g, other_s)) == (rate > other_rate)
    print(f"{name}: order of GPU shares right in {right} of {pairs} pairs more than 3 % apart")


def single_figures() -> None:
    """Decode rates of DeepSeek-V3 with all experts on the host."""
    ratios = []
    for published in PUBLISHED:
        worker = worker_of("deepseek-v3", 1, "w4a16", published.prompt)
        moe = worker.shape.moe
        if moe is None:
            raise SystemExit("not a mixture of experts")
        shape = replace(worker.shape, moe=replace(moe, num_experts_per_token=published.top_k))
        host = host_of(published.sockets, READ_SHARE * W4A16_BITS / Q4_K_M_BITS)
        kept = on_host(replace(worker, shape=shape), host, 0, None)
        predicted = 1.0 / step_s(kept, published.prompt + 150.0)
        ratios.append(predicted / published.tokens_per_s)
        print(f"{published.what}: {published.tokens_per_s} tokens/s, predicted {predicted:.1f} ({ratios[-1]:.2f})")
    ordered = np.sort(np.exp(np.abs(np.log(ratios))))
    print(f"factor off: {np.median(ordered):.2f} median, {ordered[-2]:.2f} next to widest, {ordered[-1]:.2f} widest")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        table(Path(sys.argv[1]))
    single_figures()
