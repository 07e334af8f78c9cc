"""Requests from anybody: none ends the service, opens a file, or learns more than it should."""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from hostile import HOSTILE_TEXTS
from hostile_requests import asked, hostile_request
from starlette.testclient import TestClient
from web_cases import HERE, PATIENCE_S, SPEC, own_pid, until

from meshplan.cli.client import Client
from meshplan.cli.web.app import create_app
from meshplan.cli.web.calls import Calls, warm
from meshplan.cli.web.sandbox import library_folders
from meshplan.cli.web.settings import Settings

JSON = {"content-type": "application/json"}
MOST_IN_A_URL = 20_000  # of the client that asks


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"[]", 422),
        (b"\xff\xfe", 422),
        (b'{"kind": "training", "kind": "serving"}', 422),
        (b'{"kind": ' + b"[" * 100_000, 422),
        (b'{"kind": NaN}', 422),
        (b'{"kind": "none"}', 422),
        (b"x" * (2**20 + 1), 413),
    ],
)
def test_bodies_that_are_no_spec_are_refused_with_words(client: TestClient, body: bytes, status: int) -> None:
    for path in ("/api/v1/plans", "/api/v1/estimate"):
        answer = client.post(path, content=body, headers=JSON)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["detail"]


def test_a_process_that_ends_while_it_waits_takes_no_later_call_along(settings: Settings) -> None:
    """As where the system is short of memory and ends one: from then on every call was answered with 500."""
    calls = Calls(settings)
    for _ in range(2):
        os.kill(int(calls.answer(own_pid).body), signal.SIGKILL)
        until(lambda: calls.answer(warm).status == 200)  # 503 as long as the end is not noticed
    calls.close()
    with pytest.raises(RuntimeError):
        calls.answer(warm)


def test_whoever_sends_too_much_learns_so_instead_of_a_reset(settings: Settings) -> None:
    """A connection for one request was closed while its body still came: the sender, such as urllib, saw no 413."""
    config = uvicorn.Config(create_app(settings), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    running = threading.Thread(target=server.run, daemon=True)
    running.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    parts = [b"x" * 2**18] * 80
    length = {"content-length": str(sum(map(len, parts)))}
    for stated in (length, {}):  # without a length the body is counted as it comes
        asking = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        asking.request("POST", "/api/v1/plans", body=iter(parts), headers={**JSON, **stated, "connection": "close"})
        assert asking.getresponse().status == 413
        asking.close()
    server.should_exit = True
    running.join()


def test_a_body_without_a_length_is_counted(client: TestClient) -> None:
    answer = client.post("/api/v1/estimate", content=iter([b"x" * 2**16] * 40), headers=JSON)
    assert answer.status_code == 413


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_types_that_any_page_may_send_are_refused(client: TestClient, media_type: str) -> None:
    answer = client.post("/api/v1/plans", content=b"kind: training", headers={"content-type": media_type})
    assert answer.status_code == 422


def test_every_problem_of_a_spec_has_its_field(client: TestClient) -> None:
    wrong = {**SPEC, "workload": {"sequence_length": -1, "global_batch_size": "many"}}
    errors = client.post("/api/v1/plans", json=wrong).json()["errors"]
    assert {error["path"] for error in errors} == {"workload.sequence_length", "workload.global_batch_size"}


def test_the_folder_from_which_a_service_is_started_is_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``python -m`` puts it on the path of modules: every request could name traces and models in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert tmp_path.resolve() not in library_folders()


@pytest.mark.parametrize("name", ["own.json", "../secret/config.json", "/etc/passwd", "{folder}/config.json"])
def test_no_file_that_a_request_names_is_opened(client: TestClient, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    answer = client.post("/api/v1/estimate", json={**SPEC, "model": name.format(folder=tmp_path)})
    absent = client.post("/api/v1/estimate", json={**SPEC, "model": "/absent/config.json"})
    assert answer.status_code == absent.status_code == 422
    told, of_none = (one.json()["errors"][0]["message"] for one in (answer, absent))
    named = name.format(folder=tmp_path)
    assert told.replace(named, "") == of_none.replace("/absent/config.json", "")


@pytest.mark.parametrize("text", [text[:MOST_IN_A_URL] for text in HOSTILE_TEXTS])
def test_hostile_texts_are_answered(client: TestClient, text: str) -> None:
    answers = [
        client.get("/api/v1/plans/x", params={"kind": text}),
        client.get("/api/v1/compare", params={"plans": text}),
        client.get("/api/v1/catalog/devices", params={"search": text}),
        client.post("/api/v1/estimate", json={**SPEC, "model": text}),
    ]
    for answer in answers:
        assert answer.status_code < 500, answer.text
        assert "Traceback" not in answer.text
        assert "\x1b" not in answer.text


def test_hostile_requests_are_answered_and_leave_no_trace(
    address: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of those of ``tests/benchmarks/hostile_requests.py``, as bytes over a connection."""
    monkeypatch.chdir(tmp_path)
    random_, where = random.Random(22), urlsplit(address)
    Client(address).estimate(SPEC)  # its processes load what they need
    for _ in range(120):
        request = hostile_request(random_)
        found = asked(str(where.hostname), int(where.port or 0), request)
        assert found.complaint() is None, request[:500]
    assert "Traceback" not in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_clients_that_leave_in_the_middle_of_a_body_are_no_errors(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = urlsplit(address)
    for path in ("/api/v1/estimate", "/api/v1/plans", "/api/v1/validate", "/ask"):
        head = f"POST {path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        with socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S) as connection:
            connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
    until(lambda: Client(address).ask("GET", "/healthz")["status"] == "ok")
    assert "Traceback" not in caplog.text
    assert "ERROR" not in caplog.text


def test_a_token_is_needed_where_one_is_set(settings: Settings) -> None:
    guarded: Any = Settings(db=settings.db, token="0123456789abcdef", callers=1)  # noqa: S106
    with TestClient(create_app(guarded), HERE) as asking:
        assert asking.get("/healthz").status_code == 200
        for wrong in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic 0123456789abcdef"}):
            answer = asking.get("/api/v1/catalog/devices", headers=wrong)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        right = {"authorization": "Bearer 0123456789abcdef"}
        assert asking.get("/api/v1/catalog/devices", headers=right).status_code == 200


def test_other_names_of_the_host_are_refused(client: TestClient) -> None:
    assert client.get("/healthz", headers={"host": "evil.example"}).status_code == 400


def test_every_answer_bears_the_headers(client: TestClient) -> None:
    for answer in (client.get("/healthz"), client.get("/nothing"), client.post("/api/v1/plans", content=b"")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers


def test_clients_wait_for_their_own_jobs(settings: Settings) -> None:
    with TestClient(create_app(Settings(db=settings.db, callers=1, most_waiting=0)), HERE) as asking:
        answer = asking.post("/api/v1/plans?seed=12345", json=SPEC)
        assert answer.status_code == 429
