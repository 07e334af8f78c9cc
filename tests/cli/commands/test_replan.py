"""``meshplan replan`` as an operator calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from meshplan.catalogs.errors import EXIT_SPEC
from meshplan.cli.commands.plan import app as plan_app
from meshplan.cli.commands.replan import app

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.2-1b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 3}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 240},
}


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("replan")
    (folder / "spec.json").write_text(json.dumps(SPEC))
    asked = CliRunner().invoke(plan_app, [str(folder / "spec.json"), "--db", str(folder / "c.sqlite"), "--tag", "runs"])
    assert asked.exit_code == 0, asked.output
    return str(folder / "c.sqlite")


def test_a_table_for_the_night(database: str) -> None:
    shown = call("runs", "--db", database, "--fewer", "2", "--more", "1")
    assert shown.exit_code == 0, shown.output
    for change in ("1 more", "1 less", "2 less", "join, if they"):
        assert change in shown.output
    assert max(len(line) for line in shown.output.splitlines()) <= 80


def test_its_plans_are_stored(database: str) -> None:
    answer = json.loads(call("runs", "--db", database, "--without", "node1", "--format", "json").output)
    (row,) = answer["rows"]
    assert row["lost_nodes"] == [1]
    again = call(row["plan_id"], "--db", database, "--format", "json")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(("without", "word"), [("node-a", "no node is called"), ("99999999", "no node is called")])
def test_a_wrong_name_is_said(database: str, without: str, word: str) -> None:
    shown = call("runs", "--db", database, "--without", without)
    assert shown.exit_code != 0
    assert word in str(shown.exception)


LINK = {"bandwidth": "50 GB/s", "latency": "5 us"}


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"nodes": [{"type": "dgx-h100", "count": 3}]}, "meshplan plan SPEC --set cluster.nodes.0.count=2"),
        (
            {"nodes": [{"type": "dgx-h100", "count": 1}, {"type": "dgx-a100-80gb", "count": 2}]},
            "meshplan plan SPEC --set cluster.nodes.1.count=1",
        ),
        (
            {"nodes": [{"type": "dgx-h100", "count": 1}, {"type": "dgx-a100-80gb", "count": 1}]},
            "without the entry of cluster.nodes that is gone",
        ),
        (
            {
                "devices": {"type": "h100-sxm", "nodes": 2, "per_node": 4},
                "links": {"intra_node": LINK, "inter_node": LINK},
            },
            "meshplan plan SPEC --set cluster.devices.nodes=1",
        ),
        # One node was told to ask for one node.
        ({"nodes": [{"type": "dgx-h100", "count": 1}]}, "from its only node: without it no request is answered"),
        (
            {"devices": {"type": "h100-sxm", "nodes": 1, "per_node": 4}, "links": {"intra_node": LINK}},
            "constraints.min_spare_replicas: 1",
        ),
    ],
)
def test_a_serving_plan_is_told_what_to_ask_instead(tmp_path: Path, cluster: dict[str, Any], says: str) -> None:
    spec = {
        "kind": "serving",
        "model": "llama-3.1-8b",
        "cluster": cluster,
        "workload": {"input_length": 1000, "output_length": 100, "request_rate_per_s": 1},
        "slo": {"ttft_p99_s": 5},
        "fixed": {"tensor_parallel": 1},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    db = str(tmp_path / "c.sqlite")
    asked = CliRunner().invoke(plan_app, [str(tmp_path / "spec.json"), "--db", db, "--tag", "serves"])
    assert asked.exit_code == 0, asked.output
    shown = call("serves", "--db", db)
    assert says in str(shown.exception)
    assert "count=0" not in str(shown.exception)
    assert getattr(shown.exception, "exit_code", EXIT_SPEC) == EXIT_SPEC


def test_the_files_of_an_elastic_job(database: str, tmp_path: Path) -> None:
    out = tmp_path / "job"
    shown = call("runs", "--db", database, "--fewer", "1", "--more", "1", "--out", str(out))
    assert shown.exit_code == 0, shown.output
    assert {path.name for path in out.glob("nodes-*")} == {"nodes-2", "nodes-3", "nodes-4"}
    assert "1 more" in (out / "OPERATOR.md").read_text()
    assert "--nnodes 2:4 " in (out / "elastic.sh").read_text()
    again = call("runs", "--db", database, "--fewer", "1", "--out", str(out))
    assert again.exit_code != 0
