"""The command that comes next after a plan works, or its place is taken by why no target writes files."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command

from meshplan.cli.reports.plan import database_option, secret_first

SMALL = ("--model", "llama-3.2-1b")
SERVED = ("--concurrency", "2", "--lengths", "128/16")
TRAINED = ("--batch", "8", "--sequence-length", "2k")
NVIDIA, AMD, GOOGLE, AWS = "1xH100", "1xhgx-mi300x", "1xgcp-v6e-8", "1xaws-trn2-48xlarge"
WRITTEN = [
    *((NVIDIA, (*SERVED, "--target", engine)) for engine in ("vllm", "sglang", "trtllm")),
    *((NVIDIA, (*SERVED, "--set", f"quantization=[{scheme}]")) for scheme in ("fp8", "w8a16")),
    *((AMD, (*SERVED, "--target", engine)) for engine in ("vllm", "sglang")),
    *((device, (*TRAINED, "--target", "megatron")) for device in (NVIDIA, AMD)),
    (NVIDIA, (*TRAINED, "--target", "deepspeed", "--set", "fixed.tensor_parallel=1")),
]
REFUSED = [
    *((device, question, "no launcher for devices") for device in (GOOGLE, AWS) for question in (SERVED, TRAINED)),
    (NVIDIA, (*SERVED, "--set", "quantization=[w4a16]"), "--model-path ORGANISATION/MODEL-AWQ"),
    (NVIDIA, (*SERVED, "--target", "llama.cpp"), "MODEL-GGUF"),
    (NVIDIA, (*TRAINED, "--target", "any"), "--script"),
]


@pytest.mark.parametrize(("device", "question"), WRITTEN, ids=str)
def test_the_command_that_writes_files_works(
    device: str, question: tuple[str, ...], meshplan: Command, tmp_path: Path
) -> None:
    outcome = meshplan("plan", *SMALL, "--gpus", device, *question)
    assert outcome.code == 0, outcome.err
    (emit,) = [line.split() for line in outcome.out.splitlines() if line.strip().startswith("meshplan emit")]
    assert meshplan(*emit[1 : emit.index("--out")], "--out", tmp_path / "files").code == 0
    assert "No launcher files" not in outcome.out


@pytest.mark.parametrize(
    ("url", "named", "before"),
    [
        ("postgresql://meshplan@host/plans", " --db postgresql+psycopg://meshplan@host/plans", ""),
        ("postgresql://meshplan:secret@host/plans", "", ", with MESHPLAN_DB set to that URL"),
        (None, "", ""),
    ],
)
def test_commands_after_a_password_can_be_typed_as_they_stand(url: str | None, named: str, before: str) -> None:
    """They named the database by a URL with three asterisks in it."""
    assert (database_option(url), secret_first(url)) == (named, before)


@pytest.mark.parametrize(("device", "question", "why"), REFUSED, ids=str)
def test_where_the_plans_own_target_writes_nothing_it_says_why(
    device: str, question: tuple[str, ...], why: str, meshplan: Command, tmp_path: Path
) -> None:
    outcome = meshplan("plan", *SMALL, "--gpus", device, *question)
    assert outcome.code == 0, outcome.err
    (words,) = ("No launcher files" + part for part in " ".join(outcome.out.split()).split("No launcher files")[1:])
    assert why in words
    for line in outcome.out.splitlines():
        if line.strip().startswith("meshplan emit"):  # of another target, which writes them
            command = line.split()
            assert "--target" in command
            assert (
                meshplan(*command[1 : command.index("--out")], *command[-2:], "--out", tmp_path / command[-1]).code == 0
            )
