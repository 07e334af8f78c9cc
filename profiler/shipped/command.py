"""What the fits of shipped files share: the command line ``python -m MODULE SOURCE … FOLDER``, a citation."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

AICONFIGURATOR = (
    "Fitted to kernel times published with AIConfigurator, aiconfigurator-core 0.12.0 "
    "(https://github.com/ai-dynamo/aiconfigurator, Apache-2.0)"
)


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
