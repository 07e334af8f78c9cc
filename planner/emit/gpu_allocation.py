"""An allocation as files: router weights, node pools for Karpenter, SkyPilot tasks, a picture, and a page about them.

The servers of each pool are launched by the serving targets (:mod:`meshplan.planner.launch.gpu_allocation` asks them, a
folder for each pool); here is what lies above the pools. Karpenter's fields are those of karpenter.sh/v1 NodePool
(karpenter.sh/docs/concepts/nodepools), which provisions for AWS here: offers of other providers are in the table only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.drawing import PALETTE, Axis, Drawing, Plot
from meshplan.catalogs.untrusted.quoting import markdown_text, yaml_text
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import Artifact, commented, stamp, stamp_fields

ROUTER_FILE = PurePosixPath("router_weights.json")
NODE_POOLS_FILE = PurePosixPath("node_pools.yaml")
OVERVIEW_FILE = PurePosixPath("README.md")
PICTURE_FILE = PurePosixPath("fleet.svg")
_AWS, _SPOT = "aws", "spot"
_LABEL = "meshplan/pool"
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
# Most characters of a DNS label (RFC 1035), and those of a digest that stands for what was cut off.
_LABEL_LENGTH, _DIGEST_LENGTH = 63, 8
_WIDTH, _HEIGHT, _MARGIN, _BAR_GAP = 640, 300, 56, 0.15


def object_name(name: str) -> str:
    """A DNS label out of any name: lower case, digits and dashes; one of more than 63 characters ends in a digest."""
    label = _NOT_IN_NAMES.sub("-", name.lower()).strip("-")
    return label if len(label) <= _LABEL_LENGTH else _told_apart(label, name)


def pool_names(plan: Plan) -> dict[str, str]:
    """Kind → DNS label of each pool of all fleets, no two alike."""
    kinds = [row["kind"] for of_scenario in (plan.answer or {})["fleets"] for row in of_scenario["replicas"]]
    labels = {kind: object_name(kind) for kind in kinds}
    often = Counter(labels.values())
    return {kind: label if often[label] == 1 else _told_apart(label, kind) for kind, label in labels.items()}


def _told_apart(label: str, name: str) -> str:
    """A label that other names do not share."""
    end = "-" + hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_LENGTH]
    return label[: _LABEL_LENGTH - len(end)].strip("-") + end


def router_weights(plan: Plan) -> Artifact:
    """Every service's rules: a request goes to the first rule that its lengths fit, to a pool drawn by the weights.

    Pools of the role ``decode`` take over what ``prefill`` ones began; weights of each role sum to 1 or to each other.
    """
    answer, names = plan.answer or {}, pool_names(plan)
    services = []
    for service in answer["services"]:
        pools = [
            {
                "name": names[row["kind"]],
                "kind": row["kind"],
                "role": row["role"],
                "replicas": row["count"],
                "spare": row["spare"],
            }
            for row in answer["fleets"][0]["replicas"]
            if row["service"] == service["name"]
        ]
        rules = [
            {
                "scenario": scenario["scenario"],
                "input_tokens": bucket["input_tokens"],
                "output_tokens": bucket["output_tokens"],
                "request_rate_per_s": scenario["request_rate_per_s"],
                "weights": {names[kind]: share for kind, share in scenario["weights"].items()},
            }
            for bucket in service["buckets"]
            for scenario in bucket["scenarios"]
        ]
        services.append({"name": service["name"], "model": service["model"], "pools": pools, "rules": rules})
    document = {"meshplan": stamp_fields(plan, None), "services": services}
    return Artifact(path=ROUTER_FILE, content=json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def node_pools(plan: Plan) -> Artifact | None:
    """Karpenter NodePools of the AWS nodes, of the cluster's EC2NodeClass ``default``; None where there are none."""
    objects = [_node_pool(plan, unit) for unit in _aws_nodes(plan)]
    if not objects:
        return None
    body = yaml_text(objects, all_documents=True, width=120, explicit_start=True)
    return Artifact(path=NODE_POOLS_FILE, content=commented(stamp(plan, None)) + body)


def _aws_nodes(plan: Plan) -> list[Mapping[str, Any]]:
    """AWS units that are whole nodes: of single devices of a node nobody there rents out any."""
    if plan.spec["market"].get("rent", "node") != "node":
        return []
    return [unit for unit in (plan.answer or {})["fleets"][0]["units"] if unit["provider"] == _AWS]


def instance_type(node_type: str) -> str:
    """AWS's name of a node type of the catalog.

    >>> instance_type("aws-p5-48xlarge")
    'p5.48xlarge'
    """
    family, _, size = node_type.removeprefix(f"{_AWS}-").rpartition("-")
    return f"{family}.{size}"


def _node_pool(plan: Plan, unit: Mapping[str, Any]) -> dict[str, Any]:
    name = object_name(unit["offer"])
    requirements = [
        ("node.kubernetes.io/instance-type", instance_type(unit["node_type"])),
        ("karpenter.sh/capacity-type", _SPOT if unit["terms"] == _SPOT else "on-demand"),
    ]
    if unit["region"]:
        requirements.append(("topology.kubernetes.io/region", unit["region"]))
    if unit.get("zone"):
        requirements.append(("topology.kubernetes.io/zone", unit["zone"]))
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name, "annotations": {"meshplan/plan-digest": plan.digest}},
        "spec": {
            "template": {
                "metadata": {"labels": {_LABEL: name}},
                "spec": {
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"},
                    "requirements": [{"key": key, "operator": "In", "values": [value]} for key, value in requirements],
                },
            },
            "limits": {"nvidia.com/gpu": str(unit["count"] * unit["num_devices"])},
        },
    }


def skypilot_resources(plan: Plan) -> tuple[Artifact, ...]:
    """A SkyPilot task for each AWS offer that holds its nodes: servers are started on them with ``sky exec``."""
    found = []
    for unit in _aws_nodes(plan):
        # SkyPilot's infra: cloud/region/zone; a zone without its region cannot stand there.
        place = "/".join([_AWS, *([unit["region"], *filter(None, [unit.get("zone")])] if unit["region"] else [])])
        task = {
            "name": object_name(unit["offer"]),
            "num_nodes": unit["count"],
            "resources": {
                "infra": place,
                "instance_type": instance_type(unit["node_type"]),
                "use_spot": unit["terms"] == _SPOT,
            },
        }
        text = commented(stamp(plan, None)) + yaml_text(task)
        found.append(Artifact(path=PurePosixPath("skypilot") / f"{object_name(unit['offer'])}.yaml", content=text))
    return tuple(found)


def overview(plan: Plan, folders: Mapping[str, str], notes: Sequence[str]) -> Artifact:
    """A page: what to rent, what runs where, which file is which.

    Args:
        plan: the allocation.
        folders: kind → folder of its launcher files.
        notes: what the user should know.
    """
    answer = plan.answer or {}
    fleet = answer["fleets"][0]
    lines = [f"<!-- {line} -->" for line in stamp(plan, None)]
    lines += [f"# Fleet at {fleet['usd_per_hour']:,.2f} USD/h", ""]
    lines += ["| rent | units | devices each | terms | USD/h |", "|---|---:|---:|---|---:|"]
    lines += [
        f"| {markdown_text(unit['offer'])} | {unit['count']} | {unit['num_devices']} | "
        f"{markdown_text(unit['terms'])} | {unit['usd_per_hour']:,.2f} |"
        for unit in fleet["units"]
    ]
    lines += ["", "| pool | replicas | of these spare | launcher files |", "|---|---:|---:|---|"]
    lines += [
        f"| {markdown_text(row['kind'])} | {row['count']} | {row['spare']} | {folders.get(row['kind'], '')} |"
        for row in fleet["replicas"]
    ]
    lines += ["", f"- `{ROUTER_FILE}`: where each size of request goes.", f"- `{PICTURE_FILE}`: cost against SLOs."]
    if _aws_nodes(plan):
        lines += [f"- `{NODE_POOLS_FILE}`: Karpenter NodePools.", "- `skypilot/`: the same nodes as SkyPilot tasks."]
    lines += [f"- {markdown_text(note)}" for note in answer["notes"]]
    lines += [f"- {note}" for note in notes]
    return Artifact(path=OVERVIEW_FILE, content="\n".join(lines) + "\n")


def picture(plan: Plan) -> Artifact:
    """Cost against scaled SLO latencies as bars, self-contained."""
    answer = plan.answer or {}
    rows = answer["alternatives"]["pareto"]
    most = max((row["objective"] for row in rows if row["objective"] is not None), default=0.0) or 1.0
    title = f"{plan.spec.get('name') or plan.plan_id}: {answer['objective']} against SLO latencies"
    drawing = Drawing(_WIDTH, _HEIGHT, title=title)
    drawing.heading(_MARGIN, title)
    bottom = _HEIGHT - _MARGIN
    plot = Plot(drawing, Axis(0, len(rows)), Axis(0, most), _MARGIN, _MARGIN, _WIDTH - _MARGIN, bottom)
    for index, row in enumerate(rows):
        value = row["objective"]
        left, top = plot.at(index + _BAR_GAP, value or 0.0)
        right, _ = plot.at(index + 1 - _BAR_GAP, 0.0)
        middle = (left + right) / 2
        drawing.rect(left, top, right - left, bottom - top, fill=PALETTE[0])
        drawing.text(middle, top - 4, "no plan" if value is None else f"{value:,.2f}", anchor="middle")
        drawing.text(middle, bottom + 16, f"× {row['slo_factor']:g}", anchor="middle")
    plot.name_axes("every latency of the SLO multiplied by")
    return Artifact(path=PICTURE_FILE, content=str(drawing))
