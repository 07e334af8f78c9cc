r"""Signs that steer a terminal instead of being shown: found, and written as ``\u001b``.

These are the control characters of ASCII and of Latin-1 (ECMA-48), line and paragraph separators, and the marks that
turn the direction of writing (Unicode UAX #9; CVE-2021-42574). A tab and the end of a line are text.
"""

from __future__ import annotations

import re

_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
_CONTROL = re.compile(f"[{_STEERING}]")
# A lone half of a surrogate pair cannot be encoded at all.
_NOT_SHOWN = re.compile(f"[{_STEERING}\ud800-\udfff]")
_HEX_DIGITS = 4


def control_character(text: str) -> str | None:
    r"""The first control character of ``text`` as it is shown; None where there is none.

    A carriage return before a line end counts as a line end.

    >>> control_character("a\r\nb\tc"), control_character("a\x1b[2J")
    (None, '\\u001b')
    """
    found = _CONTROL.search(text.replace("\r\n", "\n"))
    return None if found is None else _escape(found)


def shown(text: str) -> str:
    r"""``text`` with every sign that would steer a terminal written out; JSON reads it back as the same text.

    >>> shown("a\x1b[2J\n")
    'a\\u001b[2J\n'
    """
    return _NOT_SHOWN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):0{_HEX_DIGITS}x}"
