"""What a worker writes down as it runs: segments of iterations, and the gaps between tokens that no segment tells."""

from __future__ import annotations

from array import array

# Numbers kept as Python objects before they are packed: some megabytes.
MOST_RECORDS = 100_000


class Record:
    """The record of one worker, which :class:`~meshplan.planner.serving.simulation.run.WorkerRun` has as arrays.

    ``segments`` are the fields of :class:`~meshplan.planner.serving.simulation.run.Segments` in a row, one segment
    after the other: a list is quick to append to, an array (``packed``) is small. ``pauses`` are decoding requests that
    wait for prompts: [time of their last tokens, how many].
    """

    def __init__(self) -> None:
        self.segments: list[float] = []
        self.packed = array("d")
        self.gap_s, self.gap_count = array("d"), array("d")
        self.pauses: list[list[float]] = []

    def pack(self, least: int = 0) -> None:
        """Move the segments to a compact array, if they are more numbers than that."""
        if len(self.segments) > least:
            self.packed += array("d", self.segments)
            self.segments.clear()

    def gap(self, seconds: float) -> None:
        """A token came so long after the one before."""
        self.gap_s.append(seconds)
        self.gap_count.append(1)

    def end_pauses(self, end: float) -> None:
        """Requests that waited get their next tokens."""
        self.gap_s.extend(end - last_s for last_s, _ in self.pauses)
        self.gap_count.extend(count for _, count in self.pauses)

    def last_token_s(self, joined_s: float, now: float) -> float:
        """When the last token of a request came that waits no more: at the last decode iteration, or when it joined."""
        for group in reversed(self.pauses):
            if group[0] == joined_s:
                group[1] -= 1
                return joined_s
        if not self.pauses:
            return now
        self.pauses[0][1] -= 1
        return self.pauses[0][0]
