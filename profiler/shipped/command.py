"""The command line that the fits of shipped files share: ``python -m MODULE SOURCE … FOLDER``."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path


def write_files(make: Callable[..., Mapping[str, str]]) -> None:
    """Write what ``make`` returns (name of a file → text) to the folder that is named last.

    Args:
        make: its parameters are paths of what is fitted, in the order of the command line.
    """
    parser = argparse.ArgumentParser(description=inspect.getdoc(make))
    for name in inspect.signature(make).parameters:
        parser.add_argument(name, type=Path)
    parser.add_argument("folder", type=Path, help="for the files, such as catalogs/seed")
    arguments = vars(parser.parse_args())
    folder = arguments.pop("folder")
    for name, text in make(**arguments).items():
        (folder / name).write_text(text, encoding="utf-8")
