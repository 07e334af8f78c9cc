"""What pages show, asked without a browser: plans as views, forms as specs, texts of anybody, addresses that stay."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import HOSTILE_TEXTS
from page_cases import ROOT, SERVING
from starlette.testclient import TestClient
from web_cases import HERE, ended

from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.web.app import create_app
from meshplan.cli.web.pages import site
from meshplan.cli.web.pages.views import ask, charts, evidence
from meshplan.cli.web.pages.views.answer import answer_view
from meshplan.cli.web.pages.views.job import job_view
from meshplan.cli.web.settings import Settings
from meshplan.planner.core.plan import PLAN_ID_LENGTH, Plan, digest
from meshplan.planner.service import make_plan
from meshplan.planner.training.problem.spec import read_training_spec

pytestmark = pytest.mark.xdist_group("pages")
PAGE = {"accept": "text/html"}


# --- views ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> Plan:
    return Plan.from_document(json.loads((ROOT / "tests" / "golden" / "cli" / "plan-70b.json").read_text()))


def test_the_first_line_is_a_product_that_holds(large: Plan) -> None:
    view = answer_view(large)
    devices, replicas, *degrees = (int(number) for number in re.findall(r"\d+", view["equation"]))
    product = replicas
    for degree in degrees:
        product *= degree
    assert product == devices == large.config["world_size"]


def test_bars_of_memory_and_time_are_the_plans_own(large: Plan) -> None:
    view = answer_view(large)
    for bar, stage in zip(view["memory"], large.memory["stages"], strict=True):
        held = sum(part["width"] for part in bar["parts"]) / 100 * large.memory["device_memory_bytes"]
        assert held == pytest.approx(stage["typical_bytes"], rel=2e-3)
        assert bar["typical_at"] <= bar["safe_at"] <= bar["limit_at"]
    assert [row["name"] for row in view["time"]] == [row["name"] for row in large.breakdown]
    assert view["time"][0]["width"] == 100.0


def test_exactly_one_candidate_is_chosen_and_every_other_says_why_not(large: Plan) -> None:
    rows = answer_view(large)["candidates"]["rows"]
    assert [row["chosen"] for row in rows].count(True) == 1
    assert all(row["reason"] for row in rows if not row["chosen"])


def test_a_diffusion_plan_says_how_long_and_rests_on_its_fit(catalog: Catalog) -> None:
    plan = make_plan(yaml.safe_load(ask.EXAMPLE_TEXTS["diffusion"]), catalog)
    view = answer_view(plan)
    candidates = view["tables"][0]
    assert [row["chosen"] for row in candidates["rows"]].count(True) == 1
    assert "takes about" in view["sentences"][1]
    assert {row["badge"]["level"] for row in view["predicted"]} == {evidence.CALIBRATED}
    cost = next(row for row in view["predicted"] if row["metric"] == "usd_per_item")
    assert cost["low"] != cost["high"]


def test_a_plan_on_two_gpu_types_offers_what_can_start_it(catalog: Catalog) -> None:
    asked = ask.form_view(ask.EXAMPLES["training on two GPU types"], catalog)
    assert asked["errors"] == []
    view = answer_view(make_plan(yaml.safe_load(asked["yaml"]), catalog))
    assert view["targets"][0]["name"] == "flagscale"
    assert [target["is_first"] for target in view["targets"]].count(True) == 1
    assert "timeline" not in {picture["name"] for picture in view["pictures"]}


def test_every_figure_has_a_badge(large: Plan) -> None:
    known = {*evidence.LEVELS.values(), evidence.LISTED, evidence.GIVEN, evidence.EXACT}
    for row in answer_view(large)["predicted"]:
        assert row["badge"]["level"] in known
        assert row["badge"]["words"]
        assert row["low_at"] <= row["value_at"] <= row["high_at"] <= 100


@pytest.mark.parametrize("most", [0.0, 1e-9, 0.37, 1.0, 93.0, 5e12, float("inf")])
def test_ticks_are_few_and_within(most: float) -> None:
    found = charts.ticks(most)
    assert 1 <= len(found) <= 6
    assert all(0 <= tick <= most for tick in found)


@pytest.fixture
def catalog(settings: Settings) -> Catalog:
    return Catalog.open(settings.db)


# --- the form ---------------------------------------------------------------------------------------------------------


def test_examples_are_those_of_the_project(catalog: Catalog) -> None:
    for name, text in ask.EXAMPLE_TEXTS.items():
        assert text == (ROOT / f"{name}.yaml").read_text()
        assert ask.text_view(text, catalog)["errors"] == []
    view = ask.form_view(ask.EXAMPLES["training"], catalog)
    assert view["errors"] == []
    written, shipped = (yaml.safe_load(text) for text in (view["yaml"], ask.EXAMPLE_TEXTS["example"]))
    assert read_training_spec(written) == read_training_spec(shipped)
    served = ask.form_view(ask.EXAMPLES["serving"], catalog)
    assert yaml.safe_load(served["yaml"]) == yaml.safe_load(ask.EXAMPLE_TEXTS["serving"])
    made = ask.form_view(ask.EXAMPLES["images"], catalog)
    assert made["errors"] == []
    assert yaml.safe_load(made["yaml"])["kind"] == "diffusion"
    assert made["command"] == "meshplan plan --model flux.1-dev --gpus 1xdgx-h100 --slo latency=10s"


def test_a_form_asks_a_model_that_embeds_for_vectors(catalog: Catalog) -> None:
    view = ask.form_view({"model": "bge-m3", "gpus": "1xL4", "rate": "20"}, catalog)
    assert view["errors"] == []
    assert yaml.safe_load(view["yaml"])["workload"]["task"] == "embed"
    assert "--lengths 512" in view["command"]


@pytest.mark.parametrize(
    ("example", "model", "words"),
    [
        ("serving", "flux.1-dev", "makes images or videos"),
        ("training", "FLUX.1-dev", "makes images or videos"),
        ("images", "llama-3.1-70b", "unknown diffusion model"),
    ],
)
def test_a_model_for_another_purpose_is_said_at_the_model(
    catalog: Catalog, example: str, model: str, words: str
) -> None:
    (error,) = ask.form_view({**ask.EXAMPLES[example], "model": model}, catalog)["errors"]
    assert error["field"] == "model"
    assert words in error["message"]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("model", "llama-3.1-70x"),
        ("gpus", "8xh1000"),
        ("gpus", "many"),
        ("rate", "fast"),
        ("rate", "-1"),
        ("slo", "ttft_p99"),
        ("lengths", "4000/none"),
        ("objective", "fun"),
        ("target", "none"),
    ],
)
def test_a_problem_is_shown_at_its_field(catalog: Catalog, field: str, text: str) -> None:
    errors = ask.form_view({**ask.EXAMPLES["serving"], field: text}, catalog)["errors"]
    assert [error["field"] for error in errors] == [field]


def test_a_form_is_asked_and_leads_to_its_answer(client: TestClient, plans: dict[str, str], working: None) -> None:
    asked = client.post("/ask", data={"spec": yaml.safe_dump(SERVING)}, follow_redirects=False)
    assert asked.status_code == 303
    assert asked.headers["location"] == f"/plans/{plans['serving']}"
    other = client.post("/ask", data={"spec": yaml.safe_dump({**SERVING, "slo": {"ttft_p99_s": 1e-6}})})
    job_id = other.url.path.rpartition("/")[2]
    assert ended(client, job_id)["state"] == "done"
    told = client.get(f"/jobs/{job_id}", headers=PAGE).text
    assert "No plan keeps every limit" in told
    assert "The least change that helps" in told


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}],
)
def test_forms_of_other_sites_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    for path in ("/ask", "/ask/check", "/jobs/x/cancel"):
        assert client.post(path, data={"model": "x"}, headers=headers).status_code == 422
    assert client.post("/ask/check", data={"model": "x"}, headers={"origin": HERE}).status_code == 200


# --- texts of anybody -------------------------------------------------------------------------------------------------


def test_hostile_texts_of_a_plan_are_shown_as_text(
    client: TestClient, plan: dict[str, Any], settings: Settings
) -> None:
    rows = PlanRows(Catalog.open(settings.db).engine)
    payload = "\"><img src=x onerror=alert(1)></script><script>alert(1)</script>{{7*7}}'"
    content = {key: value for key, value in plan.items() if key != "plan_id"}
    content["provenance"] = {**content["provenance"], "sources": {payload: payload}}
    content["breakdown"] = [{**row, "name": payload, "evidence": payload} for row in content["breakdown"]]
    content["rejected"] = [{"reason": payload, "count": 1}]
    solution = {key: value for key, value in content["solution"].items() if key not in ("wall_s", "cpu_s")}
    forged = {"plan_id": digest({**content, "solution": solution})[:PLAN_ID_LENGTH], **content}
    rows.insert(forged, name=payload, tag="hostile")
    try:
        for path in (
            f"/plans/{forged['plan_id']}",
            "/plans",
            "/compare",
            f"/compare?plans={forged['plan_id']},{plan['plan_id']}",
        ):
            answer = client.get(path, headers=PAGE)
            assert answer.status_code == 200, path
            assert "<img src=x" not in answer.text
            assert "<script>alert" not in answer.text
            assert "49" not in re.findall(r"onerror=alert\(1\)[^<]*\{\{(.*?)\}\}", answer.text)
        assert "&lt;script&gt;alert(1)" in client.get(f"/plans/{forged['plan_id']}").text
    finally:
        rows.delete(forged["plan_id"])


@pytest.mark.parametrize("text", [text[:2000] for text in HOSTILE_TEXTS])
def test_hostile_texts_of_an_address_are_shown_as_text(client: TestClient, plans: dict[str, str], text: str) -> None:
    answers = [
        client.get("/", params={"model": text, "gpus": "8xh100", "purpose": text}),
        client.get("/compare", params={"plans": text}, headers=PAGE),
        client.get("/catalog/devices", params={"search": text}, headers=PAGE),
        client.get(f"/plans/{plans['small']}/instead", params={"choice": text}, headers=PAGE),
        client.get(f"/plans/{plans['small']}/what-if", params={"price": text}, headers=PAGE),
        client.get(f"/plans/{plans['small']}/files", params={"target": text}, headers=PAGE),
        client.post("/ask", data={"spec": text}, headers=PAGE),
    ]
    for answer in answers:
        assert answer.status_code < 500, answer.text
        assert "<script>alert" not in answer.text
        assert "<img src=x" not in answer.text
        assert answer.headers["content-type"] == "application/zip" or "\x1b" not in answer.text


def test_no_page_opens_a_file(client: TestClient, plans: dict[str, str], settings: Settings) -> None:
    opened: list[str] = []
    watching = [True]

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str):
            opened.append(arguments[0])

    paths = (
        "/",
        "/?example=training",
        "/plans",
        "/compare",
        "/runs",
        "/catalog",
        "/nothing",
        f"{site.STATIC}/pages.css",
    )
    own = (f"/plans/{plans['large']}", f"/plans/{plans['small']}/what-if", f"/plans/{plans['mapping']}/links.svg")
    for path in (*paths, *own):  # once before: what is loaded when it is needed first is code
        client.get(path, headers=PAGE)
    sys.addaudithook(watch)
    for path in (*paths, *own):
        client.get(path, headers=PAGE)
    watching.clear()
    assert [path for path in opened if not path.startswith(str(settings.db))] == []


# --- addresses --------------------------------------------------------------------------------------------------------


def test_addresses_of_plans_lead_to_their_id(client: TestClient, plans: dict[str, str]) -> None:
    answer = client.get(f"/plans/{plans['large'][:6]}", follow_redirects=False)
    assert answer.headers["location"] == f"/plans/{plans['large']}"


def test_static_files_are_kept_for_good_and_others_are_not_there(client: TestClient) -> None:
    style = client.get(f"{site.STATIC}/pages.css")
    assert style.headers["content-type"].startswith("text/css")
    assert "immutable" in style.headers["cache-control"]
    for path in (f"{site.STATIC}/../site.py", f"{site.STATIC}/none.js", "/static/old/pages.css"):
        assert client.get(path).status_code == 404


def test_scripts_and_styles_stand_in_files_of_their_own() -> None:
    pages = Path(site.__file__).parent
    for file in (pages / "templates").iterdir():
        text = file.read_text()
        assert not re.search(
            r"<style|\sstyle=|\son[a-z]+=|<script(?! type=\"module\" src=)|https?://(?!\" ~ host)", text
        ), file.name
        assert "|safe" not in text.replace(" ", "")
    for file in (pages / "static").iterdir():
        assert not re.search(r"innerHTML|eval\(|@import|url\(", file.read_text()), file.name


def test_errors_are_pages_for_people_and_documents_for_programs(client: TestClient) -> None:
    assert client.get("/plans/none", headers=PAGE).headers["content-type"].startswith("text/html")
    assert client.get("/nothing", headers=PAGE).headers["content-type"].startswith("text/html")
    assert client.get("/nothing").headers["content-type"] == "application/problem+json"
    assert client.get("/api/v1/plans/none", headers=PAGE).headers["content-type"] == "application/problem+json"


def test_a_browser_is_asked_for_the_token(settings: Settings) -> None:
    guarded = Settings(db=settings.db, token="0123456789abcdef", callers=1)  # noqa: S106
    with TestClient(create_app(guarded), HERE) as asking:
        refused = asking.get("/catalog")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert asking.get("/api/v1/plans").headers["www-authenticate"] == "Bearer"
        for word, status in (("0123456789abcdef", 200), ("wrong", 401)):
            given = base64.b64encode(f"anybody:{word}".encode()).decode()
            assert asking.get("/catalog", headers={"authorization": f"Basic {given}"}).status_code == status
        assert asking.get("/catalog", headers={"authorization": "Basic no base64"}).status_code == 401


def test_pictures_and_reports_are_those_of_the_command_line(client: TestClient, plans: dict[str, str]) -> None:
    assert client.get(f"/plans/{plans['large']}/timeline.svg").text.startswith("<svg")
    for name in ("mapping", "links"):
        answer = client.get(f"/plans/{plans['mapping']}/{name}.svg")
        assert answer.headers["content-type"] == "image/svg+xml"
    assert client.get(f"/plans/{plans['mapping']}/timeline.svg").status_code == 422
    assert "The best" in client.get(f"/plans/{plans['large']}/report").text


def test_what_if_moves_what_it_says(client: TestClient, plans: dict[str, str]) -> None:
    at_rest = client.get(f"/plans/{plans['small']}/what-if/figures").text
    half = client.get(f"/plans/{plans['small']}/what-if/figures?utilisation=50").text
    assert re.search(r"cost of a billion tokens.*?\+100\.0%", half, re.DOTALL)
    assert "+100.0%" not in at_rest
    larger = client.get(f"/plans/{plans['small']}/what-if/figures?batch=128").text
    assert re.search(r"step time.*?\+\d", larger, re.DOTALL)
    for wrong in ("price=-1", "price=nan", "batch=1e9", "price=x"):
        assert client.get(f"/plans/{plans['small']}/what-if/figures?{wrong}").status_code == 422
    assert client.get(f"/plans/{plans['mapping']}/what-if").status_code == 422


def test_a_question_that_waits_says_how_many_come_first(tmp_path: Path) -> None:
    jobs = Jobs(Catalog.open(f"sqlite:///{tmp_path / 'jobs.sqlite'}").engine)
    asked = [jobs.submit({"spec": SERVING}, kind="serving", digest=name) for name in "abc"]
    words = [job_view(job, num_ahead=jobs.ahead_of(job))["words"] for job in asked]
    assert words == [
        "waiting for a worker",
        "waiting for a worker, 1 question before it",
        "waiting for a worker, 2 questions before it",
    ]


def test_the_api_says_how_many_come_first(client: TestClient) -> None:
    job = client.post("/api/v1/plans?seed=971", json=SERVING).json()["job_id"]
    client.delete(f"/api/v1/jobs/{job}")
    assert ended(client, job)["num_ahead"] == 0
