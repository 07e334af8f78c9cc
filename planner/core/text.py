"""Small pieces of English that messages share."""

from __future__ import annotations


def counted(count: float, noun: str, plural: str = "") -> str:
    """A number with its noun, in the singular where there is one of it.

    Args:
        count: how many.
        noun: singular.
        plural: only where it is not ``noun`` with an s.

    >>> counted(1, "file"), counted(0, "file"), counted(1024, "request"), counted(2, "policy", "policies")
    ('1 file', '0 files', '1,024 requests', '2 policies')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
