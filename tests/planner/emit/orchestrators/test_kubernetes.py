"""Kubernetes targets against the types that Kubeflow generates from the CRDs; unknown fields are found by round trip.

The generated models drop what they do not know, so a document is accepted only when it comes back unchanged.
"""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from emit_cases import LLAMA_70B, LLAMA_70B_ON_64, config_for, plan_for, request_for
from golden_variants import difference, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.orchestrators import kubernetes
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch.registry import emit
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON

QUICK_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FILES = {"jobset": "jobset.yaml", "job": "job.yaml", "trainjob": "trainjob.yaml"}
REQUEST = replace(request_for(LLAMA_70B, LLAMA_70B_ON_64, hosts=()), image="registry.example/train:1")


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    from kubeflow_trainer_api import models

    return {
        "JobSet": models.JobsetV1alpha2JobSet,
        "Job": models.IoK8sApiBatchV1Job,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }


def documents(target: str, request: TrainingRequest = REQUEST) -> list[dict[str, Any]]:
    emitted = emit(target, request, framework="megatron")
    file = next(artifact for artifact in emitted.artifacts if str(artifact.path) == FILES[target])
    return list(yaml.load_all(file.content, Loader=QUICK_LOADER))


def main(target: str, request: TrainingRequest = REQUEST) -> dict[str, Any]:
    return documents(target, request)[-1]


@pytest.mark.parametrize("target", FILES)
def test_every_legal_plan_is_accepted_with_its_number_of_devices(kinds: dict[str, Any], target: str) -> None:
    checked = 0
    for tensor, pipeline, context, data in itertools.product((1, 2, 4, 8), (1, 2, 3, 4), (1, 2), (1, 2, 3, 4, 8)):
        config = config_for(
            LLAMA_70B,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            context_parallel=context,
            data_parallel=data,
            zero_stage=1,
            num_microbatches=12,
        )
        if MEGATRON.broken(LLAMA_70B, config) or config.world_size > 128 or config.world_size % 8:
            continue
        request = replace(request_for(LLAMA_70B, config, hosts=()), image="registry.example/train:1")
        document = main(target, request)
        assert refusal(kinds, document) is None
        assert num_devices(document) == config.world_size
        checked += 1
    assert checked > 50, "nearly all plans are illegal: the grid proves little"


def refusal(kinds: dict[str, Any], document: dict[str, Any]) -> str | None:
    """Why ``document`` is none of its kind, or None."""
    try:
        read = kinds[document["kind"]].from_dict(document).to_dict()
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    return None if read == document else "unknown field"


def pods(document: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """(number of pods, pod spec) of each group."""
    if document["kind"] == "JobSet":
        groups = document["spec"]["replicatedJobs"]
        specs = [(group["replicas"], group["template"]["spec"]) for group in groups]
    else:
        specs = [(1, document["spec"])]
    return [(replicas * spec["completions"], spec["template"]["spec"]) for replicas, spec in specs]


def num_devices(document: dict[str, Any]) -> int:
    if document["kind"] == "TrainJob":
        trainer = document["spec"]["trainer"]
        return trainer["numNodes"] * int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    limits = [(count, pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for count, pod in pods(document)]
    return sum(count * int(limit) for count, limit in limits)


def test_version_is_the_one_that_the_files_name() -> None:
    assert importlib.metadata.version("kubeflow-trainer-api") == kubernetes.SCHEMA.version


def test_golden(golden) -> None:
    full: dict[str, str] = {}
    for target, file in FILES.items():
        found = texts(emit(target, REQUEST, framework="megatron").artifacts)
        found["manifest.yaml"] = found.pop(file)
        if target == "jobset":
            full = found
            golden(f"emit/{target}/{file}", found["manifest.yaml"])
            golden(f"emit/{target}/README.md", found["README.md"])
        else:
            golden(f"emit/{target}.diff", difference(found, full))
        assert set(found) == {"manifest.yaml", "README.md"}


@pytest.mark.parametrize("target", FILES)
def test_a_document_is_accepted_with_its_number_of_devices(target: str, kinds: dict[str, Any]) -> None:
    document = main(target)
    assert refusal(kinds, document) is None
    assert num_devices(document) == LLAMA_70B_ON_64.world_size


def mutations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """``document`` with one unknown field in each mapping, and with one wrong type for each number and list."""

    def walk(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        yield path, node
        children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in children:
            yield from walk(child, (*path, key))

    def changed(path: tuple[Any, ...], change: Callable[[Any], Any]) -> dict[str, Any]:
        root = {"root": copy.deepcopy(document)}
        parent: Any = root
        full = ("root", *path)
        for key in full[:-1]:
            parent = parent[key]
        parent[full[-1]] = change(parent[full[-1]])
        return root["root"]

    free = {"annotations", "limits", "nodeSelector"}  # any key is allowed in these
    for path, node in walk(document, ()):
        if isinstance(node, dict) and not free & set(path):
            yield f"{path} + unknown field", changed(path, lambda value: {**value, "replicaz": 1})
        if isinstance(node, int | list) and not isinstance(node, bool):
            yield f"{path} of another type", changed(path, lambda _: "three")


@pytest.mark.parametrize("target", FILES)
def test_every_mutation_is_refused(target: str, kinds: dict[str, Any]) -> None:
    cases = list(mutations(main(target)))
    assert len(cases) > 15
    accepted = [what for what, document in cases if refusal(kinds, document) is None]
    assert accepted == []


TABLES = st.lists(st.integers(1, 8), min_size=1, max_size=12).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))), st.permutations(range(8)))
)


@pytest.mark.parametrize("target", FILES)
@given(drawn=TABLES)
@settings(max_examples=25, deadline=None)
def test_any_hosts_of_consecutive_ranks(target: str, kinds: dict[str, Any], drawn: Any) -> None:
    sizes, order, devices = drawn
    table = tuple((host, devices[local]) for host in order for local in range(sizes[host]))
    config = config_for(LLAMA_70B, data_parallel=len(table))
    plan = plan_for(LLAMA_70B, config, rank_table=table)
    request = replace(request_for(LLAMA_70B, config, plan=plan, hosts=()), devices_per_host=8)
    document = main(target, request)
    assert refusal(kinds, document) is None
    assert num_devices(document) == 8 * len(sizes)
    rows = documents(target, request)[0]["data"]["hosts.txt"].splitlines()
    told = [row.split() for row in rows if not row.startswith("#")]
    said = tuple((int(node), int(device)) for node, _, names in told for device in names.split(","))
    assert said == tuple((order.index(host), device) for host, device in table)


@pytest.mark.parametrize("target", FILES)
def test_files_of_the_pod_are_those_of_the_framework(target: str) -> None:
    data = documents(target)[0]["data"]
    alone = {str(file.path): file.content for file in emit("megatron", REQUEST).artifacts}
    assert data == {name: text for name, text in alone.items() if "launch_host" not in name and name != "README.md"}


def test_named_hosts_are_pinned(kinds: dict[str, Any]) -> None:
    config = config_for(LLAMA_70B, data_parallel=3)
    plan = plan_for(LLAMA_70B, config, rank_table=((1, 0), (1, 1), (0, 3)))
    request = request_for(LLAMA_70B, config, plan=plan, hosts=("alpha", "beta"))
    document = main("jobset", request)
    assert refusal(kinds, document) is None
    first, second = (pod for _, pod in pods(document))
    assert first["nodeSelector"] == {"kubernetes.io/hostname": "beta"}
    assert first["containers"][0]["command"][-1].endswith('launch.sh "0"')
    assert second["nodeSelector"] == {"kubernetes.io/hostname": "alpha"}
    master = {entry["value"] for pod in (first, second) for entry in pod["containers"][0]["env"][:1]}
    assert master == {f"meshplan-{plan.plan_id}-node-000-0-0.meshplan-{plan.plan_id}"}
    for target in ("job", "trainjob"):
        with pytest.raises(CannotExpressError, match="named hosts"):
            emit(target, request, framework="megatron")


@pytest.mark.parametrize("target", FILES)
def test_scattered_ranks_are_refused(target: str) -> None:
    config = config_for(LLAMA_70B, data_parallel=3)
    plan = plan_for(LLAMA_70B, config, rank_table=((0, 0), (1, 1), (0, 3)))
    with pytest.raises(CannotExpressError, match="returns to a host"):
        emit(target, request_for(LLAMA_70B, config, plan=plan, hosts=()), framework="megatron")


def test_files_too_large_for_a_config_map() -> None:
    config = config_for(LLAMA_70B, data_parallel=80_000)
    with pytest.raises(CannotExpressError, match="bytes in one ConfigMap"):
        emit("jobset", request_for(LLAMA_70B, config, hosts=()), framework="megatron")


@given(image=st.text(min_size=1, max_size=60))
@settings(max_examples=25, deadline=None)
def test_hostile_image_names_stay_one_value(image: str) -> None:
    document = main("job", replace(REQUEST, image=image))
    assert document["spec"]["template"]["spec"]["containers"][0]["image"] == image


def test_without_an_image_the_placeholder_is_named() -> None:
    emitted = emit("jobset", replace(REQUEST, image=""), framework="megatron")
    assert any("--image" in note for note in emitted.notes)
    assert "registry.invalid/megatron:replace-me" in emitted.artifacts[1].content


def test_skypilot_gets_hosts_and_a_known_device(golden, tmp_path: Path) -> None:
    for artifact in emit("skypilot", REQUEST, framework="megatron").artifacts:
        if artifact.path.name in {"task.yaml", "README.md"}:
            golden(f"emit/skypilot/{artifact.path}", artifact.content)
    task = yaml.safe_load(emit("skypilot", REQUEST, framework="megatron").artifacts[1].content)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (8, {"H100": 8})
    with pytest.raises(CannotExpressError, match="an unknown device"):
        emit("skypilot", replace(REQUEST, device=None), framework="megatron")


@pytest.mark.parametrize("target", ["jobset", "job", "trainjob"])
def test_pods_ask_for_the_network(target: str) -> None:
    """Without RDMA devices NCCL would use TCP: pods ask for those of the cluster's plugin, or the README says so."""
    plain = emit(target, request_for(LLAMA_70B, LLAMA_70B_ON_64, hosts=()), framework="megatron")
    assert any("--pod-resource" in note for note in plain.notes)
    request = replace(request_for(LLAMA_70B, LLAMA_70B_ON_64, hosts=()), pod_resources={"rdma/ib": 8})
    made = emit(target, request, framework="megatron")
    assert not any("--pod-resource" in note for note in made.notes)
    text = next(file.content for file in made.artifacts if file.path.suffix == ".yaml")
    assert "rdma/ib: '8'" in text
    assert ("IPC_LOCK" in text) is (target != "trainjob")


@pytest.mark.parametrize("text", ["1e5", "12e3", "1e-5", "+1e5", ".5e1"])
def test_text_that_kubectl_would_read_as_a_number_is_quoted(text: str) -> None:
    """A label, variable or argument must be text; YAML 1.1, which PyYAML follows, asks floats for a point."""
    assert kubernetes.yaml_text({"value": text}) == f"value: '{text}'\n"
    assert f"- '{text}'\n" in kubernetes.yaml_file(PurePosixPath("file"), (), [{"args": [text]}]).content
