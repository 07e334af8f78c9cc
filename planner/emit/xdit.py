"""A diffusion plan as xDiT's command line: one script that makes pictures of prompts, and a page about it.

Models that xDiT's model runner knows are started by it: ``xfuser.runner``, which the wheel of 0.7.0 has and that of
0.4.5 has not; the names are those that its models are registered under, with the options that they say they take. The
others are started by xDiT's example scripts, which are in its repository, not in its package; they take the arguments
of ``xfuser/config/args.py``, read in the wheels of 0.4.5 and 0.7.0 (2026-11-24). The degrees' product must be the
number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.hardware import Device
from meshplan.catalogs.untrusted.quoting import shell_word
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.emit.artifact import Artifact, EmittedPlan, commented, stamp
from meshplan.planner.emit.gpu_checks import gpu_checks
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.text import MANIFEST_CHECK, README_FILE, plain

TARGET = "xdit"
# The release whose wheel has the model runner, and the one that plans were measured with.
RUNNER_RELEASE, MEASURED_RELEASE = "0.7.0", "0.4.5"
SCRIPT = PurePosixPath("generate.sh")
# Degree of a plan → xDiT's argument.
FLAGS: Mapping[str, str] = {
    "ulysses": "--ulysses_degree",
    "ring": "--ring_degree",
    "pipefusion": "--pipefusion_parallel_degree",
    "tensor_parallel": "--tensor_parallel_degree",
}
# Of replica 0; the others of a host count on from here.
FIRST_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class XditRequest:
    """What is emitted.

    Args:
        plan: with its configuration.
        model: as the plan carries it: fields of :class:`meshplan.catalogs.models.diffusion.DiffusionModel`.
        job: height, width, frames, steps.
        device: of the hosts; None where the catalog knows it no longer.
        devices_per_host: on one host.
        model_path: checkpoint; empty for where the model is published.
    """

    plan: Plan
    model: Mapping[str, Any]
    job: Mapping[str, int]
    device: Device | None
    devices_per_host: int
    model_path: str = ""


def features() -> tuple[Feature, ...]:
    """What the target states about itself."""
    read = "xfuser 0.4.5 and 0.7.0, config/args.py, read"
    rows = {**FLAGS, "cfg_parallel": "--use_cfg_parallel", "replicas": "one call of generate.sh each"}
    return tuple(Feature(name=name, expressed_by=flag, verified_by=read) for name, flag in rows.items())


def arguments(request: XditRequest) -> list[str]:
    """Arguments of xDiT, prompts left out."""
    config, job, support = request.plan.config, request.job, request.model["xdit"]
    published = str(request.model["source"]).removeprefix("https://huggingface.co/")
    words = ["--model", request.model_path or support["runner"] or published]
    words += ["--height", str(job["height"]), "--width", str(job["width"])]
    words += ["--num_inference_steps", str(job["steps"])]
    if job["frames"] > 1:
        words += ["--num_frames", str(job["frames"])]
    for name, flag in FLAGS.items():
        if config[name] > 1:
            words += [flag, str(config[name])]
    if config["cfg_parallel"] > 1:
        words.append("--use_cfg_parallel")
    if config["pipefusion"] > 1 and not support["runner"]:  # the runner has its defaults: as many patches, one step
        words += ["--num_pipeline_patch", str(config["pipefusion"]), "--warmup_steps", "1"]
    if request.model["vae"]["tiled"]:
        words += ["--enable_tiling", "--enable_slicing"]
    return words


def emit(request: XditRequest) -> EmittedPlan:
    """The files."""
    return EmittedPlan(
        target=TARGET,
        artifacts=(
            Artifact(path=README_FILE, content=_readme(request)),
            Artifact(path=SCRIPT, content=_script(request), executable=True),
        ),
        parser_verified=None,
        notes=tuple(_notes(request)),
    )


def _replica_devices(request: XditRequest) -> int:
    config = request.plan.config
    found = config["cfg_parallel"]
    for name in FLAGS:
        found *= config[name]
    return int(found)


def _notes(request: XditRequest) -> list[str]:
    config, support = request.plan.config, request.model["xdit"]
    found = [f"Give {counted(config['batch_size'], 'prompt')} at a time: the plan's batch."]
    if not support["runner"]:
        found.append(
            f"Set XDIT_DIR to a checkout of xDiT of that release: its {plain(support['script'])} starts the model."
        )
    else:
        found.append(
            f"xDiT {RUNNER_RELEASE} has the model runner; the plan's times are of {MEASURED_RELEASE}, without it."
        )
    if config["pipefusion"] > 1:
        found.append("PipeFusion uses keys and values of the step before: pictures differ from those of one device.")
    return found


def _script(request: XditRequest) -> str:
    size, hosts = _replica_devices(request), 1
    per_host = min(size, request.devices_per_host)
    hosts = size // per_host
    support = request.model["xdit"]
    start = "-m xfuser.runner" if support["runner"] else f'"$XDIT_DIR"/{shell_word(support["script"])}'
    need = "" if support["runner"] else ': "${XDIT_DIR:?set it to a checkout of xDiT}"\n'
    words = " ".join(shell_word(word) for word in arguments(request))
    placed = f"--nproc_per_node={per_host}"
    if hosts > 1:
        placed += f' --nnodes={hosts} --node_rank="${{NODE_RANK:?}}" --master_addr="${{MASTER_ADDR:?}}"'
        placed += f" --master_port={FIRST_PORT}"
    else:
        placed += f' --master_port="$(( {FIRST_PORT} + replica ))"'
    return (
        "#!/usr/bin/env bash\n"
        + commented(stamp(request.plan, None))
        + f"""# usage: [REPLICA=0] ./{SCRIPT} PROMPT...   (replicas 0 to {request.plan.config["replicas"] - 1})
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
hostname=$(hostname)
fail() {{ echo "generate.sh: $*" >&2; exit 1; }}
{MANIFEST_CHECK}(( $# == {request.plan.config["batch_size"]} )) || [[ ${{MESHPLAN_ANY_BATCH:-0}} == 1 ]] || fail \\
  "the plan's batch is {request.plan.config["batch_size"]}, $# prompts were given; set MESHPLAN_ANY_BATCH=1 for others"
{need}replica=${{REPLICA:-0}}
[[ $replica =~ ^[0-9]+$ ]] && (( replica < {request.plan.config["replicas"]} )) || fail "there is no replica $replica"
first=$(( replica % {request.devices_per_host // per_host} * {per_host} ))
mapfile -t device_list < <(seq "$first" "$(( first + {per_host - 1} ))")
check_devices() {{
{gpu_checks(request.device)}
  :
}}
[[ ${{MESHPLAN_SKIP_CHECKS:-0}} == 1 ]] || check_devices
CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${{device_list[*]}}")
export CUDA_VISIBLE_DEVICES
exec torchrun {placed} {start} {words} --prompt "$@"
"""
    )


def _places(request: XditRequest, size: int) -> list[str]:
    """Where replicas are started."""
    if size > request.devices_per_host:
        hosts = size // request.devices_per_host
        return [f"Start a replica on each of its {hosts} hosts, with NODE_RANK (from 0) and MASTER_ADDR set."]
    each = request.devices_per_host // size
    if request.plan.config["replicas"] == 1:
        return []
    return [f"REPLICA=1 starts the second replica, and so on; a host takes {counted(each, 'replica')}, in this order."]


def _readme(request: XditRequest) -> str:
    plan, config = request.plan, request.plan.config
    chosen = ", ".join(f"{name} {value}" for name, value in config.items() if value > 1) or "one device"
    size = _replica_devices(request)
    latency = plan.predicted["latency_s"]
    lines = [
        f"# {plain(str(request.model['name']))} with xDiT",
        "",
        f"Plan {plan.plan_id}: {counted(config['replicas'], 'replica')} of {counted(size, 'device')}; {chosen}.",
        f"A batch of {config['batch_size']} is expected to take {latency.value:.3g} s "
        f"({latency.low:.3g} to {latency.high:.3g} s) once the model is loaded and warm.",
        "",
        f"    pip install xfuser=={RUNNER_RELEASE if request.model['xdit']['runner'] else MEASURED_RELEASE}",
        f'    ./{SCRIPT} "a lighthouse in the rain"' + (" ..." if config["batch_size"] > 1 else ""),
        "",
        *_places(request, size),
        "The arguments were read in xDiT's parser, not run.",
        "",
        *(f"- {note}" for note in _notes(request)),
    ]
    return "\n".join(lines) + "\n"
