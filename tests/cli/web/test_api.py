"""Every answer of the command line over HTTP is the same text."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from command_line import Command
from measured_rows import TRAINING_ROW
from starlette.testclient import TestClient
from web_cases import HERE, SPEC, ended, until

from meshplan.cli.web.app import create_app
from meshplan.cli.web.settings import Settings


@pytest.fixture
def printed(meshplan: Command, settings: Settings) -> Callable[..., str]:
    """What the command line prints of the service's database, as JSON."""

    def run(*arguments: Any) -> str:
        outcome = meshplan(*arguments, "--db", settings.db, "--format", "json")
        assert outcome.code in (0, 3), outcome.err
        return outcome.out

    return run


def test_a_question_becomes_a_job_and_its_plan(client: TestClient, plan: dict[str, Any]) -> None:
    again = client.post("/api/v1/plans", json=SPEC)
    assert again.status_code == 200
    assert again.json() == plan
    jobs = client.get("/api/v1/jobs").json()["jobs"]
    assert [job["plan_id"] for job in jobs].count(plan["plan_id"]) == 1


def test_other_options_are_another_question(client: TestClient, plan: dict[str, Any]) -> None:
    asked = client.post("/api/v1/plans?top=2&seed=1", json=SPEC)
    assert asked.status_code == 202
    assert asked.headers["location"] == f"/api/v1/jobs/{asked.json()['job_id']}"
    assert ended(client, asked.json()["job_id"])["state"] == "done"


def test_a_second_opinion_on_a_plan_that_is_stored_is_told(client: TestClient, working: None) -> None:
    answers = [client.post(f"/api/v1/plans?seed=17{more}", json=SPEC).json() for more in ("", "&certify=true")]
    first, second = (client.get(ended(client, asked["job_id"])["plan"]).json() for asked in answers)
    assert second["certificate"]["outcome"] == "agrees"
    assert first["plan_id"] == second["plan_id"]


def test_plans_are_those_of_the_command_line(client: TestClient, plan: dict[str, Any], printed: Any) -> None:
    plan_id = plan["plan_id"]
    assert client.get(f"/api/v1/plans/{plan_id}").text == printed("plans", "show", plan_id)
    assert client.get(f"/api/v1/plans/{plan_id[:6]}").json() == plan
    rows = client.get("/api/v1/plans?kind=training").json()["plans"]
    assert rows == json.loads(printed("plans", "list", "--kind", "training"))


def test_explanations_are_those_of_the_command_line(client: TestClient, plan: dict[str, Any], printed: Any) -> None:
    plan_id = plan["plan_id"]
    assert client.get(f"/api/v1/plans/{plan_id}/explain").text == printed("explain", plan_id)
    asked = client.get(f"/api/v1/plans/{plan_id}/explain", params={"instead": ["zero=3"]}).json()
    told = json.loads(printed("explain", plan_id, "--instead", "zero=3"))
    for document in (asked, told):
        for clock in ("wall_s", "cpu_s"):
            document["other"]["solution"].pop(clock, None)
    assert asked == told


def test_estimates_are_those_of_the_command_line(client: TestClient, printed: Any, tmp_path: Any) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPEC))
    asked, told = client.post("/api/v1/estimate", json=SPEC).json(), json.loads(printed("estimate", spec))
    for document in (asked, told):
        for clock in ("wall_s", "cpu_s"):
            document["solution"].pop(clock, None)
    assert asked == told


def test_what_was_measured_is_compared(client: TestClient, plan: dict[str, Any], printed: Any) -> None:
    plan_id = plan["plan_id"]
    assert client.get(f"/api/v1/compare?plans={plan_id}").status_code == 404
    told = client.post(f"/api/v1/plans/{plan_id}/record", json={"iteration_s": 3.5})
    assert told.status_code == 201
    assert client.get(f"/api/v1/compare?plans={plan_id}").text == printed("compare", plan_id)
    unknown = client.post(f"/api/v1/plans/{plan_id}/record", json={"speed": 1})
    assert unknown.status_code == 422
    assert unknown.json()["errors"][0]["path"] == "speed"


def test_launcher_files_come_as_an_archive(
    client: TestClient, plan: dict[str, Any], meshplan: Command, settings: Settings, tmp_path: Any
) -> None:
    answer = client.get(f"/api/v1/plans/{plan['plan_id']}/files?target=megatron")
    assert answer.status_code == 200
    assert meshplan("emit", plan["plan_id"], "--target", "megatron", "--out", tmp_path / "out", "--db", settings.db)
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        written = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
        assert {name: archive.read(name).decode() for name in archive.namelist()} == written
        assert archive.getinfo("launch.sh").external_attr >> 16 & 0o111
    assert client.get(f"/api/v1/plans/{plan['plan_id']}/files?target=megatron").content == answer.content
    assert client.get(f"/api/v1/plans/{plan['plan_id']}/files?target=vllm").status_code == 422


def test_the_catalog_is_that_of_the_command_line(client: TestClient, printed: Any) -> None:
    rows = client.get("/api/v1/catalog/devices?search=h100").json()["devices"]
    assert rows == json.loads(printed("catalog", "list", "devices", "--search", "h100"))
    assert client.get("/api/v1/catalog/nodes/dgx-h100").text == printed("catalog", "show", "dgx-h100")
    missing = client.get("/api/v1/catalog/devices/h100-sxm").json()
    assert missing["status"] == 404
    assert "did you mean" in missing["detail"]


def test_entries_are_imported_as_by_the_command_line(client: TestClient, printed: Any) -> None:
    fact = {"field": "tdp_w", "value": 650.0, "level": "measured elsewhere", "source": "s", "date": "2026-01-01"}
    entries = {"format": "meshplan-catalog/1", "devices": {"l4": {"facts": [fact]}}}
    told = client.post("/api/v1/catalog", json=entries)
    assert (told.status_code, told.json()) == (201, {"added": 1, "replaced": 0, "unchanged": 0})
    assert client.post("/api/v1/catalog", json=entries).json()["unchanged"] == 1
    assert "650" in client.get("/api/v1/catalog/devices/l4").text == printed("catalog", "show", "l4")
    wrong = client.post("/api/v1/catalog", json={**entries, "devices": {"l4": {"facts": [{**fact, "value": -1}]}}})
    assert wrong.status_code == 422
    assert "tdp_w" in wrong.json()["detail"]
    assert json.loads(printed("catalog", "remove", "l4"))["removed"] == 1


def test_an_imported_number_counts_for_the_next_question(client: TestClient, printed: Any) -> None:
    """For a second the service went on answering from the catalog of before."""
    spec = {**SPEC, "cluster": {"nodes": [{"type": "l4-pcie-8", "count": 1}]}}
    fact = {"field": "memory_bandwidth_bytes_per_s", "value": 2e11, "level": "measured elsewhere", "source": "s"}
    entries = {"format": "meshplan-catalog/1", "devices": {"l4": {"facts": [{**fact, "date": "2026-01-01"}]}}}

    def state() -> str:
        return str(client.post("/api/v1/estimate", json=spec).json()["catalog_digest"])

    before = state()
    assert client.post("/api/v1/catalog", json=entries).status_code == 201
    after = state()
    assert json.loads(printed("catalog", "remove", "l4"))["removed"] == 1
    until(lambda: state() == before)  # another process has changed it
    assert after != before


def test_schemas_are_those_of_the_command_line(client: TestClient, meshplan: Command) -> None:
    for kind in ("training", "serving", "gpu-allocation", "rank-mapping"):
        told = json.loads(meshplan("catalog", "schema", "--kind", kind, "--format", "json").out)
        assert client.get(f"/api/v1/schema/{kind}").json() == told


def test_a_question_may_be_yaml(client: TestClient, plan: dict[str, Any]) -> None:
    answer = client.post(
        "/api/v1/plans", content=yaml.safe_dump(SPEC), headers={"content-type": "application/yaml; charset=utf-8"}
    )
    assert answer.status_code == 200
    assert answer.json() == plan


def test_no_plan_is_an_answer(client: TestClient, plan: dict[str, Any]) -> None:
    spec = {**SPEC, "model": "llama-3.1-405b"}
    job = ended(client, client.post("/api/v1/plans", json=spec).json()["job_id"])
    assert (job["state"], job["plan"]) == ("done", None)
    assert job["answer"]["solution"]["status"] == "infeasible"
    again = client.post("/api/v1/plans", json=spec)
    assert again.status_code == 200
    assert again.json() == job["answer"]
    assert client.get("/api/v1/plans/latest").json()["solution"]["status"] != "infeasible"


def test_events_tell_how_a_job_goes(client: TestClient, plan: dict[str, Any]) -> None:
    asked = client.post("/api/v1/plans?seed=7", json=SPEC).json()
    told = client.get(f"/api/v1/jobs/{asked['job_id']}/events").text  # until the job has ended
    events = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("event:")]
    assert events[-1] == "done"
    last = json.loads([line for line in told.splitlines() if line.startswith("data:")][-1].partition(":")[2])
    assert last == client.get(f"/api/v1/jobs/{asked['job_id']}").json()


def test_a_waiting_job_can_be_cancelled(client: TestClient, settings: Settings) -> None:
    asked = client.post("/api/v1/plans?seed=99", json=SPEC).json()
    assert client.delete(f"/api/v1/jobs/{asked['job_id']}").status_code == 202
    assert ended(client, asked["job_id"])["state"] in ("cancelled", "done", "failed")
    assert client.delete("/api/v1/jobs/none").status_code == 404


def test_a_job_that_others_wait_for_goes_on(client: TestClient, settings: Settings) -> None:
    asked = client.post("/api/v1/plans?seed=98", json=SPEC).json()
    with TestClient(create_app(settings), HERE, client=("10.0.0.2", 1)) as other:
        assert other.post("/api/v1/plans?seed=98", json=SPEC).json()["job_id"] == asked["job_id"]
        left = client.delete(f"/api/v1/jobs/{asked['job_id']}").json()
        assert (left["cancel_asked"], left["num_askers"]) == (False, 1)
        told = client.get(f"/jobs/{asked['job_id']}/progress").json()
        if not told["is_finished"]:
            assert "Others wait" in told["others"]
            assert not told["can_stop"]
        other.delete(f"/api/v1/jobs/{asked['job_id']}")
    assert ended(client, asked["job_id"])["state"] in ("cancelled", "done")


def test_measured_rows_are_validated_as_by_the_command_line(client: TestClient, printed: Any, tmp_path: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    other = {**TRAINING_ROW, "id": "run-2", "task": "dreaming"}
    rows.write_text(json.dumps(TRAINING_ROW) + "\n\n" + json.dumps(other) + "\n")
    headers = {"content-type": "application/x-ndjson"}
    answer = client.post("/api/v1/validate", content=rows.read_bytes(), headers=headers)
    assert answer.text == printed("validate", rows)
    assert [row["status"] for row in answer.json()["rows"]] == ["ok", "unsupported"]
    for wrong in (b"{", b"[]", b"\xff"):
        assert client.post("/api/v1/validate", content=wrong, headers=headers).status_code == 422
    assert client.post("/api/v1/validate", content=b"{}", headers={"content-type": "text/plain"}).status_code == 422


def test_monitors_learn_of_requests_questions_and_jobs(client: TestClient, plan: dict[str, Any]) -> None:
    def value(of: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next((line.rpartition(" ")[2] for line in lines if line.startswith(of)), "0"))

    named = 'meshplan_http_requests_total{method="GET",route="/api/v1/plans/{handle}",status="200"}'
    before, known = value(named), value('meshplan_questions_total{outcome="known"}')
    client.get(f"/api/v1/plans/{plan['plan_id']}")
    client.get("/../../nothing-of-this-name")
    client.post("/api/v1/plans", json=SPEC)
    assert value(named) == before + 1
    assert value('meshplan_questions_total{outcome="known"}') == known + 1
    assert value('meshplan_questions_total{outcome="searched"}') >= 1
    assert value('meshplan_jobs{state="done"}') >= 1
    assert value('meshplan_http_request_seconds_count{route="/api/v1/plans"}') >= 1
    assert "nothing-of-this-name" not in client.get("/metrics").text


def test_a_search_that_is_stopped_as_it_begins_is_cancelled(client: TestClient, working: None) -> None:
    cluster = {"nodes": [{"type": "dgx-h100", "count": 1280}]}
    asked = client.post("/api/v1/plans?seed=3", json={**SPEC, "cluster": cluster, "fixed": {}}).json()
    until(lambda: client.get(f"/api/v1/jobs/{asked['job_id']}").json()["state"] == "running")
    client.delete(f"/api/v1/jobs/{asked['job_id']}")
    assert ended(client, asked["job_id"])["state"] in ("cancelled", "done")


def test_the_openapi_document_names_every_resource(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/api/v1/plans", "/api/v1/jobs/{job_id}", "/api/v1/estimate", "/api/v1/schema/{kind}"} <= set(paths)
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/livez").json()["status"] == "ok"
