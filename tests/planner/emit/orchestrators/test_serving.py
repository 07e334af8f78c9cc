"""Kubernetes documents of serving plans: devices, commands, pods against the types that Kubeflow generates."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import yaml
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL
from emitted import pods
from golden_variants import difference
from llm_d_schema import LLM_D_VALUES
from lws_schema import LEADER_WORKER_SET
from serving_cases import aggregated, disaggregated, layout, pool, random_config, serving_plan, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.orchestrators import ray_serve
from meshplan.planner.emit.serving import vllm
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.launch.registry import emit_serving
from meshplan.planner.serving.problem.config import KvConnector, Role, Router, ServingConfig
from meshplan.planner.serving.problem.engines.table import ENGINES
from meshplan.planner.serving.problem.quantization import Quantization

FP8 = Quantization.uniform("fp8_block")
KUBERNETES = ("lws", "kserve", "dynamo", "llm-d")
NIXL_ONLY = ("kserve", "dynamo", "llm-d", "ray")
IMAGE = "registry.example/engine:1"


def pair(engine: str, **fields: Any) -> ServingRequest:
    prefill = pool(layout(8), Role.PREFILL, num_workers=2, quantization=FP8)
    decode = pool(layout(1, 1, 16, 16), Role.DECODE, quantization=FP8)
    return serving_request(DEEPSEEK_V3, disaggregated(engine, prefill, decode, **fields), image=IMAGE)


def documents(target: str, request: ServingRequest) -> list[dict[str, Any]]:
    file = next(file for file in emit_serving(target, request).artifacts if str(file.path).endswith(".yaml"))
    return list(yaml.load_all(file.content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def num_devices(found: list[dict[str, Any]]) -> int:
    total = 0
    for document in found:
        for count, pod in pods(document):
            for container in pod["containers"]:
                total += count * int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
    return total


@pytest.mark.parametrize(
    ("target", "other_engines"),
    [("lws", ("sglang",)), ("kserve", ()), ("dynamo", ("sglang", "trtllm")), ("skypilot-serve", ()), ("llm-d", ())],
)
def test_golden(target: str, other_engines: tuple[str, ...], golden) -> None:
    def own(engine: str) -> dict[str, str]:
        files = emit_serving(target, pair(engine)).artifacts
        return {str(file.path): file.content for file in files if file.path.suffix in {".yaml", ".md"}}

    full = own("vllm")
    for name, text in full.items():
        golden(f"emit/{target}/vllm/{name}", text)
    for engine in other_engines:
        golden(f"emit/{target}/{engine}.diff", difference(own(engine), full))


def test_golden_ray(golden) -> None:
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8, 2), num_workers=2, quantization=FP8))
    for artifact in emit_serving("ray", request).artifacts:
        golden(f"emit/ray/vllm/{artifact.path}", artifact.content)


@pytest.mark.parametrize("target", KUBERNETES)
def test_pods_are_pods(target: str) -> None:
    """The types drop unknown fields, so a pod counts as accepted only when it comes back unchanged."""
    from kubeflow_trainer_api import models

    if target == "llm-d":
        pytest.skip("its values hold parts of pods; the chart makes the pods")
    for document in documents(target, pair("vllm")):
        for _, pod in pods(document):
            assert models.IoK8sApiCoreV1PodSpec.from_dict(pod).to_dict() == pod
        if document.get("kind") in {"Service", "ConfigMap"}:
            kind = getattr(models, f"IoK8sApiCoreV1{document['kind']}", None)
            if kind is not None:
                assert kind.from_dict(document).to_dict() == document


@pytest.mark.parametrize(("target", "num_plans"), [("lws", 100), ("kserve", 60), ("dynamo", 60), ("llm-d", 60)])
def test_random_plans_ask_for_their_devices(target: str, num_plans: int) -> None:
    """LeaderWorkerSets are held against the API's own fields as well, their pods against the pod types."""
    from kubeflow_trainer_api import models

    sets = jsonschema.Draft202012Validator(LEADER_WORKER_SET)
    draw = random.Random(21)
    emitted = 0
    while emitted < num_plans:
        engine = draw.choice({"kserve": ("vllm",), "llm-d": ("vllm",)}.get(target, tuple(ENGINES)))
        shape = draw.choice((LLAMA_70B, MIXTRAL, DEEPSEEK_V3))
        config = random_config(draw, ENGINES[engine], shape)
        try:
            found = documents(target, serving_request(shape, config, quantized_checkpoint=True))
        except CannotExpressError:
            continue
        emitted += 1
        assert num_devices(found) == config.num_devices
        for document in (one for one in found if one.get("kind") == "LeaderWorkerSet"):
            sets.validate(document)
            for _, pod in pods(document):
                assert models.IoK8sApiCoreV1PodSpec.from_dict(pod).to_dict() == pod


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replica"), 2),
        (("spec", "replicas"), "two"),
        (("spec", "leaderWorkerTemplate", "size"), 0),
        (("spec", "leaderWorkerTemplate", "restartPolicy"), "Always"),
        (("spec", "startupPolicy"), "Never"),
        (("apiVersion",), "leaderworkerset.x-k8s.io/v1alpha1"),
    ],
)
def test_a_wrong_field_of_a_set_is_refused(path: tuple[str, ...], value: object) -> None:
    document = next(one for one in documents("lws", pair("vllm")) if one.get("kind") == "LeaderWorkerSet")
    *folders, name = path
    place = document
    for folder in folders:
        place = place[folder]
    place[name] = value
    assert not jsonschema.Draft202012Validator(LEADER_WORKER_SET).is_valid(document)


def test_arguments_are_those_of_the_engine() -> None:
    request = pair("vllm")
    leader = next(one for one in documents("lws", request) if one["metadata"]["name"].endswith("decode"))
    words = leader["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]["command"]
    planned = [word for flag in vllm.arguments(request, request.config.pools[1]) for word in flag]
    assert words[3 : 3 + len(planned)] == planned
    assert words[words.index("--master-addr") + 1] == "$(LWS_LEADER_ADDRESS)"
    router = next(one for one in documents("lws", request) if one["kind"] == "Deployment")
    said = router["spec"]["template"]["spec"]["containers"][0]["command"]
    name = f"meshplan-{request.plan.plan_id}-prefill"
    assert said[said.index("--prefill") + 1] == f"http://{name}-0.{name}:8100"


def test_hostile_names_stay_one_value() -> None:
    evil = 'org/$(POD_IP) "x": {y} `id`'
    request = replace(pair("vllm"), model_path=evil)
    for target in KUBERNETES:
        commands = [
            [*container["command"], *container.get("args", ())]
            for document in documents(target, request)
            for _, pod in pods(document)
            for container in pod["containers"]
            if "resources" in container
        ]
        # $$( is what Kubernetes turns into $( without expanding it.
        assert commands
        assert all('org/$$(POD_IP) "x": {y} `id`' in command for command in commands)


def test_trtllm_brings_its_options_and_its_leader() -> None:
    decode = pool(layout(1, 1, 8, 8), Role.DECODE, quantization=FP8)
    prefill = pool(layout(8), Role.PREFILL, quantization=FP8)
    found = documents("lws", serving_request(DEEPSEEK_V3, disaggregated("trtllm", prefill, decode)))
    maps = {key for one in found if one["kind"] == "ConfigMap" for key in one["data"]}
    assert maps == {"prefill_options.yaml", "decode_options.yaml", "disaggregated.yaml"}


def test_engine_kwargs_of_ray() -> None:
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8, 2)))
    (program,) = vllm.job(request).programs
    said = ray_serve.engine_kwargs(program)
    assert (said["tensor_parallel_size"], said["pipeline_parallel_size"]) == (8, 2)
    assert said["enable_prefix_caching"] is False
    assert said["gpu_memory_utilization"] == 0.9
    assert said["distributed_executor_backend"] == "ray"


@pytest.mark.parametrize(
    ("target", "request_", "match"),
    [
        ("kserve", pair("sglang"), "the engine sglang"),
        ("llm-d", pair("sglang"), "the engine sglang"),
        ("llm-d", replace(pair("vllm"), model_path="org/{{ .Values }}"), "for a template"),
        *((target, pair("vllm", kv_connector=KvConnector.MOONCAKE), "Mooncake") for target in NIXL_ONLY),
        ("lws", pair("trtllm"), "reaches the others by MPI"),
        ("ray", pair("vllm"), "data-parallel attention"),
        ("lws", replace(pair("vllm"), hosts=("a", "b", "c", "d")), "named hosts"),
        ("kserve", replace(pair("vllm"), model_path="/models/x"), "the folder '/models/x'"),
        (
            "kserve",
            serving_request(LLAMA_70B, aggregated("vllm", layout(8), num_workers=2, router=Router.ROUND_ROBIN)),
            "takes turns",
        ),
        ("kserve", serving_request(LLAMA_70B, aggregated("vllm", layout(16))), "a worker of 2 hosts with 1 stages"),
    ],
)
def test_what_cannot_be_expressed_is_refused(target: str, request_: ServingRequest, match: str) -> None:
    with pytest.raises(CannotExpressError, match=match):
        emit_serving(target, request_)


def test_a_pod_needs_no_names_of_devices() -> None:
    """Every plan that the search makes has a rank table; a pod asks for a number of devices."""
    config = aggregated("vllm", layout(2), num_workers=3)
    places = tuple((0, device) for device in (1, 0, 2, 3, 4, 5))
    plan = serving_plan(LLAMA_70B, config, rank_table=places)
    for target in KUBERNETES:
        assert num_devices(documents(target, serving_request(LLAMA_70B, config, plan=plan))) == config.num_devices
    (ray,) = documents("ray", serving_request(LLAMA_70B, config, plan=plan))
    (pool_,) = ray["applications"][0]["args"]["llm_configs"]
    kwargs = pool_["engine_kwargs"]
    ranks = kwargs["tensor_parallel_size"] * kwargs["pipeline_parallel_size"]
    assert pool_["deployment_config"]["num_replicas"] * ranks == config.num_devices


def test_skypilot_runs_the_plans_devices_on_hosts_counted_from_zero() -> None:
    """A plan may use the later hosts of a cluster: only those that it uses are asked for."""
    config = aggregated("vllm", layout(4), num_workers=2)
    places = tuple((3, device) for device in range(4)) + tuple((7, device) for device in range(4))
    plan = serving_plan(LLAMA_70B, config, rank_table=places)
    emitted = emit_serving("skypilot-serve", serving_request(LLAMA_70B, config, plan=plan))
    files = {str(file.path): file.content for file in emitted.artifacts}
    assert yaml.safe_load(files["task.yaml"])["num_nodes"] == 2
    rows = [line.split() for line in files["workers.txt"].splitlines() if not line.startswith("#")]
    assert [(row[2], row[-1]) for row in rows] == [("0", "0,1,2,3"), ("1", "0,1,2,3")]


@pytest.mark.parametrize(
    ("engine", "config", "installs"),
    [
        ("vllm", aggregated("vllm", layout(8)), "pip install vllm==0.33.0"),
        ("sglang", aggregated("sglang", layout(4), num_workers=2), "pip install sglang==0.5.23 sglang-router==0.3.2"),
        (
            "vllm",
            disaggregated("vllm", pool(layout(4), Role.PREFILL), pool(layout(4), Role.DECODE)),
            "pip install vllm==0.33.0 vllm-router==0.1.17 nixl",
        ),
        ("trtllm", aggregated("trtllm", layout(8)), None),
    ],
)
def test_a_cloud_s_bare_machine_gets_the_engine_or_the_reader_is_told(
    engine: str, config: ServingConfig, installs: str | None
) -> None:
    """``sky launch`` of a task without image and setup ends with "vllm is not on the PATH"."""
    request = serving_request(LLAMA_70B, config)
    for image in ("", "mine/own:1"):
        emitted = emit_serving("skypilot-serve", replace(request, image=image))
        task = next(yaml.safe_load(one.content) for one in emitted.artifacts if str(one.path) == "task.yaml")
        assert task.get("setup", "").strip() == ("" if image else installs or "")
        assert any("names no image" in note for note in emitted.notes) is (not image and installs is None)


@pytest.mark.parametrize("target", ["lws", "llm-d", "dynamo"])
def test_pods_that_fetch_a_gated_model_have_a_token(target: str) -> None:
    """Llama's weights come with a token of Hugging Face only; a folder needs none."""
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8)), model_path="meta-llama/Llama-3.1-70B-Instruct")
    text = "".join(one.content for one in emit_serving(target, request).artifacts)
    assert "HF_TOKEN" in text
    assert "optional: true" in text  # where nobody made the secret, pods start without it
    folder = "".join(
        one.content for one in emit_serving(target, replace(request, model_path="pvc://models/llama")).artifacts
    )
    assert "HF_TOKEN" not in folder


@pytest.mark.parametrize("image", ["", "vllm/vllm-openai:v0.11.0"])
def test_an_image_for_dynamo_must_hold_dynamo(image: str) -> None:
    emitted = emit_serving("dynamo", serving_request(LLAMA_70B, aggregated("vllm", layout(8)), image=image))
    (note,) = (note for note in emitted.notes if "must hold NVIDIA Dynamo" in note)
    assert note.startswith(image or "The image ")
    assert "python3 -m dynamo.vllm" in note


def test_what_stands_twice_is_written_twice() -> None:
    """No anchors: a person edits one probe, not both."""
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8)))
    for target in ("lws", "llm-d", "kserve"):
        assert all("&id" not in one.content for one in emit_serving(target, request).artifacts)


@pytest.mark.parametrize("router", [router for router in Router if router is not Router.LEAST_CONNECTIONS])
def test_one_worker_needs_no_router(router: Router) -> None:
    """What leads workers is refused only where there are several."""
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8), router=router))
    for target in (*KUBERNETES, "ray", "skypilot-serve"):
        assert documents(target, request)


def test_ray_routes_by_prefix() -> None:
    config = aggregated("vllm", layout(8), num_workers=2, router=Router.PREFIX_AWARE)
    (ray,) = documents("ray", serving_request(LLAMA_70B, config))
    (pool_,) = ray["applications"][0]["args"]["llm_configs"]
    routes = pool_["deployment_config"]["request_router_config"]
    assert routes == {"request_router_class": "ray.serve.llm.request_router:PrefixCacheAffinityRouter"}


def test_values_of_llm_d_are_those_of_its_chart() -> None:
    for request in (pair("vllm"), serving_request(LLAMA_70B, aggregated("vllm", layout(4, 4), num_workers=2))):
        (values,) = documents("llm-d", request)
        jsonschema.Draft202012Validator(LLM_D_VALUES).validate(values)
        assert values["multinode"] is any(program.num_nodes > 1 for program in vllm.job(request).programs)
        assert values["prefill"]["create"] is request.config.is_disaggregated
        jsonschema.Draft202012Validator(LLM_D_VALUES).validate(values)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(LLM_D_VALUES).validate({**values, "decoder": {}})
