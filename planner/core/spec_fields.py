"""The field types that specs are made of: quantities with their units as text, counts, money."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from meshplan.catalogs.errors import UnitError
from meshplan.catalogs.units import EXAMPLES, UNITS, Dimension, format_bandwidth, format_duration, parse_quantity

MAX_DEVICES = 1_000_000
# No link, price or run is beyond these limits; they keep sums and products finite.
LINK_BYTES_PER_S = (1e3, 1e15)
MAX_LATENCY_S = 60.0
MAX_USD = 1e12


def _quantity(dimension: Dimension) -> Any:
    def read(value: object) -> float:
        try:
            return parse_quantity(value, dimension)
        except UnitError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(read)


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


Bytes = Annotated[float, _quantity(Dimension.BYTES), AfterValidator(_positive), _quantity_schema(Dimension.BYTES)]
BytesPerS = Annotated[
    float, _quantity(Dimension.BYTES_PER_S), AfterValidator(_bandwidth), _quantity_schema(Dimension.BYTES_PER_S)
]
Latency = Annotated[float, _quantity(Dimension.S), AfterValidator(_latency), _quantity_schema(Dimension.S)]
Seconds = Annotated[float, _quantity(Dimension.S), AfterValidator(_positive), _quantity_schema(Dimension.S)]
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES)]
CountOrNone = Annotated[int, Field(strict=True, ge=0, le=MAX_DEVICES)]
Dollars = Annotated[float, Field(gt=0, le=MAX_USD, allow_inf_nan=False)]


class SpecModel(BaseModel):
    """A section of a spec: no unknown keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
