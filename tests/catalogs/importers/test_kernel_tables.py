"""Tables of kernel times: sound ones are read, malformed ones refused with the line and the reason."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.importers.kernel_tables import read_collective_table, read_gemm_table

# Rows of the AIConfigurator tables (Apache-2.0), see NOTICE.
GEMM = """device,dtype,m,n,k,time_s
a100-sxm-80gb,bfloat16,1,32,32,2.492e-06
a100-sxm-80gb,bfloat16,1,32,64,2.662e-06
"""
NCCL = """device,num_devices,collective,dtype,size_bytes,time_s,nccl_version
a100-sxm-80gb,2,all_gather,half,512,8.98e-06,2.27.3
"""


def written(tmp_path: Path, text: str, name: str = "table.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_a_sound_table_is_read(tmp_path: Path, name: str) -> None:
    rows = read_gemm_table(written(tmp_path, GEMM, name))
    assert rows[1] == {"device": "a100-sxm-80gb", "dtype": "bfloat16", "m": 1, "n": 32, "k": 64, "time_s": 2.662e-06}


def test_collectives_are_read(tmp_path: Path) -> None:
    assert read_collective_table(written(tmp_path, NCCL))[0]["size_bytes"] == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GEMM.replace("time_s", "time"), "unknown column 'time'; no unit: name it 'time_s'"),
        (GEMM.replace("time_s", "latency_ms"), "no column 'time_s'"),
        (GEMM.replace("1,32,32,2.492e-06", "2.492e-06,32,32,1"), "are columns swapped"),
        (GEMM.replace("a100-sxm-80gb,bfloat16,1,32,64", "1,bfloat16,80,32,64"), "line 3.*a number .1. where a text"),
        (GEMM + "a100-sxm-80gb,bfloat16,1,32\n", "line 4: 4 values under 6 headings"),
        (GEMM.replace("2.662e-06", "nan"), "line 3: time_s: 'nan' is not a finite number"),
        (GEMM.replace("1,32,64,2.662e-06", "8192,65536,65536,2.662e-06"), "more than any device"),
        ("device,dtype,m,n,k,time_s\n", "has no rows"),
        ("", "no column 'device'"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read_gemm_table(written(tmp_path, text))


def test_swapped_sizes_and_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"size_bytes.*swapped"):
        read_collective_table(written(tmp_path, NCCL.replace("512,8.98e-06", "8.98e-06,512")))


def test_a_table_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(CatalogError, match="cannot read the table"):
        read_gemm_table(path)
