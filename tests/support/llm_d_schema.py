"""Values of the chart llm-d-modelservice and their types, as JSON Schema.

Transcribed from the chart's own ``values.schema.tmpl.json`` and the comments of its ``values.yaml``
(llm-d-incubation/llm-d-modelservice, charts/llm-d-modelservice, commits 00b82e2 and 024c0f2): names of the values, and
which objects take unknown ones. Of decode and prefill the chart takes any field; listed is what its templates read.
"""

from __future__ import annotations

from typing import Any

from lws_schema import COUNT, strict

_TEXT = {"type": "string"}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_CONTAINER = strict(
    {
        "name": _TEXT,
        "image": _TEXT,
        "modelCommand": {"enum": ["vllmServe", "imageDefault", "custom"]},
        "command": {"type": "array", "items": _TEXT},
        "args": {"type": "array", "items": _TEXT},
        "env": {"type": "array"},
        "imagePullPolicy": _TEXT,
        "ports": {"type": "array"},
        "resources": strict(
            {"limits": {"type": "object"}, "requests": {"type": "object"}, "claims": {"type": "array"}}
        ),
        "mountModelVolume": {"type": "boolean"},
        "volumeMounts": {"type": "array"},
        "extraConfig": {"type": "object"},
    },
    "image",
    "modelCommand",
)
_ROLE = strict(
    {
        "create": {"type": "boolean"},
        "autoscaling": strict({"enabled": {"type": "boolean"}}),
        "replicas": COUNT,
        "parallelism": strict({key: {**COUNT, "minimum": 1} for key in ("tensor", "data", "dataLocal", "workers")}),
        "containers": {"type": "array", "items": _CONTAINER},
        "volumes": {"type": "array"},
        "nodeSelector": {"type": "object"},
        "acceleratorTypes": {"type": "object"},
        "extraConfig": {"type": "object"},
    },
    "create",
)
LLM_D_VALUES: dict[str, Any] = strict(
    {
        "fullnameOverride": _TEXT,
        "multinode": {"type": "boolean"},
        "accelerator": strict({"type": {"enum": ["nvidia", "intel-i915", "intel-xe", "intel-gaudi", "amd", "google"]}}),
        "modelArtifacts": strict(
            {"name": _TEXT, "uri": _TEXT, "size": _TEXT, "authSecretName": _TEXT, "labels": {"type": "object"}},
            "name",
            "uri",
        ),
        "routing": strict(
            {
                "servicePort": _PORT,
                "proxy": {
                    "type": "object",
                    "properties": {"enabled": {"type": "boolean"}, "targetPort": _PORT, "connector": _TEXT},
                },
            }
        ),
        "decode": _ROLE,
        "prefill": _ROLE,
    },
    "modelArtifacts",
    "decode",
    "prefill",
)
