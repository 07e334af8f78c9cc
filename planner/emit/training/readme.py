"""The README.md of an output folder: what to run, what was planned, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshplan.planner.emit.artifact import Artifact, stamp
from meshplan.planner.emit.hosts import MAX_HOST_SCRIPTS
from meshplan.planner.emit.text import README_FILE, plain
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.training.torchrun import HOSTS_FILE, LAUNCH_SCRIPT, RANK_TABLE_FILE, Launch, master_address


def overview(launch: Launch, *, start: str = "", notes: Sequence[str] = ()) -> Artifact:
    """README.md for one launch.

    Args:
        launch: the job.
        start: how to start it; empty for one script per host.
        notes: those of an orchestrator, besides those of the job.
    """
    job = launch.job
    request = job.request
    rows = "\n".join(f"| {name} | {value} |" for name, value in _choice_rows(request))
    variables = "\n".join(
        f"| `{row.name}` | {f'`{row.default}`' if row.default else '–'} | {row.meaning} |" for row in job.settings
    )
    listed_notes = "\n".join(f"- {note}" for note in (*job.notes, *notes)) or "- none"
    lines = "\n".join(f"    {line}" for line in stamp(request.plan, job.verified))
    content = f"""# {plain(request.shape.name)} on {request.world_size} devices

{lines}

{start or _how_to_start(launch)}

Flags after the node rank are passed on and override those of the plan.

## What was planned

| choice | value |
|---|---|
{rows}

`{RANK_TABLE_FILE}` has the host and the device of each rank.

## Variables

A plan does not decide these. The defaults train on {job.data}.

| variable | default | meaning |
|---|---|---|
{variables}
| `MASTER_ADDR` | {_master(launch, start)} | name or address of the first host |
| `MASTER_PORT` | `{request.master_port}` | rendezvous |
| `TORCHRUN` | `torchrun` | another torchrun |
| `MESHPLAN_SKIP_CHECKS` | `0` | 1: start without checking GPUs and the connection to the first host |

## Notes

{listed_notes}
"""
    return Artifact(path=README_FILE, content=content)


def _choice_rows(request: TrainingRequest) -> Iterator[tuple[str, str]]:
    """The choices of a plan, those of stages one row for each stage."""
    for name, value in request.choices.items():
        if name == "stages":
            for number, stage in enumerate(value):
                yield f"stage {number}", ", ".join(f"{choice} {what}" for choice, what in stage.items())
        else:
            yield name, str(value)


def _master(launch: Launch, start: str) -> str:
    """The default that launch.sh has for the first host; orchestrators set the variable themselves."""
    if start:
        return "set by the launcher"
    default = master_address(launch)
    return f"`{plain(default)}`" if default else "REQUIRED"


def _how_to_start(launch: Launch) -> str:
    num_hosts = len(launch.placements)
    common = f"`./{LAUNCH_SCRIPT} NODE_RANK`, with the node rank that `{HOSTS_FILE}` gives it"
    if num_hosts > MAX_HOST_SCRIPTS:
        return f"Start on each of the {num_hosts} hosts, all at about the same time: {common}."
    last = num_hosts - 1
    names = "`launch_host_000.sh`" if last == 0 else f"`launch_host_000.sh` … `launch_host_{last:03d}.sh`"
    return (
        f"Start on each of the {num_hosts} host(s), all at about the same time, its own script of {names}, or {common}."
    )
