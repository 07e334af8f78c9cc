"""Small pieces of text that messages share."""

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


def rounded_up(value: float) -> float:
    """Three significant digits, never below ``value``: what a message says is enough must be enough.

    >>> rounded_up(1.2341), rounded_up(1.23)
    (1.24, 1.23)
    """
    digits = float(f"{value:.2e}")
    return digits if digits >= value else float(f"{value * 1.005:.2e}")  # more than rounding takes back
