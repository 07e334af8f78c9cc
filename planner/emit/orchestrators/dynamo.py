"""A serving plan as a DynamoGraphDeployment (nvidia.com/v1beta1), for vLLM, SGLang and TensorRT-LLM.

Dynamo's operator joins the hosts of a worker and its frontend is the router: of the engine's arguments only those
that the plan decides are passed on.
"""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.orchestrators import kubernetes
from meshplan.planner.emit.orchestrators import serving_kubernetes as kube
from meshplan.planner.emit.serving import trtllm
from meshplan.planner.emit.serving.job import Argument, PoolProgram, ServingJob
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Role, Router

TARGET = "dynamo"
FILE = "dynamographdeployment.yaml"
_MODULES = {
    "vllm": ("dynamo.vllm", "--model"),
    "sglang": ("dynamo.sglang", "--model-path"),
    "trtllm": ("dynamo.trtllm", "--model-path"),
}
# dynamo.trtllm's spelling of trtllm-serve's flags (ai-dynamo/dynamo, components/src/dynamo/trtllm).
_TRTLLM_FLAGS = {
    "--tp_size": "--tensor-parallel-size",
    "--pp_size": "--pipeline-parallel-size",
    "--ep_size": "--expert-parallel-size",
    "--max_batch_size": "--max-batch-size",
    "--max_num_tokens": "--max-num-tokens",
    "--max_seq_len": "--max-seq-len",
    "--kv_cache_free_gpu_memory_fraction": "--free-gpu-memory-fraction",
}
# The engines' own images (vllm/vllm-openai, lmsysorg/sglang) hold no Dynamo: pods end with "No module named dynamo".
_IMAGE_NOTE = (
    "{image} must hold NVIDIA Dynamo: pods run `python3 -m {module}` and `python3 -m dynamo.frontend`. Images of "
    "{engine} itself do not hold it; NVIDIA's are nvcr.io/nvidia/ai-dynamo/*-runtime."
)
_TYPES = {Role.MIXED: "worker", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_MODES = {Router.ROUND_ROBIN: "round-robin", Router.LEAST_LOADED: "least-loaded", Router.PREFIX_AWARE: "kv"}


def wrap(job: ServingJob) -> EmittedPlan:
    """``dynamographdeployment.yaml``: the frontend and one component a pool.

    Raises:
        CannotExpressError: named hosts, or an engine that Dynamo does not run.
    """
    kube.refuse_places(job, TARGET)
    kube.refuse_mooncake(job, TARGET)
    if job.target not in _MODULES:
        raise CannotExpressError(TARGET, f"the engine {job.target}", f"one of {', '.join(_MODULES)}, or target lws")
    mode = _MODES[job.request.config.router]
    command = ["python3", "-m", "dynamo.frontend", "--http-port", str(job.request.port), "--router-mode", mode]
    frontend = {
        "name": "Frontend",
        "type": "frontend",
        "replicas": 1,
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": kube.image(job), "command": command}]}},
    }
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": kube.metadata(job, kube.object_name(job)),
        "spec": {
            "backendFramework": job.target,
            "components": [frontend, *(_component(job, program) for program in job.programs)],
        },
    }
    note = _IMAGE_NOTE.format(image=job.request.image or "The image", module=_MODULES[job.target][0], engine=job.target)
    return kube.emitted(job, target=TARGET, file=FILE, objects=[*kube.config_maps(job), graph], more=(note,))


def _component(job: ServingJob, program: PoolProgram) -> dict[str, Any]:
    module, model = _MODULES[job.target]
    arguments: list[Argument] = ["python3", "-m", module, model, job.request.model]
    role = program.pool.role
    if job.target == "trtllm":
        arguments += ["--served-model-name", job.request.model]
        arguments += [part for flag, *value in program.flags for part in (_TRTLLM_FLAGS[flag], *value)]
        arguments += ["--extra-engine-args", f"{kubernetes.MOUNT}/{trtllm.options_path(job.request, program.pool)}"]
    else:
        arguments += [part for flag in program.flags for part in flag]
    if job.target != "sglang" and role is not Role.MIXED:
        arguments += ["--disaggregation-mode", role.value]
    values = kube.placeholders(head="", node_rank="")
    if job.target == "sglang" and role is Role.PREFILL:
        arguments += ["--disaggregation-bootstrap-port", values["bootstrap_port"]]
    node = kube.container(job, program, arguments, values, ready=False)
    component: dict[str, Any] = {
        "name": role.value,
        "type": _TYPES[role],
        "replicas": program.pool.num_workers,
        "podTemplate": {"spec": {"containers": [node], "volumes": kube.volumes(job)}},
    }
    if program.num_nodes > 1:
        component["multinode"] = {"nodeCount": program.num_nodes}
    return component


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    pods = "pods: types of kubeflow-trainer-api; the graph's own fields: golden only"
    return (
        Feature(name="workers", expressed_by="components, replicas", verified_by=pods),
        Feature(name="hosts", expressed_by="multinode.nodeCount, device limits", verified_by=pods),
        Feature(name="router", expressed_by="dynamo.frontend --router-mode", verified_by="golden only"),
        Feature(
            name="configuration",
            expressed_by="the engine's flags after dynamo.vllm, dynamo.sglang or dynamo.trtllm",
            verified_by="the flags by the engine's parser; Dynamo's own were not run",
        ),
    )
