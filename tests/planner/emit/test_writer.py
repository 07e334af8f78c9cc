"""Writing is all or nothing, stays in its folder and never replaces what was not offered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from meshplan.catalogs.errors import EmitError
from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.emit.writer import write_artifacts

FILES = (
    Artifact(path=PurePosixPath("a.txt"), content="one\n"),
    Artifact(path=PurePosixPath("sub/run.sh"), content="#!/bin/sh\n", executable=True),
)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_writes_every_file_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    paths = write_artifacts(FILES, out)
    assert [path.read_text() for path in paths] == ["one\n", "#!/bin/sh\n"]
    assert names(out) == {"a.txt", "sub", "sub/run.sh", "SHA256SUMS"}
    assert os.access(out / "sub/run.sh", os.X_OK)
    assert not os.access(out / "a.txt", os.X_OK)


def test_existing_file_needs_force(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(EmitError, match=r"already holds a\.txt.*--force"):
        write_artifacts(FILES, tmp_path)
    assert names(tmp_path) == {"a.txt"}
    write_artifacts(FILES, tmp_path, force=True)
    assert (tmp_path / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize("path", ["../out.txt", "/tmp/out.txt", "sub/../../out.txt", "a/../b.txt"])
def test_path_outside_is_refused(tmp_path: Path, path: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(EmitError, match="leads out of"):
        write_artifacts([Artifact(path=PurePosixPath(path), content="")], out)
    assert not out.exists()


def test_symbolic_link_to_a_folder_outside_is_refused(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (out / "sub").symlink_to(outside)
    with pytest.raises(EmitError, match="symbolic link"):
        write_artifacts(FILES, out, force=True)
    assert names(outside) == set()
    assert not (out / "a.txt").exists()


def test_symbolic_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    outside.write_text("precious")
    (out / "a.txt").symlink_to(outside)
    with pytest.raises(EmitError, match="symbolic link"):
        write_artifacts(FILES, out, force=True)
    assert outside.read_text() == "precious"


def test_out_that_is_itself_a_link_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "out").symlink_to(real)
    write_artifacts(FILES, tmp_path / "out")
    assert (real / "a.txt").is_file()


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(EmitError, match="not a folder"):
        write_artifacts(FILES, tmp_path / "out")
    with pytest.raises(EmitError, match="cannot write"):
        write_artifacts(FILES, tmp_path / "out" / "below")


def test_two_artifacts_of_one_path(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match="two files"):
        write_artifacts([FILES[0], FILES[0]], tmp_path)


def test_failure_on_the_way_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.txt").write_text("before")
    replace = Path.replace

    def full_disk(self: Path, target: Path) -> Path:
        if target.name == "run.sh":
            raise OSError(28, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(EmitError, match=r"cannot write .*run\.sh: No space left"):
        write_artifacts(FILES, out, force=True)
    assert (out / "a.txt").read_text() == "before"
    assert names(out) == {"a.txt"}


def test_failure_in_a_new_folder_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, mode: int) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "chmod", denied)
    with pytest.raises(EmitError, match="Permission denied"):
        write_artifacts(FILES, tmp_path / "out")
    assert names(tmp_path) == set()


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_manifest_is_what_sha256sum_checks(tmp_path: Path) -> None:
    write_artifacts(FILES, tmp_path / "out")
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path / "out", check=False).returncode == 0
    (tmp_path / "out" / "a.txt").write_text("changed")
    assert subprocess.run(check, cwd=tmp_path / "out", capture_output=True, check=False).returncode != 0


def test_force_replaces_a_folder_of_ours_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifacts(FILES, out)
    write_artifacts(FILES[:1], out, force=True)
    assert names(out) == {"a.txt", "SHA256SUMS"}
    assert names(tmp_path) == {"out", "out/a.txt", "out/SHA256SUMS"}


def test_force_keeps_the_files_of_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifacts(FILES, out)
    (out / "logs").mkdir()
    (out / "logs" / "mine.log").write_text("mine")
    write_artifacts(FILES, out, force=True)
    assert (out / "logs" / "mine.log").read_text() == "mine"


KILLED = """
import os, signal, sys, threading
from pathlib import Path, PurePosixPath
from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.emit.writer import write_artifacts
mark = sys.argv[2]
files = [Artifact(path=PurePosixPath(f"d{n % 3}/f{n}"), content=mark * 1000) for n in range(40)]
count = int(sys.argv[3])
def tracer(frame, event, argument):
    global count
    count -= 1
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return tracer
sys.settrace(tracer)
write_artifacts(files, Path(sys.argv[1]), force=True)
"""


def test_a_killed_process_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    """Killed at lines spread over the whole write; tests/benchmarks/kills.py does it a thousand times."""
    out = tmp_path / "out"
    seen = set()
    for number, line in enumerate((40, 400, 900, 2000, 4000, 9000, 10**9)):
        before = digests(out) if out.exists() else {}
        mark = "abcdefg"[number]
        subprocess.run([sys.executable, "-c", KILLED, str(out), mark, str(line)], check=False)
        after = digests(out) if out.exists() else {}
        complete = len(after) == 41 and all(text == mark * 1000 for name, text in after.items() if name[0] == "d")
        assert after == before or complete
        seen.add(complete)
    assert seen == {True, False}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
