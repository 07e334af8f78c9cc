"""Text of the files that a plan becomes: names, sizes and sentences that are safe in any of them."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

README_FILE = PurePosixPath("README.md")


_NOT_PLAIN = re.compile(r"[^\w .,:()+/-]")


def plain(text: str) -> str:
    """``text`` on one line, without signs that Markdown or a shell would take for more."""
    return _NOT_PLAIN.sub("", " ".join(text.split())) or "unnamed"
