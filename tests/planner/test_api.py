"""The public names of ``meshplan.planner``: what a notebook calls, loaded when used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshplan import planner
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner import (
    EmitError,
    Plan,
    SpecError,
    compare_plans,
    emit_plan,
    estimate_plan,
    explain,
    explain_instead,
    load_catalog,
    make_plan,
    write_files,
)

SPEC = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64, "precision": "bf16"},
    "constraints": {"target": "megatron"},
}
HEAVY = ("numpy", "sqlalchemy", "yaml", "ortools", "pulp")


@pytest.fixture(scope="module")
def made(catalog: Catalog) -> Plan:
    return make_plan(SPEC, catalog)


def test_every_name_is_there_and_listed() -> None:
    assert sorted(planner.__all__) == planner.__all__ == dir(planner)
    assert sorted(planner._MODULE_OF) == planner.__all__
    assert all(getattr(planner, name) is not None for name in planner.__all__)
    with pytest.raises(AttributeError, match="no attribute 'plan_nothing'"):
        planner.__getattr__("plan_nothing")


def test_importing_it_costs_nothing() -> None:
    code = f"import sys, meshplan.planner; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_from_a_question_to_files(made: Plan, catalog: Catalog, tmp_path: Path) -> None:
    files = write_files(emit_plan(made, "megatron", catalog), tmp_path / "out")
    assert (tmp_path / "out" / "megatron_args.txt") in files
    with pytest.raises(EmitError, match="already holds"):
        write_files(emit_plan(made, "megatron", catalog), str(tmp_path / "out"))
    assert write_files(emit_plan(made, "megatron", catalog), tmp_path / "out", force=True) == files


def test_a_plan_survives_its_json(made: Plan) -> None:
    assert Plan.from_document(made.to_document()).plan_id == made.plan_id


def test_a_plan_is_explained_and_held_against_others(made: Plan, catalog: Catalog) -> None:
    assert explain(made).to_document()["proof"]
    other, reason = explain_instead(made, {"tensor_parallel": 8}, catalog)
    assert other is not None
    assert reason
    assert "tensor_parallel" in [row.field for row in compare_plans([made, other]).choices]


def test_a_file_answers_as_the_mapping_does(made: Plan, tmp_path: Path) -> None:
    import json

    file = tmp_path / "question.json"
    file.write_text(json.dumps(SPEC))
    catalog = load_catalog(str(tmp_path / "catalog.sqlite"))
    assert make_plan(file, catalog).plan_id == make_plan(str(file), catalog).plan_id == made.plan_id
    file.write_text(json.dumps({**SPEC, "fixed": {"tensor_parallel": 2}}))
    assert estimate_plan(file, catalog).config["tensor_parallel"] == 2


def test_paths_in_a_spec_file_are_its_own_folders(catalog: Catalog, tmp_path: Path) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(catalog.model("llama-3.1-8b")))
    (tmp_path / "question.json").write_text(json.dumps({**SPEC, "model": "config.json"}))
    assert make_plan(tmp_path / "question.json", catalog).solution["status"] == "optimal"


def test_what_is_wrong_is_said_at_once(catalog: Catalog) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan({"kind": "training", "model": "llama", "cluster": {}}, catalog)
    assert len(caught.value.problems) > 1


def test_a_stand_alone_answer_has_no_explanation(catalog: Catalog) -> None:
    problem = Path(__file__).parents[1] / "data" / "rank_mapping" / "rank-mapping-uniform-6n-pp3-dp2.json"
    plan = make_plan(problem, catalog)
    with pytest.raises(SpecError, match=r"rank-mapping, optimal\) has no explanation"):
        explain(plan)
