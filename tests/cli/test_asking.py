"""Questions without a spec file: options, overrides, standard input, and the spec that ``init`` writes."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import SPEC, Command

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.models import diffusion
from meshplan.cli.asking import Asked, slo_of
from meshplan.cli.gpus import cluster_of
from meshplan.cli.question import with_settings
from meshplan.planner.core.reading.spec_reader import plain_numbers
from meshplan.planner.diffusion.problem.spec import read_diffusion_spec
from meshplan.planner.training.problem.spec import TrainingSpec


@pytest.fixture
def catalog(database: Path) -> Catalog:
    return Catalog.open(str(database))


@pytest.mark.parametrize(
    ("text", "nodes", "most"),
    [
        ("16xH100", {"dgx-h100": 2}, None),
        ("4xH100", {"dgx-h100": 1}, 4),
        ("H100x20", {"dgx-h100": 3}, 20),
        ("2xdgx-h100", {"dgx-h100": 2}, None),
        ("8xH100, 8xA100", {"dgx-h100": 1, "dgx-a100-80gb": 1}, None),
        ("1xaws-p5-48xlarge", {"aws-p5-48xlarge": 1}, None),
        ("8xMI300X", {"hgx-mi300x": 1}, None),
        ("3 x L40S", {"l40s-pcie-8": 1}, 3),
    ],
)
def test_gpus_stand_in_nodes_of_their_maker(
    text: str, nodes: dict[str, int], most: int | None, catalog: Catalog
) -> None:
    cluster, devices = cluster_of(text, catalog)
    assert {node["type"]: node["count"] for node in cluster["nodes"]} == nodes
    assert devices == most


@pytest.mark.parametrize(
    ("text", "count", "each", "most"),
    [
        ("256xGB200", 4, 64, None),
        ("2048xGB200", 32, 64, None),
        ("144xGB200", 2, None, None),
        ("64xGB200", 1, None, 64),
        ("100xGB200", 2, None, 100),
    ],
)
def test_racks_share_a_job_evenly(text: str, count: int, each: int | None, most: int | None, catalog: Catalog) -> None:
    """Of racks filled one by one, 72 and 72 and 72 and 40, groups of 64 experts crossed the network."""
    cluster, devices = cluster_of(text, catalog)
    (rack,) = cluster["nodes"]
    assert (rack["count"], rack.get("devices"), devices) == (count, each, most)


def test_part_nodes_of_several_types_limit_each_type_by_itself(catalog: Catalog) -> None:
    cluster, most = cluster_of("2xRTX4090,1xA100,8xH100,12xL40S", catalog)
    assert cluster["nodes"] == [
        {"type": "rtx-4090-pcie-8", "count": 1, "devices": 2},
        {"type": "dgx-a100-80gb", "count": 1, "devices": 1},
        {"type": "dgx-h100", "count": 1},
        {"type": "l40s-pcie-8", "count": 2, "devices": 6},
    ]
    assert most is None  # a limit on all together would let two A100 stand in for the 4090s
    assert cluster_of("2xH100,2xH100", catalog) == ({"nodes": [{"type": "dgx-h100", "count": 1}]}, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("16xH1000", "did you mean"),
        ("8H100", "did you mean 8xH100"),
        ("9xA100,4xH100", "9 GPUs beside others are spread evenly over 2 nodes of 8 .*: write 8 or 10"),
        ("H100", "16xH100"),
        ("0xH100", "at least 1"),
        ("4xraspberry-pi-5", "raspberry-pi-5 is a machine at home: ask in a file with kind: edge"),
    ],
)
def test_gpus_that_cannot_be_read_say_why(text: str, words: str, catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=words):
        cluster_of(text, catalog)


def test_a_number_apart_from_its_gpus_is_told_to_join_them(meshplan: Command) -> None:
    """``--gpus 8 H100`` was answered with: give a spec file or --model and --gpus, not both."""
    wrong = meshplan("plan", "--model", "llama-3.1-8b", "--gpus", "8", "H100", "--rate", "1")
    assert wrong.code == 2
    assert "--gpus: write 8xH100, in one word" in wrong.err


def test_limits_have_units() -> None:
    assert slo_of("ttft_p99=2s, tpot_p95=50ms,e2e_mean_s=1 min") == {
        "ttft_p99_s": 2.0,
        "tpot_p95_s": 0.05,
        "e2e_mean_s": 60.0,
    }
    with pytest.raises(SpecError, match="ttft_p99=2 has no unit; write ttft_p99=2ms or ttft_p99=2s"):
        slo_of("ttft_p99=2")
    with pytest.raises(SpecError, match="ttft_p99 is limited twice"):
        slo_of("ttft_p99=2s,ttft_p99_s=3")
    assert slo_of("ttft_p99_s=2,tpot_p95_s=50ms") == {"ttft_p99_s": 2.0, "tpot_p95_s": 0.05}
    with pytest.raises(SpecError, match=r"ttft_p99: decimals have a point \(0\.5s\)"):
        slo_of("ttft_p99=0,5s,tpot_p95=50ms")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Asked(target="trtlm", rate=1.0), r"--target: 'trtlm' is none of .*did you mean 'trtllm'"),
        (Asked(target="slurm"), r"'slurm' is none of megatron, .*meshplan emit PLAN --target slurm"),
        (Asked(target="megatron", rate=1.0, slo="ttft_p99=1s"), "megatron trains models, and --rate and --slo is of"),
        (Asked(target="vllm", batch="1M"), "vllm serves models, and --batch is of training"),
    ],
)
def test_a_target_that_cannot_be_meant_is_told(asked: Asked, said: str, catalog: Catalog) -> None:
    asked.model, asked.gpus = "llama-3.1-8b", "8xH100"
    with pytest.raises(SpecError, match=said):
        asked.document(catalog)


def test_a_rate_without_limits_says_that_requests_may_wait(catalog: Catalog) -> None:
    """The fewest devices that finish the rate are the answer then, however long a request waits for them."""
    asked = Asked(model="llama-3.1-8b", gpus="1xH100", lengths="100/10", rate=1.0)
    asked.document(catalog)
    assert asked.assumed == ["no limit on latencies: what keeps pace with the rate will do (--slo)"]
    limited = Asked(model="llama-3.1-8b", gpus="1xH100", lengths="100/10", rate=1.0, slo="ttft_p99=1s")
    limited.document(catalog)
    assert limited.assumed == []


def test_a_language_model_of_the_catalog_reads_no_diffusion_models(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffusion, "diffusion_models", lambda: pytest.fail("read for a language model"))
    assert Asked(model="Qwen/Qwen3-32B", gpus="8xH100", rate=1.0).document(catalog)["kind"] == "serving"


def test_a_question_that_says_neither_or_both_gets_two_commands_to_copy(catalog: Catalog) -> None:
    for asked in (Asked(model="m", gpus="8xH100"), Asked(model="m", gpus="8xH100", rate=1.0, batch="4M")):
        with pytest.raises(SpecError, match=r"To serve: .* To train: "):
            asked.kind(catalog)


def test_a_model_of_images_asks_for_images(catalog: Catalog) -> None:
    asked = Asked(model="black-forest-labs/FLUX.1-dev", gpus="4xL40S", rate=0.2, slo="latency=20s")
    document = asked.document(catalog)
    assert document["kind"] == "diffusion"
    assert document["workload"] == {"width": 1024, "height": 1024, "steps": 50, "request_rate_per_s": 0.2}
    assert document["slo"] == {"latency_s": 20.0}
    assert read_diffusion_spec(document).constraints.max_devices == 4
    assert len(asked.assumed) == 1
    assert Asked(model="wan2.1-t2v-14b", gpus="8xH100").document(catalog)["workload"]["frames"] == 81
    with pytest.raises(
        SpecError, match=r"--lengths: FLUX.1 dev makes images or videos and has no --lengths and --batch"
    ):
        Asked(model="flux.1-dev", gpus="8xH100", lengths="1/1", batch="4").document(catalog)


@pytest.mark.parametrize(
    ("model", "lengths", "workload"),
    [
        ("BAAI/bge-m3", None, {"task": "embed", "input_length": 512}),
        ("bge-m3", "2k", {"task": "embed", "input_length": "2k"}),
        ("BAAI/bge-reranker-v2-m3", None, {"task": "rerank", "input_length": 512}),
        ("openai/whisper-large-v3", None, {"audio": {"seconds": 30}, "input_length": 4, "output_length": 100}),
        ("openai/whisper-large-v3", "4/50", {"audio": {"seconds": 30}, "input_length": 4, "output_length": 50}),
    ],
)
def test_models_that_do_not_chat_are_asked_for_what_they_do(
    model: str, lengths: str | None, workload: dict[str, Any], catalog: Catalog
) -> None:
    asked = Asked(model=model, gpus="1xL4", rate=2.0, lengths=lengths, slo="e2e_p99=1s")
    assert asked.document(catalog)["workload"] == {**workload, "request_rate_per_s": 2.0}
    assert len(asked.assumed) == (lengths is None)


def test_a_model_that_embeds_has_no_answer_to_count(catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=r"--lengths: BGE M3 makes no tokens: write those of a text alone: 512"):
        Asked(model="bge-m3", gpus="1xL4", rate=2.0, lengths="512/1").document(catalog)


@pytest.mark.parametrize("lengths", ["1000", "/1000", "4k/", ""])
def test_half_of_the_lengths_is_refused_by_the_name_of_its_option(lengths: str, catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=r"--lengths: .* 4000/1000"):
        Asked(model="llama-3.1-8b", gpus="8xH100", rate=1.0, lengths=lengths).document(catalog)


def test_estimate_takes_overrides(meshplan: Command, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    found = meshplan("estimate", spec, "--set", "fixed.activation_recompute=full", "--format", "json").json
    assert found["config"]["activation_recompute"] == "full"
    assert meshplan("estimate", spec, "--set", "nothing").code == 2


def test_an_override_reaches_any_depth_and_leaves_the_spec_alone() -> None:
    spec: dict[str, Any] = {"cluster": {"nodes": [{"type": "a", "count": 1}]}, "workload": {}}
    changed = with_settings(
        spec, ["cluster.nodes[0].count=4", "fixed.tensor_parallel=8", "slo={ttft_p99_s: 2}", "workload.x=8k"]
    )
    assert changed["cluster"]["nodes"][0] == {"type": "a", "count": 4}
    assert changed["fixed"] == {"tensor_parallel": 8}
    assert changed["slo"] == {"ttft_p99_s": 2}
    assert changed["workload"] == {"x": "8k"}
    assert spec == {"cluster": {"nodes": [{"type": "a", "count": 1}]}, "workload": {}}


@pytest.mark.parametrize("setting", ["x", "=3", "cluster.nodes.7.count=1", "kind.deeper=1", "a={"])
def test_an_override_that_cannot_be_applied_says_so(setting: str) -> None:
    with pytest.raises(SpecError):
        with_settings({"kind": "training", "cluster": {"nodes": []}}, [setting])


def test_one_question_has_one_digest_however_its_numbers_are_written(meshplan: Command, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.replace("4096", "4k").replace("count: 1", 'count: "1"').replace("1e9", "1B"))
    plain = tmp_path / "plain.yaml"
    plain.write_text(SPEC)
    written, usual = (meshplan("plan", path, "--no-store", "--format", "json").json for path in (spec, plain))
    assert written["plan_id"] == usual["plan_id"]


def test_numbers_that_cannot_be_read_stay_for_the_reader() -> None:
    document = {"workload": {"sequence_length": "long", "global_batch_size": "64"}, "unknown": "8k"}
    assert plain_numbers(TrainingSpec, document) == {
        "workload": {"sequence_length": "long", "global_batch_size": 64},
        "unknown": "8k",
    }


def test_one_line_asks_a_whole_question(meshplan: Command) -> None:
    outcome = meshplan(
        "plan", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpus", "2xH100", "--slo", "ttft_p99=2s", "--rate", "1"
    )
    assert outcome.code == 0
    assert "assumed: 1024/1024 tokens in and out" in outcome.err
    assert "is stored; next:" in outcome.out


def test_options_beside_a_file_are_told_as_settings(meshplan: Command, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    refused = meshplan("plan", spec, "--objective", "energy", "--target", "torchtitan")
    assert refused.code == 2
    assert "--set objective=energy --set constraints.target=torchtitan" in refused.err


def test_a_trace_brings_its_lengths(meshplan: Command, tmp_path: Path) -> None:
    """Lengths were assumed beside it, and the two refused each other."""
    trace = tmp_path / "trace.jsonl"
    lines = [f'{{"arrival_s": {second}, "input_length": 500, "output_length": 20}}' for second in range(20)]
    trace.write_text("\n".join(lines))
    question = ("plan", "--model", "llama-3.1-8b", "--gpus", "1xH100", "--slo", "ttft_p99=2s")
    outcome = meshplan(*question, "--set", f"workload.trace={trace}")
    assert (outcome.code, "assumed: 1024" in outcome.err) == (0, False)


def test_a_spec_comes_from_standard_input(meshplan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(SPEC))
    outcome = meshplan("plan", "-", "--set", "fixed.tensor_parallel=2", "--format", "json")
    assert outcome.json["config"]["tensor_parallel"] == 2


@pytest.mark.parametrize("arguments", [(), ("x.yaml", "--model", "m"), ("--model", "llama-3.1-8b", "--rate", "1")])
def test_half_a_question_is_refused_in_words(arguments: tuple[str, ...], meshplan: Command) -> None:
    outcome = meshplan("plan", *arguments)
    assert outcome.code == 2
    assert "--gpus" in outcome.err


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3.2-1b", ("--batch", "64", "--sequence-length", "8k")),
        ("llama-3.2-1b", ("--rate", "2", "--lengths", "1000/100", "--slo", "ttft_p99=2s")),
        ("llama-3.2-1b", ("--rate", "2", "--target", "sglang")),
        ("flux.1-dev", ("--rate", "0.1", "--slo", "latency=20s")),
    ],
)
def test_init_writes_a_spec_that_can_be_planned(
    model: str, options: tuple[str, ...], meshplan: Command, tmp_path: Path
) -> None:
    spec = tmp_path / "question.yaml"
    outcome = meshplan("init", "--model", model, "--gpus", "2xH100", *options, spec)
    assert outcome.code == 0
    assert f"meshplan plan {spec}" in outcome.out
    assert yaml.safe_load(spec.read_text())["model"] == model
    assert meshplan("plan", spec, "--no-store").code == 0
    again = meshplan("init", "--model", model, "--gpus", "2xH100", *options, spec)
    assert (again.code, "--force" in again.err) == (6, True)


@pytest.mark.parametrize("gpus", ["1xA100", "2xA100"])
def test_the_next_commands_can_be_typed(meshplan: Command, gpus: str) -> None:
    """None twice, and none that asks for more devices than there are."""
    question = ("--model", "llama-3.2-1b", "--gpus", gpus, "--concurrency", "4", "--lengths", "128/16")
    outcome = meshplan("plan", *question)
    commands = [line.split() for line in outcome.out.partition("next:\n")[2].splitlines() if "meshplan" in line]
    assert len({" ".join(words) for words in commands}) == len(commands) > 1
    (explained,) = [words for words in commands if words[1] == "explain"]
    assert ("--instead" in explained) == (gpus != "1xA100")
    assert meshplan(*explained[1:]).code == 0
