"""``meshplan import``: specs that price and plan, what is assumed, and what cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command_line import Command

LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --vocab-size 128256 --swiglu"
)
COMMAND = (
    f"torchrun --nproc-per-node 8 pretrain_gpt.py {LLAMA_8B} --seq-length 4096 --micro-batch-size 1 "
    "--global-batch-size 64 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 4 --sequence-parallel"
)


def test_the_spec_is_priced_and_planned(meshplan: Command, tmp_path: Path) -> None:
    spec = tmp_path / "current.yaml"
    done = meshplan("import", COMMAND, "--node-type", "dgx-h100", "--model", "llama-3.1-8b", "--out", spec)
    assert done.code == 0
    assert f"meshplan estimate {spec}" in done.out
    assert yaml.safe_load(spec.read_text())["fixed"]["data_parallel"] == 2
    priced = meshplan("estimate", spec, "--format", "json")
    assert priced.code == 0
    assert priced.json["config"]["tensor_parallel"] == 4
    again = meshplan("import", COMMAND, "--node-type", "dgx-h100", "--model", "llama-3.1-8b", "--out", spec)
    assert again.code == 6
    assert "--force" in again.err


def test_the_next_commands_work(meshplan: Command, tmp_path: Path) -> None:
    options = ("--node-type", "dgx-h100", "--model", "llama-3.1-8b")
    current, free = tmp_path / "current.yaml", tmp_path / "free.yaml"
    assert meshplan("import", COMMAND, *options, "--out", current).code == 0
    assert "meshplan compare current better" in meshplan("import", COMMAND, *options, "--free", "--out", free).out
    assert "fixed" not in yaml.safe_load(free.read_text())
    assert meshplan("plan", current, "--tag", "current").code == 0
    assert meshplan("plan", free, "--tag", "better").code == 0
    compared = meshplan("compare", "current", "better", "-f", "json").json
    assert {row["metric"] for row in compared["metrics"]} >= {"iteration_s"}


def test_compare_shows_what_would_be_better(meshplan: Command) -> None:
    done = meshplan("import", COMMAND, "--node-type", "dgx-h100", "--model", "llama-3.1-8b", "--compare", "-f", "json")
    assert done.code == 0
    times = next(row for row in done.json["comparison"]["metrics"] if row["metric"] == "iteration_s")
    current, better = (one["value"] for one in times["predicted"])
    assert better <= current
    text = meshplan("import", COMMAND, "--node-type", "dgx-h100", "--model", "llama-3.1-8b", "--compare")
    assert "tensor_parallel" in text.out


@pytest.mark.parametrize(("nodes", "code", "message"), [(2, 3, "infeasible"), (4, 0, "does not fit")])
def test_compare_says_what_does_not_fit(meshplan: Command, nodes: int, code: int, message: str) -> None:
    command = (
        f"torchrun --nproc-per-node 8 --nnodes {nodes} pretrain_gpt.py --seq-length 8192 --global-batch-size 64 --bf16 "
        "--tensor-model-parallel-size 2 --num-layers 80"
    )
    done = meshplan("import", command, "--node-type", "dgx-h100", "--model", "llama-3.1-70b", "--compare")
    assert done.code == code
    assert message in done.out.lower()


def test_what_was_assumed_and_not_read_is_listed(meshplan: Command) -> None:
    done = meshplan("import", f"{COMMAND} --weird 'a\nb: c'", "--device", "h100-sxm-80gb")
    assert done.code == 0
    assert "# Assumed" in done.out
    for text in ("cluster.nodes.type = dgx-h100", "pipeline_parallel = 1", "--weird"):
        assert text in done.out
    # What is imported cannot break out of a comment.
    assert yaml.safe_load(done.out).keys() == {"kind", "model", "cluster", "workload", "constraints", "fixed"}


def test_words_after_dashes_are_a_command(meshplan: Command) -> None:
    done = meshplan(
        "import", "--node-type", "dgx-h100", "--model", "llama-3.1-8b", "-f", "json", "--", *COMMAND.split()
    )
    assert done.json["spec"]["fixed"]["tensor_parallel"] == 4


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (("", ""), (), "--node-type"),
        (("", ""), ("--node-type", "dgx-h101"), "unknown node type 'dgx-h101'; did you mean"),
        (("", ""), ("--device", "h101"), "unknown device"),
        (("--nproc-per-node 8", "--nproc-per-node 6"), ("--node-type", "dgx-h100"), "does not divide the 6 processes"),
        (("--nproc-per-node 8", "--nproc-per-node 16"), ("--node-type", "dgx-h100"), "dgx-h100 has 8 devices"),
        (("--seq-length 4096", ""), ("--node-type", "dgx-h100"), "--sequence-length"),
        (("--global-batch-size 64", "--global-batch-size 63"), ("--node-type", "dgx-h100"), "63 is no multiple"),
        (("--hidden-size 4096", "--hidden-size 4097"), ("--node-type", "dgx-h100"), "has these sizes"),
        (("", ""), ("--node-type", "dgx-h100", "--model", "llama-3.1-70b"), "the model has 80"),
        (("", ""), ("--node-type", "dgx-h100", "--env", "X"), "NAME=VALUE"),
        (("", ""), ("--node-type", "dgx-h100", "--model", "lama-3.1-8b"), "llama-3.1-8b"),
        (("", ""), ("--node-type", "dgx-h100", "--sequence-length", "2048"), "keep one"),
        (("pretrain_gpt.py", "pretrain_gpt.py '"), ("--node-type", "dgx-h100"), "quote"),
        (("", ""), ("--node-type", "dgx-h100", "--from", "megatorn"), "did you mean 'megatron'"),
    ],
)
def test_problems_are_named(meshplan: Command, change: tuple[str, str], options: tuple[str, ...], message: str) -> None:
    done = meshplan("import", COMMAND.replace(*change) if change[0] else COMMAND, *options)
    assert done.code in {2, 4}
    assert message in " ".join(done.err.split())


def test_an_unwritable_output_is_named(meshplan: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = meshplan("import", COMMAND, "--node-type", "dgx-h100", "--out", tmp_path / "file" / "spec.yaml")
    assert done.code == 6
    assert f"cannot write {tmp_path / 'file' / 'spec.yaml'}: Not a directory" in done.err


def test_own_files_come_back(meshplan: Command, spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "files"
    assert meshplan("plan", spec, "--out", out, "--tag", "mine").code == 0
    planned = meshplan("plans", "show", "mine", "-f", "json").json["config"]
    found = meshplan("import", out / "megatron_args.txt", "--node-type", "dgx-h100", "--nodes", 1, "-f", "json").json[
        "spec"
    ]
    assert all(planned[name] == value for name, value in found["fixed"].items())


def test_a_comparison_says_current_and_proposed_and_keeps_both(meshplan: Command) -> None:
    command = "vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 8 --max-num-seqs 64"
    answers = ("--node-type", "dgx-h100", "--input-length", "1000", "--output-length", "200", "--concurrency", "32")
    done = meshplan("import", command, *answers, "--compare")
    heads = [line for line in done.out.splitlines() if line.split()[:1] in (["Choice"], ["Predicted"])]
    assert heads
    assert all("current" in head and "proposed" in head for head in heads)
    assert "  - -tp 8\n" in done.out
    # The proposal may have several pools, whose names stand before their flags.
    assert any(line.startswith("  + ") and "--" in line for line in done.out.splitlines())
    names = {row["name"] for row in meshplan("plans", "list", "-f", "json").json}
    assert {"current", "proposed"} <= names
