"""``meshplan catalog`` as a person or a script uses it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Command = Callable[..., Any]
SECTIONS = ("devices", "links", "nodes", "models", "diffusion-models", "machines", "prices")


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("form", ["table", "json", "yaml", "csv", "markdown"])
def test_every_section_lists_in_every_format(meshplan: Command, section: str, form: str) -> None:
    done = meshplan("catalog", "list", section, "--format", form)
    assert (done.code, done.err) == (0, "")
    if form == "json":
        count = len(done.json)
    elif form == "yaml":
        count = len(yaml.safe_load(done.out))
    elif form == "csv":
        count = len(list(csv.reader(io.StringIO(done.out)))) - 1
    else:
        return
    least = {"devices": 25, "links": 20, "nodes": 40, "diffusion-models": 11, "machines": 3, "prices": 15}
    assert count >= least.get(section, 0)


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_fit_80_columns_but_for_the_citations(meshplan: Command, section: str) -> None:
    lines = meshplan("catalog", "list", section).out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("[")) <= 80


@pytest.mark.parametrize("form", ["table", "json", "yaml", "csv", "markdown"])
def test_a_model_is_listed_and_shown_in_every_format(meshplan: Command, tmp_path: Path, form: str) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "rope_scaling": {"factor": 8.0}}
    model = {"name": "Tiny", "family": "llama", "config": config, "source": "a test", "date": "2026-11-21"}
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump({"format": "meshplan-catalog/1", "models": {"tiny": model}}), encoding="utf-8")
    assert meshplan("catalog", "import", str(file)).code == 0
    assert "tiny" in meshplan("catalog", "list", "models", "--format", form).out
    shown = meshplan("catalog", "show", "tiny", "--format", form)
    assert (shown.code, shown.err) == (0, "")
    assert "hidden_size" in shown.out


@pytest.mark.parametrize(
    ("name", "slug", "kind"),
    [("FLUX.1-dev", "flux.1-dev", "diffusion_model"), ("raspberry-pi-5", "raspberry-pi-5", "machine")],
)
def test_what_ships_whole_is_shown_with_its_source(meshplan: Command, name: str, slug: str, kind: str) -> None:
    entry = meshplan("catalog", "show", name, "--format", "json").json
    assert (entry["kind"], entry["slug"]) == (kind, slug)
    assert entry["source"]
    assert "parameters" in entry["values"] or "cores" in entry["values"]
    assert entry["source"].split()[0][:40] in meshplan("catalog", "show", name).out.replace("\n", "")


def test_show_tells_where_every_number_comes_from(meshplan: Command) -> None:
    entry = meshplan("catalog", "show", "h100-sxm-80gb", "--format", "json").json
    assert (entry["kind"], entry["vendor"], entry["architecture"]) == ("device", "nvidia", "hopper")
    facts = {fact["field"]: fact for fact in entry["facts"]}
    assert facts["peak_flops_per_s.bf16"]["value"] == 989e12
    for fact in facts.values():
        assert set(fact) >= {"value", "low", "high", "num_samples", "level", "date", "source", "rules"}
        assert fact["source"]
        assert fact["date"]
    table = meshplan("catalog", "show", "h100-sxm-80gb").out
    assert "989.0 TFLOP/s" in table
    assert "9.89e+14" in table
    assert re.search(r"^\[\d+\] 2026-11-21, https://", table, re.MULTILINE)


@pytest.mark.parametrize("name", ["nvlink4", "dgx-h100", "gb200-nvl72"])
def test_show_knows_links_and_node_types(meshplan: Command, name: str) -> None:
    assert meshplan("catalog", "show", name).code == 0
    assert meshplan("catalog", "show", name, "--format", "yaml").out.startswith("kind: ")


@pytest.mark.parametrize(("written", "slug"), [("H100", "h100"), ("meta-llama/Llama-3.1-8B", "llama-3.1-8b")])
def test_show_takes_the_names_that_specs_take(meshplan: Command, written: str, slug: str) -> None:
    assert meshplan("catalog", "show", written, "--format", "json").json["slug"].startswith(slug)


def test_an_unknown_name_exits_4_with_the_closest(meshplan: Command) -> None:
    done = meshplan("catalog", "show", "dgx-h10")
    assert (done.code, done.out) == (4, "")
    assert "did you mean 'dgx-h100'" in done.err


MEASURED = {
    "format": "meshplan-catalog/1",
    "devices": {
        "t4": {
            "facts": [
                {
                    "field": "memory_bandwidth_bytes_per_s",
                    "value": 2.4e11,
                    "low": 2.3e11,
                    "high": 2.5e11,
                    "num_samples": 5,
                    "level": "measured here",
                    "source": "our own node",
                    "date": "2026-11-20",
                }
            ]
        }
    },
}


def test_a_measurement_is_imported_shown_with_its_spread_and_overrules(meshplan: Command, tmp_path: Path) -> None:
    file = tmp_path / "measured.yaml"
    file.write_text(yaml.safe_dump(MEASURED), encoding="utf-8")
    assert meshplan("catalog", "import", str(file), "--format", "json").json == {
        "added": 1,
        "replaced": 0,
        "unchanged": 0,
    }
    table = meshplan("catalog", "show", "t4").out
    assert "memory_bandwidth_bytes_per_s" in table
    assert "n=5" in table
    assert "(230.0 GB/s" in table
    assert "(overruled)" in table
    listed = meshplan("catalog", "list", "--format", "json").json
    assert next(row for row in listed if row["slug"] == "t4")["memory_bandwidth_bytes_per_s"] == 2.4e11


def test_a_bad_file_exits_4_with_every_problem(meshplan: Command, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"format": "meshplan-catalog/1", "devices": {"x": {}, "y": 1}}', encoding="utf-8")
    done = meshplan("catalog", "import", str(file))
    assert done.code == 4
    assert "devices.x.name: must be a text" in done.err
    assert "devices.y: must be a mapping" in done.err


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_export_and_import_between_two_databases(meshplan: Command, tmp_path: Path, form: str) -> None:
    file = tmp_path / f"export.{form}"
    assert meshplan("catalog", "export", "--format", form, "--out", str(file)).code == 0
    other = str(tmp_path / "other.sqlite")
    changes = meshplan("catalog", "import", str(file), "--db", other, "--format", "json").json
    assert changes["added"] == changes["replaced"] == 0
    assert changes["unchanged"] > 500


def test_an_export_is_no_table(meshplan: Command) -> None:
    done = meshplan("catalog", "export", "--format", "table")
    assert done.code == 2
    assert "json or yaml" in done.err


def test_upgrade_of_a_current_and_of_a_missing_database(meshplan: Command, tmp_path: Path) -> None:
    assert meshplan("catalog", "upgrade", "--format", "json").json["seeds_refreshed"] is False
    new = meshplan("catalog", "upgrade", "--db", str(tmp_path / "new.sqlite"), "--format", "json").json
    assert new["from_revision"] == "new"


def test_a_catalog_of_another_version_is_noted_on_stderr(meshplan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshplan.catalogs.database.seeds.seed_digest", lambda: "of a newer version")
    done = meshplan("catalog", "list", "--format", "json")
    assert done.code == 0
    assert "refresh: meshplan catalog upgrade" in done.err
    assert len(done.json) >= 25


def test_a_list_is_searched_by_words_in_any_case(meshplan: Command) -> None:
    found = meshplan("catalog", "list", "nodes", "--search", "H100 AWS", "--format", "json").json
    assert {row["slug"] for row in found} == {"aws-p5-48xlarge"}
    assert meshplan("catalog", "list", "models", "--search", "no such", "--format", "json").json == []


def test_the_choices_are_read_at_80_columns(meshplan: Command) -> None:
    """What a choice means, is called and is by default stands in one wide column; the notes are not wrapped."""
    lines = meshplan("catalog", "choices").out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("["))
    assert len(lines) < 150
    assert any("tensor_parallel                devices that split each matrix product" in line for line in lines)
