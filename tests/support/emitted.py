"""Which devices emitted files start something on, counted in the files alone; and whether a refusal is a true one.

Shares no code with the emitters: YAML, the host and worker tables, and the reasons in words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import yaml
from emit_cases import GPT2_XL, LLAMA_70B, MIXTRAL, QWEN3_4B, SHAPES, config_for, plan_for, request_for
from serving_cases import random_config, serving_plan, serving_request

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch.registry import TARGETS, emit, emit_serving, framework_names
from meshplan.planner.serving.problem.config import Router
from meshplan.planner.serving.problem.engines.table import ENGINES
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS

DEVICES_PER_HOST = 8
_SCRIPTED = ("torchrun", "deepspeed", "accelerate")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def pods(document: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(how many, spec) of every pod that asks for devices or routes."""
    spec, kind = document.get("spec", {}), document.get("kind")
    if "modelArtifacts" in document:
        for part in (document["prefill"], document["decode"]):
            if part["create"]:
                yield part["replicas"] * part["parallelism"]["workers"], part
    elif kind == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        yield spec["replicas"], group["leaderTemplate"]["spec"]
        yield spec["replicas"] * (group["size"] - 1), group["workerTemplate"]["spec"]
    elif kind == "LLMInferenceService":
        for part in (one for one in (spec, spec.get("prefill")) if one):
            said, nodes = part["parallelism"], 1
            if "worker" in part:
                nodes = said["data"] // said["dataLocal"] if "data" in said else said["pipeline"]
                yield part["replicas"] * (nodes - 1), part["worker"]
            yield part["replicas"], part["template"]
    elif kind == "DynamoGraphDeployment":
        for component in spec["components"]:
            nodes = component.get("multinode", {}).get("nodeCount", 1)
            yield component["replicas"] * nodes, component["podTemplate"]["spec"]
    elif kind == "Deployment":
        yield spec["replicas"], spec["template"]["spec"]


def _asked(document: Mapping[str, Any]) -> int:
    limits = (
        count * int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
        for count, pod in pods(document)
        for container in pod["containers"]
    )
    return sum(limits)


def devices_of(emitted: EmittedPlan) -> int:
    """Devices that the files start something on."""
    files = {file.path.name: file.content for file in emitted.artifacts}
    for content in [text for name, text in files.items() if name.endswith(".yaml")]:
        for document in yaml.load_all(content, Loader=_LOADER):
            data = document.get("data", {}) if document.get("kind") == "ConfigMap" else {}
            files |= {name: text for name, text in data.items() if name == "hosts.txt"}
    for name, column in (("workers.txt", 7), ("hosts.txt", 2)):
        if name in files:
            rows = [line.split() for line in files[name].splitlines() if line.strip() and not line.startswith("#")]
            return sum(len(row[column].split(",")) for row in rows)
    if "ranks.txt" in files:
        return sum(not line.startswith("#") for line in files["ranks.txt"].splitlines())
    content = next(
        text for name, text in files.items() if name.endswith(".yaml") and not name.endswith("_options.yaml")
    )
    documents = list(yaml.load_all(content, Loader=_LOADER))
    if "applications" in documents[0]:
        arguments = documents[0]["applications"][0]["args"]
        total = 0
        for one in arguments.get("llm_configs") or arguments.values():
            kwargs = one["engine_kwargs"]
            ranks = kwargs["tensor_parallel_size"] * kwargs["pipeline_parallel_size"]
            total += one["deployment_config"]["num_replicas"] * ranks
        return total
    return sum(map(_asked, documents))


# --- random plans -----------------------------------------------------------------------------------------------------


def random_serving(draw: random.Random) -> ServingRequest:
    """A legal plan of any engine, its workers on hosts one after the other as the search places them."""
    engine, shape = draw.choice(tuple(ENGINES)), draw.choice((LLAMA_70B, MIXTRAL))
    config = random_config(draw, ENGINES[engine], shape)
    table: list[tuple[int, int]] = []
    following = 0
    for pool in config.pools:
        size = pool.layout.num_devices
        for _ in range(pool.num_workers):
            left = DEVICES_PER_HOST - following % DEVICES_PER_HOST
            if size > left:
                following += left % DEVICES_PER_HOST
            table += [divmod(place, DEVICES_PER_HOST) for place in range(following, following + size)]
            following += size
    plan = serving_plan(shape, config, rank_table=tuple(table))
    return serving_request(shape, config, plan=plan, quantized_checkpoint=True)


def random_training(draw: random.Random) -> TrainingRequest:
    """A plan of any degrees whose product is its devices, legal for some framework or not."""
    shape: ModelShape = draw.choice((LLAMA_70B, MIXTRAL, QWEN3_4B, GPT2_XL))
    tensor, pipeline, context = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 1, 2))
    replicas = draw.choice((1, 2, 4, 8, 16))
    config = config_for(
        shape,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        context_parallel=context,
        data_parallel=replicas,
        expert_parallel=draw.choice((1, 2, 4)) if shape.moe is not None else 1,
        zero_stage=draw.choice((0, 1, 2, 3)) if replicas * context > 1 else 0,
        activation_recompute=draw.choice(("none", "full", "selective")),
    )
    order = list(range(config.world_size))
    if draw.random() < 0.2:
        draw.shuffle(order)
    table = tuple(divmod(place, DEVICES_PER_HOST) for place in order)
    # Of a checkpoint, which every framework can start from.
    spec = {"kind": "training", "model": shape.slug, "workload": {"phase": "sft"}}
    request = request_for(shape, config, plan=plan_for(shape, config, rank_table=table, spec=spec), hosts=())
    return replace(request, devices_per_host=DEVICES_PER_HOST)


def random_allowed(framework: str, draw: random.Random) -> TrainingRequest:
    """A plan that a search for this framework may choose: no rule of it is broken."""
    rules = FRAMEWORKS.get(framework, ANY_FRAMEWORK)
    while True:
        shape: ModelShape = draw.choice((LLAMA_70B, QWEN3_4B) if framework == "torchtune" else SHAPES)
        tensor, context = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 2))
        replicas, precision = draw.choice((1, 2, 4, 8, 16)), draw.choice(rules.precisions)
        config = config_for(
            shape,
            tensor_parallel=tensor,
            pipeline_parallel=draw.choice((1, 1, 2, 4)),
            context_parallel=context,
            data_parallel=replicas,
            expert_parallel=draw.choice((1, 2, 4)) if shape.moe is not None else 1,
            zero_stage=draw.choice((0, 1, 2, 3, 3)) if replicas * context > 1 else 0,
            activation_recompute=draw.choice(rules.recompute_modes),
            precision=precision,
            sequence_parallel=tensor > 1 and rules.sequence_parallel,
        )
        if not rules.broken(shape, config) and rules.splits_as(config.layers_per_chunk):
            break
    spec = {"kind": "training", "model": shape.slug, "workload": {"phase": "sft"}}
    request = request_for(shape, config, plan=plan_for(shape, config, spec=spec), hosts=())
    return replace(request, devices_per_host=DEVICES_PER_HOST, script="mine.py" if framework in _SCRIPTED else "")


# --- reasons ----------------------------------------------------------------------------------------------------------


def is_true_of_serving(request: ServingRequest, target: str, reason: str) -> bool:
    """Whether a refusal's reason holds of the plan: known words, each with what must then be so."""
    config = request.config
    layouts = [pool.layout for pool in config.pools]
    nodes = [-(-layout.num_devices // DEVICES_PER_HOST) for layout in layouts]
    several = config.is_disaggregated or config.pools[0].num_workers > 1
    known = {
        "the engine": (target in {"kserve", "ray", "llm-d"} and config.engine != "vllm")
        or (target == "dynamo" and config.engine == "llama.cpp"),
        "a plan for": target in ENGINES and config.engine != target,
        "takes turns": several and config.router is Router.ROUND_ROBIN,
        "before whole workers": several
        and config.router is Router.PREFIX_AWARE
        and config.engine in ("trtllm", "llama.cpp"),
        "CUDA graphs": config.engine == "llama.cpp" and any(not pool.limits.cuda_graphs for pool in config.pools),
        "reaches the others by MPI": config.engine == "trtllm" and max(nodes) > 1,
        "data-parallel attention": any(layout.attention_data_parallel > 1 for layout in layouts),
        "stages and data-parallel ranks": any(
            layout.pipeline_parallel > 1 and layout.attention_data_parallel > 1 for layout in layouts
        ),
        "a worker of": max(nodes) > 1,
        "data-parallel ranks of": any(layout.attention_data_parallel > 1 for layout in layouts) and max(nodes) > 1,
        "split unevenly": any(layout.num_devices % count for layout, count in zip(layouts, nodes, strict=True)),
        "whole prompts": any(not pool.limits.chunked_prefill for pool in config.pools),
        "speculation": config.speculation is not None,
        "a KV cache in": any(pool.quantization.kv_cache != "bf16" for pool in config.pools),
        "attention_data_parallel": any(layout.attention_data_parallel > 1 for layout in layouts),
        "context": any(layout.context_parallel > 1 for layout in layouts),
    }
    return any(holds for words, holds in known.items() if words in reason)


# --- every target -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one plan under one target.

    Args:
        target: name, with the framework where it wraps one.
        is_emitted: there are files; otherwise a refusal.
        wrong: what is not so as it should be; empty for nothing.
    """

    target: str
    is_emitted: bool
    wrong: str = ""


def serving_outcomes(request: ServingRequest) -> Iterator[Outcome]:
    """One serving plan under every target for such plans."""
    wanted = request.config.num_devices
    for target in (one.name for one in TARGETS if one.serves):
        try:
            used = devices_of(emit_serving(target, request))
        except CannotExpressError as error:
            wrong = "" if is_true_of_serving(request, target, error.what) else f"refused without reason: {error.what}"
            yield Outcome(target, is_emitted=False, wrong=wrong)
            continue
        yield Outcome(target, is_emitted=True, wrong="" if used == wanted else f"{used} devices, the plan has {wanted}")


def training_outcomes(request: TrainingRequest) -> Iterator[Outcome]:
    """One training plan under every orchestrator, around every framework.

    Whether a framework's own refusal is true its parser says (tests/conformance); an orchestrator refuses what its
    framework refuses, and else only ranks that it cannot place.
    """
    hosts = [host for host, _ in request.plan.rank_table or ()]
    is_scattered = 1 + sum(before != after for before, after in pairwise(hosts)) > len(set(hosts))
    for framework in framework_names():
        request = replace(request, script="mine.py" if framework in _SCRIPTED else "")
        own = _refusal("slurm", request, framework)
        for target in (one.name for one in TARGETS if one.wraps and not one.serves):
            refused = _refusal(target, request, framework)
            name = f"{target}/{framework}"
            if refused:
                is_true = bool(own) or (is_scattered and "rank table" in refused)
                wrong = "" if is_true else f"refused without reason: {refused}"
                yield Outcome(name, is_emitted=False, wrong=wrong)
                continue
            used, wanted = devices_of(emit(target, request, framework=framework)), request.config.world_size
            wrong = "" if used == wanted else f"{used} devices, the plan has {wanted}"
            yield Outcome(name, is_emitted=True, wrong=wrong)


def framework_outcomes(framework: str, draw: random.Random, count: int) -> Iterator[Outcome]:
    """Plans that the framework's rules allow, in its own files and under each orchestrator: none is refused."""
    targets = [(framework, None), *((one.name, framework) for one in TARGETS if one.wraps and not one.serves)]
    for _ in range(count):
        request = random_allowed(framework, draw)
        for target, started in targets:
            name = target if started is None else f"{target}/{framework}"
            try:
                used, wanted = devices_of(emit(target, request, framework=started)), request.config.world_size
            except EmitError as error:
                yield Outcome(name, is_emitted=False, wrong=f"refused what its rules allow: {error}")
                continue
            wrong = "" if used == wanted else f"{used} devices, the plan has {wanted}"
            yield Outcome(name, is_emitted=True, wrong=wrong)


def _refusal(target: str, request: TrainingRequest, framework: str) -> str:
    try:
        emit(target, request, framework=framework)
    except EmitError as error:
        return str(error)
    return ""
