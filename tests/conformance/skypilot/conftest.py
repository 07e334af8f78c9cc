"""SkyPilot's own reader of task files, offline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The text of a task → SkyPilot's ``Task``.
ReadTask = Callable[[str], Any]


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # SkyPilot writes into the home folder when it is imported.
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
        import sky as module

        yield module


@pytest.fixture
def read_task(sky: Any, tmp_path: Path) -> ReadTask:
    def read(text: str) -> Any:
        path = tmp_path / "task.yaml"
        path.write_text(text, encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sky.Task.from_yaml(str(path))

    return read
