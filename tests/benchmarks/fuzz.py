"""Forged plans and mutated inputs over every reader: how many are bugs, slow, large, or leave something behind.

Each command runs in a process of its own, with a limit on time and memory. Prints a line a reader:
``exits``, and the inputs of exit 1, of more than 10 s, of more than 2 GiB, and with a payload in any output.

    python tests/benchmarks/fuzz.py --forged 2000 --mutated 20000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from hostile import CANARY, HOSTILE_TEXTS, random_forgery

ROOT = Path(__file__).parents[2]
MOST_S, MOST_BYTES = 10.0, 2 * 2**30
BATCH = 50  # inputs of one process; its peak memory is that of its worst input
TRAINING = """\
kind: training
model: llama-3.1-8b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {sequence_length: 4096, global_batch_size: 64}
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=4
GPUS=8
ARGS=(--tensor-model-parallel-size 8 --num-layers 32 --hidden-size 4096 --num-attention-heads 32)
ARGS+=(--seq-length 4096 --micro-batch-size 1 --global-batch-size $((GPUS * 16)) --bf16)
cat << EOF > note
text
EOF
srun torchrun --nnodes 4 --nproc-per-node "$GPUS" pretrain_gpt.py "${ARGS[@]}" 2>&1
"""
MANIFEST = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  replicas: 2
  template:
    spec:
      containers:
      - name: server
        image: vllm/vllm-openai:latest
        command: ["/bin/sh", "-c"]
        args: ["vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 2 --max-num-seqs 64"]
---
apiVersion: v1
kind: Service
metadata: {name: chat}
"""
TUNED = """\
base_model: meta-llama/Llama-3.1-8B
adapter: lora
lora_r: 16
datasets: [{path: data, type: alpaca}]
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 4
bf16: true
fsdp_config: {reshard_after_forward: true}
dp_shard_size: 8
"""
STAGES = json.dumps({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
                     "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})  # fmt: skip
TRACE = "arrival_s,input_length,output_length\n0.0,128,16\n0.5,256,32\n1.5,64,8\n"
LOADS = "layer,expert,count\n0,0,5\n0,1,7\n1,0,3\n1,1,9\n"
SIGNS = [
    *"{}[]:,&*!|>-?'\"#%@ \n\t\0\x1b$`()<>;=01.e~\\",
    "\r\n",
    "&a ",
    "*a ",
    "<<EOF\n",
    "$((",
    "$(",
    "1e999",
    "9" * 30,
]


def mutated(text: str, random_: random.Random) -> bytes:
    """A few random edits: bytes, signs, repeated or missing pieces, hostile texts."""
    for _ in range(random_.choice([1, 1, 1, 2, 5])):
        at = random_.randrange(len(text) + 1)
        to = min(len(text), at + random_.randint(0, 40))
        piece = random_.choice(
            [
                random_.choice(SIGNS) * random_.choice([1, 1, 2, 200]),
                random_.choice(HOSTILE_TEXTS[:-8]),
                text[at:to] * random_.choice([2, 50]),
                "",
            ]
        )
        text = text[:at] + piece + text[random_.choice([at, to]) :]
    content = text.encode("utf-8", "replace")[: 2**20]
    if random_.random() < 0.1:
        at = random_.randrange(len(content) + 1)
        content = content[:at] + bytes([random_.randrange(256)]) + content[at + 1 :]
    return content


def commands(folder: Path) -> dict[str, tuple[str, str, list[list[str]]]]:
    """Reader → file name, sound text, commands that read it."""
    catalog = json.dumps(
        {
            "format": "meshplan-catalog/1",
            "devices": {"h100-sxm-80gb": {"facts": [
                {"field": "tdp_w", "value": 650.0, "level": "measured here", "source": "s", "date": "2026-01-01"}
            ]}},
        }
    )  # fmt: skip
    model = json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100})  # fmt: skip
    (folder / "model.yaml").write_text(TRAINING.replace("llama-3.1-8b", "config.json"))
    serving = {"kind": "serving", "model": "llama-3.1-8b", "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
               "workload": {"trace": "trace.csv"}, "slo": {"ttft_p99_s": 5}}  # fmt: skip
    (folder / "trace.yaml").write_text(json.dumps(serving))
    limit = ["--no-store", "--time-limit", "2"]
    where = ["--node-type", "dgx-h100"]
    load = ["--input-length", "1000", "--output-length", "100", "--concurrency", "8"]
    model_of = ["--model", "llama-3.1-8b", "--nodes", "1"]
    return {
        "spec (YAML)": ("spec.yaml", TRAINING, [["plan", "spec.yaml", *limit]]),
        "import script": ("run.sh", SCRIPT, [["import", "run.sh", *where, "--model", "llama-3.1-8b"]]),
        "import pods": ("pods.yaml", MANIFEST, [["import", "pods.yaml", *where, *load]]),
        "import YAML": ("tune.yaml", TUNED, [["import", "tune.yaml", *where, "--nodes", "1"]]),
        "import JSON": ("zero.json", STAGES, [["import", "zero.json", *where, *model_of, "--sequence-length", "4096"]]),
        "catalog": ("catalog.json", catalog, [["catalog", "import", "catalog.json"]]),
        "model": ("config.json", model, [["plan", "model.yaml", *limit]]),
        "trace": ("trace.csv", TRACE, [["plan", "trace.yaml", *limit]]),
        "loads": ("loads.csv", LOADS, [["experts", "loads.csv", "--devices", "2"]]),
        "measured": ("measured.json", '{"iteration_s": 2.5}', [["plans", "record", "base", "measured.json"]]),
    }


def sound(reader: str, base: tuple[str, str, list[list[str]]], folder: Path) -> None:
    """Stop where the text before any edit is refused: its mutations would test little."""
    name, text, lines = base
    (folder / name).write_text(text)
    for line in lines:  # in a process of its own: a time limit counts from the start of the process
        command = [sys.executable, "-m", "meshplan.cli.main", *line]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{reader}: {' '.join(line)}: {done.stderr}")


def plans(folder: Path) -> dict[str, Any]:
    """A plan of each kind that this checkout's examples ask for."""
    found = {}
    for name in ("example", "serving", "allocation"):
        run_one(["plan", str(ROOT / f"{name}.yaml"), "--no-store", "--format", "json"], folder / "out", folder / "err")
        found[name] = json.loads((folder / "out").read_text())
    return found


def run_one(arguments: list[str], out: Path, err: Path) -> int:
    """One command in this process; its exit code."""
    from meshplan.cli.main import run

    with out.open("w", encoding="utf-8") as stdout, err.open("w", encoding="utf-8") as stderr:
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = stdout, stderr
        try:
            run(arguments)
        except SystemExit as exit_:
            return int(exit_.code or 0)
        finally:
            sys.stdout, sys.stderr = before
    return 0


def payload(folder: Path) -> bool:
    """Whether an output steers a terminal, or a canary was made."""
    texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err")]
    pages = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*.html")]
    return (
        any(re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text) for text in texts)
        or any("<script" in page for page in pages)
        or (folder / CANARY).exists()
    )


def inputs(reader: str, folder: Path, base: Any, random_: random.Random) -> Iterator[list[list[str]]]:
    """Writes one hostile input after the other; the commands that read it."""
    if reader == "plan":
        while True:
            (folder / "plan.json").write_text(json.dumps(random_forgery(random_.choice(list(base.values())), random_)))
            file = "./plan.json"
            yield [["plans", "show", file], ["explain", file], ["emit", file, "--out", "files", "--force"],
                   ["explain", file, "--pareto", "page.html", "--force"],
                   ["plans", "show", file, "-f", "csv"]]  # fmt: skip
    name, text, lines = base
    while True:
        (folder / name).write_bytes(mutated(text, random_))
        yield lines


def work(reader: str, base: Any, seed: int, count: int, database: str, queue: Any) -> None:
    """``count`` inputs; results go to the queue."""
    os.environ["MESHPLAN_DB"] = database
    resource.setrlimit(resource.RLIMIT_AS, (3 * MOST_BYTES, 3 * MOST_BYTES))
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        commands(folder)
        source = inputs(reader, folder, base, random.Random(seed))
        for _, lines in zip(range(count), source, strict=False):
            for line in lines:
                started = time.monotonic()
                code = run_one(line, folder / "out", folder / "err")
                found[f"exit {code}"] += 1
                found["slow"] += time.monotonic() - started > MOST_S
                found["payload"] += payload(folder)
                if code == 1:
                    queue.put(("bug", (folder / "err").read_text()[:300]))
    found["large"] += resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_BYTES
    queue.put(("done", found))


def batch(function: Callable[..., None], *arguments: Any) -> tuple[Counter[str], list[str]]:
    """One process; a process that dies counts as a crash."""
    queue: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=function, args=(*arguments, queue))
    process.start()
    total: Counter[str] = Counter()
    bugs: list[str] = []
    deadline = time.monotonic() + BATCH * 5 * MOST_S
    while process.is_alive() or not queue.empty():
        if queue.empty():
            time.sleep(0.05)
            if time.monotonic() > deadline:
                process.kill()
                total["hangs"] += 1
            continue
        kind, value = queue.get()
        if kind == "bug":
            bugs.append(value)
        else:
            total += value
    total["crashes"] += process.exitcode not in (0, None)
    return total, bugs


def main() -> None:
    """Forge, mutate, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forged", type=int, default=2000)
    parser.add_argument("--mutated", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the reader's name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = os.environ["MESHPLAN_DB"] = str(folder / "catalog.sqlite")
        (folder / "base.yaml").write_text(TRAINING)
        run_one(["plan", str(folder / "base.yaml"), "--tag", "base"], folder / "out", folder / "err")
        readers: dict[str, Any] = {"plan": None, **commands(folder)}
        if options.only in "plan":
            readers["plan"] = plans(folder)
        for reader, base in readers.items():
            if options.only not in reader:
                continue
            if base is not None and reader != "plan":
                sound(reader, base, folder)
            count = options.forged if reader == "plan" else options.mutated // (len(readers) - 1)
            total: Counter[str] = Counter()
            bugs: list[str] = []
            for start in range(0, count, BATCH):
                size = min(BATCH, count - start)
                found, more = batch(work, reader, base, options.seed * 1_000_003 + start, size, database)
                total += found
                bugs += more
            exits = ", ".join(f"{key}: {value}" for key, value in sorted(total.items()) if key.startswith("exit"))
            bad = {key: total[key] for key in ("slow", "large", "payload", "hangs", "crashes")}
            print(f"{reader:13} {count} inputs; {exits}; {bad}", flush=True)
            for text in sorted(set(bugs))[:10]:
                print(f"    {text.strip()}")


if __name__ == "__main__":
    main()
