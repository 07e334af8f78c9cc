"""What the shell offers while a command line is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command

from meshplan.cli.completion import complete_gpus, complete_model, complete_plan, complete_target


def test_models_gpus_and_targets_begin_with_what_is_typed(database: Path) -> None:
    assert "qwen3-32b" in complete_model("Qwen3-3")
    assert all(name.startswith("qwen3-3") for name in complete_model("Qwen3-3"))
    assert complete_model("no such") == []
    assert "16xh100-sxm-80gb" in complete_gpus("16xh1")
    assert "8xl4,2xdgx-h100" in complete_gpus("8xl4,2xdgx")
    assert complete_gpus("h1") == []
    assert complete_target("meg") == ["megatron"]


def test_plans_are_offered_by_tag_and_id(meshplan: Command, spec: Path, database: Path) -> None:
    assert complete_plan("") == ["latest"]
    meshplan("plan", spec, "--tag", "weekend")
    offered = complete_plan("")
    assert offered[:2] == ["latest", "weekend"]
    assert complete_plan(offered[2][:4]) == [offered[2]]


def test_a_catalog_that_cannot_be_opened_completes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPLAN_DB", str(tmp_path))
    assert complete_model("q") == []
