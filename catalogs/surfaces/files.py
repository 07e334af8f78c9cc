"""Files of surfaces: those that ship, and those that the user fitted to kernel tables of their own.

A file lists rows, and several rows may make one surface. A user's file holds the surfaces of one device,
``NAME.SLUG.json`` beside the default database (or in the folder that ``MESHPLAN_SURFACES`` names). Its surfaces replace
shipped ones with the same key (device, phase and framework of attention, for example).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.seed import SEED_FOLDER

ENVIRONMENT_VARIABLE = "MESHPLAN_SURFACES"
# Serving engines whose kernels were measured. Where a caller names none, attention is that of the first of these that
# was measured on the device, experts are those of the fastest.
FRAMEWORKS = ("trtllm", "vllm", "sglang")

Row = Mapping[str, Any]
Rows = Sequence[Row]
Key = tuple[str, ...]
Surface = TypeVar("Surface")


class SurfaceFile:
    """One kind of surfaces; files are read, and surfaces built, when they are first asked for.

    Args:
        name: the shipped file's.
        key: fields of a row that identify its surface; the framework is the third where there is one.
        listed: name of the list of rows; the file's other fields belong to each row.
        frameworks: in the order in which they are tried where the caller names none.
    """

    def __init__(
        self, name: str, *, key: Sequence[str], listed: str = "tables", frameworks: Sequence[str] = FRAMEWORKS
    ) -> None:
        self.shipped = SEED_FOLDER / name
        self._key, self._listed, self._frameworks = key, listed, frameworks
        self._built: dict[tuple[Any, Key], Any] = {}

    def find(self, build: Callable[[Rows], Surface], *key: str) -> Surface | None:
        """The surface that ``build`` makes of the rows with a key; None where there are none."""
        if key not in self.rows:
            return None
        if (build, key) not in self._built:
            self._built[build, key] = build(self.rows[key])
        found: Surface = self._built[build, key]
        return found

    def measured(
        self, build: Callable[[Rows], Surface], device: str, subject: str, framework: str, *rest: str
    ) -> Iterator[Surface]:
        """The surface of one framework; with ``any``, those of all that were measured, in order."""
        for name in self._frameworks if framework == "any" else (framework,):
            surface = self.find(build, device, subject, name, *rest)
            if surface is not None:
                yield surface

    def write_for(self, device: str, rows: Sequence[Row], **shared: Any) -> None:
        """Write the user's file of a device; the next surface that is asked for is read anew."""
        path = user_folder() / f"{self.shipped.stem}.{device}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text(rows, **shared), encoding="utf-8")
        self.forget()

    def text(self, rows: Iterable[Row], **shared: Any) -> str:
        """A file with one row per line, after the fields that belong to all."""
        return listing(self._listed, rows, **shared)

    def forget(self) -> None:
        """Read the files anew when the next surface is asked for."""
        self.__dict__.pop("rows", None)
        self._built.clear()

    @cached_property
    def rows(self) -> Mapping[Key, Rows]:
        """Key → rows of its surface, each with the fields that the file gives all its rows."""
        rows: dict[Key, Rows] = {}
        for document in _documents(self.shipped):
            shared = {name: value for name, value in document.items() if name != self._listed}
            found: dict[Key, list[Row]] = {}
            for row in document[self._listed]:
                found.setdefault(tuple(row[name] for name in self._key), []).append(shared | row)
            rows |= found
        return rows


def listing(name: str, rows: Iterable[Row], **shared: Any) -> str:
    """JSON with the ``shared`` fields and a list called ``name``, one row per line."""
    head = "".join(f"{json.dumps(field)}: {json.dumps(value)},\n" for field, value in shared.items())
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{{{head}"{name}": [\n{lines}\n]}}\n'


def user_folder() -> Path:
    """Folder of the user's surfaces; it need not exist."""
    configured = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if configured:
        return Path(configured).expanduser()
    return Path(platformdirs.user_data_dir("meshplan", appauthor=False)) / "surfaces"


def _documents(shipped: Path) -> Iterator[dict[str, Any]]:
    """The shipped file, then the user's.

    Raises:
        CatalogError: a file of the user is not JSON.
    """
    yield json.loads(shipped.read_text(encoding="utf-8"))
    for path in sorted(user_folder().glob(f"{shipped.stem}.*.json")):
        try:
            yield json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CatalogError(f"cannot read the surfaces {path}: {error}; remove it or fit it again") from error
