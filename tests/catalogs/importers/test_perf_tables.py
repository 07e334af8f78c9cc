"""Parquet tables of kernel times: sound ones are read, malformed ones refused with the row and the reason."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.importers.perf_tables import all_versions, data_folder, read_perf_table

TEXTS, COUNTS = ("kernel_source",), ("num_gpus", "message_size")
SOUND: dict[str, list[Any]] = {
    "kernel_source": ["TRTLLM", "TRTLLM"],
    "num_gpus": [2, 2],
    "message_size": [128, 256],
    "latency": [0.0026, 0.0027],
    "another": ["x", "y"],
}


def written(tmp_path: Path, **changes: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    content = {name: values for name, values in (SOUND | changes).items() if values is not None}
    path = tmp_path / "table.parquet"
    parquet.write_table(arrow.table(content), path)
    return path


def test_a_sound_table_is_read_in_seconds(tmp_path: Path) -> None:
    columns = read_perf_table(written(tmp_path), texts=TEXTS, counts=COUNTS)
    assert columns["message_size"].tolist() == [128, 256]
    assert columns["time_s"].tolist() == pytest.approx([2.6e-6, 2.7e-6])


def test_an_older_table_is_text(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    rows = zip(*SOUND.values(), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in (SOUND, *rows)) + "\n")
    columns = read_perf_table(path, texts=TEXTS, counts=COUNTS)
    assert columns["message_size"].tolist() == [128, 256]
    assert columns["time_s"].tolist() == pytest.approx([2.6e-6, 2.7e-6])
    for content, message in (("", "no column"), ("kernel_source,num_gpus,message_size,latency\nA,2,x,1\n", "texts")):
        path.write_text(content)
        with pytest.raises(CatalogError, match=message):
            read_perf_table(path, texts=TEXTS, counts=COUNTS)


def test_a_column_of_newer_tables_may_be_missing(tmp_path: Path) -> None:
    columns = read_perf_table(written(tmp_path), texts=TEXTS, counts=(*COUNTS, "window"), optional=("window",))
    assert columns["window"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": None}, "no column 'num_gpus'"),
        ({"latency": None}, "no column 'latency'"),
        ({"latency": [0.0026, None]}, "row 1: latency: nan"),
        ({"latency": [0.0026, -1.0]}, "row 1: latency: -1"),
        ({"latency": [2.6e-9, 2.6e-9]}, "another unit"),
        ({"latency": ["fast", "slow"]}, "texts where numbers belong"),
        ({"message_size": [128, 1.5]}, "1.5 is not a whole number"),
        ({"message_size": [128, -4]}, "row 1: message_size: -4"),
        ({"kernel_source": ["TRTLLM", None]}, "row 1: kernel_source"),
        ({name: [] for name in SOUND}, "no rows"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        read_perf_table(written(tmp_path, **changes), texts=TEXTS, counts=COUNTS)
    assert "nothing was imported" in str(caught.value)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "table.parquet"
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CatalogError, match="cannot read the table"):
        read_perf_table(path, texts=TEXTS, counts=COUNTS)


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CatalogError, match=r"meshplan\[aiconfigurator\]"):
        read_perf_table(tmp_path / "table.parquet", texts=TEXTS, counts=COUNTS)


def test_versions_come_newest_first(tmp_path: Path) -> None:
    for version in ("1.3.0rc20", "1.3.0rc9", "1.2.0", "1.3.0", "0.14.0"):
        path = tmp_path / "h100_sxm" / "moe" / "trtllm" / version / "moe_perf.parquet"
        path.parent.mkdir(parents=True)
        path.touch()
    found = all_versions(tmp_path, "h100_sxm", "moe", "trtllm", "moe_perf")
    assert [path.parent.name for path in found] == ["1.3.0", "1.3.0rc20", "1.3.0rc9", "1.2.0", "0.14.0"]
    assert data_folder(tmp_path) == tmp_path


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="holds no kernel tables"):
        data_folder(tmp_path)
