"""The README.md of an output folder of a serving plan."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.planner.core.text import counted
from meshplan.planner.emit.artifact import Artifact, stamp
from meshplan.planner.emit.serving.benchmark import uses_aiperf
from meshplan.planner.emit.serving.job import ServingJob
from meshplan.planner.emit.text import README_FILE, plain
from meshplan.planner.serving.problem.config import Pool


def serving_overview(job: ServingJob, *, num_hosts: int, start: str = "", notes: Sequence[str] = ()) -> Artifact:
    """README.md for one serving plan.

    Args:
        job: what is served.
        num_hosts: hosts in use; 0 where an orchestrator decides.
        start: how to start it; empty for the scripts.
        notes: those of an orchestrator, besides those of the job.
    """
    request = job.request
    config = request.config
    lines = "\n".join(f"    {line}" for line in stamp(request.plan, job.verified))
    pools = "\n\n".join(_pool_text(name, pool) for name, pool in zip(config.pool_names, config.pools, strict=True))
    listed_notes = "\n".join(f"- {note}" for note in (*job.notes, *notes)) or "- none"
    is_alone = sum(pool.num_workers for pool in config.pools) == 1
    router = "" if is_alone else f" Router: {config.router.value}."
    content = f"""# {plain(request.shape.name)} on {counted(config.num_devices, "device")} with {config.engine}

{lines}

{start or _how_to_start(job, num_hosts)}

Checkpoint: `{plain(request.model)}`, {_holds(job)}.{router}

{pools}

{_how_to_measure(job)}## Notes

{listed_notes}
"""
    return Artifact(path=README_FILE, content=content)


def _how_to_measure(job: ServingJob) -> str:
    """How the plan's figures are measured; empty where the workload is a trace."""
    if job.request.load is None:
        return ""
    tool = "aiperf" if uses_aiperf(job.target) else "the engine's own load generator"
    return (
        f"## Measure\n\n`./benchmark.sh URL` warms the servers up and sends the workload of the plan with {tool}; its "
        "head says how `meshplan plans record` reads the result and sets it beside the plan's figures.\n\n"
    )


def _holds(job: ServingJob) -> str:
    """What the checkpoint has to hold."""
    request = job.request
    schemes = {scheme for pool in request.config.pools for scheme in (pool.quantization.mlp, pool.quantization.experts)}
    narrow = sorted(schemes - {"bf16", "fp16"})
    if narrow and all(request.is_quantized(scheme) for scheme in narrow):
        return f"which has to hold weights in {', '.join(narrow)}"
    return "in 16 bits" if not narrow else f"in 16 bits: the engine makes {', '.join(narrow)} of it"


def _pool_text(name: str, pool: Pool) -> str:
    choices: list[tuple[str, object]] = [
        ("workers", pool.num_workers),
        ("devices of a worker", pool.layout.num_devices),
    ]
    choices += [(name, getattr(pool.layout, name)) for name in pool.layout.__dataclass_fields__]
    limits = {name: getattr(pool.limits, name) for name in pool.limits.__dataclass_fields__ if name != "admission"}
    choices += [(name, value) for name, value in limits.items() if value is not None]  # None: what the engine does
    choices += [("weight", pool.weight)] if pool.weight > 1 else []
    choices += [] if pool.power_cap_w is None else [("power_cap_w", f"{pool.power_cap_w:g}")]
    choices += [("formats", pool.quantization.label), ("hosts", plain(pool.node_type))]
    rows = "\n".join(f"| {name} | {value} |" for name, value in choices)
    return f"## Role {name}\n\n| choice | value |\n|---|---|\n{rows}"


def _how_to_start(job: ServingJob, num_hosts: int) -> str:
    request = job.request
    default = "those of the plan" if request.hosts else "`127.0.0.1`" if num_hosts == 1 else "–"
    hosts = "the host" if num_hosts == 1 else f"each of the {num_hosts} hosts"
    text = f"Start on {hosts} `./launch.sh HOST`, with the host number of `workers.txt`"
    if not request.hosts and num_hosts > 1:
        text += ", and `MESHPLAN_HOSTS` set to the addresses of all hosts in order"
    last = "Clients talk to it" if job.router is None else "then `./router.sh` on one host. Clients talk to the router"
    separator = ". " if job.router is None else "; "
    return f"""{text}{separator}{last}, port {request.port}.

| variable | default | meaning |
|---|---|---|
| `MESHPLAN_HOSTS` | {default} | addresses of the hosts, in order |
| `MESHPLAN_LOGS` | `logs` beside the scripts | folder of the servers' logs |
| `MESHPLAN_READY_TIMEOUT_S` | `3600` | how long the servers may take to load |
| `MESHPLAN_SKIP_CHECKS` | `0` | 1: start without checking GPUs |

Flags after the host number are passed on to every server and override those of the plan."""
