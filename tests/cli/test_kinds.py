"""A kind that the registry alone knows is planned, stored and shown by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command
from toy_kind import register_coin


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
