"""Which rank goes on which node, when every directed link has its own measured bandwidth: the question as data.

A cell (pipeline r, stage q) of a pipeline × data-parallel job takes one node; tensor parallelism stays inside the
node. The solver is :mod:`meshplan.planner.rank_mapping.solve`, the notation is in ``planner/solvers/README.md``.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.errors import Problem, SpecError, closest_names, did_you_mean

KIND = "rank-mapping"

REQUIRED_COUNTS = ("num_nodes", "pipeline_parallel", "data_parallel_nodes")
OPTIONAL_COUNTS = ("devices_per_node",)
REQUIRED_AMOUNTS = ("pipeline_message_bytes", "data_parallel_message_bytes", "num_microbatches_exposed")
ARRAYS = ("bandwidth_bytes_per_s", "latency_s")
KNOWN_KEYS = ("kind", "name", *REQUIRED_COUNTS, *OPTIONAL_COUNTS, *REQUIRED_AMOUNTS, *ARRAYS)

# A bad matrix is often bad everywhere (a wrong unit, a transposed file): name the first few links, count the rest.
MAX_LINKS_NAMED = 8

# Beyond these no link of a cluster lies and the matrix is in another unit: a tenth of 10 Mbit/s Ethernet; light to the
# moon and back takes less than 3 s.
LEAST_FASTEST_BYTES_PER_S = 1.25e5
MOST_LEAST_LATENCY_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMappingProblem:
    """One rank-mapping question.

    Args:
        name: of the instance; empty when it has none.
        num_nodes: nodes n, numbered from 0.
        devices_per_node: devices in each node; they share the node's cell. Reported, not used.
        pipeline_parallel: stages P of each pipeline.
        data_parallel_nodes: pipelines d, which is the number of nodes in each stage's data-parallel ring; P·d = n.
        pipeline_message_bytes: activations (or their gradients) of one micro-batch between two stages, bytes.
        data_parallel_message_bytes: gradients that one node reduces in one step, bytes.
        num_microbatches_exposed: how many times the critical path of a pipeline crosses each stage boundary.
        bandwidth_bytes_per_s: [n, n], row = sender, directed; the diagonal is 1 and means nothing.
        latency_s: [n, n], row = sender; the diagonal is 0.
    """

    name: str = ""
    num_nodes: int
    devices_per_node: int = 1
    pipeline_parallel: int
    data_parallel_nodes: int
    pipeline_message_bytes: float
    data_parallel_message_bytes: float
    num_microbatches_exposed: float
    bandwidth_bytes_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]

    @classmethod
    def from_document(cls, document: Mapping[str, Any], base: Path) -> RankMappingProblem:
        """Read a ``kind: rank-mapping`` document.

        Args:
            document: parsed YAML or JSON.
            base: folder of the instance; array files are read from this folder only.

        Raises:
            SpecError: with every problem found, each with its path.
        """
        reader = _Reader(document=document, base=base)
        reader.check_keys()
        counts = {key: reader.count(key) for key in REQUIRED_COUNTS}
        devices_per_node = reader.count("devices_per_node") if "devices_per_node" in document else 1
        amounts = {key: reader.amount(key) for key in REQUIRED_AMOUNTS}
        num_nodes = counts["num_nodes"]
        reader.check_degrees(counts)
        bandwidth = reader.matrix("bandwidth_bytes_per_s", num_nodes)
        if bandwidth is not None:
            reader.check_links(
                "bandwidth_bytes_per_s",
                bandwidth,
                bad=~(np.isfinite(bandwidth) & (bandwidth > 0)),
                rule="must be a positive finite number of bytes/s",
                fix="measure it again, or leave a node with a dead link out (and lower the parallel degrees)",
            )
            reader.check_connected("bandwidth_bytes_per_s", bandwidth)
            reader.check_bandwidth_unit("bandwidth_bytes_per_s", bandwidth)
        latency = reader.matrix("latency_s", num_nodes) if document.get("latency_s") is not None else None
        if latency is not None:
            reader.check_links(
                "latency_s",
                latency,
                bad=~(np.isfinite(latency) & (latency >= 0)),
                rule="must be a finite number of seconds, 0 or more",
                fix="leave latency_s out where it was not measured",
            )
            reader.check_latency_unit("latency_s", latency)
        if reader.problems or num_nodes is None or bandwidth is None:
            raise SpecError(reader.problems)
        np.fill_diagonal(bandwidth, 1.0)
        latency = np.zeros_like(bandwidth) if latency is None else latency
        np.fill_diagonal(latency, 0.0)
        return cls(
            name=str(document.get("name", "")),
            num_nodes=num_nodes,
            devices_per_node=devices_per_node or 1,
            pipeline_parallel=counts["pipeline_parallel"] or 1,
            data_parallel_nodes=counts["data_parallel_nodes"] or 1,
            pipeline_message_bytes=amounts["pipeline_message_bytes"] or 0.0,
            data_parallel_message_bytes=amounts["data_parallel_message_bytes"] or 0.0,
            num_microbatches_exposed=amounts["num_microbatches_exposed"] or 0.0,
            bandwidth_bytes_per_s=bandwidth,
            latency_s=latency,
        )


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Reads single fields and remembers what was wrong with each."""

    document: Mapping[str, Any]
    base: Path
    problems: list[Problem] = field(default_factory=list)

    def problem(self, path: str, message: str) -> None:
        self.problems.append(Problem(path=path, message=message))

    def check_keys(self) -> None:
        kind = self.document.get("kind", KIND)
        if kind != KIND:
            self.problem("kind", f"is {kind!r}, expected {KIND!r}")
        for key in self.document:
            if key not in KNOWN_KEYS:
                hint = did_you_mean(closest_names(str(key), KNOWN_KEYS))
                self.problem(str(key), f"unknown key{hint or '; known keys: ' + ', '.join(KNOWN_KEYS)}")
        name = self.document.get("name", "")
        if not isinstance(name, str):
            self.problem("name", f"must be text, got {name!r}")

    def count(self, key: str) -> int | None:
        """A whole number ≥ 1, or None with a problem noted."""
        value = self._required(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problem(key, f"must be a whole number ≥ 1, got {value!r}")
            return None
        return value

    def amount(self, key: str) -> float | None:
        """A finite number ≥ 0, or None with a problem noted."""
        value = self._required(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            self.problem(key, f"must be a finite number ≥ 0, got {value!r}")
            return None
        return float(value)

    def _required(self, key: str) -> object:
        value: object = self.document.get(key)
        if value is None:
            self.problem(key, "is missing")
        return value

    def check_degrees(self, counts: Mapping[str, int | None]) -> None:
        nodes, stages, pipelines = (counts[key] for key in REQUIRED_COUNTS)
        if nodes is None or stages is None or pipelines is None or stages * pipelines == nodes:
            return
        cells = f"pipeline_parallel × data_parallel_nodes = {stages} × {pipelines} = {stages * pipelines}"
        if stages * pipelines > nodes:
            self.problem("num_nodes", f"{cells} cells, more than the {nodes} nodes; lower a degree or add nodes")
        else:
            self.problem(
                "num_nodes",
                f"{cells} cells leave {nodes - stages * pipelines} of {nodes} nodes without a rank; "
                "raise a degree or leave nodes out of the matrix",
            )

    def matrix(self, key: str, num_nodes: int | None) -> NDArray[np.float64] | None:
        """A fresh [n, n] array of floats (None entries become NaN), or None with a problem noted."""
        value = self._required(key)
        if value is None:
            return None
        try:
            if isinstance(value, Mapping):
                array = self._array_from_file(key, value)
            else:
                array = np.array(value, dtype=np.float64)
        except (TypeError, ValueError):
            self.problem(key, "is not a rectangular matrix of numbers")
            return None
        if array is None:
            return None
        nodes = num_nodes or max(array.shape, default=0)
        if array.shape != (nodes, nodes):
            shape = " × ".join(str(size) for size in array.shape) or "a single number"
            self.problem(key, f"is {shape}, expected num_nodes × num_nodes = {nodes} × {nodes}")
            return None
        return array

    def _array_from_file(self, key: str, reference: Mapping[str, Any]) -> NDArray[np.float64] | None:
        """Read ``{"file": "x.npz", "key": "bandwidth"}``; only plain arrays, only beside the instance."""
        extra = sorted(set(map(str, reference)) - {"file", "key"})
        name, entry = reference.get("file"), reference.get("key")
        if extra or not isinstance(name, str) or not isinstance(entry, str):
            self.problem(key, 'must be an embedded matrix or {"file": "NAME.npz", "key": "ENTRY"}')
            return None
        folder = self.base.resolve()
        file = (folder / name).resolve()
        if file.parent != folder:
            self.problem(f"{key}.file", f"{name!r} leaves the folder of the instance; put the file beside it")
            return None
        try:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                self.problem(f"{key}.file", f"{name!r} holds a bare array; save it with numpy.savez under a name")
                return None
            with archive:
                if entry not in archive:
                    hint = did_you_mean(closest_names(entry, archive))
                    self.problem(f"{key}.key", f"{name!r} has no entry {entry!r}{hint}")
                    return None
                return np.array(archive[entry], dtype=np.float64)
        except FileNotFoundError:
            self.problem(f"{key}.file", f"there is no {name!r} beside the instance")
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            self.problem(f"{key}.file", f"{name!r} is not a NumPy archive of plain arrays: {error}")
        return None

    def check_links(
        self, key: str, matrix: NDArray[np.float64], *, bad: NDArray[np.bool_], rule: str, fix: str
    ) -> None:
        """Note the off-diagonal entries in ``bad`` by sender and receiver."""
        bad = bad & ~np.eye(len(matrix), dtype=bool)
        senders, receivers = np.nonzero(bad)
        for sender, receiver in list(zip(senders.tolist(), receivers.tolist(), strict=True))[:MAX_LINKS_NAMED]:
            value = matrix[sender, receiver]
            self.problem(
                f"{key}[{sender}][{receiver}]",
                f"link from node {sender} to node {receiver} is {value:g}, {rule}; {fix}",
            )
        if len(senders) > MAX_LINKS_NAMED:
            self.problem(key, f"{len(senders) - MAX_LINKS_NAMED} more links of this sort")

    def check_bandwidth_unit(self, key: str, matrix: NDArray[np.float64]) -> None:
        """Note a matrix whose fastest link is slower than any link of a cluster: 25 for 25 GB/s."""
        links = matrix[~np.eye(len(matrix), dtype=bool)]
        fastest = links[np.isfinite(links)].max(initial=0.0)
        if 0.0 < fastest < LEAST_FASTEST_BYTES_PER_S:
            self.problem(
                key,
                f"has {fastest:g} bytes/s as its fastest link, which no cluster has; "
                "the unit is bytes per second: 25 GB/s is 25e9, 200 Gb/s too",
            )

    def check_latency_unit(self, key: str, matrix: NDArray[np.float64]) -> None:
        """Note a matrix whose least latency is longer than any network's: 5 for 5 µs."""
        links = matrix[~np.eye(len(matrix), dtype=bool)]
        least = links[np.isfinite(links)].min(initial=np.inf)
        if MOST_LEAST_LATENCY_S < least < np.inf:
            self.problem(
                key, f"has {least:g} s as its least latency, which no cluster has; the unit is seconds: 5 µs is 5e-6"
            )

    def check_connected(self, key: str, matrix: NDArray[np.float64]) -> None:
        """Note nodes that no chain of working links leads to, or from."""
        working = np.isfinite(matrix) & (matrix > 0)
        for links, way in ((working, "cannot reach"), (working.T, "cannot be reached from")):
            lost = np.flatnonzero(~_reached_from_first(links)).tolist()
            if lost:
                named = ", ".join(map(str, lost[:MAX_LINKS_NAMED])) + (" …" if len(lost) > MAX_LINKS_NAMED else "")
                self.problem(key, f"is disconnected: node 0 {way} {len(lost)} of {len(matrix)} nodes ({named})")


def _reached_from_first(links: NDArray[np.bool_]) -> NDArray[np.bool_]:
    reached = np.zeros(len(links), dtype=bool)
    reached[0] = True
    fresh = reached
    while fresh.any():
        fresh = links[fresh].any(axis=0) & ~reached
        reached = reached | fresh
    return reached
