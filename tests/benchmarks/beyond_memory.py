"""Models larger than their devices against published rates: llama.cpp, and SGLang with KTransformers' kernels.

    python tests/benchmarks/beyond_memory.py

Every row of ``tests/data/published/beyond_memory.yaml`` is one request at a time, priced with shipped constants. The
host's share of its bandwidth is solved from the twelve decode rates of KTransformers' tutorial, its matrix rates from
three prefills (``catalogs/seed/hosts.yaml``); nothing is fitted to the other sources. A rate of N generated tokens is
taken at the mean context. Prefill is printed beside; the bound is that of devices and host at peak rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.bounds.overlap_bound import resource_seconds
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.estimator.steady_state import prefill_s
from meshplan.planner.serving.problem.config import Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.weight_tiers import Way, WeightTiers
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.tiers.host import USABLE_SHARE
from meshplan.planner.serving.tiers.kernels import kernel_of
from meshplan.planner.serving.tiers.popularity import even
from meshplan.planner.serving.tiers.worker import HostExperts

ROWS = Path(__file__).parents[1] / "data" / "published" / "beyond_memory.yaml"
# Not in the catalog: a card of the same generation with the memory bandwidth that the source states, of the RTX 2080 Ti
# with the maker's, and with the memory that the source had left.
STANDS_FOR = {"rtx-2080": ("quadro-rtx-6000", 448e9), "rtx-2080-ti": ("quadro-rtx-6000", 616e9)}
AVAILABLE_BYTES = {"rtx-2080-ti": 11 * 2**30}
W4A16_BITS = 8.0 * (0.5 + 2.5 / 128.0)
WITHIN = 0.2
FITTED = "tutorial, sglang, weights on the host"  # the host's constants are solved from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure beside its prediction.

    Args:
        group: source, and whether anything lies on the host.
        what: the row in words.
        decode: measured tokens/s, predicted, and the bound; None where none was printed.
        prefill: measured and predicted tokens/s; None where none was printed.
    """

    group: str
    what: str
    decode: tuple[float, float, float] | None
    prefill: tuple[float, float] | None


def problem_of(row: Mapping[str, Any], host: Mapping[str, Any] | None, prompt: int, output: int) -> ServingProblem:
    device, _ = STANDS_FOR.get(row["device"], (row["device"], 0.0))
    cluster: dict[str, Any] = {
        "devices": {"type": device, "per_node": row["num_devices"], "nodes": 1},
        "links": {"intra_node": {"bandwidth": "25 GB/s", "latency": "10 us"}},
    }
    if host is not None:
        cluster |= {"host_memory": "2 TB", "host_sockets": host["sockets"]}
        cluster |= {} if host["processor"] == "assumed" else {"host_processor": host["processor"]}
        cluster |= {"host_memory_bandwidth": host["bandwidth"]} if "bandwidth" in host else {}
    spec = {
        "kind": "serving",
        "model": row["model"],
        "cluster": cluster,
        "workload": {"input_length": prompt, "output_length": output, "concurrency": 1},
        "quantization": [row["scheme"]],
        "constraints": {"target": row["engine"]},
    }
    problem = resolve_serving(read_serving_spec(spec), Catalog(open_database()), Path()).problem
    return problem if host is None or "drives_bytes_per_s" not in host else with_drives(problem, row, host)


def with_drives(problem: ServingProblem, row: Mapping[str, Any], host: Mapping[str, Any]) -> ServingProblem:
    """The question with what no spec can say: memory that was left on device and host, and a measured drive."""
    ((node_type, machine),) = problem.machines.items()
    device = replace(machine.device, usable_memory_bytes=AVAILABLE_BYTES[row["device"]])
    there = replace(
        problem.tiering.hosts[node_type],
        memory_bytes=host["usable_bytes"] / USABLE_SHARE,
        drives_bytes_per_s=float(host["drives_bytes_per_s"]),
    )
    return replace(
        problem,
        machines={node_type: replace(machine, device=device)},
        tiering=replace(problem.tiering, hosts={node_type: there}),
    )


def pool_of(row: Mapping[str, Any], problem: ServingProblem) -> Pool:
    """The row's worker; experts on devices where the source names no number: as many as the planner finds room for."""
    ((node_type, machine),) = problem.machines.items()
    count, stacked = row["num_devices"], row["engine"] == "llama.cpp"
    layout = Layout(pipeline_parallel=count) if stacked else Layout(tensor_parallel=count, expert_tensor_parallel=count)
    limits = replace(problem.rules.default_limits(machine.device), max_num_seqs=1)
    limits = replace(limits, max_batched_tokens=row.get("chunk", limits.max_batched_tokens))
    tiers = None
    if stacked and row["layers_on_host"] == "fewest":
        placed = problem.tiering.placements(problem, Role.MIXED, Counter())
        tiers = min((one.weight_tiers for one in placed), key=lambda one: one.host_layers)
    elif stacked and row["layers_on_host"]:
        tiers = WeightTiers(way=Way.LAYERS_ON_HOST, host_bytes=0.0, host_layers=row["layers_on_host"])
    elif "device_experts" in row:
        (host,) = problem.tiering.hosts.values()
        kernel = kernel_of(row["scheme"], host.processor)
        tiers = WeightTiers(
            way=Way.EXPERTS_ON_HOST,
            host_bytes=0.0,
            device_experts=row["device_experts"],
            kernel=kernel.name,
            device_prefill_tokens=row.get("device_prefill_tokens", 512 if kernel.prefills_on_devices else 0),
        )
    elif not stacked:
        placed = problem.tiering.placements(problem, Role.MIXED, Counter())
        found = next(one for one in placed if one.layout == layout)
        tiers = replace(found.weight_tiers, device_prefill_tokens=row["device_prefill_tokens"])
    return Pool(
        role=Role.MIXED,
        layout=layout,
        num_workers=1,
        limits=limits,
        quantization=problem.quantizations[0],
        node_type=node_type,
        weight_tiers=tiers,
    )


def as_stated(row: Mapping[str, Any], worker: Worker) -> Worker:
    """The worker with what the row states and no spec can: a device, experts of a token, bits of a stored weight."""
    if row["device"] in STANDS_FOR:
        device = replace(worker.machine.device, memory_bandwidth_bytes_per_s=STANDS_FOR[row["device"]][1])
        worker = replace(worker, machine=replace(worker.machine, device=device))
    moe = worker.shape.moe
    if not isinstance(worker, HostExperts) or moe is None:
        return worker
    if "top_k" in row:
        moe = replace(moe, num_experts_per_token=row["top_k"])
        shape = replace(worker.shape, moe=moe)
        worker = replace(worker, shape=shape, popularity=even(moe.num_experts, row["top_k"]))
    if "stored_bits" in row:
        share = worker.host.read_share * W4A16_BITS / row["stored_bits"]
        worker = replace(worker, host=replace(worker.host, read_share=share))
    return worker


def compared(row: Mapping[str, Any], hosts: Mapping[str, Any]) -> Iterator[Compared]:
    on_host = row.get("layers_on_host", 1) != 0
    for prompt, output, decode, prefill in row["figures"]:
        problem = problem_of(row, hosts.get(row.get("host")) if on_host else None, prompt, output)
        worker = as_stated(row, pool_worker(problem.site, pool_of(row, problem), problem.workload))
        cost = worker.step_cost()
        predicted = 1.0 / (cost.decode_s(1) + cost.decode_context_s[1] * (prompt + output / 2.0))
        seconds = resource_seconds(replace(worker, role=Role.DECODE), np.array([1.0]))
        bound = (output - 1.0) / max(float(each[0]) for each in seconds.values())
        first = prompt / prefill_s(cost, float(prompt), cached=0.0, budget=worker.limits.max_batched_tokens)
        yield Compared(
            group=f"{row['source']}, {row['engine']}, {'weights on the host' if on_host else 'all on devices'}",
            what=f"{row['model']} {row['scheme']} {row['num_devices']} x {row['device']}, {prompt} + {output}",
            decode=None if decode is None else (decode, predicted, bound),
            prefill=None if prefill is None else (prefill, float(first)),
        )


def summary(name: str, pairs: list[tuple[float, float]]) -> None:
    errors = np.array([predicted / measured - 1.0 for measured, predicted in pairs])
    within = float(np.mean(np.abs(errors) <= WITHIN))
    print(
        f"{name}: {len(pairs)} figures, {np.median(np.abs(errors)):.1%} median ({np.median(errors):+.1%} signed), "
        f"{within:.0%} within {WITHIN:.0%}"
    )


def line(one: Compared) -> str:
    said = []
    if one.decode is not None:
        measured, predicted, bound = one.decode
        ratio = f"{predicted / measured:.2f}"
        said.append(
            f"{measured:.4g} tokens/s, predicted {predicted:.3g} ({ratio}), {measured / bound:.0%} of the bound"
        )
    if one.prefill is not None:
        said.append(f"prefill {one.prefill[0]:g}, predicted {one.prefill[1]:.0f}")
    return f"{one.what}: {'; '.join(said)}"


def main() -> None:
    document = yaml.safe_load(ROWS.read_text())
    found = [one for row in document["rows"] for one in compared(row, document["hosts"])]
    print(*map(line, found), "", sep="\n")
    decodes = [(one.group, one.decode) for one in found if one.decode is not None]
    for group in dict.fromkeys(group for group, _ in decodes):
        summary(f"decode, {group}", [rates[:2] for name, rates in decodes if name == group])
    summary("decode, all", [rates[:2] for _, rates in decodes])
    on_host = [(group, rates[:2]) for group, rates in decodes if group.endswith("host")]
    summary("decode, weights on the host", [rates for _, rates in on_host])
    held_out = [rates for group, rates in on_host if group != FITTED]
    summary("decode, weights on the host, nothing fitted to the source", held_out)
    widest = np.sort([max(one / other, other / one) for one, other in held_out])
    print(f"widest factors of these: {', '.join(f'{factor:.2f}' for factor in widest[::-1][:5])}")
    for group in dict.fromkeys(one.group for one in found if one.prefill is not None):
        summary(f"prefill, {group}", [one.prefill for one in found if one.prefill is not None and one.group == group])
    above = sum(rates[0] > rates[2] for _, rates in decodes)
    print(f"above the bound: {above} of {len(decodes)}")


if __name__ == "__main__":
    main()
