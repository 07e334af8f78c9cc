"""The scripts are run for real, with stand-ins for torchrun and nvidia-smi that note what they were given."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from emit_cases import LLAMA_70B, LLAMA_70B_ON_64, MIXTRAL, config_for, plan_for, request_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import EmitError
from meshplan.planner.emit.hosts import MAX_HOST_SCRIPTS
from meshplan.planner.emit.text import plain
from meshplan.planner.emit.training.megatron import job as megatron
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit

TORCHRUN = r"""#!/usr/bin/env bash
printf '%s\n' "$@" > "$NOTES/argv"
env > "$NOTES/env"
"""
NVIDIA_SMI = """#!/usr/bin/env bash
for index in 0 1 2 3 4 5 6 7; do echo "$index, ${FAKE_GPU:-NVIDIA H100 80GB HBM3}, ${FAKE_MIB:-81559}"; done
"""
H100_MIB = "81559"


class Host:
    """One host on which the emitted files lie, with its own PATH."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "out"
        self.tools = root / "tools"
        self.tools.mkdir()
        for name, text in (("torchrun", TORCHRUN), ("nvidia-smi", NVIDIA_SMI)):
            (self.tools / name).write_text(text)
            (self.tools / name).chmod(0o755)
        (root / "megatron").mkdir()
        (root / "megatron" / "pretrain_gpt.py").write_text("")

    def run(self, request: TrainingRequest, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess:
        write_artifacts(emit("megatron", request).artifacts, self.out, force=True)
        (self.root / "argv").unlink(missing_ok=True)
        environment = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "NOTES": str(self.root),
            "MEGATRON_LM": str(self.root / "megatron"),
            **variables,
        }
        command = [str(self.out / script), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")

    @property
    def argv(self) -> list[str]:
        return (self.root / "argv").read_text().splitlines()

    @property
    def env(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (self.root / "env").read_text().splitlines() if "=" in line)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


LLAMA = request_for(LLAMA_70B, LLAMA_70B_ON_64)


def test_host_script_starts_torchrun_with_the_planned_arguments(host: Host) -> None:
    done = host.run(LLAMA, "launch_host_000.sh", "--seed", "7", DATA_PATH="1.0 a 2.0 b")
    assert done.returncode == 0, done.stderr
    start = ["--nnodes", "8", "--node-rank", "0", "--nproc-per-node", "8", "--rdzv-backend", "static"]
    start += ["--master-addr", "node-0", "--master-port", "29500", "--max-restarts", "0"]
    assert host.argv[: len(start)] == start
    program = host.argv[len(start) :]
    assert program[0].endswith("megatron/pretrain_gpt.py")
    planned = [word for flag in megatron.arguments(LLAMA) for word in flag]
    assert program[1 : 1 + len(planned)] == planned
    assert program[-2:] == ["--seed", "7"]
    data = program.index("--data-path")
    assert program[data + 1 : data + 5] == ["1.0", "a", "2.0", "b"]
    assert "--mock-data" not in program
    assert host.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert host.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_fully_sharded_unsets_the_queue_variable(host: Host) -> None:
    request = request_for(LLAMA_70B, config_for(LLAMA_70B, data_parallel=8, zero_stage=3))
    done = host.run(request, "launch_host_000.sh", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert done.returncode == 0, done.stderr
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in host.env


def test_table_of_another_order_is_honoured(host: Host) -> None:
    config = config_for(LLAMA_70B, tensor_parallel=4, data_parallel=2)
    table = ((1, 6), (1, 4), (1, 5), (1, 7), (1, 0), (0, 3), (0, 2), (0, 1))
    request = request_for(LLAMA_70B, config, plan=plan_for(LLAMA_70B, config, rank_table=table), hosts=("a", "b"))
    assert host.run(request, "launch_host_000.sh").returncode == 0
    assert host.env["CUDA_VISIBLE_DEVICES"] == "6,4,5,7,0"
    assert host.argv[host.argv.index("--nproc-per-node") + 1] == "5"
    assert host.env["MASTER_ADDR"] == "b"
    assert host.run(request, "launch_host_001.sh", MESHPLAN_SKIP_CHECKS="1").returncode == 0
    assert host.env["CUDA_VISIBLE_DEVICES"] == "3,2,1"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FAKE_GPU": "NVIDIA A100-SXM4-80GB"}, "GPU 0 is NVIDIA A100-SXM4-80GB, the plan is for H100"),
        ({"FAKE_MIB": "40000"}, "GPU 0 has 40000 MiB, the plan counts on 78469 MiB"),
        ({"MEGATRON_LM": ""}, "set MEGATRON_LM to a checkout"),
        ({"MEGATRON_LM": "/nowhere"}, "has no pretrain_gpt.py"),
        ({"TORCHRUN": "no-such-program"}, "torchrun is not on the PATH"),
        ({"TOKENIZER_TYPE": "HuggingFaceTokenizer"}, "set TOKENIZER_MODEL"),
    ],
)
def test_checks_before_the_start(host: Host, variables: dict[str, str], message: str) -> None:
    done = host.run(LLAMA, "launch_host_000.sh", **variables)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (host.root / "argv").exists()


def test_missing_gpu(host: Host) -> None:
    config = config_for(LLAMA_70B, tensor_parallel=2)
    request = request_for(LLAMA_70B, config, plan=plan_for(LLAMA_70B, config, rank_table=((0, 7), (0, 8))))
    assert "node-0 has no GPU 8" in host.run(request, "launch_host_000.sh").stderr


def test_first_host_must_answer(host: Host) -> None:
    refused = host.run(LLAMA, "launch.sh", "1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert refused.returncode == 0, refused.stderr
    unknown = host.run(LLAMA, "launch.sh", "1", MASTER_ADDR="no-such-host.invalid")
    assert unknown.returncode != 0
    assert "cannot reach MASTER_ADDR=no-such-host.invalid" in unknown.stderr


@pytest.mark.parametrize("words", [(), ("8",), ("x",), ("-1",), ("1; true",)])
def test_wrong_node_rank(host: Host, words: tuple[str, ...]) -> None:
    done = host.run(LLAMA, "launch.sh", *words)
    assert done.returncode == 1
    assert "node rank" in done.stderr


def test_without_names_the_master_is_asked_for(host: Host) -> None:
    request = replace(LLAMA, hosts=())
    assert "set MASTER_ADDR" in host.run(request, "launch_host_000.sh").stderr
    assert host.run(request, "launch_host_000.sh", MASTER_ADDR="10.0.0.1").returncode == 0


def test_many_hosts_share_one_script(host: Host) -> None:
    config = config_for(LLAMA_70B, tensor_parallel=8, data_parallel=1280)
    emitted = emit("megatron", request_for(LLAMA_70B, config))
    assert MAX_HOST_SCRIPTS < 1280
    assert [str(file.path) for file in emitted.artifacts] == [
        "README.md",
        "megatron_args.txt",
        "launch.sh",
        "hosts.txt",
        "rank_table.json",
    ]
    done = host.run(request_for(LLAMA_70B, config), "launch.sh", "1279", MESHPLAN_SKIP_CHECKS="1")
    assert done.returncode == 0, done.stderr
    assert host.argv[host.argv.index("--node-rank") + 1] == "1279"


def test_scripts_are_valid_bash(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    for path in write_artifacts(emit("megatron", LLAMA).artifacts, tmp_path):
        if path.suffix == ".sh":
            subprocess.run([bash, "-n", str(path)], check=True)


@given(name=st.text(min_size=1, max_size=40) | st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True))
@settings(max_examples=60, deadline=None)
def test_hostile_host_names_are_refused_or_plain(name: str) -> None:
    request = replace(LLAMA, hosts=(name, *LLAMA.hosts[1:]))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]*", name):
        with pytest.raises(EmitError, match="is no host name"):
            emit("megatron", request)
        return
    emitted = emit("megatron", request)
    script = next(file for file in emitted.artifacts if file.path.name == "launch.sh")
    assert f"MASTER_ADDR:-{name}}}" in script.content


@given(name=st.text(max_size=60))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hostile_model_names_run_nothing(host: Host, name: str) -> None:
    hostile = f"{name}\n$(touch {host.root}/pwned) `touch {host.root}/pwned`; touch {host.root}/pwned #"
    shape = replace(MIXTRAL, name=hostile, slug=hostile)
    request = request_for(shape, config_for(shape, data_parallel=8, expert_parallel=8))
    done = host.run(request, "launch_host_000.sh")
    assert done.returncode == 0, done.stderr
    assert not (host.root / "pwned").exists()
    title = (host.out / "README.md").read_text().splitlines()[0]
    assert title.endswith(" on 8 devices")
    assert "`" not in title


def test_plain_names_stay_as_they_are() -> None:
    assert plain("Llama-3.1-70B (base)") == "Llama-3.1-70B (base)"
    assert plain("\n`") == "unnamed"
