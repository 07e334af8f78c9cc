"""xDiT's command line from a plan: arguments, processes, and texts that stay texts."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from diffusion_questions import spec

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError
from meshplan.planner.service import emit_plan, estimate_plan, plan_target


def script(catalog: Catalog, model: str, **fixed: int) -> str:
    plan = estimate_plan(spec(model, fixed=fixed), catalog)
    assert plan_target(plan) == "xdit"
    emitted = emit_plan(plan, "xdit", catalog)
    return next(file.content for file in emitted.artifacts if file.path.name == "generate.sh")


def started(text: str, folder: Path, *prompts: str, **variables: str) -> list[str]:
    """What the script would run: torchrun is a program that prints its arguments."""
    (folder / "generate.sh").write_text(text)
    (folder / "torchrun").write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES"\nprintf "%s\\n" "$@"\n')
    (folder / "torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "MESHPLAN_SKIP_CHECKS": "1", **variables}
    done = subprocess.run(
        ["bash", str(folder / "generate.sh"), *prompts], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr]


def test_the_runner_gets_every_degree(catalog: Catalog, tmp_path: Path) -> None:
    words = started(script(catalog, "hunyuanvideo", ulysses=4, ring=2), tmp_path, "a $(touch lighthouse)")
    assert words[0] == "0,1,2,3,4,5,6,7"
    joined = " ".join(words[1:])
    assert "--nproc_per_node=8" in joined
    assert "-m xfuser.runner --model tencent/HunyuanVideo --height 720 --width 1280" in joined
    assert "--num_frames 129 --ulysses_degree 4 --ring_degree 2 --enable_tiling --enable_slicing" in joined
    assert words[-2:] == ["--prompt", "a $(touch lighthouse)"]


def test_replicas_take_devices_of_their_own(catalog: Catalog, tmp_path: Path) -> None:
    text = script(catalog, "pixart-sigma", ulysses=2, cfg_parallel=2, replicas=2)
    words = started(text, tmp_path, "a cat", REPLICA="1", XDIT_DIR="/opt/xdit")
    assert words[0] == "4,5,6,7"
    assert "/opt/xdit/examples/pixartsigma_example.py" in words
    assert {"--use_cfg_parallel", "--nproc_per_node=4"} <= set(words)
    assert "there is no replica 2" in started(text, tmp_path, "a cat", REPLICA="2", XDIT_DIR="/opt/xdit")[0]
    assert "XDIT_DIR" in started(text, tmp_path, "a cat")[0]
    assert "the plan's batch is 1, 2 prompts were given" in started(text, tmp_path, "a", "b", XDIT_DIR="/x")[0]


def test_the_devices_are_compared_and_no_replica_is_split_over_hosts(catalog: Catalog, tmp_path: Path) -> None:
    plan = estimate_plan(spec("wan2.1-t2v-14b", count=2, fixed={"ring": 3, "replicas": 4}), catalog)
    assert plan.solution["kept"]
    emitted = emit_plan(plan, "xdit", catalog)
    text = next(file.content for file in emitted.artifacts if file.path.name == "generate.sh")
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\nfor gpu in 0 1 2 3 4 5 6 7; do echo $gpu, NVIDIA H100 80GB HBM3, 81559; done\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    for replica, devices in enumerate(("0,1,2", "3,4,5", "0,1,2", "3,4,5")):
        words = started(text, tmp_path, "a cat", REPLICA=str(replica), MESHPLAN_SKIP_CHECKS="0")
        assert words[0] == devices
    five = estimate_plan(spec("wan2.1-t2v-14b", count=2, fixed={"ring": 3, "replicas": 5}), catalog)
    assert five.solution["broken"] == ["devices"]


def test_a_checkpoint_stays_one_word(catalog: Catalog) -> None:
    plan = estimate_plan(spec("flux.1-dev"), catalog)
    emitted = emit_plan(plan, "xdit", catalog, model_path="/models/it's; rm -rf x")
    text = next(file.content for file in emitted.artifacts if file.path.name == "generate.sh")
    command = next(line for line in text.splitlines() if line.startswith("exec torchrun"))
    assert "/models/it's; rm -rf x" in shlex.split(command)


def test_other_targets_and_options_are_refused(catalog: Catalog) -> None:
    plan = estimate_plan(spec("flux.1-dev"), catalog)
    with pytest.raises(EmitError, match="does not launch diffusion plans; targets that do: xdit"):
        emit_plan(plan, "vllm", catalog)
    with pytest.raises(EmitError, match="takes no --image"):
        emit_plan(plan, "xdit", catalog, image="x")
