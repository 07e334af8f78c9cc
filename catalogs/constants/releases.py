"""Release numbers of software as they can be compared."""

from __future__ import annotations

import re


def release_numbers(text: str) -> tuple[int, ...]:
    """``26.04.01`` as numbers; a text without numbers is newer than any release.

    >>> release_numbers("0.8.1.post2") < release_numbers("0.12")
    True
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", text))
    return numbers or (10**9,)
