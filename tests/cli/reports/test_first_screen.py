"""The first screen of an answer: short, complete, and the same numbers as the whole report."""

from __future__ import annotations

import re

import pytest
from command_line import Command

ONE_LINE = {
    "training": ("--model", "llama-3.1-70b", "--gpus", "64xH100", "--batch", "512", "--tokens", "1T"),
    "small training": ("--model", "llama-3.1-8b", "--gpus", "8xA100", "--sequence-length", "4k"),
    "experts": ("--model", "Qwen/Qwen3-30B-A3B", "--gpus", "16xH200", "--batch", "256"),
    "serving": ("--model", "llama-3.1-70b", "--gpus", "8xH100", "--rate", "2", "--slo", "ttft_p99=3s,tpot_p95=50ms"),
    "serving without a load": ("--model", "qwen3-32b", "--gpus", "2xH100", "--lengths", "1000/200"),
}
# The same forms of an answer, of searches that are short.
SMALL = {
    "training": ("--model", "llama-3.2-1b", "--gpus", "8xA100", "--sequence-length", "4k"),
    "serving": (
        *("--model", "qwen3-32b", "--gpus", "2xH100", "--rate", "1", "--lengths", "1000/200"),
        *("--slo", "ttft_p99=3s,tpot_p95=50ms", "--set", "workload.num_requests=500"),
    ),
}


@pytest.mark.parametrize("question", ONE_LINE.values(), ids=ONE_LINE)
def test_an_answer_fits_one_screen_of_80_columns(question: tuple[str, ...], meshplan: Command) -> None:
    outcome = meshplan("plan", *question)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("Answer: ") for line in lines)
    assert any(line.lstrip().startswith("meshplan plans show ") for line in lines)


@pytest.mark.parametrize("question", SMALL.values(), ids=SMALL)
def test_the_first_screen_says_what_the_whole_report_says(question: tuple[str, ...], meshplan: Command) -> None:
    short, full = (
        " ".join(meshplan(*words).out.split()) for words in (("plan", *question), ("plans", "show", "latest"))
    )
    assert len(full) > 1.5 * len(short)
    answer = short[short.index("Answer: ") : short.index("✔")]
    numbers = re.findall(r"\d[\d,]*\.\d+ (?:s|ms|GiB|d)\b", answer)
    assert len(numbers) >= 4
    assert [number for number in numbers if number.split()[0] not in full] == []


def test_formats_for_programs_hold_everything(meshplan: Command) -> None:
    document = meshplan("plan", *SMALL["serving"], "--format", "json").json
    assert document["answer"]["sensitivity"]
    assert document["rejected"]


# Whose tables have columns of their own.
OTHER_TABLES = {
    "mixed training": ("--model", "llama-3.2-1b", "--gpus", "8xH100,8xA100", "--sequence-length", "4k"),
    "embedding": ("--model", "bge-m3", "--gpus", "1xL4", "--rate", "20"),
}
TICKETS = {**SMALL, **OTHER_TABLES}


@pytest.mark.parametrize("question", TICKETS.values(), ids=TICKETS)
def test_markdown_is_a_ticket(question: tuple[str, ...], meshplan: Command) -> None:
    text = meshplan("plan", *question, "--format", "markdown").out
    assert text.startswith("### ")
    assert "\nAnswer: " in text
    tables = [block for block in text.split("\n\n") if block.startswith("| ")]
    assert len(tables) == 2
    for table in tables:
        assert len({line.count("|") - line.count("\\|") for line in table.splitlines()}) == 1


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("2xRTX4090", "on 1 × rtx-4090-pcie-8, 2 devices at most: "),
        ("1xL40S,2xA100", "on 1 × l40s-pcie-1 + 1 × dgx-a100-80gb (2 of its devices): "),
        ("8xA100", "on 1 × dgx-a100-80gb: "),
    ],
)
def test_the_question_says_how_many_devices_of_a_node_it_has(gpus: str, said: str, meshplan: Command) -> None:
    options = ("--rate", "1", "--lengths", "500/100", "--set", "workload.num_requests=200")
    out = meshplan("plan", "--model", "llama-3.1-8b", "--gpus", gpus, *options).out
    assert said in " ".join(out.split())
