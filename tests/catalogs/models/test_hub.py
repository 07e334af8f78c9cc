"""Configurations by Hugging Face id: from the caches of this machine, and by network where it is asked for."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import ModelConfigError
from meshplan.catalogs.models.config import MAX_CONFIG_BYTES
from meshplan.catalogs.models.download import download_config
from meshplan.catalogs.models.hub import cached_config, is_hub_id
from meshplan.planner.cluster.lookup import look_up_shape
from meshplan.planner.core.problems import Problems
from tests.support.command_line import Command

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


class Hub(BaseHTTPRequestHandler):
    """Answers by the model's name."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """One file of one model."""
        Hub.asked.append(self.path)
        name = self.path.split("/")[2]
        places = {
            "elsewhere": self.path.replace("elsewhere", "tiny"),
            "to-a-file": "file:///etc/passwd",
            "to-ftp": "ftp://127.0.0.1/config.json",
        }
        if name in places:
            self.send_response(302)
            self.send_header("Location", places[name])
            self.end_headers()
            return
        bodies = {"tiny": json.dumps(CONFIG), "page": "<html>", "list": "[1]", "huge": " " * (MAX_CONFIG_BYTES + 2)}
        self.send_response({"gated": 403, "private": 401, "broken": 500}.get(name, 200 if name in bodies else 404))
        self.end_headers()
        self.wfile.write(bodies.get(name, "").encode())

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub of this machine, and empty caches."""
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Hub.asked.clear()
    yield address
    server.shutdown()
    server.server_close()


def test_what_was_fetched_is_kept_and_found(hub: str, catalog: Catalog, tmp_path: Path) -> None:
    assert cached_config("some/tiny") is None
    file = download_config("some/tiny")
    assert cached_config("some/tiny") == file
    assert file.is_relative_to(tmp_path / "cache")
    assert Hub.asked == ["/some/tiny/resolve/main/config.json"]
    problems = Problems()
    shape = look_up_shape("some/tiny", catalog, Path(), problems)
    assert shape is not None
    assert (shape.slug, shape.hidden_size, shape.source) == ("tiny", 64, "https://huggingface.co/some/tiny")
    assert json.loads(download_config("some/elsewhere").read_text()) == CONFIG
    assert hub


def test_what_another_program_keeps_is_found(hub: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "huggingface" / "hub" / "models--some--kept"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("../../outside")
    assert cached_config("some/kept") is None
    commit = "0123456789" * 4
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps(CONFIG))
    assert cached_config("some/kept") == folder / "snapshots" / commit / "config.json"
    assert hub
    assert not Hub.asked


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("some/absent", "no model some/absent"),
        ("some/gated", "gated: fetch it yourself and give its path: hf download some/gated config.json"),
        ("some/private", "wants an account"),
        ("some/broken", "it answers 500"),
        ("some/page", "is not JSON"),
        ("some/list", "must hold a JSON object"),
        ("some/huge", "is larger than"),
        ("some/to-a-file", "it answers 302"),
        ("some/to-ftp", "leads to another kind of address \\(ftp\\)"),
        ("../etc", "is not a Hugging Face id"),
        ("a/../b", "is not a Hugging Face id"),
        ("tiny", "is not a Hugging Face id"),
    ],
)
def test_what_is_not_fetched(model: str, message: str, hub: str, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=message):
        download_config(model)
    assert not list(tmp_path.rglob("config.json"))
    assert hub


def test_a_hub_that_does_not_answer_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch, hub: str) -> None:
    assert hub
    monkeypatch.setenv("HF_ENDPOINT", "ftp://127.0.0.1")
    with pytest.raises(ModelConfigError, match=r"HF_ENDPOINT=ftp://127.0.0.1 is no address"):
        download_config("some/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelConfigError, match=r"cannot be fetched.*refused.*hf download some/tiny"):
        download_config("some/tiny")


def test_a_configuration_is_fetched_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, hub: str, meshplan: Command
) -> None:
    asked = ("plan", "--model", "some/tiny", "--gpus", "1xH100", "--concurrency", "1", "--lengths", "32/8")
    refused = meshplan(*asked)
    assert refused.code == 2
    assert "or plan with --download" in " ".join(refused.err.split())
    assert not Hub.asked
    fetched = meshplan(*asked, "--download")
    assert fetched.code == 0, fetched.err
    assert "fetched: " in fetched.err

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(urllib.request, "build_opener", never)
    assert meshplan(*asked, "--download").code == 0
    assert hub


def test_an_id_is_an_owner_and_a_name_and_no_path() -> None:
    assert is_hub_id("zai-org/GLM-4.6")
    assert not any(map(is_hub_id, ("", "a", "a/b/c", "/a/b", "a/b ", "a/..", "a/b\n", "a/\x1b[31m")))
