"""A stored serving plan as a request to the emitters: hosts from the catalog, memory from the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import EmitError, UnknownEntryError
from meshplan.planner.cluster.lookup import usable_part
from meshplan.planner.core.plan import shape_from_document
from meshplan.planner.emit.artifact import EmitOptions
from meshplan.planner.emit.serving.load import Load, with_room
from meshplan.planner.emit.serving.request import HostType, ServingRequest, WorkerMemory
from meshplan.planner.launch.checkpoint import checkpoint_of
from meshplan.planner.launch.registry import emit_serving
from meshplan.planner.serving.problem.engines.table import LLAMA_CPP
from meshplan.planner.serving.problem.requests import prompt_length
from meshplan.planner.serving.problem.workload.spec import ServingWorkloadSpec
from meshplan.planner.serving.resolve import CHECKPOINT_FORMATS

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.emit.artifact import EmittedPlan


def target(plan: Plan) -> str | None:
    """The engine that the plan was made for."""
    return str(plan.config["engine"]) if plan.config else None


def files(plan: Plan, target_name: str, catalog: Catalog, options: EmitOptions) -> EmittedPlan:
    """Launcher files of a serving plan, in memory; see :func:`meshplan.planner.service.emit_plan`."""
    if not plan.config:
        raise EmitError(f"plan {plan.plan_id} found no configuration to launch")
    if any("ffn" in pool for pool in plan.config["pools"]):
        raise EmitError(
            "attention and FFN on different devices: no release of vLLM, SGLang or TensorRT-LLM read here has words "
            "for it (SGLang's main branch has --afd-role, vLLM an external plugin, both experimental); plan without "
            "attention_ffn for files that can be started"
        )
    shape = shape_from_document(plan.provenance["model"])
    checkpoint = checkpoint_of(str(plan.spec["model"]), shape, plan.config["pools"], options.model_path)
    request = ServingRequest(
        plan=plan,
        shape=shape,
        host_types={
            str(pool["node_type"]): host_type(str(pool["node_type"]), catalog, plan.spec["cluster"])
            for pool in plan.config["pools"]
        },
        model_path=checkpoint.path,
        quantized_checkpoint=checkpoint.is_quantized or _quantized_checkpoint(plan, options),
        draft_model=str((plan.spec.get("speculation") or {}).get("draft_model") or ""),
        max_sequence_length=_longest_request(plan),
        load=_load(plan),
        prefix_caching=_prefix_caching(plan),
        memory={
            str(row.get("pool", row["role"])): WorkerMemory(
                weights_bytes=row["weights_bytes"], activations_bytes=row["workspace_bytes"]
            )
            for row in plan.memory["pools"]
        },
        image=options.image,
        framework_version=options.framework_version,
        pod_resources=options.pod_resources,
    )
    return emit_serving(target_name, request)


def _quantized_checkpoint(plan: Plan, options: EmitOptions) -> bool | None:
    """A checkpoint that is named for a plan with weights on the host is one in the plan's formats: engines load such
    weights as they are. So is one whose own files told the plan its formats, and every GGUF.
    """
    if plan.config["engine"] == LLAMA_CPP.name:
        return True
    if CHECKPOINT_FORMATS in plan.provenance.get("sources", {}):
        return True
    beyond = any("weight_tiers" in pool for pool in plan.config["pools"])
    return True if options.model_path and beyond else None


def host_type(node_type: str, catalog: Catalog, cluster: Mapping[str, Any] | None = None) -> HostType:
    """Hosts of a node type of the catalog, or of the devices that the spec's ``cluster`` describes in place, with the
    devices of each that a plan may use.

    Raises:
        EmitError: the catalog no longer knows them.
    """
    cluster = cluster or {}
    try:
        if devices := cluster.get("devices"):
            return HostType(devices_per_host=int(devices["per_node"]), device=catalog.device(str(devices["type"])))
        node = usable_part(cluster, catalog.node_type(node_type))
    except UnknownEntryError as error:
        raise EmitError(f"the catalog no longer knows the hosts of this plan: {error}") from error
    return HostType(devices_per_host=node.devices_per_host, device=node.device)


def _is_nominal(workload: Mapping[str, Any]) -> bool:
    """Whether every request has the lengths that the spec states, or at most them."""
    return all(workload.get(name) is None for name in ("input_lengths", "output_lengths", "sessions"))


def _prefix_share(workload: Mapping[str, Any]) -> float:
    """Share of the longest prompt that is a prefix which others have, too."""
    if (tokens := workload.get("prefix_tokens")) is not None:
        return min(float(tokens) / float(workload["input_length"]), 1.0)
    return float(workload.get("prefix_hit_rate", 0.0))


def _pooled_length(workload: Mapping[str, Any]) -> int | None:
    """Tokens of an answer that is a vector or a score: none; None where answers are tokens."""
    return 0 if workload.get("task", "generate") != "generate" else None


def _longest_request(plan: Plan) -> int | None:
    """Prompt and answer together with room above them, where the spec gives their lengths."""
    workload = plan.spec["workload"]
    tokens = _tokens_of_longest(workload)
    if tokens is None:
        return None
    shape, images = shape_from_document(plan.provenance["model"]), workload.get("images")
    if shape.encoder is not None:
        return shape.max_sequence_length  # transcripts differ in length, and the cache is paged
    seen = 0
    if images is not None and shape.vision is not None:
        seen = images.get("per_request", 1) * shape.vision.tokens(images["width"], images["height"])
    whole = [pool["limits"] for pool in plan.config["pools"] if not pool["limits"]["chunked_prefill"]]
    budget = min((int(limits["max_batched_tokens"]) for limits in whole), default=None)
    return with_room(tokens + seen, shape.max_sequence_length, budget)


def _tokens_of_longest(workload: Mapping[str, Any]) -> int | None:
    """Tokens of the longest prompt and answer together; None where a trace brings them."""
    if not _is_nominal(workload):
        return ServingWorkloadSpec.model_validate(dict(workload)).longest
    prompt, output = prompt_length(workload), workload.get("output_length", _pooled_length(workload))
    return None if prompt is None or output is None else prompt + int(output)


def _prefix_caching(plan: Plan) -> bool | None:
    """On where the workload does not say whether prompts share prefixes: the plan counts no hit, and hits only help."""
    workload = plan.spec["workload"]
    shape = shape_from_document(plan.provenance["model"])
    says = "prefix_hit_rate" in workload or "prefix_tokens" in workload
    return None if says or shape.keeps_prompts_whole else True


def _load(plan: Plan) -> Load | None:
    """What a benchmark sends: the workload, or the load that the plan can take where the spec leaves it open."""
    workload = plan.spec["workload"]
    output_length = workload.get("output_length", _pooled_length(workload))
    if workload.get("input_length") is None or output_length is None or workload.get("task") == "rerank":
        return None  # a trace; sound; or pairs of texts, which no load generator read here makes
    if not _is_nominal(workload) or workload.get("stages") is not None:
        return None  # load generators read here draw no such lengths, rates or conversations
    rate, concurrency = workload.get("request_rate_per_s"), workload.get("concurrency")
    if rate is None and concurrency is None:
        rate = plan.predicted["requests_per_s"].value
    return Load(
        input_length=int(workload["input_length"]),
        output_length=int(output_length),
        length_ratio=float(workload.get("length_ratio", 1.0)),
        request_rate_per_s=rate,
        concurrency=concurrency,
        prefix_hit_rate=_prefix_share(workload),
        num_prefixes=int(workload.get("num_prefixes") or 1),
    )
