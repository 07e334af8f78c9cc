"""Replicas of a model on one device under MPS, predicted beside measured: python tests/benchmarks/mps.py

Measured by the authors of arXiv:2503.08311 (FerranAgulloLopez/vLLMBatchingMemoryGap at f34b849 and a9186347,
benchmarks/definitive_results/replication/overall_metrics, log_*.out): 2,000 requests of ShareGPT at once, dealt out
evenly, OPT in fp16, vLLM of October 2024 with xFormers, an H100 with 64 GB; threads as MPS leaves them (no percentage
was set), memory 0.9/n of the device's for each of n replicas.

What replicas gain depends on what the host takes of an iteration, and that on the release; how fast the memory of that
H100 is, is not said, the catalog's is taken. So each is predicted twice: as the constants ship, and with the host time
of an iteration read from the run of one replica with as many requests in flight. The last lines ask the runs alone:
whether host + n · device, read from one and four replicas, holds for two.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from meshplan.catalogs.constants.machines.device_shares import MpsShare
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.problem.config import Layout, Pool, Role, Router, ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.deployment import serve

NODE = "dgx-h100"
BISECTIONS = 12
NUM_REQUESTS, PROMPT = 2000, 221_292 / 2000
ANSWER = {"opt-1.3b": 584_704 / 2000, "opt-2.7b": 562_660 / 2000}
SHAPES = {"opt-1.3b": (24, 2048, 32), "opt-2.7b": (32, 2560, 32)}  # config.json of facebook/opt-…: layers, width, heads
MEMORY_BYTES = 63.43 * 2**30  # as the servers print it
# (model, requests in flight of each, replicas) → output tokens/s of all, mean time per output token, s
MEASURED = {
    ("opt-1.3b", 96, 1): (6616.69, 14.16e-3),
    ("opt-1.3b", 96, 2): (8933.31, 19.05e-3),
    ("opt-1.3b", 96, 4): (9555.56, 31.74e-3),
    ("opt-1.3b", 256, 1): (7886.72, 29.97e-3),
    ("opt-1.3b", 256, 2): (10641.92, 37.99e-3),
    ("opt-1.3b", 256, 4): (10678.74, 51.32e-3),
    ("opt-2.7b", 96, 1): (4428.55, 20.58e-3),
    ("opt-2.7b", 96, 2): (5544.96, 30.94e-3),
    ("opt-2.7b", 128, 1): (4740.36, 25.20e-3),
    ("opt-2.7b", 128, 2): (6012.59, 36.98e-3),
}


def question(name: str, catalog: Catalog, folder: Path) -> ServingProblem:
    """The published load on one H100 with the memory that the servers print."""
    layers, width, heads = SHAPES[name]
    config = folder / name / "config.json"
    config.parent.mkdir()
    told = {"model_type": "opt", "num_hidden_layers": layers, "hidden_size": width, "ffn_dim": 4 * width}
    told |= {"num_attention_heads": heads, "vocab_size": 50272, "max_position_embeddings": 2048}
    told |= {"word_embed_proj_dim": width, "activation_function": "relu", "torch_dtype": "float16"}
    config.write_text(json.dumps(told | {"tie_word_embeddings": True, "do_layer_norm_before": True}))
    spec = {
        "kind": "serving",
        "model": str(config),
        "cluster": {"nodes": [{"type": NODE, "count": 1}]},
        "workload": {
            "input_length": round(PROMPT),
            "output_length": round(ANSWER[name]),
            "num_requests": NUM_REQUESTS,
            "arrival": "all_at_once",
        },
        "constraints": {"max_devices": 1},
    }
    problem = resolve_serving(read_serving_spec(spec), catalog, folder).problem
    machine = problem.machines[NODE]
    device = replace(machine.device, memory_bytes=int(MEMORY_BYTES), usable_memory_bytes=int(MEMORY_BYTES))
    return replace(problem, machines={NODE: replace(machine, device=device)})


def predicted(problem: ServingProblem, most: int, replicas: int, *, host_s: float | None = None) -> float:
    """Output tokens/s of so many replicas together."""
    site = problem.site
    machine = site.machines[NODE]
    if host_s is not None:
        site = replace(site, constants={NODE: replace(site.constants[NODE], host_step_s=host_s)})
    limits = replace(problem.rules.default_limits(machine.device), max_num_seqs=most)
    pool = Pool(
        role=Role.MIXED,
        layout=Layout(),
        num_workers=replicas,
        limits=limits,
        quantization=problem.quantizations[0],
        node_type=NODE,
        share=None if replicas == 1 else MpsShare.of(machine.device.memory_bytes, replicas),
    )
    run = serve(site, ServingConfig(engine="vllm", pools=(pool,), router=Router.ROUND_ROBIN), problem.workload)
    return float(run.output_length.sum() / run.finish_s.max())


def host_of_one(problem: ServingProblem, most: int, tokens_per_s: float) -> float:
    """Host time of an iteration with which one replica comes out as measured, s."""
    low, high = 0.0, 0.1
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        slower = predicted(problem, most, 1, host_s=middle) < tokens_per_s
        low, high = (low, middle) if slower else (middle, high)
    return (low + high) / 2.0


def main() -> None:
    """Print gains and rates."""
    catalog = Catalog(open_database())
    with tempfile.TemporaryDirectory() as folder:
        problems = {name: question(name, catalog, Path(folder)) for name in SHAPES}
    errors: dict[str, list[float]] = {"as shipped": [], "host time from one replica": []}
    for (name, most, replicas), (rate, _) in MEASURED.items():
        problem, (one, _) = problems[name], MEASURED[name, most, 1]
        host_s = host_of_one(problem, most, one)
        told = f"{name}, {replicas} × {most} in flight: measured {rate:,.0f} tokens/s ({rate / one - 1.0:+.0%})"
        for title, host in {"as shipped": None, "host time from one replica": host_s}.items():
            made, alone = (predicted(problem, most, count, host_s=host) for count in (replicas, 1))
            told += f"; {title} {made:,.0f} ({made / alone - 1.0:+.0%})"
            if replicas > 1:
                errors[title].append((made / alone) / (rate / one) - 1.0)
        print(f"{told}; host {1e3 * host_s:.1f} ms")
    for title, off in errors.items():
        each = ", ".join(f"{one:+.0%}" for one in off)
        print(f"gain over one replica, {title}: {median(map(abs, off)):.1%} median error, {each}")
    for name, most in dict.fromkeys((name, most) for name, most, replicas in MEASURED if replicas > 2):
        one, two, four = (MEASURED[name, most, replicas][1] for replicas in (1, 2, 4))
        device = (four - one) / 3.0
        print(
            f"{name}, {most} in flight: {1e3 * (one - device):.1f} ms of host and {1e3 * device:.1f} ms of device a "
            f"token by one and four replicas; so {1e3 * (one + device):.1f} ms of two, measured {1e3 * two:.1f} ms"
        )


if __name__ == "__main__":
    main()
