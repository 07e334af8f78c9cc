"""Goldens of variants: one full golden per template, and for each variant the difference from it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from meshplan.planner.emit.artifact import Artifact

HOST_SCRIPT = re.compile(r"launch_host_(\d{3})\.sh")
_DIGEST = re.compile(r"plan digest: ([0-9a-f]{64})")
_ID = 12  # signs of a digest that name a plan


def texts(artifacts: Iterable[Artifact], *, ranks_per_host: int = 8) -> dict[str, str]:
    """Content by file name. Of the scripts of single hosts the first stands for all.

    Args:
        artifacts: what was emitted.
        ranks_per_host: of a training plan on hosts called ``node-0`` ….

    Raises:
        AssertionError: the script of another host differs from the first in more than its numbers.
    """
    found = {str(artifact.path): artifact.content for artifact in artifacts}
    first = found.get("launch_host_000.sh", "")
    for name in list(found):
        matched = HOST_SCRIPT.fullmatch(name)
        host = int(matched[1]) if matched else 0
        if host:
            low = host * ranks_per_host
            expected = first.replace('/launch.sh" 0 ', f'/launch.sh" {host} ').replace(
                f"host 0 (node-0): ranks 0 to {ranks_per_host - 1}.",
                f"host {host} (node-{host}): ranks {low} to {low + ranks_per_host - 1}.",
            )
            assert found.pop(name) == expected != first, name
    return found


def difference(variant: Mapping[str, str], full: Mapping[str, str]) -> str:
    """What turns the files of ``full`` into those of ``variant``: by file, the lines replaced and their new text.

    The plan's digest counts as equal where both have it, so that it is no difference of every file.
    """
    theirs, ours = _digest(variant), _digest(full)
    parts = []
    for name in sorted({*variant, *full}):
        if name not in variant:
            parts.append(f"=== {name}: absent\n")
            continue
        assert variant[name].endswith("\n"), name
        before = full.get(name, "").splitlines()
        after = variant[name].replace(theirs, ours).replace(theirs[:_ID], ours[:_ID]).splitlines()
        parts.append(f"=== {name}\n")
        for kind, low, high, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if kind != "equal":
                parts.append(f"@ {low + 1},{high}\n" + "".join(f"{line}\n" for line in after[first:last]))
    return "".join(parts)


def _digest(files: Mapping[str, str]) -> str:
    found = {match[1] for text in files.values() for match in _DIGEST.finditer(text)}
    assert len(found) == 1, f"one digest in all files, not {found}"
    return found.pop()
