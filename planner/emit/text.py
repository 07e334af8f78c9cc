"""Text of the files that a plan becomes: names, sizes and sentences that are safe in any of them."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

README_FILE = PurePosixPath("README.md")
# Digest of every emitted file, in the format of sha256sum.
MANIFEST = PurePosixPath("SHA256SUMS")
# Bash that stops where a file of the folder $here differs from the manifest; it may use ``fail``.
MANIFEST_CHECK = rf"""if [[ -f $here/{MANIFEST} && ${{MESHPLAN_SKIP_CHECKS:-0}} != 1 ]]; then
  changed=$(cd -- "$here" && sha256sum --check --quiet {MANIFEST} 2>&1) || fail \
    "files differ from what meshplan wrote: $changed; emit them again, or set MESHPLAN_SKIP_CHECKS=1"
fi
"""


_PUBLISHED = re.compile(r"huggingface\.co/([\w.-]+/[\w.-]+)")
_NOT_PLAIN = re.compile(r"[^\w .,:()+/-]")


def published_name(source: str) -> str:
    """Hugging Face name of a model out of the address where it was found; empty where there is none."""
    found = _PUBLISHED.search(source)
    return found.group(1) if found else ""


def plain(text: str) -> str:
    """``text`` on one line, without signs that Markdown or a shell would take for more."""
    return _NOT_PLAIN.sub("", " ".join(text.split())) or "unnamed"
