"""Files of surfaces: the user's replace shipped ones with the same key, and a surface is built once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.surfaces import attention, experts, files, gemm, latent_attention
from meshplan.catalogs.surfaces.files import Rows, SurfaceFile

SHIPPED = [
    {"device": "d", "kind": "k", "framework": "vllm", "value": 1},
    {"device": "d", "kind": "k", "framework": "trtllm", "value": 2},
    {"device": "d", "kind": "k", "framework": "trtllm", "value": 3},
]


@pytest.fixture
def surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SurfaceFile:
    monkeypatch.setattr(files, "SEED_FOLDER", tmp_path)
    monkeypatch.setenv(files.ENVIRONMENT_VARIABLE, str(tmp_path / "user"))
    made = SurfaceFile("things.json", key=("device", "kind", "framework"))
    made.shipped.write_text(made.text(SHIPPED, source="shipped"), encoding="utf-8")
    return made


def values(rows: Rows) -> tuple[str, list[int]]:
    return rows[0]["source"], [row["value"] for row in rows]


def test_rows_with_one_key_make_one_surface(surfaces: SurfaceFile) -> None:
    assert surfaces.find(values, "d", "k", "trtllm") == ("shipped", [2, 3])
    assert surfaces.find(values, "d", "k", "trtllm") is surfaces.find(values, "d", "k", "trtllm")
    assert surfaces.find(values, "d", "k", "sglang") is None


def test_any_framework_is_tried_in_the_order_of_preference(surfaces: SurfaceFile) -> None:
    assert [value for _, value in surfaces.measured(values, "d", "k", "any")] == [[2, 3], [1]]
    assert [value for _, value in surfaces.measured(values, "d", "k", "vllm")] == [[1]]
    assert not list(surfaces.measured(values, "d", "k", "sglang"))


def test_the_users_file_replaces_its_keys_alone_and_counts_at_once(surfaces: SurfaceFile) -> None:
    assert surfaces.find(values, "d", "k", "trtllm") == ("shipped", [2, 3])
    surfaces.write_for("d", [{"device": "d", "kind": "k", "framework": "trtllm", "value": 9}], source="user")
    assert surfaces.find(values, "d", "k", "trtllm") == ("user", [9])
    assert surfaces.find(values, "d", "k", "vllm") == ("shipped", [1])


def test_a_broken_file_of_the_user_is_named(surfaces: SurfaceFile, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "things.d.json").write_text("{")
    with pytest.raises(CatalogError, match=r"things\.d\.json"):
        surfaces.find(values, "d", "k", "vllm")


@pytest.mark.parametrize("made", [attention.SURFACES, experts.SURFACES, gemm.SURFACES, latent_attention.SURFACES])
def test_shipped_files_are_as_their_fits_write_them(made: SurfaceFile) -> None:
    text = made.shipped.read_text(encoding="utf-8")
    content = json.loads(text)
    listed = "surfaces" if "surfaces" in content else "tables"
    rows = content.pop(listed)
    assert made.text(rows, **content) == text
