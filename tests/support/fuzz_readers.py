"""What meshplan reads, each as a sound text with the commands that read it; and random edits of such a text."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hostile import HOSTILE_TEXTS, places

MOST_INPUT_BYTES = 2**20
SUPPORT = Path(__file__).parent
DATA = SUPPORT.parent / "data"
TRAINING = """\
kind: training
model: llama-3.1-8b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {sequence_length: 4096, global_batch_size: 64}
fixed: {tensor_parallel: 1, pipeline_parallel: 1, context_parallel: 1, data_parallel_shard: 8, zero_stage: 1}
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
ACCELERATED = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_activation_checkpointing: true}
"""
TRACE = "arrival_s,input_length,output_length\n0.0,128,16\n0.5,256,32\n1.5,64,8\n"
LOADS = "layer,expert,count\n0,0,5\n0,1,7\n1,0,3\n1,1,9\n"
SERVING = """\
kind: serving
model: llama-3.1-8b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {input_length: 512, output_length: 64, concurrency: 8, num_requests: 64}
fixed: {tensor_parallel: 1, pipeline_parallel: 1, num_workers: 1}
"""
ALLOCATION = """\
kind: gpu-allocation
model: llama-3.1-8b
market: {rent: node, offers: [{type: aws-g5-xlarge, max_nodes: 8}, {type: dgx-a100-80gb}]}
workload: {buckets: [{input_tokens: [1, 512], output_tokens: [1, 64], request_rate_per_s: 2}]}
slo: {ttft_p99_s: 3, tpot_p95_s: 0.1}
"""
RUN = (
    TRAINING.replace("global_batch_size: 64}", "global_batch_size: 64, num_training_tokens: 2T}")
    + """\
run: {failures_per_node_day: 0.004, checkpoint: {interval: 30 min}}
"""
)
SWEEP = """\
kind: sweep
name: batches
base: {kind: training, model: llama-3.1-8b, cluster: {nodes: [{type: dgx-h100, count: 1}]},
       workload: {sequence_length: 4096, global_batch_size: 64},
       fixed: {tensor_parallel: 1, pipeline_parallel: 1, zero_stage: 1}}
over: {workload.global_batch_size: [64, 128], workload.sequence_length: [2048, 4k]}
group_by: [workload.sequence_length]
"""
BENCH = json.dumps({"request_throughput": 1.98, "output_throughput": 1980.5, "mean_ttft_ms": 410.25,
                    "p99_ttft_ms": 1830.0, "mean_tpot_ms": 21.5, "p99_tpot_ms": 31.0, "num_prompts": 600})  # fmt: skip
LOG = "".join(
    f" [2026-01-01 00:00:0{step}] iteration {step:8d}/     100 | consumed samples: {step * 64} | elapsed time "
    f"per iteration (ms): {milliseconds} | throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.0E-04 |\n"
    for step, milliseconds in enumerate((9000.0, 2000.0, 2100.0, 2050.0), start=1)
)
PRICES = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,AvailabilityZone
p5.48xlarge,H100,8,192,2048,98.32,49.16,us-east-1,us-east-1a
p5.48xlarge,H100,8,192,2048,55.04,27.52,us-east-2,us-east-2a
"""
NCCL = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid   1000 on     node0 device  0 [0x18] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1001 on     node0 device  1 [0x2a] NVIDIA H100 80GB HBM3
#
# all_reduce_perf
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    20.00   52.43   52.43      0    20.00   52.43   52.43      0
     8388608       2097152     float     sum      -1    60.00  139.81  139.81      0    60.00  139.81  139.81      0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One kind of input.

    Args:
        name: as printed.
        file: where the text is written.
        text: sound: no command refuses it.
        commands: that read the file, one after the other.
        is_packed: the file holds the text compressed by gzip.
        beside: other files that the commands need.
        body: reads the text without a command line (bodies of the HTTP API).
    """

    name: str
    file: str
    text: str
    commands: tuple[tuple[str, ...], ...] = ()
    is_packed: bool = False
    beside: tuple[tuple[str, str], ...] = ()
    body: Callable[[bytes], None] | None = None

    def write(self, folder: Path, content: bytes) -> None:
        """The input and what stands beside it."""
        for name, text in self.beside:
            (folder / name).write_text(text)
        (folder / self.file).write_bytes(gzip.compress(content, 1) if self.is_packed else content)


def _question(content: bytes) -> None:
    """The body of a question over HTTP, as the service reads it."""
    from meshplan.cli.web.asking import check_question, read_question

    check_question(read_question(content, "application/yaml"))


def _options(content: bytes) -> None:
    """The query of a question over HTTP: options of ``meshplan plan``."""
    from urllib.parse import parse_qsl

    from pydantic import ValidationError

    from meshplan.catalogs.errors import Problem, SpecError
    from meshplan.cli.web.asking import Options

    try:
        Options.model_validate(dict(parse_qsl(content.decode("utf-8", "replace"))))
    except ValidationError as error:
        raise SpecError([Problem(path="", message=str(error))], of="the request") from error


def readers() -> tuple[Reader, ...]:
    """Every reader of the command line and of HTTP."""
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
    traced = json.dumps({"kind": "serving", "model": "llama-3.1-8b",
                         "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
                         "workload": {"trace": "trace.csv"}, "slo": {"ttft_p99_s": 5},
                         "fixed": {"tensor_parallel": 1, "num_workers": 1}})  # fmt: skip
    observed = (SUPPORT.parent / "validation" / "observations.jsonl").read_text(encoding="utf-8").splitlines()[0] + "\n"
    served = (SUPPORT.parent / "validation" / "serving-observations.jsonl").read_text(encoding="utf-8").splitlines()[0]
    mapping = (DATA / "rank_mapping" / "rank-mapping-uniform-6n-pp3-dp2.json").read_text(encoding="utf-8")
    allocation = (DATA / "gpu_allocation" / "toy.json").read_text(encoding="utf-8")
    limit = ("--no-store", "--time-limit", "5")
    where = ("--node-type", "dgx-h100")
    load = ("--input-length", "1000", "--output-length", "100", "--concurrency", "8")
    model_of = ("--model", "llama-3.1-8b", "--nodes", "1")
    return (
        Reader(name="spec", file="spec.yaml", text=TRAINING, commands=(("plan", "spec.yaml", *limit),)),
        Reader(name="serving spec", file="spec.yaml", text=SERVING, commands=(("plan", "spec.yaml", *limit),)),
        Reader(name="allocation", file="spec.yaml", text=ALLOCATION, commands=(("plan", "spec.yaml", *limit),)),
        Reader(name="run", file="spec.yaml", text=RUN, commands=(("plan", "spec.yaml", *limit),)),
        Reader(name="batch", file="spec.yaml", text=RUN,
               commands=(("batch", "spec.yaml", "--noise", "0:1M,1:8M", "--batches", "256k,512k"),)),
        Reader(name="sweep", file="sweep.yaml", text=SWEEP, commands=(("sweep", "run", "sweep.yaml", "-n", "1"),)),
        Reader(name="mapping", file="spec.json", text=mapping, commands=(("plan", "spec.json", *limit),)),
        Reader(name="fleet problem", file="spec.json", text=allocation, commands=(("plan", "spec.json", *limit),)),
        Reader(name="model", file="config.json", text=model, commands=(("plan", "model.yaml", *limit),),
               beside=(("model.yaml", TRAINING.replace("llama-3.1-8b", "config.json")),)),
        Reader(name="trace", file="trace.csv", text=TRACE, commands=(("plan", "trace.yaml", *limit),),
               beside=(("trace.yaml", traced),)),
        Reader(name="import script", file="run.sh", text=SCRIPT,
               commands=(("import", "run.sh", *where, "--model", "llama-3.1-8b"),)),
        Reader(name="import pods", file="pods.yaml", text=MANIFEST, commands=(("import", "pods.yaml", *where, *load),)),
        Reader(name="import YAML", file="tune.yaml", text=TUNED,
               commands=(("import", "tune.yaml", *where, "--nodes", "1"),)),
        Reader(name="import JSON", file="zero.json", text=STAGES,
               commands=(("import", "zero.json", *where, *model_of, "--sequence-length", "4096"),)),
        Reader(name="import launcher", file="accelerate.yaml", text=ACCELERATED,
               commands=(("import", "accelerate.yaml", *where, *model_of, "--sequence-length", "4096",
                          "--global-batch-size", "64"),)),
        Reader(name="catalog", file="catalog.json", text=catalog, commands=(("catalog", "import", "catalog.json"),)),
        Reader(name="prices", file="aws.csv", text=PRICES,
               commands=(("catalog", "import", "aws.csv", "--provider", "aws"),)),
        Reader(name="collectives", file="nccl.log", text=NCCL,
               commands=(("profile", "import", "nccl.log", "--name", "lab", "--device", "h100-sxm-80gb"),)),
        Reader(name="loads", file="loads.csv", text=LOADS, commands=(("experts", "loads.csv", "--devices", "2"),)),
        Reader(name="packed trace", file="trace.csv.gz", text=TRACE, is_packed=True,
               commands=(("plan", "trace.yaml", *limit),), beside=(("trace.yaml", traced.replace(".csv", ".csv.gz")),)),
        Reader(name="observations", file="rows.jsonl", text=observed, commands=(("validate", "rows.jsonl"),)),
        Reader(name="serving rows", file="rows.jsonl", text=served + "\n", commands=(("validate", "rows.jsonl"),)),
        Reader(name="measured", file="measured.json", text='{"iteration_s": 2.5}',
               commands=(("plans", "record", "base", "measured.json"),)),
        Reader(name="training log", file="train.log", text=LOG,
               commands=(("plans", "record", "base", "--from", "train.log"),)),
        Reader(name="serving log", file="bench.json", text=BENCH,
               commands=(("plans", "record", "served", "--from", "bench.json"),)),
        Reader(name="HTTP body", file="body.yaml", text=TRAINING, body=_question),
        Reader(name="HTTP options", file="query", text="top=5&seed=1&time_limit_s=30&certify=true", body=_options),
    )  # fmt: skip


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
    content = text.encode("utf-8", "replace")[:MOST_INPUT_BYTES]
    if random_.random() < 0.1:
        at = random_.randrange(len(content) + 1)
        content = content[:at] + bytes([random_.randrange(256)]) + content[at + 1 :]
    return content


# Values of every shape, for a place that expects another one.
SHAPES: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    "",
    "x",
    [],
    [1],
    [[]],
    [{"a": [1]}],
    {},
    {"a": 1},
    {"a": {"b": []}},
]


def reshaped(text: str, random_: random.Random) -> bytes:
    """One or two fields of a document with a value of another shape, or gone; any other text as :func:`mutated`."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        document = None
    if not isinstance(document, dict):
        return mutated(text, random_)
    for _ in range(random_.choice([1, 1, 2])):
        *folders, key = random_.choice(list(places(document)) or [("kind",)])
        inner = document
        for folder in folders:
            inner = inner[folder]
        if isinstance(inner, dict) and random_.random() < 0.1:
            inner.pop(key, None)
        else:
            inner[key] = random_.choice(SHAPES)
    return json.dumps(document).encode()
