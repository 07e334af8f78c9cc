"""Numbers with a comma: 2,5 s and 4,000 are how many people write decimals and thousands; here both have none."""

from __future__ import annotations

import re

_COMMA = re.compile(r"\s*(?P<whole>\d+),(?P<rest>\d+)(?P<unit>\s*[^\d,]*)")
_THOUSAND = 3  # digits after a comma that parts thousands


def without_comma(written: object) -> str:
    """How a number with a comma is written, to be put behind what was wrong with it; empty for anything else.

    >>> without_comma("2,5 s"), without_comma("4,000"), without_comma("2.5")
    ('; a decimal has a point: 2.5 s', '; thousands have no comma: 4000', '')
    """
    match = _COMMA.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        return ""
    whole, rest, unit = match["whole"], match["rest"], match["unit"]
    if len(rest) == _THOUSAND:
        return f"; thousands have no comma: {whole}{rest}{unit}"
    return f"; a decimal has a point: {whole}.{rest}{unit}"
