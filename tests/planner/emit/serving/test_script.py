"""The serving scripts are run for real; stand-ins for engines, curl and nvidia-smi note their arguments."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from emit_cases import B200, DEEPSEEK_V3, H100, LLAMA_70B, MIXTRAL
from golden_variants import difference, texts
from serving_cases import (
    NODE,
    aggregated,
    disaggregated,
    layout,
    pool,
    random_config,
    serving_plan,
    serving_request,
)

from meshplan.catalogs.constants.machines.device_shares import MpsShare
from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.emit.serving import llama_cpp, sglang, trtllm, vllm
from meshplan.planner.emit.serving.request import HostType, ServingRequest
from meshplan.planner.emit.terms import flattened, read_all
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit, emit_serving, engine_names
from meshplan.planner.serving.problem.config import EngineLimits, Role, Router, Speculation
from meshplan.planner.serving.problem.engines.table import ENGINES
from meshplan.planner.serving.problem.quantization import Quantization

# Notes its arguments and its devices, then waits to be ended as a server does, at most until so many have noted theirs.
SERVER = f"""#!{sys.executable}
import json, os, sys, time
names = ("CUDA_VISIBLE_DEVICES", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
names += ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
note = {{"words": [os.path.basename(sys.argv[0]), *sys.argv[1:]], **{{name: os.environ.get(name) for name in names}}}}
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps(note) + "\\n")
end = time.monotonic() + float(os.environ.get("STAY_S", "0.5"))
while time.monotonic() < end and len(open(os.environ["NOTES"]).readlines()) < int(os.environ.get("ALL", "1000")):
    time.sleep(0.05)
"""
SMI = '#!/usr/bin/env bash\nfor gpu in 0 1 2 3 4 5 6 7; do echo "$gpu, NVIDIA H100 80GB HBM3, 81559"; done\n'
PROGRAMS = ("vllm", "python3", "trtllm-serve", "llama-server", "mpirun", "vllm-router", "nginx")


def tools(folder: Path) -> dict[str, str]:
    path = folder / "tools"
    path.mkdir(exist_ok=True)
    for name, text in (
        *((program, SERVER) for program in PROGRAMS),
        ("nvidia-smi", SMI),
        ("curl", "#!/usr/bin/env bash\n"),
    ):
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    return {"PATH": f"{path}:{os.environ['PATH']}", "NOTES": str(folder / "notes")}


def start(
    folder: Path, request: ServingRequest, *words: str, script: str = "launch.sh", **variables: str
) -> list[dict]:
    """Arguments and devices of each started program."""
    out = folder / "out"
    write_artifacts(emit_serving(request.config.engine, request).artifacts, out, force=True)
    environment = {**tools(folder), **variables}
    Path(environment["NOTES"]).unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", str(out / script), *words], env=environment, capture_output=True, text=True, check=False
    )
    if "a worker ended" not in done.stderr and done.returncode:
        raise RuntimeError(done.stderr)
    notes = Path(environment["NOTES"])
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def value(note: dict, flag: str) -> str:
    return note["words"][note["words"].index(flag) + 1]


FP8 = Quantization.uniform("fp8_block")
PAIR = (pool(layout(8), Role.PREFILL, num_workers=2, quantization=FP8), pool(layout(1, 1, 16, 16), Role.DECODE))


@pytest.mark.parametrize("engine", [name for name in engine_names() if ENGINES[name].disaggregates])
def test_golden(engine: str, golden) -> None:
    mixed = serving_request(LLAMA_70B, aggregated(engine, layout(4), num_workers=3, quantization=bf16()))
    decode = replace(PAIR[1], quantization=FP8)
    guesses = Speculation(num_draft_tokens=2, acceptance=0.8)
    config = disaggregated(engine, PAIR[0], decode, speculation=guesses)
    pair = serving_request(DEEPSEEK_V3, config, hosts=("a", "b", "c", "d"), max_sequence_length=8192)
    full, variant = (texts(emit_serving(engine, request).artifacts) for request in (pair, mixed))
    for name, text in full.items():
        golden(f"emit/{engine}/disaggregated/{name}", text)
    golden(f"emit/{engine}/aggregated.diff", difference(variant, full))


def bf16() -> Quantization:
    return Quantization.uniform("bf16")


def test_workers_of_a_host_share_no_device_and_no_port(tmp_path: Path) -> None:
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(2), num_workers=4))
    # Four servers start one after the other: the first has to stay until the last has noted its arguments.
    notes = start(tmp_path, request, "0", "--seed", "7", STAY_S="10", ALL="4")
    assert sorted(note["CUDA_VISIBLE_DEVICES"] for note in notes) == ["0,1", "2,3", "4,5", "6,7"]
    assert sorted(value(note, "--port") for note in notes) == ["8100", "8101", "8102", "8103"]
    for note in notes:
        assert note["words"][:3] == ["vllm", "serve", "publisher/llama-3.1-70b"]
        assert note["words"][-2:] == ["--seed", "7"]
    (router,) = start(tmp_path, request, script="router.sh")
    urls = router["words"][router["words"].index("--worker-urls") + 1 :]
    assert urls == [f"http://127.0.0.1:{port}" for port in range(8100, 8104)]


# A daemon notes how it is called; a server answers once it has noted its port; waiting takes no time to speak of.
DAEMON = '#!/usr/bin/env bash\nif [[ $# == 0 ]]; then set -- "$(cat)"; fi\necho "$*" >> "$NOTES.daemon"\n'
ANSWERS = '#!/usr/bin/env bash\nport=${@: -1}\nport=${port##*:}\ngrep -q "\\"${port%%/*}\\"" "$NOTES"\n'
SLEEP = "#!/usr/bin/env bash\nexec /bin/sleep 0.05\n"


@pytest.mark.parametrize("own_daemon", [True, False])
def test_replicas_of_a_device_start_in_turn_each_with_its_part(tmp_path: Path, own_daemon: bool) -> None:
    """All first replicas, and once they answer all second ones; one daemon, which is ended if it was started here."""
    share = MpsShare.of(H100.memory_bytes, 2)
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(1), num_workers=4, share=share))
    own = tmp_path / "own"
    own.mkdir()
    for name, text in {"nvidia-cuda-mps-control": DAEMON, "curl": ANSWERS, "sleep": SLEEP}.items():
        (own / name).write_text(text)
        (own / name).chmod(0o755)
    variables = {"PATH": f"{own}:{tools(tmp_path)['PATH']}", "STAY_S": "3"}
    variables |= {} if own_daemon else {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}
    notes = start(tmp_path, request, "0", **variables)
    assert {note["CUDA_VISIBLE_DEVICES"] for note in notes[:2]} == {"0", "1"}
    assert {note["CUDA_VISIBLE_DEVICES"] for note in notes[2:]} == {"0", "1"}
    assert len({value(note, "--port") for note in notes}) == len(notes) == 4
    assert {value(note, "--gpu-memory-utilization") for note in notes} == {"0.45"}
    assert {note["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for note in notes} == {"50"}
    pipes = {note["CUDA_MPS_PIPE_DIRECTORY"] for note in notes}
    assert len(pipes) == 1
    assert (pipes == {"/run/mps"}) is not own_daemon
    daemon = tmp_path / "notes.daemon"
    assert (daemon.read_text().split() if daemon.exists() else []) == (["-d", "quit"] if own_daemon else [])


def test_a_single_worker_serves_clients_itself(tmp_path: Path) -> None:
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8)), port=9000)
    (note,) = start(tmp_path, request, "0")
    assert value(note, "--port") == "9000"
    assert not (tmp_path / "out" / "router.sh").exists()
    assert "Router" not in (tmp_path / "out" / "README.md").read_text()


def test_a_worker_over_two_hosts(tmp_path: Path) -> None:
    for engine, address in (("vllm", "--master-addr"), ("sglang", "--dist-init-addr")):
        request = serving_request(LLAMA_70B, aggregated(engine, layout(8, 2)), hosts=("first", "second"))
        (head,) = start(tmp_path, request, "0")
        (other,) = start(tmp_path, request, "1")
        assert [value(note, "--node-rank") for note in (head, other)] == ["0", "1"]
        assert value(head, address) == value(other, address)
        assert value(other, address).startswith("first")
        assert ("--headless" in other["words"]) == (engine == "vllm")
        assert "--headless" not in head["words"]


def test_tensorrt_llm_starts_other_hosts_through_mpi(tmp_path: Path) -> None:
    request = serving_request(LLAMA_70B, aggregated("trtllm", layout(8, 2)), hosts=("first", "second"))
    (head,) = start(tmp_path, request, "0")
    assert head["words"][:5] == ["mpirun", "-n", "16", "--host", "first:8,second:8"]
    assert start(tmp_path, request, "1") == []


def test_roles_have_their_own_flags_and_hosts(tmp_path: Path) -> None:
    config = disaggregated("vllm", *(replace(one, quantization=FP8) for one in PAIR))
    request = serving_request(DEEPSEEK_V3, config)
    hosts = {"MESHPLAN_HOSTS": "p0 p1 d0 d1"}
    (prefill,) = start(tmp_path, request, "1", **hosts)
    (decode,) = start(tmp_path, request, "3", **hosts)
    assert json.loads(value(prefill, "--kv-transfer-config"))["kv_role"] == "kv_producer"
    assert json.loads(value(decode, "--kv-transfer-config"))["kv_role"] == "kv_consumer"
    assert prefill["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "p1"
    assert value(decode, "--master-addr") == "d0"
    (router,) = start(tmp_path, request, script="router.sh", **hosts)
    assert router["words"][-6:] == [
        *("--prefill", "http://p0:8100", "--prefill", "http://p1:8100"),
        *("--decode", "http://d0:8100"),
    ]


def test_hostile_names_stay_arguments(tmp_path: Path) -> None:
    evil = "a $(touch /tmp/x)`id`\"'; rm -rf ~ #{port}"
    for engine in ("vllm", "trtllm", "sglang"):
        request = serving_request(LLAMA_70B, aggregated(engine, layout(8)), model_path=evil)
        (note,) = start(tmp_path, request, "0")
        assert evil in note["words"]
    guesses = Speculation(num_draft_tokens=2, acceptance=0.8)
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8), speculation=guesses), draft_model=evil)
    (note,) = start(tmp_path, request, "0")
    assert json.loads(value(note, "--speculative-config"))["model"] == evil
    for bad in ("--config=x", "a\nb"):
        with pytest.raises(EmitError, match="is no path of a model"):
            emit_serving("vllm", serving_request(LLAMA_70B, aggregated("vllm", layout(8)), model_path=bad))
    with pytest.raises(EmitError, match="is no host name"):
        emit_serving("vllm", serving_request(LLAMA_70B, aggregated("vllm", layout(8)), hosts=("a;id",)))


def test_checks_stop_a_wrong_host(tmp_path: Path) -> None:
    wrong = {NODE: HostType(devices_per_host=8, device=B200)}
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8)), host_types=wrong)
    with pytest.raises(RuntimeError, match="GPU 0 is NVIDIA H100 80GB HBM3, the plan is for B200"):
        start(tmp_path, request, "0")
    with pytest.raises(RuntimeError, match="numbered from 0"):
        start(tmp_path, request, "1")
    with pytest.raises(RuntimeError, match="usage"):
        start(tmp_path, request)


TABLES = {"vllm": vllm.TERMS, "sglang": sglang.TERMS, "trtllm": trtllm.TERMS, "llama.cpp": llama_cpp.TERMS}
DEGREES = ("tensor_parallel", "pipeline_parallel", "attention_data_parallel", "expert_parallel", "context_parallel")
LIMITS = ("max_num_seqs", "max_batched_tokens")
SWITCHES = ("prefix_caching", "cuda_graphs", "custom_all_reduce")


def arguments_of(text: str, options: dict) -> dict:
    """Flags of an argument file, and for TensorRT-LLM the keys of its options file."""
    flags = (line.partition(" ") for line in text.splitlines() if line.startswith("--"))
    return {flag: value for flag, _, value in flags} | flattened(options)


@pytest.mark.parametrize("engine", engine_names())
def test_random_plans_ask_for_their_devices(engine: str) -> None:
    """The defect of peers: attention-data ranks counted twice make 256 devices of a worker of 16."""
    draw = random.Random(11)
    emitted = 0
    while emitted < 200:
        shape = draw.choice((LLAMA_70B, MIXTRAL, DEEPSEEK_V3))
        config = random_config(draw, ENGINES[engine], shape)
        request = serving_request(shape, config, quantized_checkpoint=True)
        try:
            files = {str(file.path): file.content for file in emit_serving(engine, request).artifacts}
        except CannotExpressError:
            continue
        emitted += 1
        rows = [line.split() for line in files["workers.txt"].splitlines() if not line.startswith("#")]
        places = [(row[2], device) for row in rows for device in row[7].split(",")]
        assert len(places) == len(set(places)) == config.num_devices
        for one in config.pools:
            text = files[f"{one.role.value}_args.txt"]
            found = read_all(
                TABLES[engine], arguments_of(text, trtllm.options(request, one) if engine == "trtllm" else {})
            )
            assert not found.problems
            assert {name: found.values[name] for name in LIMITS} == {name: getattr(one.limits, name) for name in LIMITS}
            assert {name: found.values.get(name, True) for name in SWITCHES} == {
                name: getattr(one.limits, name) for name in SWITCHES
            }
            assert {name: found.values.get(name, 1) for name in DEGREES} == {
                name: getattr(one.layout, name) for name in DEGREES
            }
            own = [row for row in rows if row[1] == one.role.value]
            assert sum(len(row[7].split(",")) for row in own) == one.num_devices


def test_rank_tables_are_honoured(tmp_path: Path) -> None:
    config = aggregated("vllm", layout(2), num_workers=2)
    plan = serving_plan(LLAMA_70B, config, rank_table=((1, 5), (1, 3), (0, 7), (0, 6)))
    request = serving_request(LLAMA_70B, config, plan=plan, hosts=("x", "y"))
    (note,) = start(tmp_path, request, "1")
    assert note["CUDA_VISIBLE_DEVICES"] == "5,3"
    uneven = serving_plan(LLAMA_70B, config, rank_table=((0, 0), (1, 0), (0, 1), (0, 2)))
    assert emit_serving("vllm", serving_request(LLAMA_70B, config, plan=uneven))
    split = aggregated("vllm", layout(4))
    plan = serving_plan(LLAMA_70B, split, rank_table=((0, 0), (0, 1), (0, 2), (1, 0)))
    with pytest.raises(CannotExpressError, match="split unevenly"):
        emit_serving("vllm", serving_request(LLAMA_70B, split, plan=plan))
    short = serving_plan(LLAMA_70B, config, rank_table=((0, 0),))
    with pytest.raises(EmitError, match="has 1 ranks, the configuration 4"):
        emit_serving("vllm", serving_request(LLAMA_70B, config, plan=short))


def test_what_cannot_be_expressed_is_refused() -> None:
    def refused(shape, config, match: str, **fields) -> None:
        with pytest.raises(CannotExpressError, match=match):
            emit_serving(config.engine, serving_request(shape, config, **fields))

    refused(LLAMA_70B, aggregated("vllm", layout(5)), "num_attention_heads must be a multiple")
    refused(LLAMA_70B, aggregated("vllm", layout(8), limits=EngineLimits(chunked_prefill=False)), "whole prompts")
    awq = Quantization.uniform("w4a16")
    refused(LLAMA_70B, aggregated("vllm", layout(8), quantization=awq), "w4a16 from a 16-bit checkpoint")
    refused(LLAMA_70B, aggregated("trtllm", layout(8), quantization=Quantization.uniform("fp8")), "16-bit checkpoint")
    refused(DEEPSEEK_V3, aggregated("vllm", layout(8, expert=8)), "published checkpoint, which holds fp8_block")
    guesses = Speculation(num_draft_tokens=2, acceptance=0.8)
    for engine in ("vllm", "sglang", "trtllm"):
        refused(LLAMA_70B, aggregated(engine, layout(8), speculation=guesses), "speculation without a draft")
    refused(LLAMA_70B, aggregated("llama.cpp", layout(1), speculation=guesses), "speculative decoding")
    prefix = aggregated("trtllm", layout(4), num_workers=2, router=Router.PREFIX_AWARE)
    refused(LLAMA_70B, prefix, "router that is prefix_aware")
    refused(MIXTRAL, aggregated("vllm", layout(8, 3)), "a worker of 24 devices on hosts of 5", host_types=hosts_of(5))
    with pytest.raises(CannotExpressError, match="a plan for sglang"):
        emit_serving("vllm", serving_request(LLAMA_70B, aggregated("sglang", layout(8))))


def hosts_of(devices: int) -> dict[str, HostType]:
    return {NODE: HostType(devices_per_host=devices, device=H100)}


def test_bad_requests_are_named() -> None:
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8)))
    with pytest.raises(EmitError, match="launches training plans"):
        emit_serving("megatron", request)
    with pytest.raises(EmitError, match="unknown emit target 'k8s'; did you mean 'job', 'jobset', 'trainjob' or 'lws'"):
        emit_serving("k8s", request)
    with pytest.raises(EmitError, match="unknown emit target 'vlm'; did you mean 'vllm'"):
        emit_serving("vlm", request)
    with pytest.raises(EmitError, match="nothing is known of hosts"):
        emit_serving("vllm", replace(request, host_types={}))
    with pytest.raises(EmitError, match="of the kind 'training'"):
        emit_serving("vllm", replace(request, plan=replace(request.plan, kind="training")))
    with pytest.raises(EmitError, match="has no configuration to launch"):
        emit_serving("vllm", replace(request, plan=replace(request.plan, config={})))
    with pytest.raises(EmitError, match="no checkpoint of Llama"):
        emit_serving("vllm", replace(request, model_path=""))
    with pytest.raises(EmitError, match="launches serving plans"):
        emit("vllm", request)
    published = replace(request, model_path="", shape=replace(LLAMA_70B, source="https://huggingface.co/org/m/blob/x"))
    assert published.model == "org/m"


def test_a_changed_file_stops_the_launch(tmp_path: Path) -> None:
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8)))
    write_artifacts(emit_serving("vllm", request).artifacts, tmp_path / "out")
    workers = tmp_path / "out" / "workers.txt"
    workers.write_text(workers.read_text() + "# more\n")
    command = ["bash", str(tmp_path / "out" / "launch.sh"), "0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "workers.txt: FAILED" in ran.stderr
    assert "MESHPLAN_SKIP_CHECKS=1" in ran.stderr


@pytest.mark.parametrize(("workers", "prefixes", "is_said"), [(2, 300, True), (1, 300, False), (2, None, False)])
def test_a_router_that_looks_for_prefixes_is_named(workers: int, prefixes: int | None, is_said: bool) -> None:
    config = aggregated("sglang", layout(4), num_workers=workers)
    plan = serving_plan(LLAMA_70B, config)
    plan = replace(plan, spec={**plan.spec, "workload": {"prefix_hit_rate": 0.5, "num_prefixes": prefixes}})
    notes = emit_serving("sglang", serving_request(LLAMA_70B, config, plan=plan)).notes
    assert any("cache_aware" in note for note in notes) is is_said
