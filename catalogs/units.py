"""Text to SI numbers and back: the only place where units are read or written; and the time as rows hold it.

A bare number is rejected: ``900`` may be bytes, gigabytes or gigabits. Decimal and binary prefixes are kept apart
(1 GB = 10^9 bytes, 1 GiB = 2^30 bytes), and so are bits and bytes (400 Gb/s = 50 GB/s).

>>> parse_quantity("80 GiB", Dimension.BYTES)
85899345920.0
>>> parse_quantity("400 Gb/s", Dimension.BYTES_PER_S)
50000000000.0
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from enum import Enum

from meshplan.catalogs.errors import UnitError, closest_names, did_you_mean

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BITS_PER_BYTE = 8.0
SECONDS_PER_HOUR, SECONDS_PER_DAY = 3600.0, 86_400.0
_WHOLE_DOLLARS_FROM = 1000


class Dimension(Enum):
    """What a quantity measures; the value is how messages name it, with the SI unit."""

    BYTES = "an amount of memory (bytes)"
    BYTES_PER_S = "a bandwidth (bytes/s)"
    S = "a time (s)"
    FLOPS_PER_S = "a compute rate (FLOP/s)"
    W = "a power (W)"
    USD = "an amount of money (USD)"
    USD_PER_HOUR = "a price (USD/h)"


def _prefixed(stem: str, scale: float, *, binary: bool = False) -> dict[str, float]:
    table = {f"{prefix}{stem}": factor * scale for prefix, factor in _DECIMAL.items()}
    if binary:
        table |= {f"{prefix}{stem}": factor * scale for prefix, factor in _BINARY.items()}
    return table


_BYTES = _prefixed("B", 1.0, binary=True) | {"bytes": 1.0}
_BITS = _prefixed("b", 1.0 / _BITS_PER_BYTE, binary=True) | _prefixed("bit", 1.0 / _BITS_PER_BYTE)
UNITS: dict[Dimension, dict[str, float]] = {
    Dimension.BYTES: _BYTES,
    Dimension.BYTES_PER_S: {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()}
    | {f"{prefix}bps": factor / _BITS_PER_BYTE for prefix, factor in _DECIMAL.items()},
    Dimension.S: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}
    | dict.fromkeys(("sec", "second", "seconds"), 1.0)
    | dict.fromkeys(("minute", "minutes"), 60.0)
    | dict.fromkeys(("hr", "hour", "hours"), 3600.0)
    | dict.fromkeys(("day", "days"), 86400.0)
    | dict.fromkeys(("week", "weeks"), 604800.0),
    Dimension.FLOPS_PER_S: _prefixed("FLOP/s", 1.0) | _prefixed("FLOPS", 1.0) | _prefixed("FLOPs/s", 1.0),
    Dimension.W: _prefixed("W", 1.0),
    Dimension.USD: {"USD": 1.0, "$": 1.0},
    Dimension.USD_PER_HOUR: {
        "USD/h": 1.0,
        "$/h": 1.0,
        "USD/hr": 1.0,
        "$/hr": 1.0,
        "USD/s": SECONDS_PER_HOUR,
    },
}
# How a quantity of each dimension is written, for messages and editors.
EXAMPLES: dict[Dimension, str] = {
    Dimension.BYTES: "80 GiB",
    Dimension.BYTES_PER_S: "50 GB/s",
    Dimension.S: "5 us",
    Dimension.FLOPS_PER_S: "989 TFLOP/s",
    Dimension.W: "700 W",
    Dimension.USD: "1000 USD",
    Dimension.USD_PER_HOUR: "2.5 USD/h",
}
# Units that a message lists: one spelling of each.
_SHOWN_UNITS: dict[Dimension, tuple[str, ...]] = {
    Dimension.BYTES: ("B", "MB", "GB", "TB", "MiB", "GiB", "TiB"),
    Dimension.BYTES_PER_S: ("MB/s", "GB/s", "TB/s", "GiB/s", "Gb/s", "Gbps"),
    Dimension.S: ("us", "ms", "s", "min", "h", "d", "weeks"),
    Dimension.FLOPS_PER_S: ("GFLOP/s", "TFLOP/s", "PFLOP/s"),
    Dimension.W: ("W", "kW", "MW"),
    Dimension.USD: ("USD", "$"),
    Dimension.USD_PER_HOUR: ("USD/h", "$/h"),
}
_DIGITS = re.compile(r"\d{1,18}")
_TOKENS = re.compile(r"\s*(?P<number>\d[\d_]{0,17}(?:\.\d{1,9})?)\s*(?P<prefix>[kKmM]?)i?\s*(?:tokens)?\s*")
_TOKEN_PREFIXES = {"": 1, "k": 2**10, "m": 2**20}
_TOTAL = re.compile(
    r"\s*(?P<number>\d{1,18}(?:\.\d{1,9})?(?:[eE]\+?\d{1,2})?)\s*(?P<prefix>[kKmMbBgGtT]?)\s*(?:tokens)?\s*"
)
_TOTAL_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_NUMBER = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*")
_QUANTITY = re.compile(r"^\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>\D.*?)?\s*$")


def parse_quantity(text: object, dimension: Dimension) -> float:
    """Read ``"<number> <unit>"`` and return the value in SI units.

    Args:
        text: such as ``"900 GB/s"``; anything but text is rejected, because its unit is unknown.
        dimension: what it must measure.

    Raises:
        UnitError: no unit, an unknown unit, a unit of another dimension, or not a finite number above or equal to 0.
    """
    match = _QUANTITY.match(text) if isinstance(text, str) else None
    units = UNITS[dimension]
    example = EXAMPLES[dimension]
    if match is None:
        given = f"{text!r} has no unit" if isinstance(text, (int, float)) else f"cannot read {text!r}"
        raise UnitError(f"{given}; {dimension.value} is written like {example!r}")
    unit = match["unit"]
    if unit is None:
        raise UnitError(f"{text!r} has no unit; {dimension.value} is written like {example!r}")
    if unit not in units:
        raise UnitError(f"{text!r}: {_explain_unit(unit, dimension)}")
    value = float(match["number"]) * units[unit]
    if not math.isfinite(value) or value < 0:
        raise UnitError(f"{text!r}: must be a finite number of at least 0")
    return value


def parse_seconds(written: object) -> float:
    """A time of a key that names its unit (``ttft_p99_s``): a number is in seconds, a text brings its own unit.

    >>> parse_seconds(0.05), parse_seconds("50 ms"), parse_seconds("0.05")
    (0.05, 0.05, 0.05)

    Raises:
        UnitError: not a number, or a unit that measures no time.
    """
    if isinstance(written, int | float) and not isinstance(written, bool):
        return float(written)
    if isinstance(written, str) and _NUMBER.fullmatch(written):
        return float(written)
    if not isinstance(written, str) or _QUANTITY.match(written) is None:
        raise UnitError(f"{written!r} is no time: write seconds such as 0.05, or a unit such as '50 ms'")
    return parse_quantity(written, Dimension.S)


def _explain_unit(unit: str, dimension: Dimension) -> str:
    """Why ``unit`` does not measure ``dimension``, and what was probably meant."""
    if unit.startswith(","):
        return "a number has a point before its decimals and nothing between its thousands, such as 1250.5"
    if dimension is Dimension.BYTES and unit in _BITS:
        return f"{unit!r} counts bits; memory is in bytes: write {unit.replace('b', 'B', 1)!r}"
    for other, table in UNITS.items():
        if unit in table:
            return f"{unit!r} is {other.value}, here {dimension.value} is wanted"
    hint = did_you_mean(closest_names(unit, UNITS[dimension]))
    return f"unknown unit {unit!r} for {dimension.value}{hint}; units: {', '.join(_SHOWN_UNITS[dimension])}"


def parse_count(written: object, *, least: int = 1, most: int | None) -> int:
    """A whole number, as a number or as its digits in text.

    >>> parse_count("1_024", most=10_000), parse_count(8, most=8)
    (1024, 8)

    Raises:
        UnitError: not a whole number, or outside ``least`` … ``most``.
    """
    digits = written.strip().replace("_", "") if isinstance(written, str) else ""
    value = int(digits) if _DIGITS.fullmatch(digits) else written
    return _within(value, written, least, most, "a whole number such as 8")


def parse_tokens(written: object, *, least: int = 1, most: int | None) -> int:
    """Tokens of a length or a batch; ``k`` and ``M`` count as in the names of context lengths, 1,024 and 1,024².

    >>> parse_tokens("8k", most=2**30), parse_tokens("4M", most=2**30), parse_tokens(4096, most=2**30)
    (8192, 4194304, 4096)

    Raises:
        UnitError: not a number of tokens, or outside ``least`` … ``most``.
    """
    match = _TOKENS.fullmatch(written) if isinstance(written, str) else None
    value: object = written
    if match is not None:
        exact = float(match["number"].replace("_", "")) * _TOKEN_PREFIXES[match["prefix"].lower()]
        if "." in match["number"] and not match["prefix"]:  # 4.000 is four thousand where commas part decimals
            raise UnitError(f"{written!r}: write thousands without a point, as in 4000 or 4k")
        value = int(exact) if exact.is_integer() else written
    return _within(value, written, least, most, "a whole number of tokens such as 8192 or 8k (= 8192)")


def parse_total_tokens(written: object) -> float:
    """Tokens of a whole run, decimal as they are published: ``15T`` is 15·10¹².

    >>> parse_total_tokens("15T"), parse_total_tokens("300 B"), parse_total_tokens(1e12)
    (15000000000000.0, 300000000000.0, 1000000000000.0)

    Raises:
        UnitError: not a number.
    """
    match = _TOTAL.fullmatch(written) if isinstance(written, str) else None
    if isinstance(written, int | float) and not isinstance(written, bool):
        number, factor = written, 1.0
    elif match is not None:
        number, factor = float(match["number"]), _TOTAL_PREFIXES[match["prefix"].upper()]
    else:
        raise UnitError(f"{written!r} is not a number of tokens such as 15e12, 15T or 300B")
    try:
        tokens = float(number) * factor
    except OverflowError:  # a whole number beyond all floats
        tokens = math.inf
    if not math.isfinite(tokens):
        raise UnitError(f"{str(written)[:40]}: must be a finite number of tokens")
    return tokens


def _within(value: object, written: object, least: int, most: int | None, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnitError(f"{written!r} is not {what}")
    if value < least:
        raise UnitError(f"{written!r}: must be at least {least:,}")
    if most is not None and value > most:
        raise UnitError(f"{written!r}: must be at most {most:,}")
    return value


def format_bytes(value: float) -> str:
    """Binary prefix, as the frameworks and drivers report device memory.

    >>> format_bytes(85899345920)
    '80.0 GiB'
    """
    for prefix, factor in reversed(_BINARY.items()):
        if abs(value) >= factor:
            return f"{value / factor:.1f} {prefix}B"
    return f"{value:.0f} B"


def format_bandwidth(value: float) -> str:
    """Decimal prefix, as links are sold.

    >>> format_bandwidth(50e9)
    '50.0 GB/s'
    """
    return f"{_decimal(value)}B/s"


def format_flops(value: float) -> str:
    """Compute rate with a decimal prefix.

    >>> format_flops(989e12)
    '989.0 TFLOP/s'
    """
    return f"{_decimal(value)}FLOP/s"


def _decimal(value: float) -> str:
    for prefix, factor in sorted(_DECIMAL.items(), key=lambda item: -item[1]):
        if prefix != "K" and abs(value) >= factor:
            return f"{value / factor:.1f} {prefix}"
    return f"{value:.1f} "


# Unit, its seconds, from how many of it on it is chosen, digits.
_DURATIONS = (("d", 86400.0, 2, 1), ("h", 3600.0, 2, 1), ("min", 60.0, 10, 1), ("s", 1.0, 1, 2), ("ms", 1e-3, 1, 1))

# From here on no digits after the point: of days, as every other unit is below it.
_WHOLE_FROM = 1000.0


def format_duration(value: float) -> str:
    """The unit a person would choose.

    >>> format_duration(0.0123), format_duration(4.2), format_duration(2 * 86400)
    ('12.3 ms', '4.20 s', '2.0 d')
    >>> format_duration(130.0), format_duration(1220.7), format_duration(2307.93 * 86400)
    ('130.00 s', '20.3 min', '2,308 d')
    """
    if not math.isfinite(value):
        return "∞" if value > 0 else str(value)
    for unit, factor, least, digits in _DURATIONS:
        if abs(value) >= least * factor:
            shown = value / factor
            return f"{shown:,.0f} {unit}" if abs(shown) >= _WHOLE_FROM else f"{shown:.{digits}f} {unit}"
    return f"{value / 1e-6:.1f} us"


def format_usd(value: float) -> str:
    """Money: cents below a thousand dollars, whole dollars above.

    >>> format_usd(1234567.8), format_usd(2.5)
    ('$1,234,568', '$2.50')
    """
    return f"${value:,.0f}" if abs(value) >= _WHOLE_DOLLARS_FROM else f"${value:,.2f}"


def now() -> str:
    """This moment, ISO 8601 UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
