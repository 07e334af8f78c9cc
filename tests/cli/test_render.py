"""The one renderer: goldens of its five formats."""

from __future__ import annotations

import csv
import io
import json

import pytest
import yaml

from meshplan.catalogs.units import format_bytes
from meshplan.cli.render import Column, Format, Row, rendered_document, rendered_rows

ROWS: list[Row] = [
    {"slug": "h100", "memory_bytes": 85899345920, "note": "a | b", "source": "https://example.org/a", "more": [1, 2]},
    {"slug": "t4", "memory_bytes": None, "note": "[bold]", "source": "https://example.org/a", "more": []},
]
COLUMNS = (
    Column(key="slug", title="Device", wrap=False),
    Column(key="memory_bytes", title="Memory", right=True, text=format_bytes),
    Column(key="note", title="Note"),
    Column(key="nothing", title="Nothing", optional=True),
    Column(key="source", title="", footnote=True),
)


def test_a_table_aligns_numbers_and_keeps_sources_as_footnotes() -> None:
    assert rendered_rows(ROWS, COLUMNS, Format.TABLE, title="Devices") == (
        "Devices\n"
        "Device    Memory  Note\n"
        "─────────────────────────────\n"
        "h100    80.0 GiB  a | b   [1]\n"
        "t4             –  [bold]  [1]\n"
        "[1] https://example.org/a\n"
    )


def test_markdown_escapes_bars_and_aligns_numbers() -> None:
    assert rendered_rows(ROWS, COLUMNS[:3], Format.MARKDOWN) == (
        "| Device | Memory | Note |\n| --- | ---: | --- |\n| h100 | 80.0 GiB | a \\| b |\n| t4 | – | [bold] |\n"
    )


def test_csv_holds_whole_rows_in_si() -> None:
    text = rendered_rows(ROWS, COLUMNS, Format.CSV)
    assert text.splitlines()[0] == "slug,memory_bytes,note,source,more"
    read = list(csv.DictReader(io.StringIO(text)))
    assert read[0]["memory_bytes"] == "85899345920"
    assert read[1]["memory_bytes"] == ""
    assert json.loads(read[0]["more"]) == [1, 2]


def test_csv_of_nothing_has_a_heading() -> None:
    assert rendered_rows([], COLUMNS[:2], Format.CSV) == "slug,memory_bytes\n"


def test_json_and_yaml_hold_whole_rows() -> None:
    assert json.loads(rendered_rows(ROWS, COLUMNS, Format.JSON)) == ROWS
    assert yaml.safe_load(rendered_rows(ROWS, COLUMNS, Format.YAML)) == ROWS


def test_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        rendered_rows([{"x": float("nan")}], COLUMNS, Format.JSON)


DOCUMENT: Row = {"plan": {"tensor_parallel": 8, "ok": True}, "stages": [{"layers": 4}, {"layers": 5}], "empty": []}


def test_a_document_is_flattened_for_people() -> None:
    assert rendered_document(DOCUMENT, Format.TABLE) == (
        "Field                 Value\n"
        "───────────────────────────\n"
        "plan.tensor_parallel  8\n"
        "plan.ok               yes\n"
        "stages[0].layers      4\n"
        "stages[1].layers      5\n"
        "empty                 []\n"
    )


def test_a_document_is_whole_for_programs() -> None:
    assert json.loads(rendered_document(DOCUMENT, Format.JSON)) == DOCUMENT
    assert yaml.safe_load(rendered_document(DOCUMENT, Format.YAML)) == DOCUMENT
    assert rendered_document(DOCUMENT, Format.CSV).splitlines()[:2] == ["field,value", "plan.tensor_parallel,8"]


def test_a_table_fits_its_width() -> None:
    rows = [{"slug": "x" * 30, "note": "word " * 30}]
    text = rendered_rows(rows, (COLUMNS[0], COLUMNS[2]), Format.TABLE, width=60)
    assert max(len(line) for line in text.splitlines()) <= 60
    assert text.count("word") == 30


def test_a_cell_that_must_not_break_is_never_cut_off() -> None:
    rows = [{"slug": "x" * 70, "note": "a few words to wrap"}]
    text = rendered_rows(rows, (COLUMNS[0], COLUMNS[2]), Format.TABLE, width=40)
    assert "x" * 70 in text
    assert text.replace("\n", " ").count("wrap") == 1
