"""``meshplan --server URL`` prints what ``meshplan`` prints, with the words of the service where it refuses."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from command_line import Command
from web_cases import SPEC

from meshplan.catalogs.errors import (
    EXIT_BUG,
    EXIT_SOLVER,
    EXIT_SPEC,
    CatalogError,
    CatalogUnavailableError,
    EmitError,
    MeshplanError,
    Problem,
    SolverError,
    SpecError,
    StoreError,
    UnitError,
    UnknownEntryError,
)
from meshplan.cli.client import Client, error_of
from meshplan.cli.web.problems import problem, problem_of


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def test_a_service_plans_as_this_machine_does(meshplan: Command, address: str, spec: Path) -> None:
    there = meshplan("--server", address, "plan", spec, "--format", "json").json
    here = meshplan("plan", spec, "--no-store", "--format", "json").json
    for document in (there, here):
        for clock in ("wall_s", "cpu_s"):
            del document["solution"][clock]
    assert there == here
    assert meshplan("plans", "list", "--format", "json").json == []  # it is stored there


def test_where_a_service_has_stored_a_plan_is_said(meshplan: Command, address: str, spec: Path) -> None:
    """It was called a plan that is not stored."""
    shown = meshplan("--server", address, "plan", spec)
    plan_id = meshplan("plan", spec, "--no-store", "--format", "json").json["plan_id"]
    assert f"plan {plan_id} is stored at {address}/plans/{plan_id}" in shown.out
    assert "not stored" not in shown.out


def test_limits_that_are_the_services_are_refused(meshplan: Command, address: str, spec: Path) -> None:
    """A limit of memory was taken and not heeded: the answer was another one than here."""
    refused = meshplan("--server", address, "plan", spec, "--memory-limit", "1 GiB")
    assert refused.code == 2
    assert "leave --memory-limit out" in " ".join(refused.err.split())


def test_a_service_estimates_as_this_machine_does(meshplan: Command, address: str, spec: Path) -> None:
    assert meshplan("--server", address, "estimate", spec).out == meshplan("estimate", spec).out


def test_what_the_service_refuses_is_refused_with_its_words(meshplan: Command, address: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({**SPEC, "workload": {"sequence_length": -1, "global_batch_size": 64}}))
    refused = meshplan("--server", address, "plan", wrong)
    assert refused.code == 2
    assert "workload.sequence_length" in refused.err
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump({**SPEC, "model": "llama-3.1-9b", "workload": {"sequence_length": -1}}))
    here = meshplan("plan", both)
    assert "unknown model" in here.err
    assert meshplan("--server", address, "plan", both).err == here.err  # everything that is to be mended, at once
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text(yaml.safe_dump({**SPEC, "model": "llama-3.1-9b"}))
    assert "llama-3.1-8b" in meshplan("--server", address, "plan", unknown).err


@pytest.mark.parametrize(
    "error",
    [
        SpecError.at("[3]", "is no time", of="the trace arrivals.csv"),
        SpecError([Problem(path="a", message="b"), Problem(path="", message="c")], of="the lengths\nof.csv"),
        UnitError("'450' has no unit"),
        UnknownEntryError("link", "nvlink-9", ["nvlink-4"]),
        CatalogError("price of 'x' is damaged"),
        CatalogUnavailableError("the catalog is locked"),
        StoreError("no stored plan 'x'"),
        EmitError("nothing to launch"),
        SolverError("no solver is here"),
    ],
)
def test_an_error_comes_out_as_it_went_in(error: MeshplanError) -> None:
    """With its words, and with the exit code that the command line has without a service."""
    there = error_of(problem_of(error))
    assert (str(there), there.exit_code) == (str(error), error.exit_code)


def test_a_bug_and_a_question_that_is_too_large_have_their_exit_codes() -> None:
    assert error_of(problem_of(ZeroDivisionError())).exit_code == EXIT_BUG
    assert error_of(problem(413, "The request is too large", "at most 1 byte is read")).exit_code == EXIT_SPEC
    assert error_of(problem(503, "It takes too long", "no answer within 30 s")).exit_code == EXIT_SOLVER


def test_other_commands_are_answered_here(meshplan: Command) -> None:
    refused = meshplan("--server", "http://127.0.0.1:1", "plans", "list")
    assert refused.code == 2
    assert "a service answers plan and estimate" in " ".join(refused.err.split())


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:0", "http://host:99999", "http://host/path", ""])
def test_addresses_of_no_service_are_refused(url: str) -> None:
    with pytest.raises(SpecError, match="http://HOST:PORT"):
        Client(url)


def test_nobody_there_is_said(meshplan: Command, spec: Path) -> None:
    refused = meshplan("--server", "127.0.0.1:1", "plan", spec)
    assert refused.code == 4
    assert "no service answers at http://127.0.0.1:1" in refused.err


class _Liar(BaseHTTPRequestHandler):
    """Answers whatever it is asked with a plan that was never made."""

    def do_POST(self) -> None:
        body = json.dumps({"plan_id": "0" * 12, "spec": {}, "kind": "training"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_plan_that_was_never_made_is_refused(meshplan: Command, spec: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), _Liar) as liar:
        threading.Thread(target=liar.handle_request).start()
        refused = meshplan("--server", f"127.0.0.1:{liar.server_port}", "plan", spec)
    assert refused.code == 4
    assert "is not the JSON of a plan" in refused.err


def test_a_page_of_something_else_is_no_service() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.handle_request).start()
        with pytest.raises(CatalogUnavailableError, match="no service of meshplan"):
            Client(f"127.0.0.1:{other.server_port}").estimate(SPEC)
