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

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshplan.catalogs.errors import SpecError, closest_names, did_you_mean
from meshplan.planner.core.reading.instance_reader import InstanceReader, describe

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
_OTHER_CURRENCY = re.compile(r"(?P<currency>[a-z]{3})_per_hour|currency")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """One thing that can be rented: a replica on one or more accelerators.

    Args:
        name: unique in the problem.
        usd_per_hour: price of one replica, USD/h.
        max_count: most replicas; None for any number.
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
        name: name of the instance.
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
        if reader or problem is None:
            raise SpecError(reader)
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


class _Reader(InstanceReader):
    """Reads the parts of an instance. What stands in for a wrong value is never seen: the problems are raised."""

    def problem(self, document: Any) -> GpuAllocationProblem | None:
        if not self._is_object(document, "", _PROBLEM_KEYS):
            return None
        self.one_of(document.get("kind", KIND), "kind", [KIND])
        types = [self._type(item, f"gpu_types[{i}]") for i, item in enumerate(self._list(document, "gpu_types"))]
        buckets = [self._bucket(item, f"buckets[{i}]") for i, item in enumerate(self._list(document, "buckets"))]
        self._unique([gpu_type.name for gpu_type in types])
        return GpuAllocationProblem(
            name=self.text(document.get("name", ""), "name"),
            gpu_types=tuple(types),
            buckets=tuple(buckets),
            request_rate_per_s=self._rates(document.get("request_rate_per_s"), "request_rate_per_s", len(buckets)),
            max_request_rate_per_s=self._capacities(document, types, len(buckets)),
            max_utilization=self.number(
                document.get("max_utilization", 1.0),
                "max_utilization",
                "a share above 0 and up to 1 (such as 0.85)",
                lambda share: 0.0 < share <= 1.0,
            )
            or 1.0,
            min_spare_replicas=self._count(document.get("min_spare_replicas", 0), "min_spare_replicas"),
        )

    def _type(self, item: Any, path: str) -> GpuType:
        if not self._is_object(item, path, _TYPE_KEYS, also=_is_currency):
            return GpuType(name="", usd_per_hour=0.0)
        foreign = [key for key in item if _is_currency(key)]
        for key in foreign:
            self.say(f"{path}.{key}", "prices are in USD here, no exchange rates are kept; convert to usd_per_hour")
        region, most = item.get("region"), item.get("max_count")
        name = self.text(item.get("name") or None, f"{path}.name", "a name")
        unpriced = "usd_per_hour" not in item and bool(foreign)  # which is reported
        return GpuType(
            name=name,
            usd_per_hour=0.0 if unpriced else self._amount(item.get("usd_per_hour"), f"{path}.usd_per_hour"),
            max_count=None if most is None else self._count(most, f"{path}.max_count"),
            region=None if region is None else self.text(region, f"{path}.region", "text or null"),
            terms=self.one_of(item.get("terms", TERMS[0]), f"{path}.terms", TERMS),
            interruption_headroom=self.number(
                item.get("interruption_headroom", 0.0),
                f"{path}.interruption_headroom",
                "a share from 0 to below 1",
                lambda share: 0.0 <= share < 1.0,
            )
            or 0.0,
        )

    def _bucket(self, item: Any, path: str) -> Bucket:
        if not self._is_object(item, path, _BUCKET_KEYS):
            return Bucket(input_tokens=(0, 0), output_tokens=(0, 0))
        ranges = [self._range(item.get(key), f"{path}.{key}") for key in _BUCKET_KEYS]
        return Bucket(input_tokens=ranges[0], output_tokens=ranges[1])

    def _range(self, value: Any, path: str) -> tuple[int, int]:
        if not isinstance(value, list) or len(value) != _RANGE_ENDS:
            self.say(path, f"expected [least, most] tokens, got {describe(value)}")
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
            self.say(path, f"expected an object with one array per GPU type, got {describe(table)}")
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
                rows.append(self._rates(table[name], f"{path}.{name}", num_buckets))
        return tuple(rows)

    def _rates(self, value: Any, path: str, length: int) -> tuple[float, ...]:
        """One rate per bucket; entries of a list are judged one by one, because true is no number."""
        if not isinstance(value, list):
            array = self.array(value, path)
            if array is None:
                return ()
            if array.ndim != 1:
                self.say(path, f"is {array.ndim}-dimensional; needs a list of numbers")
                return ()
            value = array.tolist()
        if len(value) != length:
            self.say(path, f"has {len(value)} entries, but there are {length} buckets; give one per bucket")
        before = len(self)
        amounts = tuple(self._amount(entry, f"{path}[{i}]") for i, entry in enumerate(value))
        extra = len(self) - before - _MOST_SHOWN
        if extra > 0:
            del self[-extra:]
            self.say(path, f"{extra} more entries are wrong in the same array")
        return amounts

    def _list(self, document: Mapping[str, Any], key: str) -> list[Any]:
        value = document.get(key)
        if not isinstance(value, list) or not value:
            self.say(key, f"expected a list with at least one entry, got {describe(value)}")
            return []
        return value

    def _is_object(
        self, item: Any, path: str, known: Sequence[str], also: Callable[[Any], bool] = lambda key: False
    ) -> bool:
        """Whether it is one; its keys are ``known`` or ``also`` lets them pass."""
        if not isinstance(item, Mapping):
            self.say(path, f"expected an object with the keys {', '.join(known)}, got {describe(item)}")
            return False
        self.keys({key: value for key, value in item.items() if not also(key)}, known, path)
        return True

    def _amount(self, value: Any, path: str) -> float:
        return self.number(value, path) or 0.0

    def _count(self, value: Any, path: str) -> int:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return self.integer(whole, path, least=0) or 0

    def _unique(self, names: Sequence[str]) -> None:
        for i, name in enumerate(names):
            if name and name in names[:i]:
                self.say(f"gpu_types[{i}].name", f"{name!r} is also the name of gpu_types[{names.index(name)}]")


def _is_currency(key: Any) -> bool:
    """Whether a key of a type gives its price in other money than dollars."""
    match = _OTHER_CURRENCY.fullmatch(str(key))
    return match is not None and match["currency"] != "usd"
