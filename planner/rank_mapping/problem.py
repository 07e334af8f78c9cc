"""Which rank goes on which node, when every directed link has its own measured bandwidth: the question as data.

A cell (pipeline r, stage q) of a pipeline × data-parallel job takes one node; tensor parallelism stays inside the
node. The solver is :mod:`meshplan.planner.rank_mapping.solve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.planner.cluster.network.network import reached_from
from meshplan.planner.core.arrays import BoolArray, FloatArray
from meshplan.planner.core.reading.instance_reader import InstanceReader

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
        name: name of the instance; empty when it has none.
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
    bandwidth_bytes_per_s: FloatArray
    latency_s: FloatArray

    @classmethod
    def from_document(cls, document: Mapping[str, Any], base: Path) -> RankMappingProblem:
        """Read a ``kind: rank-mapping`` document.

        Args:
            document: parsed YAML or JSON.
            base: folder of the instance; array files are read from this folder only.

        Raises:
            SpecError: with every problem found, each with its path.
        """
        reader = _Reader(base)
        reader.keys(document, KNOWN_KEYS)
        reader.one_of(document.get("kind", KIND), "kind", [KIND])
        name = reader.text(document.get("name", ""), "name")
        counts = {key: reader.integer(document.get(key), key, least=1) for key in REQUIRED_COUNTS}
        devices_per_node = reader.integer(document.get("devices_per_node", 1), "devices_per_node", least=1)
        amounts = {key: reader.number(document.get(key), key) for key in REQUIRED_AMOUNTS}
        num_nodes = counts["num_nodes"]
        reader.check_degrees(counts)
        bandwidth = reader.bandwidth(document.get("bandwidth_bytes_per_s"), num_nodes)
        latency = reader.latency(document.get("latency_s"), num_nodes)
        if reader or num_nodes is None or bandwidth is None:
            raise SpecError(reader)
        np.fill_diagonal(bandwidth, 1.0)
        latency = np.zeros_like(bandwidth) if latency is None else latency
        np.fill_diagonal(latency, 0.0)
        return cls(
            name=name,
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


class _Reader(InstanceReader):
    """Reads the matrices and checks what they must have in common."""

    def check_degrees(self, counts: Mapping[str, int | None]) -> None:
        nodes, stages, pipelines = (counts[key] for key in REQUIRED_COUNTS)
        if nodes is None or stages is None or pipelines is None or stages * pipelines == nodes:
            return
        cells = f"pipeline_parallel × data_parallel_nodes = {stages} × {pipelines} = {stages * pipelines}"
        if stages * pipelines > nodes:
            self.say("num_nodes", f"{cells} cells, more than the {nodes} nodes; lower a degree or add nodes")
        else:
            self.say(
                "num_nodes",
                f"{cells} cells leave {nodes - stages * pipelines} of {nodes} nodes without a rank; "
                "raise a degree or leave nodes out of the matrix",
            )

    def bandwidth(self, value: Any, num_nodes: int | None) -> FloatArray | None:
        """Bytes/s of every link, checked; None with the problems noted."""
        key = "bandwidth_bytes_per_s"
        matrix = self._matrix(value, key, num_nodes)
        if matrix is not None:
            self.check_links(
                key,
                matrix,
                bad=~(np.isfinite(matrix) & (matrix > 0)),
                rule="must be a positive finite number of bytes/s",
                fix="measure it again, or leave a node with a dead link out (and lower the parallel degrees)",
            )
            self.check_connected(key, matrix)
            self.check_bandwidth_unit(key, matrix)
        return matrix

    def latency(self, value: Any, num_nodes: int | None) -> FloatArray | None:
        """Seconds of every link, checked; None where not given, or with the problems noted."""
        key = "latency_s"
        matrix = None if value is None else self._matrix(value, key, num_nodes)
        if matrix is not None:
            self.check_links(
                key,
                matrix,
                bad=~(np.isfinite(matrix) & (matrix >= 0)),
                rule="must be a finite number of seconds, 0 or more",
                fix="leave latency_s out where it was not measured",
            )
            self.check_latency_unit(key, matrix)
        return matrix

    def _matrix(self, value: Any, key: str, num_nodes: int | None) -> FloatArray | None:
        """A fresh [n, n] array (null becomes NaN), or None with a problem noted."""
        array = self.array(value, key, holes=True)
        if array is None:
            return None
        nodes = num_nodes or max(array.shape, default=0)
        if array.shape != (nodes, nodes):
            shape = " × ".join(str(size) for size in array.shape) or "a single number"
            self.say(key, f"is {shape}, expected num_nodes × num_nodes = {nodes} × {nodes}")
            return None
        return array

    def check_links(self, key: str, matrix: FloatArray, *, bad: BoolArray, rule: str, fix: str) -> None:
        """Note the off-diagonal entries in ``bad`` by sender and receiver."""
        bad = bad & ~np.eye(len(matrix), dtype=bool)
        senders, receivers = np.nonzero(bad)
        for sender, receiver in list(zip(senders.tolist(), receivers.tolist(), strict=True))[:MAX_LINKS_NAMED]:
            value = matrix[sender, receiver]
            self.say(
                f"{key}[{sender}][{receiver}]",
                f"link from node {sender} to node {receiver} is {value:g}, {rule}; {fix}",
            )
        if len(senders) > MAX_LINKS_NAMED:
            self.say(key, f"{len(senders) - MAX_LINKS_NAMED} more links of this sort")

    def check_bandwidth_unit(self, key: str, matrix: FloatArray) -> None:
        """Note a matrix whose fastest link is slower than any link of a cluster: 25 for 25 GB/s."""
        links = matrix[~np.eye(len(matrix), dtype=bool)]
        fastest = links[np.isfinite(links)].max(initial=0.0)
        if 0.0 < fastest < LEAST_FASTEST_BYTES_PER_S:
            self.say(
                key,
                f"has {fastest:g} bytes/s as its fastest link, which no cluster has; "
                "the unit is bytes per second: 25 GB/s is 25e9, 200 Gb/s too",
            )

    def check_latency_unit(self, key: str, matrix: FloatArray) -> None:
        """Note a matrix whose least latency is longer than any network's: 5 for 5 µs."""
        links = matrix[~np.eye(len(matrix), dtype=bool)]
        least = links[np.isfinite(links)].min(initial=np.inf)
        if MOST_LEAST_LATENCY_S < least < np.inf:
            self.say(
                key, f"has {least:g} s as its least latency, which no cluster has; the unit is seconds: 5 µs is 5e-6"
            )

    def check_connected(self, key: str, matrix: FloatArray) -> None:
        """Note nodes that no chain of working links leads to, or from."""
        working = np.isfinite(matrix) & (matrix > 0)
        for links, way in ((working, "cannot reach"), (working.T, "cannot be reached from")):
            lost = np.flatnonzero(~reached_from(links, 0)).tolist()
            if lost:
                named = ", ".join(map(str, lost[:MAX_LINKS_NAMED])) + (" …" if len(lost) > MAX_LINKS_NAMED else "")
                self.say(key, f"is disconnected: node 0 {way} {len(lost)} of {len(matrix)} nodes ({named})")
