"""Questions about machines at home from spec to files, as a user asks them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError, SpecError
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.plan_document import document_problems
from meshplan.planner.edge.plan_document import PLAN
from meshplan.planner.service import emit_plan, make_plan, plan_target

LINKS = {"bandwidth": "1 Gb/s", "latency": "0.1 ms"}
PIS = {"type": "raspberry-pi-4b", "count": 4, "addresses": ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]}
CARD = {"type": "rtx-4090", "count": 1}


def ask(catalog: Catalog, model: str, *devices: dict[str, Any], **other: Any) -> Plan:
    spec = {"kind": "edge", "model": model, "devices": list(devices), "links": LINKS, **other}
    plan = make_plan(spec, catalog)
    assert document_problems(PLAN, plan.to_document()) == []
    return plan


def started(plan: Plan, catalog: Catalog, folder: Path, script: str, **variables: str) -> list[str]:
    """The words that a script would run a program with: every program is one that prints its arguments."""
    for file in emit_plan(plan, str(plan_target(plan)), catalog).artifacts:
        (folder / file.path).write_text(file.content)
    program = folder / "program"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    named = dict.fromkeys(("DLLAMA", "LLAMA_SERVER", "RPC_SERVER"), str(program))
    environment = {**os.environ, **named, "MODEL": "m", "TOKENIZER": "t", **variables}
    done = subprocess.run(["bash", str(folder / script)], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr]


def test_four_raspberry_pis_run_a_model_that_one_cannot_hold(catalog: Catalog, tmp_path: Path) -> None:
    plan = ask(catalog, "llama-2-13b", PIS)
    assert (plan.config["engine"], len(plan.config["machines"])) == ("distributed-llama", 4)
    words = started(plan, catalog, tmp_path, "root.sh")
    assert words[0] == "inference"
    assert words[words.index("--buffer-float-type") + 1] == "q80"
    assert words[words.index("--workers") + 1 :] == ["10.0.0.2:9999", "10.0.0.3:9999", "10.0.0.4:9999"]
    assert started(plan, catalog, tmp_path, "worker.sh")[:3] == ["worker", "--port", "9999"]


def test_workers_without_addresses_are_asked_for_by_number(catalog: Catalog, tmp_path: Path) -> None:
    plan = ask(catalog, "llama-2-13b", {"type": "raspberry-pi-4b", "count": 4})
    assert "addresses of 3 machines" in started(plan, catalog, tmp_path, "root.sh")[0]
    assert "WORKERS must hold" in started(plan, catalog, tmp_path, "root.sh", WORKERS="a b")[0]
    assert started(plan, catalog, tmp_path, "root.sh", WORKERS="a b c")[-1] == "c:9999"


def test_a_card_and_a_laptop_make_a_pipeline_with_most_on_the_card(catalog: Catalog, tmp_path: Path) -> None:
    laptop = {"memory": "64 GB", "memory_bandwidth": "80 GB/s"}
    plan = ask(catalog, "llama-3.1-70b", CARD, laptop)
    layers = {machine["type"]: machine["layers"] for machine in plan.config["machines"]}
    assert plan.config["engine"] == "llama.cpp-rpc"
    assert layers["rtx-4090"] > layers["machine 2"] / 2
    assert sum(layers.values()) == 80
    words = started(plan, catalog, tmp_path, "main.sh", SERVERS="10.0.0.9")
    shares = [int(one) for one in words[words.index("--tensor-split") + 1].split(",")]
    assert words[words.index("--rpc") + 1] == "10.0.0.9:50052"
    offloaded = int(words[words.index("--gpu-layers") + 1])
    assert sum(shares) in (offloaded, 81)


def test_two_laptops_on_wifi_are_told_that_one_is_enough(catalog: Catalog) -> None:
    laptop = {"memory": "16 GB", "memory_bandwidth": "50 GB/s", "count": 2}
    air = {"bandwidth": "300 Mb/s", "latency": "2 ms", "shared_air": True}
    plan = ask(catalog, "qwen3-8b", laptop, links=air)
    assert (plan.config["engine"], len(plan.config["machines"])) == ("llama.cpp", 1)
    assert any("one machine alone is fastest" in note for note in plan.provenance["notes"])
    token = plan.predicted["time_per_token_s"]
    assert token.high / token.low == pytest.approx(4.0)


def test_what_does_not_fit_says_how_many_machines_would_do(catalog: Catalog) -> None:
    plan = ask(catalog, "llama-2-70b", PIS)
    assert plan.solution["status"] == "infeasible"
    assert plan.solution["binding_constraint"] == "memory"
    (change,) = plan.solution["least_change"]
    more = int(change["change"].split()[0])
    assert ask(catalog, "llama-2-70b", {"type": "raspberry-pi-4b", "count": 4 + more}).config
    with pytest.raises(AssertionError):
        assert ask(catalog, "llama-2-70b", {"type": "raspberry-pi-4b", "count": 3 + more}).config


def test_a_limit_that_nothing_keeps_names_the_fastest(catalog: Catalog) -> None:
    plan = ask(catalog, "llama-2-7b", PIS, constraints={"time_per_token": "1 ms"})
    assert plan.solution["binding_constraint"] == "time per token"
    assert "constraints.time_per_token" in plan.solution["least_change"][0]["change"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": [{"type": "raspberry-pi-6"}]}, "small machines: raspberry-pi-4b, raspberry-pi-5"),
        ({"devices": [{"memory": "8 GB"}]}, "memory and memory_bandwidth"),
        ({"devices": [{**PIS, "count": 2}]}, "addresses has 4 entries for 2 machines"),
        ({"devices": [{**PIS, "drive": "floppy"}]}, "unknown drive 'floppy'"),
        ({"links": None}, "4 machines need links"),
        ({"devices": [{"type": "raspberry-pi-5", "addresses": ["x; rm -rf /"]}]}, "addresses"),
    ],
)
def test_wrong_input_is_told_with_its_fix(catalog: Catalog, change: dict[str, Any], words: str) -> None:
    spec = {"kind": "edge", "model": "llama-2-7b", "devices": [PIS], "links": LINKS, **change}
    with pytest.raises(SpecError, match=words):
        make_plan({key: value for key, value in spec.items() if value is not None}, catalog)


def test_files_are_of_the_plans_engine_alone(catalog: Catalog) -> None:
    plan = ask(catalog, "llama-2-13b", PIS)
    with pytest.raises(EmitError, match=r"constraints.engines: \[llama.cpp\]"):
        emit_plan(plan, "llama.cpp", catalog)
    with pytest.raises(EmitError, match="takes no --image"):
        emit_plan(plan, "distributed-llama", catalog, image="x")
