"""One job whose number of nodes changes: the launcher files of a plan for each number, and the agents that choose.

Every host starts one elastic agent (torchrun's, or ft_launcher of NVIDIA's Resiliency Extension, which watches ranks
for hangs as well). Whenever nodes come or go the agents meet again, and every process starts as a rank of the plan for
the number of nodes that met: ``rank.sh`` runs that plan's own ``launch.sh`` with its agent left out. States come from
the last checkpoint, which the framework must be able to load into another layout.

Source       torchrun: --nnodes MIN:MAX, c10d rendezvous, --rdzv-conf join_timeout and last_call_timeout (PyTorch,
             "torchrun (Elastic Launch)" and torch.distributed.elastic.rendezvous.dynamic_rendezvous). ft_launcher: the
             same flags, and --ft-initial-rank-heartbeat-timeout, --ft-rank-heartbeat-timeout (nvidia-resiliency-ext,
             "Fault Tolerance usage guide"). TORCH_DISABLE_SHARE_RDZV_TCP_STORE: the same module of torch 2.13, whose
             agents otherwise keep one store over all meetings.
Assumptions  all nodes are alike: which agent becomes which node rank is not planned, so that a rank mapping is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import EmitError
from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.emit.training.torchrun import LAUNCH_SCRIPT
from meshplan.planner.goodput.published import REPAIR_S, RESTART_S

if TYPE_CHECKING:
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.emit.artifact import EmittedPlan

FOLDER = "nodes-{}"
# What an agent of torchrun would be replaced by, were it in a script: only these scripts can do without theirs.
_STARTS_BY_TORCHRUN = 'exec "${TORCHRUN:-torchrun}" \\\n  --nnodes'
# Restarts beside those expected, in standard deviations of a Poisson count; and at least (assumed).
_DEVIATIONS, _RESTARTS = 4.0, 100
# A rank counts as hung after so many steps (NVIDIA's own safety factor), and never sooner than a minute.
_HUNG_STEPS, _LEAST_HUNG_S = 5.0, 60.0
# Nodes are waited for as long as several repairs; a meeting waits so long for further nodes after enough have come.
_REPAIRS_WAITED, _LAST_CALL_S = 3.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNodes:
    """The plan for a number of nodes, and its files.

    Args:
        nodes: how many.
        plan: uses all of them.
        emitted: its launcher files.
    """

    nodes: int
    plan: Plan
    emitted: EmittedPlan


def elastic_files(found: Sequence[OnNodes], runbook: str) -> tuple[Artifact, ...]:
    """Launcher files of a job on a changing number of nodes.

    Args:
        found: plans by number of nodes; each uses all devices of its nodes.
        runbook: what an operator does when, as text.

    Raises:
        EmitError: fewer than two numbers of nodes, a gap between them, or scripts that no agent can stand over.
    """
    rows = sorted(found, key=lambda one: one.nodes)
    numbers = [one.nodes for one in rows]
    if len(rows) == 1 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise EmitError(f"an elastic job needs plans for neighbouring numbers of nodes, there are {numbers}")
    for one in rows:
        script = next((file for file in one.emitted.artifacts if file.path == LAUNCH_SCRIPT), None)
        if script is None or _STARTS_BY_TORCHRUN not in script.content:
            raise EmitError(
                f"target {one.emitted.target} brings a launcher of its own, which no elastic agent can stand over: "
                "choose one that torchrun starts, such as megatron or torchtitan"
            )
    inner = [
        replace(file, path=PurePosixPath(FOLDER.format(one.nodes)) / file.path)
        for one in rows
        for file in one.emitted.artifacts
    ]
    usual = _settings(rows)
    return (
        operators_page(runbook),
        Artifact(path=PurePosixPath("elastic.sh"), content=_agent("torchrun", usual), executable=True),
        Artifact(path=PurePosixPath("elastic_nvrx.sh"), content=_agent("ft_launcher", usual), executable=True),
        Artifact(path=PurePosixPath("rank.sh"), content=_RANK, executable=True),
        Artifact(path=PurePosixPath("as_rank.sh"), content=_AS_RANK, executable=True),
        *inner,
    )


def operators_page(text: str) -> Artifact:
    """What an operator does when, as a file."""
    return Artifact(path=PurePosixPath("OPERATOR.md"), content=text)


def _settings(rows: Sequence[OnNodes]) -> dict[str, Any]:
    """Flags of the agents."""
    most = rows[-1]
    run: Mapping[str, Any] = most.plan.run or {}
    expected = float(run.get("interruptions", 0.0))
    slowest = max(one.plan.predicted["iteration_s"].high for one in rows)
    block_s = float(run["checkpoint"]["block_s"]) if run else 0.0
    restart_s = float(run.get("restart_s", RESTART_S))
    step_s = most.plan.predicted["iteration_s"].value
    every = round(run["checkpoint"]["interval_s"] / step_s) if run else 0
    return {
        "plan_id": most.plan.plan_id,
        "least": rows[0].nodes,
        "most": most.nodes,
        "devices": int(most.plan.config["world_size"]) // most.nodes,
        "restarts": max(_RESTARTS, math.ceil(expected + _DEVIATIONS * math.sqrt(expected))),
        "join_s": round(_REPAIRS_WAITED * REPAIR_S),
        "last_call_s": round(_LAST_CALL_S),
        "first_s": round(2.0 * restart_s + _HUNG_STEPS * slowest),
        "hung_s": round(max(_LEAST_HUNG_S, _HUNG_STEPS * (slowest + block_s))),
        "every": max(1, every),
    }


def _agent(launcher: str, settings: Mapping[str, Any]) -> str:
    """The script that starts one host's agent."""
    is_nvrx = launcher == "ft_launcher"
    return _AGENT.format(
        launcher=launcher,
        variable="FT_LAUNCHER" if is_nvrx else "TORCHRUN",
        watches=_WATCHES.format(**settings) if is_nvrx else "",
        **settings,
    )


_AGENT = r"""#!/usr/bin/env bash
# Run this on every host, also on one that comes later or comes back: {least} to {most} nodes train, whatever is there.
# RDZV_ENDPOINT=HOST:PORT names one host that stays; plan {plan_id} is the one for {most} nodes.
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
: "${{RDZV_ENDPOINT:?set RDZV_ENDPOINT to HOST:PORT of a host that stays}}"
# Where checkpoints go and come from: another number of nodes loads what the last one saved.
: "${{SAVE_DIR:?set SAVE_DIR to a folder that all hosts share}}"
export SAVE_DIR LOAD_DIR=${{LOAD_DIR:-$SAVE_DIR}} SAVE_INTERVAL=${{SAVE_INTERVAL:-{every}}}
# A store of its own for the ranks of every meeting: in one that agents keep, they would find ranks that have died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

agent() {{
  exec "${{{variable}:-{launcher}}}" \
    --nnodes {least}:{most} \
    --nproc-per-node {devices} \
    --rdzv-backend c10d \
    --rdzv-endpoint "$RDZV_ENDPOINT" \
    --rdzv-id "${{RDZV_ID:-{plan_id}}}" \
    --rdzv-conf "join_timeout={join_s},last_call_timeout=${{LAST_CALL_S:-{last_call_s}}}" \
    --max-restarts {restarts} \
{watches}    --no-python \
    "$here/rank.sh" "$@"
}}

# An agent whose meeting is broken up by another's death gives up, although its host is well: it is started again.
for ((start = 0; start < ${{AGENT_STARTS:-{restarts}}}; start++)); do
  agent "$@" &
  child=$!
  trap 'kill "$child" 2> /dev/null || true; wait "$child" || true; exit 143' TERM INT
  if wait "$child"; then
    exit 0
  fi
  sleep "${{AGENT_PAUSE:-10}}"
done
exit 1
"""

_WATCHES = """    --ft-initial-rank-heartbeat-timeout {first_s} \\
    --ft-rank-heartbeat-timeout {hung_s} \\
"""

_RANK = r"""#!/usr/bin/env bash
# One process of an elastic agent: a rank of the plan for the number of nodes that met.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
nodes=$((WORLD_SIZE / LOCAL_WORLD_SIZE))
if [[ ! -d $here/nodes-$nodes ]]; then
  printf 'rank.sh: there is no plan for %s nodes in %s\n' "$nodes" "$here" >&2
  exit 1
fi
export TORCHRUN=$here/as_rank.sh MESHPLAN_SKIP_CHECKS=1
exec "$here/nodes-$nodes/launch.sh" "$GROUP_RANK" "$@"
"""

_AS_RANK = r"""#!/usr/bin/env bash
# Takes the place of torchrun in launch.sh: the flags of the agent are left out, the program becomes this process.
set -euo pipefail
while [[ ${1:-} == --* ]]; do
  shift 2
done
exec "${PYTHON:-python}" -u "$@"
"""
