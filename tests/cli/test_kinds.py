"""A kind that the registry alone knows is planned, stored and shown by the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Command
from toy_kind import register_coin

from meshplan.planner.core.certificate import Certificate, none_better, same_value
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan


def test_the_command_line_shows_and_stores_a_new_kind(
    monkeypatch: pytest.MonkeyPatch, meshplan: Command, tmp_path: Path
) -> None:
    register_coin(monkeypatch)
    spec = tmp_path / "coin.yaml"
    spec.write_text("kind: coin\nname: toss\nsides: 2\n")
    planned = meshplan("plan", spec)
    assert planned.code == 0
    assert "coin toss: optimal" in planned.out
    assert "meshplan plans show" in planned.out
    assert meshplan("plans", "list", "--format", "json").json[0]["question"] == "toss"


def certify_coin(question: Question, made: Plan) -> Certificate:
    """A second way that finds a better coin for an odd seed."""
    checks = (
        same_value("sides", 2.0, 2.0),
        none_better("no coin below", made.solution["bound"], 1.0 - question.seed % 2),
    )
    return Certificate(method="another coin", covers="both sides", checks=checks)


def interrupted(question: Question, made: Plan) -> Certificate:
    raise KeyboardInterrupt


@pytest.fixture
def coin_spec(tmp_path: Path) -> Path:
    spec = tmp_path / "coin.yaml"
    spec.write_text("kind: coin\nname: toss\nsides: 3\n")
    return spec


def test_a_second_opinion_stands_beside_the_plan(
    monkeypatch: pytest.MonkeyPatch, meshplan: Command, coin_spec: Path
) -> None:
    register_coin(monkeypatch, certify=certify_coin)
    checked = meshplan("plan", coin_spec, "--certify", "--format", "json").json
    alone = meshplan("plan", coin_spec, "--format", "json").json
    certificate = checked.pop("certificate")
    for document in (checked, alone):
        for clock in ("wall_s", "cpu_s"):
            del document["solution"][clock]
    assert checked == alone
    assert certificate["outcome"] == "agrees"
    assert [check["what"] for check in certificate["checks"]] == ["sides", "no coin below"]
    shown = meshplan("plan", coin_spec, "--certify")
    assert shown.code == 0
    assert "Second opinion agrees: another coin; both sides" in shown.out
    assert "yes: no coin below: stated 1, found 1" in shown.out
    assert "Second opinion agrees" in meshplan("plans", "show", "latest").out


def test_a_second_opinion_that_disagrees_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, meshplan: Command, coin_spec: Path
) -> None:
    register_coin(monkeypatch, certify=certify_coin)
    shown = meshplan("plan", coin_spec, "--certify", "--seed", "1")
    assert shown.code == 5
    assert "Second opinion DISAGREES" in shown.out
    assert "NO: no coin below: stated 1, found 0" in shown.out


def test_ctrl_c_during_the_second_opinion_keeps_the_plan(
    monkeypatch: pytest.MonkeyPatch, meshplan: Command, coin_spec: Path
) -> None:
    register_coin(monkeypatch, certify=interrupted)
    shown = meshplan("plan", coin_spec, "--certify")
    assert shown.code == 0
    assert "Second opinion did not come to an end" in shown.out


def test_a_kind_without_a_second_way_says_so_before_it_works(
    monkeypatch: pytest.MonkeyPatch, meshplan: Command, coin_spec: Path
) -> None:
    register_coin(monkeypatch)
    shown = meshplan("plan", coin_spec, "--certify")
    assert shown.code == 2
    assert "answers of coin cannot be checked a second time (--certify)" in shown.err


QUESTIONS = {
    "serving": (
        "{kind: serving, model: llama-3.2-1b, cluster: {nodes: [{type: dgx-h100, count: 1}]}, "
        "workload: {input_length: 128, output_length: 16, concurrency: 4}, constraints: {max_devices: 1}}",
        "1 × TP1",
    ),
    "diffusion": (
        "{kind: diffusion, model: flux.1-dev, cluster: {nodes: [{type: dgx-h100, count: 1}]}, fixed: {replicas: 1}}",
        r"1 replica on 8 devices, \d\.\d\d s",
    ),
    "edge": (
        "{kind: edge, model: llama-3.2-1b, devices: [{type: raspberry-pi-5, count: 1}]}",
        r"\S+ on 1 × .*, .* ms a token",
    ),
}


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_list_of_plans_has_each_kinds_answer_in_short(kind: str, meshplan: Command, tmp_path: Path) -> None:
    text, answer = QUESTIONS[kind]
    spec = tmp_path / "question.yaml"
    spec.write_text(text)
    done = meshplan("plan", spec)
    assert done.code == 0, done.err
    [row] = meshplan("plans", "list", "--kind", kind, "--format", "json").json
    assert re.match(answer, row["answer"]), row["answer"]
