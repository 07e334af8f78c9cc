"""Compressed files whose headers lie, or which grow to gigabytes: refused before the memory is gone."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.untrusted import streams
from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.catalogs.untrusted.streams import array_names, csv_rows, long_lines, read_arrays


def npy(shape: str, content: bytes = b"", descr: str = "'<f8'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members.items():
            opened.writestr(f"{name}.npy", content)
    return path


def test_arrays_come_back(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", load=np.arange(6.0).reshape(2, 3), other=np.zeros(3))
    assert array_names(tmp_path / "a.npz") == ("load", "other")
    assert read_arrays(tmp_path / "a.npz", {"load"})["load"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("shape", ["(10**12,)", "(1000000000000,)", "(4, 4)", "(-1, -8)", "(2.5,)", "'x'", "(1,"])
def test_a_header_is_not_believed(shape: str, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"is not an \.npz of plain numbers"):
        read_arrays(archive(tmp_path / "a.npz", load=npy(shape, b"12345678")))


def test_an_archive_may_not_grow_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_ARRAYS_BYTES", 10_000)
    content = npy("(1000,)", bytes(8000))
    assert len(read_arrays(archive(tmp_path / "one.npz", a=content))) == 1
    with pytest.raises(DocumentError, match="more than 10000 bytes"):
        read_arrays(archive(tmp_path / "two.npz", a=content, b=content))


def test_objects_and_broken_archives_are_refused(tmp_path: Path) -> None:
    whole = archive(tmp_path / "a.npz", load=npy("(1,)", b"12345678")).read_bytes()
    for place in range(0, len(whole), 7):
        (tmp_path / "b.npz").write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        try:
            read_arrays(tmp_path / "b.npz")
        except DocumentError:
            continue
    with pytest.raises(DocumentError):
        read_arrays(archive(tmp_path / "c.npz", load=npy("(1,)", b"12345678", "'|O'")))


def test_lines_of_plain_and_compressed_files_are_the_same(tmp_path: Path) -> None:
    text = "\ufeffa,b\r\n1,2\n"
    (tmp_path / "plain.csv").write_bytes(text.encode())
    (tmp_path / "packed.csv").write_bytes(gzip.compress(text.encode()))
    for name in ("plain.csv", "packed.csv"):
        assert list(csv_rows(tmp_path / name)) == [["a", "b"], ["1", "2"]]


def test_a_bomb_of_a_kilobyte_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_ROWS", 1000)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as stream:
        stream.write(b"x" * 5_000_000)
    (tmp_path / "a.gz").write_bytes(packed.getvalue())
    with pytest.raises(DocumentError, match="more than 1000000 bytes"):
        list(long_lines(tmp_path / "a.gz", 1_000_000))
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"1\n" * 2000))
    with pytest.raises(DocumentError, match="more than 1000 lines"):
        list(long_lines(tmp_path / "b.gz"))
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"1\n" * 2000)[:-9])
    with pytest.raises(DocumentError, match="cut short"):
        list(long_lines(tmp_path / "c.gz"))
    (tmp_path / "d.csv").write_bytes(b"a\n" + b"x" * 200_000)
    with pytest.raises(DocumentError, match="no CSV"):
        list(csv_rows(tmp_path / "d.csv"))
