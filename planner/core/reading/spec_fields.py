"""The field types that specs are made of: quantities with their units as text, counts, money."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import core_schema

from meshplan.catalogs.errors import UnitError
from meshplan.catalogs.units import (
    EXAMPLES,
    UNITS,
    Dimension,
    format_bandwidth,
    format_duration,
    parse_count,
    parse_quantity,
    parse_seconds,
    parse_tokens,
    parse_total_tokens,
)

MAX_DEVICES = 1_000_000
# No link, price or run is beyond these limits; they keep sums and products finite.
LINK_BYTES_PER_S = (1e3, 1e15)
MAX_LATENCY_S = 60.0
MAX_USD = 1e12
MAX_TOTAL_TOKENS = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A text with a number and a unit, read as SI.

    Args:
        dimension: what it measures.
    """

    dimension: Dimension

    def read(self, value: object) -> float:
        """The SI value.

        Raises:
            ValueError: no unit, or one of another dimension.
        """
        try:
            return parse_quantity(value, self.dimension)
        except UnitError as error:
            raise ValueError(str(error)) from error

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_before_validator_function(self.read, handler(source))


def _quantity_schema(dimension: Dimension) -> WithJsonSchema:
    """Editors see the text form: a number and one of the dimension's units."""
    units = "|".join(re.escape(unit) for unit in sorted(UNITS[dimension]))
    pattern = rf"^\s*\+?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*({units})\s*$"
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [EXAMPLES[dimension]]})


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError("must be above 0")
    return value


def _bandwidth(value: float) -> float:
    low, high = LINK_BYTES_PER_S
    if not low <= value <= high:
        raise ValueError(f"must be within {format_bandwidth(low)} and {format_bandwidth(high)}")
    return value


def _latency(value: float) -> float:
    if value > MAX_LATENCY_S:
        raise ValueError(f"must be at most {format_duration(MAX_LATENCY_S)}")
    return value


_BYTES, _BYTES_PER_S, _TIME = (Quantity(dimension=one) for one in (Dimension.BYTES, Dimension.BYTES_PER_S, Dimension.S))
BytesOrZero = Annotated[float, _BYTES, _quantity_schema(Dimension.BYTES)]
Bytes = Annotated[float, _BYTES, AfterValidator(_positive), _quantity_schema(Dimension.BYTES)]
BytesPerS = Annotated[float, _BYTES_PER_S, AfterValidator(_bandwidth), _quantity_schema(Dimension.BYTES_PER_S)]
Latency = Annotated[float, _TIME, AfterValidator(_latency), _quantity_schema(Dimension.S)]
Seconds = Annotated[float, _TIME, AfterValidator(_positive), _quantity_schema(Dimension.S)]


# Instead of a number: chosen by the planner.
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number, also as text: ``"8"``; of tokens also ``8k`` and ``4M``.

    Args:
        least: smallest value allowed.
        most: largest value allowed; None for any.
        tokens: a length or a batch, which may be written with a prefix.
    """

    least: int = 1
    most: int | None = MAX_DEVICES
    tokens: bool = False

    def read(self, value: object) -> int:
        """The number that ``value`` says.

        Raises:
            ValueError: it says none, or one out of range.
        """
        try:
            return (parse_tokens if self.tokens else parse_count)(value, least=self.least, most=self.most)
        except UnitError as error:
            raise ValueError(str(error)) from error

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        number: dict[str, Any] = {"type": "integer", "minimum": self.least}
        if self.most is not None:
            number["maximum"] = self.most
        digits = r"^\s*\d[\d_.]*\s*[kKmM]?i?\s*(tokens)?\s*$" if self.tokens else r"^\s*\d[\d_]*\s*$"
        return {"anyOf": [number, {"type": "string", "pattern": digits}]}


class TimeInSeconds:
    """A number of seconds, for keys that end in ``_s``, or a text with a unit of time: ``0.05``, ``"50 ms"``."""

    def read(self, value: object) -> float:
        """The seconds that ``value`` says.

        Raises:
            ValueError: it says none.
        """
        try:
            return parse_seconds(value)
        except UnitError as error:
            raise ValueError(str(error)) from error

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        units = "|".join(re.escape(unit) for unit in sorted(UNITS[Dimension.S]))
        pattern = rf"^\s*\+?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*({units})?\s*$"
        number = {key: value for key, value in handler(schema).items() if key != "title"}
        return {"anyOf": [number, {"type": "string", "pattern": pattern, "examples": ["50 ms"]}]}


def _total_tokens(value: object) -> float:
    try:
        return parse_total_tokens(value)
    except UnitError as error:
        raise ValueError(str(error)) from error


Count = Annotated[int, Whole()]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOrAuto(Whole):
    """As :class:`Whole`, or the word ``auto``."""

    def read(self, value: object) -> Any:
        """The number, or ``auto``.

        Raises:
            ValueError: it says neither.
        """
        return value if value == AUTO else Whole.read(self, value)


CountOrNone = Annotated[int, Whole(least=0)]
TOTAL_TOKENS = BeforeValidator(_total_tokens)
TotalTokens = Annotated[
    float,
    TOTAL_TOKENS,
    Field(ge=1, le=MAX_TOTAL_TOKENS, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 1, "maximum": MAX_TOTAL_TOKENS},
                {
                    "type": "string",
                    "pattern": r"^\s*\d[\d.]*([eE]\+?\d+)?\s*[kKmMbBgGtT]?\s*(tokens)?\s*$",
                    "examples": ["15T"],
                },
            ]
        }
    ),
]
Dollars = Annotated[float, Field(gt=0, le=MAX_USD, allow_inf_nan=False)]


class SpecModel(BaseModel):
    """A section of a spec: no unknown keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
