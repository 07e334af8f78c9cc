"""The list of packages in pyproject.toml against the tree, and the wheel against the list."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("catalogs", "cli", "planner", "profiler")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"


def source_files() -> set[str]:
    """Everything below the four folders that is not made by running or checking it."""
    found = {path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {str(path) for path in found if "__pycache__" not in path.parts and path.suffix != ".sqlite"}


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {str(Path(file).parent) for file in source_files() if file.endswith(".py")}
    assert PROJECT["tool"]["setuptools"]["packages"] == sorted(f"meshplan.{f.replace('/', '.')}" for f in folders)


def test_every_package_says_what_it_is() -> None:
    folders = {Path(file).parent for file in source_files() if file.endswith(".py")}
    silent = [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").read_text().startswith('"""')]
    assert silent == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names inside a wheel built from a copy of the tree, so that nothing is left beside the sources."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, copy / name, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(copy / built.stdout.split()[-1]) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_file_that_the_code_reads(wheel: set[str]) -> None:
    shipped = {name.removeprefix("meshplan/") for name in wheel if name.startswith("meshplan/")}
    # Pictures of the READMEs stay out, those of the pages do not.
    pictures = {name for name in source_files() if name.endswith(".svg") and "/static/" not in name}
    assert shipped == source_files() - pictures
