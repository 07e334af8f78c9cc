"""Flags of older releases: respelled, refused with the first release that has them, and never written unseen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from emit_cases import LLAMA_70B, LLAMA_70B_ON_64, MIXTRAL, config_for, request_for
from serving_cases import aggregated, layout, serving_request

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.emit.releases import RELEASES, release_notes, release_of, since_text, spelled
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch.registry import TARGETS, emit, emit_serving, features_of
from meshplan.planner.launch.support import choice_rows


@pytest.mark.parametrize("name", RELEASES)
def test_every_row_is_about_a_flag_that_the_emitter_knows(name: str) -> None:
    """A row that nothing writes would never refuse anything."""
    target = next(target for target in TARGETS if target.name == name)
    flags = " ".join(feature.expressed_by for feature in features_of(target))
    of_no_choice = {"--module", "--master-port"}
    assert {row.flag for row in RELEASES[name].rows if row.flag not in flags} <= of_no_choice
    for row in RELEASES[name].rows:
        assert row.source
        assert release_of(name, row.since) == row.since
        assert release_of(name, RELEASES[name].checked) == RELEASES[name].checked


@pytest.mark.parametrize(
    ("target", "version", "flags", "written"),
    [
        ("sglang", "0.5.22", (("--attn-dp-size", "4"),), (("--attn-dp-size", "4"),)),
        ("sglang", "v0.5.21", (("--attn-dp-size", "4"),), (("--dp-size", "4"), ("--enable-dp-attention",))),
        ("sglang", "", (("--attn-dp-size", "4"),), (("--attn-dp-size", "4"),)),
        ("vllm", "0.16.0", (("--quantization", "fp8_per_tensor"),), (("--quantization", "fp8"),)),
        ("vllm", "0.33.0", (("--quantization", "fp8_per_tensor"),), (("--quantization", "fp8_per_tensor"),)),
        ("vllm", "0.99.0", (("--kv-cache-dtype", "nvfp4"),), (("--kv-cache-dtype", "nvfp4"),)),
        ("vllm", "0.10.0", (("--kv-cache-dtype", "auto"),), (("--kv-cache-dtype", "auto"),)),
    ],
)
def test_flags_are_those_of_the_release(target: str, version: str, flags: Any, written: Any) -> None:
    assert spelled(target, version, flags) == written


@pytest.mark.parametrize(
    ("target", "version", "flag", "first"),
    [
        ("vllm", "0.11.0", ("--kv-offloading-size", "4"), "0.11.1"),
        ("vllm", "0.10.2", ("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'), "0.11.0"),
        ("sglang", "0.5.14", ("--dcp-size", "2"), "0.5.15"),
        ("sglang", "0.5.1.post3", ("--speculative-algorithm", "STANDALONE"), "0.5.2"),
        ("megatron", "0.12.1", ("--pipeline-model-parallel-layout", "Et|tL"), "0.13.0"),
    ],
)
def test_what_a_release_lacks_is_refused_with_the_first_that_has_it(
    target: str, version: str, flag: tuple[str, ...], first: str
) -> None:
    with pytest.raises(CannotExpressError, match=f"--framework-version {first}, the first release"):
        spelled(target, version, [flag])


@pytest.mark.parametrize(
    ("target", "version", "message"),
    [
        ("vllm", "new", "is no release"),
        ("vllm", "0.9.2", "compared from 0.10.0 on"),
        ("deepspeed", "0.18.0", "releases of deepspeed were not compared"),
    ],
)
def test_releases_that_nothing_is_known_of(target: str, version: str, message: str) -> None:
    with pytest.raises(EmitError, match=message):
        release_of(target, version)


def asked(version: str, config: Any = LLAMA_70B_ON_64, shape: Any = LLAMA_70B) -> TrainingRequest:
    return replace(request_for(shape, config), framework_version=version)


def test_an_older_megatron_takes_what_it_has() -> None:
    old, new = (
        {str(file.path): file.content for file in emit("megatron", asked(one)).artifacts} for one in ("0.12.0", "")
    )
    assert old["megatron_args.txt"] == new["megatron_args.txt"]
    assert "only the parser of 0.19.2 was run" in old["README.md"]
    assert "Written for" not in new["README.md"]
    assert release_notes("megatron", "0.19.2") == ()
    sharded = config_for(LLAMA_70B, data_parallel=8, zero_stage=3)
    with pytest.raises(CannotExpressError, match=r"--use-megatron-fsdp .*Nearest it can: --framework-version 0\.14\.0"):
        emit("megatron", asked("0.13.1", sharded))
    overlapped = config_for(
        MIXTRAL, data_parallel=8, expert_parallel=8, expert_parallel_overlap=True, micro_batch_size=1
    )
    with pytest.raises(CannotExpressError, match=r"overlap-moe.*0\.14\.0"):
        emit("megatron", asked("0.13.0", overlapped, MIXTRAL))


def test_several_hosts_are_flags_of_vllm_since_a_release() -> None:
    one_host, two_hosts = (aggregated("vllm", layout(tensor=8, pipeline=stages)) for stages in (1, 2))
    for config, version in ((one_host, "0.10.0"), (two_hosts, "0.11.1")):
        emit_serving("vllm", replace(serving_request(LLAMA_70B, config), framework_version=version))
    with pytest.raises(CannotExpressError, match=r"--nnodes.*Nearest it can: --framework-version 0\.11\.1"):
        emit_serving("vllm", replace(serving_request(LLAMA_70B, two_hosts), framework_version="0.11.0"))


@pytest.mark.parametrize(
    ("version", "degrees", "spec", "is_held"),
    [
        ("0.27.1", {"tensor": 1}, {}, True),
        ("0.27.1", {"data": 8, "expert": 8}, {}, True),  # every attention-data rank is a process with one device
        ("0.27.1", {"tensor": 2}, {}, False),  # with several devices its processes hold one thread each
        ("0.28.0", {"tensor": 1}, {}, False),
        ("", {"tensor": 1}, {}, False),
        ("0.27.1", {"tensor": 1}, {"workload": {"images": {"per_request": 1}}}, False),
    ],
)
def test_an_older_vllm_on_one_device_is_held_to_one_thread(
    version: str, degrees: dict[str, int], spec: dict[str, Any], is_held: bool
) -> None:
    """Operations of the host fan out over all cores there (vllm-project/vllm, pull request 49919)."""
    request = serving_request(MIXTRAL if "expert" in degrees else LLAMA_70B, aggregated("vllm", layout(**degrees)))
    plan = replace(request.plan, spec={**request.plan.spec, **spec})
    made = emit_serving("vllm", replace(request, plan=plan, framework_version=version))
    script = next(file.content for file in made.artifacts if file.path.name == "launch.sh")
    assert ("export OMP_NUM_THREADS=1\n" in script) is is_held
    assert any("OMP_NUM_THREADS" in note for note in made.notes) is is_held


@pytest.mark.parametrize(
    ("engine", "image", "version", "said"),
    [
        ("vllm", "vllm/vllm-openai:v0.11.0", "", "vllm 0.11.0, the flags are those of 0.33.0"),
        ("vllm", "docker.io/vllm/vllm-openai:v0.11.0-x86_64@sha256:0", "", "vllm 0.11.0"),
        ("vllm", "vllm/vllm-openai:v0.33.0", "", ""),
        ("vllm", "vllm/vllm-openai:v0.33.0", "0.31.0", "vllm 0.33.0, the flags are those of 0.31.0"),
        ("vllm", "vllm/vllm-openai:latest", "", ""),
        ("vllm", "nvcr.io/nvidia/vllm:25.09-py3", "", ""),
        ("vllm", "localhost:5000/own", "", ""),
        ("sglang", "lmsysorg/sglang:v0.5.3-cu126", "", "sglang 0.5.3, the flags are those of 0.5.23"),
        ("trtllm", "nvcr.io/nvidia/tensorrt-llm/release:1.0.0", "", ""),
    ],
)
def test_an_image_of_another_release_is_said(engine: str, image: str, version: str, said: str) -> None:
    request = serving_request(LLAMA_70B, aggregated(engine, layout(8)), image=image, framework_version=version)
    notes = [note for note in emit_serving(engine, request).notes if note.startswith("The image holds")]
    assert [said in note for note in notes] == ([True] if said else [])


def test_an_older_sglang_spells_attention_ranks_its_way() -> None:
    request = serving_request(MIXTRAL, aggregated("sglang", layout(tensor=2, data=4, expert=8)))
    made = emit_serving("sglang", replace(request, framework_version="0.5.12"))
    text = next(file.content for file in made.artifacts if file.path.name.endswith("_args.txt"))
    assert "--attn-dp-size" not in text
    assert "--dp-size 4\n--enable-dp-attention\n" in text
    assert any("only the parser of 0.5.23" in note for note in made.notes)


def test_torchtitan_had_a_toml_file() -> None:
    config = config_for(LLAMA_70B, data_parallel=8, zero_stage=3)
    with pytest.raises(CannotExpressError, match=r"--module.*0\.3\.0"):
        emit("torchtitan", asked("0.2.2", config))


@pytest.mark.parametrize("target", ["slurm", "accelerate"])
def test_a_wrapped_framework_and_one_without_a_table(target: str) -> None:
    request = replace(asked("0.2.2", config_for(LLAMA_70B, data_parallel=8, zero_stage=3)), hosts=())
    with pytest.raises(EmitError, match=r"0\.3\.0|not compared"):
        emit(target, request, framework="torchtitan" if target == "slurm" else None)


def test_the_support_matrix_tells_the_release() -> None:
    assert since_text("sglang", "--attn-dp-size (inside)") == (
        "--attn-dp-size from 0.5.22 (before: --dp-size {value} --enable-dp-attention)"
    )
    since = {row["name"]: row["since"] for row in choice_rows()}
    assert since["outer_zero_stage"] == "megatron: --outer-dp-sharding-strategy from 0.14.0"
