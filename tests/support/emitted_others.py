"""Plans of images and of several node types under their own targets: devices and rules, counted in the files alone.

xDiT's arguments are read by the options of its two parsers and held against the rules of its configuration; FlagScale's
by its arguments' rules and by how many processes its runner starts on a host. Shares no code with the emitters.

Source: xfuser 0.4.5 and 0.7.0, ``xfuser/config/args.py`` and ``config.py``; FlagScale, ``flagscale/runner/utils.py``
(``get_nproc_per_node``: the lesser of a host's slots and of ``nproc_per_node``) and ``flagscale/train/arguments.py``.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import yaml
from emitted import Outcome

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.service import emit_plan, estimate_plan

IMAGES = ("pixart-sigma", "sd3.5-medium", "flux.1-dev", "hunyuanvideo", "wan2.1-t2v-14b")
NODE_TYPES = {"dgx-a100-40gb": 8, "dgx-h100": 8, "gcp-a3-highgpu-8g": 8}
MESH = 5  # tensor, context, expert, data, pipeline
_XDIT_DEGREES = ("ulysses_degree", "ring_degree", "pipefusion_parallel_degree", "tensor_parallel_degree")
_XDIT_SIZES = ("height", "width", "num_frames", "num_inference_steps", "num_pipeline_patch", "warmup_steps")
_NOT_OF_THE_RUNNER = ("num_pipeline_patch", "warmup_steps")
_STARTER = '#!/bin/sh\nprintf "%s\\n" "$CUDA_VISIBLE_DEVICES"\nprintf "%s\\n" "$@"\n'


def _is_kept(plan: Plan) -> bool:
    return not plan.solution.get("broken") and bool(plan.config)


# --- random plans -----------------------------------------------------------------------------------------------------


def random_images(draw: random.Random, catalog: Catalog) -> Plan:
    """A deployment of a diffusion transformer that the machine has room for."""
    while True:
        fixed = {name: draw.choice((1, 1, 2, 4, 8)) for name in ("ulysses", "ring")}
        fixed |= {name: draw.choice((1, 1, 2)) for name in ("cfg_parallel", "pipefusion", "tensor_parallel")}
        fixed |= {"replicas": draw.choice((1, 1, 2, 3, 4)), "batch_size": draw.choice((1, 2, 4))}
        nodes = [{"type": "dgx-h100", "count": draw.choice((1, 2, 4))}]
        spec = {"kind": "diffusion", "model": draw.choice(IMAGES), "cluster": {"nodes": nodes}, "fixed": fixed}
        try:
            plan = estimate_plan({**spec, "constraints": {"stale_activations": True}}, catalog, beyond=False)
        except SpecError:
            continue
        if _is_kept(plan):
            return plan


def random_stages(draw: random.Random, catalog: Catalog) -> Plan:
    """A training plan whose stages lie on two node types."""
    while True:
        types = draw.sample(list(NODE_TYPES), 2)
        counts = [draw.choice((1, 2)) for _ in types]
        sequences = draw.choice((4, 8, 16))  # of a micro-batch over all replicas
        number = draw.randint(2, 5)
        cuts = [0, *sorted(draw.sample(range(1, 32), number - 1)), 32]
        on = sorted((0, 1, *(draw.choice((0, 1)) for _ in range(number - 2))))
        stages = []
        for place, pool in enumerate(on):
            alike = place and on[place - 1] == pool and draw.random() < 0.7
            micro = stages[-1]["micro_batch_size"] if alike else draw.choice((1, 2, 4))
            stages.append(
                {
                    "node_type": types[pool],
                    "num_layers": cuts[place + 1] - cuts[place],
                    "tensor_parallel": stages[-1]["tensor_parallel"] if alike else draw.choice((1, 2, 4, 8)),
                    "data_parallel": sequences // micro,
                    "micro_batch_size": micro,
                    "activation_recompute": draw.choice(("none", "none", "full", "selective")),
                }
            )
        spec = {
            "kind": "training",
            "model": "llama-3.1-8b",
            "cluster": {
                "nodes": [{"type": name, "count": count} for name, count in zip(types, counts, strict=True)],
                "links": {"between_types": [{"types": types, "bandwidth": "50 GB/s", "latency": "10 us"}]},
            },
            "workload": {"sequence_length": 2048, "global_batch_size": 8 * sequences, "precision": "bf16"},
            "fixed": {"stages": stages},
        }
        try:
            return estimate_plan(spec, catalog)
        except SpecError:
            continue


# --- xDiT -------------------------------------------------------------------------------------------------------------


def _xdit_parser(*, is_runner: bool) -> argparse.ArgumentParser:
    """The options that plans use, as xDiT's parsers have them; another word ends in an error."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", nargs="*", default=[])
    for name in ("use_cfg_parallel", "enable_tiling", "enable_slicing"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in (*_XDIT_DEGREES, *_XDIT_SIZES):
        if not (is_runner and name in _NOT_OF_THE_RUNNER):
            parser.add_argument(f"--{name}", type=int, default=1)
    return parser


def _starts(folder: Path, batch: int, replica: int, rank: int) -> list[str]:
    """What one call of the script hands to torchrun, which here prints it; empty for a refusal."""
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MESHPLAN_SKIP_CHECKS": "1",
        "XDIT_DIR": "/opt/xdit",
        "REPLICA": str(replica),
        "NODE_RANK": str(rank),
        "MASTER_ADDR": "node-0",
    }
    prompts = [f"prompt {number}" for number in range(batch)]
    done = subprocess.run(
        ["bash", str(folder / "generate.sh"), *prompts], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def wrong_of_xdit(emitted: EmittedPlan, config: dict[str, Any], per_host: int) -> str:
    """What the script does otherwise than the plan says; empty for nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in emitted.artifacts:
            (folder / file.path.name).write_text(file.content)
        (folder / "torchrun").write_text(_STARTER)
        (folder / "torchrun").chmod(0o755)
        taken: set[tuple[int, str]] = set()
        for replica in range(config["replicas"] + 1):
            words = _starts(folder, config["batch_size"], replica, 0)
            if not words:
                break
            hosts = next((int(word.partition("=")[2]) for word in words if word.startswith("--nnodes=")), 1)
            if hosts > 1 and not all(_starts(folder, config["batch_size"], replica, rank) for rank in range(hosts)):
                return "a host of a replica is refused"
            if wrong := _wrong_call(words, hosts, config):
                return wrong
            devices = words[0].split(",")
            size = len(devices) * hosts
            first = replica * hosts if hosts > 1 else replica // (per_host // size)
            taken |= {(first + host, device) for host in range(hosts) for device in devices}
            if size * (replica + 1) != len(taken):
                return f"replica {replica} shares devices with another"
    wanted = prod(config.values()) // config["batch_size"]
    return "" if len(taken) == wanted else f"{len(taken)} devices, the plan has {wanted}"


def _wrong_call(words: Sequence[str], hosts: int, config: dict[str, Any]) -> str:
    processes = int(next(word.partition("=")[2] for word in words if word.startswith("--nproc_per_node=")))
    is_runner = "xfuser.runner" in words
    begins = words.index("--model")
    try:
        read = _xdit_parser(is_runner=is_runner).parse_args(words[begins:])
    except (argparse.ArgumentError, SystemExit) as error:
        return f"xDiT does not take {shlex.join(words[begins:])}: {error}"
    degrees = prod(getattr(read, name) for name in _XDIT_DEGREES) * (2 if read.use_cfg_parallel else 1)
    if degrees != processes * hosts:
        return f"the degrees make {degrees} processes, torchrun starts {processes * hosts}"
    if len(words[0].split(",")) != processes:
        return f"{processes} processes see the devices {words[0]}"
    if len(read.prompt) != config["batch_size"]:
        return f"{len(read.prompt)} prompts, the batch is {config['batch_size']}"
    return ""


def image_outcomes(plan: Plan, catalog: Catalog) -> Iterator[Outcome]:
    """One deployment under xDiT, which takes all that its rules let a plan have."""
    try:
        emitted = emit_plan(plan, "xdit", catalog)
    except CannotExpressError as error:
        yield Outcome("xdit", is_emitted=False, wrong=f"refused without reason: {error}")
        return
    per_host = catalog.node_type(str(plan.provenance["node_type"])).devices_per_host
    yield Outcome("xdit", is_emitted=True, wrong=wrong_of_xdit(emitted, dict(plan.config), per_host))


# --- FlagScale --------------------------------------------------------------------------------------------------------


def wrong_of_flagscale(emitted: EmittedPlan, stages: Sequence[dict[str, Any]]) -> str:
    """What FlagScale would refuse of the files, or do otherwise than the plan says; empty for nothing."""
    files = {str(file.path): file.content for file in emitted.artifacts}
    system = yaml.safe_load(files["train/plan.yaml"])["system"]
    runner = yaml.safe_load(files["config.yaml"])["experiment"]["runner"]
    hetero = system["hetero"]
    meshes, split = hetero["hetero_process_meshes"], hetero["hetero_pipeline_layer_split"]
    if len(meshes) % MESH:
        return "a mesh has not five numbers"
    tensor, _, _, data, parts = (meshes[place::MESH] for place in range(MESH))
    hosts = [line.split() for line in files["hostfile"].splitlines() if line and not line.startswith("#")]
    types = [words[2].removeprefix("type=") for words in hosts]
    slots = [min(int(words[1].removeprefix("slots=")), runner["nproc_per_node"]) for words in hosts]
    asked = sum(prod(meshes[first : first + MESH]) for first in range(0, len(meshes), MESH))
    wanted = sum(stage["tensor_parallel"] * stage["data_parallel"] for stage in stages)
    if not asked == wanted == sum(slots):
        return f"meshes of {asked} devices on hosts that start {sum(slots)}, the plan has {wanted}"
    if runner["nnodes"] != len(hosts):
        return f"{runner['nnodes']} nodes, {len(hosts)} hosts"
    # Ranks fill the hosts in their order: those of a mesh must lie on hosts of its type.
    lies_on = [kind for kind, count in zip(types, slots, strict=True) for _ in range(count)]
    first = 0
    for place, kind in enumerate(hetero["hetero_device_types"]):
        size = prod(meshes[MESH * place : MESH * place + MESH])
        if set(lies_on[first : first + size]) != {kind}:
            return f"mesh {place} of {kind} lies on {sorted(set(lies_on[first : first + size]))}"
        first += size
    if split != [stage["num_layers"] for stage in stages] or len(split) != sum(parts):
        return f"layers {split} in {sum(parts)} stages"
    if system["pipeline_model_parallel_size"] != len(split) or sum(split) != system["num_layers"]:
        return f"{system['pipeline_model_parallel_size']} stages of {system['num_layers']} layers, not {split}"
    sequences = data[0] * system["micro_batch_size"]
    if any(sequences % other for other in data):
        return f"{sequences} sequences of a micro-batch are not a multiple of {data}"
    return _wrong_recompute(system, stages) or ("" if len(tensor) == len(data) else "meshes of unlike length")


def _wrong_recompute(system: dict[str, Any], stages: Sequence[dict[str, Any]]) -> str:
    """Full recompute of each stage as the arguments say it; of selective recompute only whether it is there."""
    modes = [stage["activation_recompute"] for stage in stages]
    said = system.get("recompute_granularity", "none")
    if "recompute_granularity_per_stage_micro_batch" not in system:
        return "" if set(modes) == {said} else f"recompute {said} for {modes}"
    rows = [yaml.safe_load(row) for row in system["recompute_granularity_per_stage_micro_batch"]]
    written = ["full" if row[-1] else "none" for row in rows for _ in range(row[0])]
    return "" if written == modes else f"recompute {written} for {modes}"


def is_true_of_flagscale(stages: Sequence[dict[str, Any]], reason: str) -> bool:
    """Whether a refusal's reason holds of the plan."""
    modes = {stage["activation_recompute"] for stage in stages}
    sequences = stages[0]["data_parallel"] * stages[0]["micro_batch_size"]
    known = {
        "selective recompute on some": "selective" in modes and len(modes) > 1,
        "multiple of every mesh's": any(sequences % stage["data_parallel"] for stage in stages),
    }
    return any(holds for words, holds in known.items() if words in reason)


def stage_outcomes(plan: Plan, catalog: Catalog) -> Iterator[Outcome]:
    """One plan on several node types under FlagScale."""
    stages = plan.config["stages"]
    try:
        emitted = emit_plan(plan, "flagscale", catalog)
    except CannotExpressError as error:
        wrong = "" if is_true_of_flagscale(stages, str(error)) else f"refused without reason: {error}"
        yield Outcome("flagscale", is_emitted=False, wrong=wrong)
        return
    yield Outcome("flagscale", is_emitted=True, wrong=wrong_of_flagscale(emitted, stages))
