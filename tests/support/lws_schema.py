"""Fields of a LeaderWorkerSet v1 and their types, as JSON Schema; pods are checked apart.

Transcribed from the API's Go types (kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go, commit
47a6181): field names, what is required, enumerations. Unknown fields are refused, as the API server's strict
validation does.
"""

from __future__ import annotations

from typing import Any


def strict(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
COUNT_OR_SHARE = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+%$"}]}
POD_TEMPLATE = strict({"metadata": {"type": "object"}, "spec": {"type": "object"}}, "spec")
GROUP = strict(
    {
        "leaderTemplate": POD_TEMPLATE,
        "workerTemplate": POD_TEMPLATE,
        "size": {**COUNT, "minimum": 1},
        "restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
        "subGroupPolicy": strict(
            {"subGroupPolicyType": {"enum": ["LeaderWorker", "LeaderExcluded"]}, "subGroupSize": COUNT}
        ),
        "volumeClaimTemplates": {"type": "array"},
        "persistentVolumeClaimRetentionPolicy": {"type": "object"},
    },
    "workerTemplate",
)
ROLLING_UPDATE = strict({"partition": COUNT, "maxUnavailable": COUNT_OR_SHARE, "maxSurge": COUNT_OR_SHARE})
SPEC = strict(
    {
        "replicas": COUNT,
        "leaderWorkerTemplate": GROUP,
        "rolloutStrategy": strict(
            {"type": {"enum": ["RollingUpdate"]}, "rollingUpdateConfiguration": ROLLING_UPDATE}, "type"
        ),
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": strict({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}, "subdomainPolicy"),
    },
    "leaderWorkerTemplate",
)
LEADER_WORKER_SET = strict(
    {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": SPEC,
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
