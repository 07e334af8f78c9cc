"""The question "how many GPUs of which type to rent, and which request goes where?" as data.

Requests are sorted into buckets by size. One replica of a GPU type serves up to ``max_request_rate_per_s`` of a bucket
within the latency objective (0: it cannot); mixed traffic adds up linearly. The format is JSON::

    {"kind": "gpu-allocation", "name": "chat",
     "gpu_types": [{"name": "l4", "usd_per_hour": 0.7, "max_count": null}],
     "buckets": [{"input_tokens": [1, 250], "output_tokens": [1, 250]}],
     "request_rate_per_s": [6.0],
     "max_request_rate_per_s": {"l4": [2.0]},
     "max_utilization": 1.0, "min_spare_replicas": 0}

``max_utilization``, ``min_spare_replicas`` and ``name`` may be left out, and so may ``max_count``. An array may stand
in a NumPy archive beside the instance: ``{"file": "rates.npz", "key": "rate"}``; other folders are refused, and so are
pickled objects. Optional keys of a type, for one accelerator offered in several ways (each its own entry and name):

    region                 where it is, as text; shown in the answer
    terms                  ``on-demand`` (default), ``spot`` or ``reserved``; shown in the answer
    interruption_headroom  share of each replica's capacity kept free for the traffic of interrupted ones, default 0:
                           a replica is filled to max_utilization · (1 − interruption_headroom)

The rates need not be measured: whoever has an estimate of them builds :class:`GpuAllocationProblem` directly.

Source: the problem is that of Mélange (Griggs et al., arXiv:2404.14527), with shares in place of its slices.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.errors import Problem, SpecError, closest_names, did_you_mean

KIND = "gpu-allocation"
TERMS = ("on-demand", "spot", "reserved")
_PROBLEM_KEYS = (
    "kind",
    "name",
    "gpu_types",
    "buckets",
    "request_rate_per_s",
    "max_request_rate_per_s",
    "max_utilization",
    "min_spare_replicas",
)
_TYPE_KEYS = ("name", "usd_per_hour", "max_count", "region", "terms", "interruption_headroom")
_BUCKET_KEYS = ("input_tokens", "output_tokens")
_RANGE_ENDS = 2
_MOST_SHOWN = 5
_MOST_CHARACTERS = 60
_OTHER_CURRENCY = re.compile(r"(?P<currency>[a-z]{3})_per_hour|currency")
# Stands in for a number that was refused: a legal price, share and rate, so that it raises no second complaint.
_HARMLESS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """One thing that can be rented: a replica on one or more accelerators.

    Args:
        name: unique in the problem.
        usd_per_hour: of one replica, USD/h.
        max_count: most replicas to be had; None for any number.
        region: where it is; None where it does not matter.
        terms: one of :data:`TERMS`.
        interruption_headroom: share of a replica's capacity kept free, in [0, 1).
    """

    name: str
    usd_per_hour: float
    max_count: int | None = None
    region: str | None = None
    terms: str = "on-demand"
    interruption_headroom: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Requests of similar size.

    Args:
        input_tokens: least and most prompt tokens.
        output_tokens: least and most generated tokens.
    """

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def __str__(self) -> str:
        (input_low, input_high), (output_low, output_high) = self.input_tokens, self.output_tokens
        return f"{input_low}–{input_high} input and {output_low}–{output_high} output tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAllocationProblem:
    """The whole question.

    Args:
        name: of the instance.
        gpu_types: what can be rented.
        buckets: sizes of requests.
        request_rate_per_s: [buckets] requests/s that arrive.
        max_request_rate_per_s: [types][buckets] requests/s that one replica serves within the objective when it
            serves that bucket alone; 0 when it cannot.
        max_utilization: share of its capacity to which a replica may be filled, in (0, 1].
        min_spare_replicas: replicas of each type in use that carry no load in the plan.
    """

    name: str
    gpu_types: tuple[GpuType, ...]
    buckets: tuple[Bucket, ...]
    request_rate_per_s: tuple[float, ...]
    max_request_rate_per_s: tuple[tuple[float, ...], ...]
    max_utilization: float = 1.0
    min_spare_replicas: int = 0

    @classmethod
    def from_document(cls, document: Mapping[str, Any], base: Path) -> GpuAllocationProblem:
        """Read the JSON format of the module's docstring.

        Args:
            document: the instance, parsed.
            base: folder of the instance; array files are looked for here and nowhere else.

        Raises:
            SpecError: with every problem found and its path.
        """
        reader = _Reader(base)
        problem = reader.problem(document)
        if reader.problems or problem is None:
            raise SpecError(reader.problems)
        return problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The decision: what to rent and where each request goes.

    Args:
        counts: [types] replicas to rent, spares included.
        routing: [types][buckets] share of each bucket's requests; sums to 1 over the types where there is traffic.
        utilization: [types] load of the usable replicas of each type, 0 to max_utilization.
        prices_usd_per_hour: [types] what one more busy replica is worth in the linear relaxation of the problem.
    """

    counts: tuple[int, ...]
    routing: tuple[tuple[float, ...], ...]
    utilization: tuple[float, ...]
    prices_usd_per_hour: tuple[float, ...]


class _Reader:
    """Reads values and collects what is wrong with them."""

    def __init__(self, base: Path) -> None:
        self.problems: list[Problem] = []
        self._base = base

    def say(self, path: str, message: str) -> None:
        self.problems.append(Problem(path=path, message=message))

    def problem(self, document: Any) -> GpuAllocationProblem | None:
        if not isinstance(document, Mapping):
            self.say("", f"expected an object with the keys {', '.join(_PROBLEM_KEYS)}, got {_describe(document)}")
            return None
        self._unknown_keys(document, _PROBLEM_KEYS, "")
        if document.get("kind", KIND) != KIND:
            self.say("kind", f"expected {KIND!r}, got {_describe(document['kind'])}")
        name = document.get("name", "")
        if not isinstance(name, str):
            self.say("name", f"expected text, got {_describe(name)}")
        types = [self._type(item, f"gpu_types[{i}]") for i, item in enumerate(self._list(document, "gpu_types"))]
        buckets = [self._bucket(item, f"buckets[{i}]") for i, item in enumerate(self._list(document, "buckets"))]
        self._unique([gpu_type.name for gpu_type in types])
        rate = self._array(document.get("request_rate_per_s"), "request_rate_per_s", len(buckets))
        capacity = self._capacities(document, types, len(buckets))
        utilization = self._number(document.get("max_utilization", 1.0), "max_utilization")
        if not 0.0 < utilization <= 1.0:
            self.say("max_utilization", f"expected a share above 0 and up to 1 (such as 0.85), got {utilization}")
        spare = self._count(document.get("min_spare_replicas", 0), "min_spare_replicas")
        return GpuAllocationProblem(
            name=name,
            gpu_types=tuple(types),
            buckets=tuple(buckets),
            request_rate_per_s=rate,
            max_request_rate_per_s=capacity,
            max_utilization=utilization,
            min_spare_replicas=spare,
        )

    def _type(self, item: Any, path: str) -> GpuType:
        if not isinstance(item, Mapping):
            self.say(path, f"expected an object with the keys {', '.join(_TYPE_KEYS)}, got {_describe(item)}")
            return GpuType(name="", usd_per_hour=0.0)
        self._dollars_only(item, path)
        self._unknown_keys({key: value for key, value in item.items() if not _is_currency(key)}, _TYPE_KEYS, path)
        name, region, terms = item.get("name"), item.get("region"), item.get("terms", TERMS[0])
        if not isinstance(name, str) or not name:
            self.say(f"{path}.name", f"expected a name, got {_describe(name)}")
            name = ""
        if region is not None and not isinstance(region, str):
            self.say(f"{path}.region", f"expected text or null, got {_describe(region)}")
        if terms not in TERMS:
            close = did_you_mean(closest_names(terms, TERMS)) if isinstance(terms, str) else ""
            self.say(f"{path}.terms", f"expected one of {', '.join(TERMS)}, got {_describe(terms)}{close}")
        most = item.get("max_count")
        headroom = self._number(item.get("interruption_headroom", 0.0), f"{path}.interruption_headroom")
        if not 0.0 <= headroom < 1.0:
            self.say(f"{path}.interruption_headroom", f"expected a share from 0 to below 1, got {headroom}")
        return GpuType(
            name=name,
            usd_per_hour=self._price(item, path),
            max_count=None if most is None else self._count(most, f"{path}.max_count"),
            region=region,
            terms=terms,
            interruption_headroom=headroom,
        )

    def _dollars_only(self, item: Mapping[str, Any], path: str) -> None:
        for key in item:
            if _is_currency(key):
                self.say(f"{path}.{key}", "prices are in USD here, no exchange rates are kept; convert to usd_per_hour")

    def _price(self, item: Mapping[str, Any], path: str) -> float:
        if "usd_per_hour" not in item and any(_is_currency(key) for key in item):
            return _HARMLESS  # that has been said
        return self._amount(item.get("usd_per_hour"), f"{path}.usd_per_hour")

    def _bucket(self, item: Any, path: str) -> Bucket:
        if not isinstance(item, Mapping):
            self.say(path, f"expected an object with the keys {', '.join(_BUCKET_KEYS)}, got {_describe(item)}")
            return Bucket(input_tokens=(0, 0), output_tokens=(0, 0))
        self._unknown_keys(item, _BUCKET_KEYS, path)
        ranges = [self._range(item.get(key), f"{path}.{key}") for key in _BUCKET_KEYS]
        return Bucket(input_tokens=ranges[0], output_tokens=ranges[1])

    def _range(self, value: Any, path: str) -> tuple[int, int]:
        if not isinstance(value, list) or len(value) != _RANGE_ENDS:
            self.say(path, f"expected [least, most] tokens, got {_describe(value)}")
            return (0, 0)
        low, high = (self._count(end, f"{path}[{i}]") for i, end in enumerate(value))
        if low > high:
            self.say(path, f"the least, {low}, is above the most, {high}; swap them")
        return (low, high)

    def _capacities(
        self, document: Mapping[str, Any], types: Sequence[GpuType], num_buckets: int
    ) -> tuple[tuple[float, ...], ...]:
        path = "max_request_rate_per_s"
        table = document.get(path)
        if not isinstance(table, Mapping):
            self.say(path, f"expected an object with one array per GPU type, got {_describe(table)}")
            return ()
        known = [gpu_type.name for gpu_type in types]
        for key in table:
            if key not in known:
                self.say(f"{path}.{key}", f"no GPU type of that name{did_you_mean(closest_names(str(key), known))}")
        rows = []
        for name in known:
            if name and name not in table:
                self.say(path, f"no array for the GPU type {name!r}; a type that serves nothing needs zeros")
            elif name:
                rows.append(self._array(table[name], f"{path}.{name}", num_buckets))
        return tuple(rows)

    def _array(self, value: Any, path: str, length: int) -> tuple[float, ...]:
        if isinstance(value, Mapping):
            value = self._from_file(value, path)
            if value is None:
                return ()
        if not isinstance(value, list):
            self.say(path, f'expected an array or {{"file": …, "key": …}}, got {_describe(value)}')
            return ()
        if len(value) != length:
            self.say(path, f"has {len(value)} entries, but there are {length} buckets; give one per bucket")
        before = len(self.problems)
        amounts = tuple(self._amount(entry, f"{path}[{i}]") for i, entry in enumerate(value))
        extra = len(self.problems) - before - _MOST_SHOWN
        if extra > 0:
            del self.problems[-extra:]
            self.say(path, f"{extra} more entries are wrong in the same array")
        return amounts

    def _from_file(self, reference: Mapping[str, Any], path: str) -> list[Any] | None:
        self._unknown_keys(reference, ("file", "key"), path)
        file, key = reference.get("file"), reference.get("key")
        if not isinstance(file, str) or not isinstance(key, str):
            self.say(path, 'an array in a file is written {"file": "name.npz", "key": "name of the array"}')
            return None
        place = (self._base / file).resolve()
        if not place.is_relative_to(self._base.resolve()) or place.suffix != ".npz":
            self.say(path, f"{file!r} is not an .npz file in the instance's own folder; copy it there")
            return None
        try:
            with np.load(place, allow_pickle=False) as archive:
                if key not in archive:
                    self.say(path, f"{file!r} has no array {key!r}{did_you_mean(closest_names(key, archive.files))}")
                    return None
                array = archive[key]
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            self.say(path, f"cannot read {file!r}: {error}")
            return None
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            self.say(path, f"{key!r} in {file!r} is {array.ndim}-dimensional {array.dtype}; needs a list of numbers")
            return None
        numbers: list[Any] = array.tolist()
        return numbers

    def _list(self, document: Mapping[str, Any], key: str) -> list[Any]:
        value = document.get(key)
        if not isinstance(value, list) or not value:
            self.say(key, f"expected a list with at least one entry, got {_describe(value)}")
            return []
        return value

    def _number(self, value: Any, path: str) -> float:
        """A finite number; after a complaint, one that no caller complains about again."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.say(path, f"expected a number, got {_describe(value)}")
            return _HARMLESS
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.say(path, f"expected a finite number, got {_describe(value)}")
            return _HARMLESS
        return number

    def _amount(self, value: Any, path: str) -> float:
        number = self._number(value, path)
        if number < 0.0:
            self.say(path, f"must not be negative, got {number}")
        return number

    def _count(self, value: Any, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.say(path, f"expected a whole number from 0 up, got {_describe(value)}")
            return 0
        return value

    def _unique(self, names: Sequence[str]) -> None:
        for i, name in enumerate(names):
            if name and name in names[:i]:
                self.say(f"gpu_types[{i}].name", f"{name!r} is also the name of gpu_types[{names.index(name)}]")

    def _unknown_keys(self, item: Mapping[str, Any], known: Sequence[str], path: str) -> None:
        for key in item:
            if key not in known:
                where = f"{path}.{key}" if path else str(key)
                self.say(where, f"unknown key{did_you_mean(closest_names(str(key), known))}")


def _is_currency(key: Any) -> bool:
    """Whether a key of a type gives its price in other money than dollars."""
    match = _OTHER_CURRENCY.fullmatch(str(key))
    return match is not None and match["currency"] != "usd"


def _describe(value: Any) -> str:
    """A value as messages show it, cut short."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
