"""What happened to a run until now, from its log, and what follows for the rest of it.

A log is a CSV file, plain or compressed with gzip, with the columns

    time_s   seconds, ascending
    event    ``train`` a stretch of training begins (first new step), ``stop`` it is interrupted, ``now`` the log ends
    tokens   trained until then and not lost: at ``train`` what the checkpoint held, at ``stop`` and ``now`` what was
             done, whether it was saved or not
    nodes    of the job, at ``train``; those of the plan where the column is missing

Counts. n interruptions in T node-days of training; the mean restart; the rate while training; the share of the time
that made progress. The rate of interruptions is Gamma distributed before (mean and 90 % interval of what is believed
without the log) and after: shape a + n, node-days b + T. Its interval narrows as the run goes on.

Source       Gamma–Poisson conjugacy (any textbook of Bayesian statistics); quantiles by Wilson and Hilferty (1931).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.units import SECONDS_PER_DAY
from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.catalogs.untrusted.streams import csv_rows
from meshplan.planner.core.constants import INTERVAL_ENDS
from meshplan.planner.goodput.conditions import FailureRate

TRAIN, STOP, NOW = "train", "stop", "now"
NEEDED, OPTIONAL = ("time_s", "event", "tokens"), ("nodes",)
MOST_LINES, MOST_NUMBER = 1_000_000, 1e18
_END = NormalDist().inv_cdf(INTERVAL_ENDS[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """What a log comes to.

    Args:
        wall_s: from its first line to its last.
        training_s: of the stretches.
        interruptions: stops.
        node_days: nodes × days of training.
        restart_s: mean time from a stop to the next stretch; None where no restart is complete.
        tokens: kept at the end, less those at the beginning.
        tokens_per_s: while training, lost work included.
    """

    wall_s: float
    training_s: float
    interruptions: int
    node_days: float
    restart_s: float | None
    tokens: float
    tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Effective training time ratio: time that the tokens kept took to train, over wall time."""
        return self.tokens / self.tokens_per_s / self.wall_s if self.tokens_per_s > 0.0 else 0.0


def read_run_log(path: Path, *, nodes: float) -> RunLog:
    """The log of a run.

    Args:
        path: of the file.
        nodes: of the job where the log does not say.

    Raises:
        SpecError: unreadable, or a line that cannot follow the one before, by its number.
    """
    where = f"the run's log {path}"
    try:
        rows = csv_rows(path)
        header = [name.strip() for name in next(rows, [])]
        unknown = [name for name in header if name not in (*NEEDED, *OPTIONAL)]
        missing = [name for name in NEEDED if name not in header]
        if missing or unknown:
            message = f"columns must be {', '.join(NEEDED)} and may be {', '.join(OPTIONAL)}, not {', '.join(header)}"
            raise SpecError.at("line 1", message[:200], of=where)
        lines = [
            _line(dict(zip(header, row, strict=False)), number, nodes, where)
            for number, row in enumerate(rows, start=2)
            if row and number <= MOST_LINES
        ]
    except (OSError, DocumentError, UnicodeError) as error:
        raise SpecError.at("--run", f"{path}: {error}") from error
    return _counted(lines, where)


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    time_s: float
    event: str
    tokens: float
    nodes: float


def _line(cells: dict[str, str], number: int, nodes: float, where: str) -> _Line:
    try:
        found = _Line(
            number,
            float(cells["time_s"]),
            cells["event"].strip(),
            float(cells["tokens"]),
            float(cells.get("nodes") or nodes),
        )
        numbers = (found.time_s, found.tokens, found.nodes)
        if found.event not in (TRAIN, STOP, NOW) or not all(0.0 <= value <= MOST_NUMBER for value in numbers):
            raise ValueError(f"event is {TRAIN}, {STOP} or {NOW}, and numbers are not negative")
    except (KeyError, ValueError) as error:
        raise SpecError.at(f"line {number}", f"{error}: {dict(cells)}"[:200], of=where) from error
    return found


def _counted(lines: Sequence[_Line], where: str) -> RunLog:
    training = node_days = done = 0.0
    restarts: list[float] = []
    began: _Line | None = None
    stopped: _Line | None = None
    stops = 0
    for before, line in zip((None, *lines), lines, strict=False):
        _check_order(before, line, began, where)
        if line.event == TRAIN:
            if stopped is not None:
                restarts.append(line.time_s - stopped.time_s)
            began = line
            continue
        if began is not None:
            seconds = line.time_s - began.time_s
            training += seconds
            node_days += began.nodes * seconds / SECONDS_PER_DAY
            done += line.tokens - began.tokens
        stops += line.event == STOP
        began, stopped = None, line if line.event == STOP else stopped
    if training <= 0.0 or done <= 0.0 or lines[-1].time_s <= lines[0].time_s:
        raise SpecError.at("", "no stretch of training with tokens is complete", of=where)
    return RunLog(
        wall_s=lines[-1].time_s - lines[0].time_s,
        training_s=training,
        interruptions=stops,
        node_days=node_days,
        restart_s=sum(restarts) / len(restarts) if restarts else None,
        tokens=max(0.0, lines[-1].tokens - lines[0].tokens),
        tokens_per_s=done / training,
    )


def _check_order(before: _Line | None, line: _Line, began: _Line | None, where: str) -> None:
    """A stretch begins where none runs and ends where one does; time ascends."""
    wrong = ""
    if before is not None and line.time_s < before.time_s:
        wrong = f"time {line.time_s:g} s is before that of the line above, {before.time_s:g} s"
    elif (line.event == TRAIN) == (began is not None) and line.event != NOW:
        wrong = f"{line.event} follows {before.event if before is not None else 'nothing'}"
    elif before is not None and before.event == NOW:
        wrong = f"{line.event} follows {NOW}, which ends a log"
    elif began is not None and line.tokens < began.tokens:
        wrong = f"{line.tokens:g} tokens are fewer than the {began.tokens:g} that the stretch began with"
    if wrong:
        raise SpecError.at(f"line {line.number}", wrong, of=where)


def updated_rate(rate: FailureRate, interruptions: float, node_days: float) -> FailureRate:
    """What is believed of the rate of interruptions once some were counted.

    Args:
        rate: believed before, with its 90 % interval.
        interruptions: counted.
        node_days: that they were counted in.
    """
    spread = max(math.log(rate.high / rate.low) / (2.0 * _END), 1e-6) if rate.low > 0.0 else 1.0
    # A Gamma distribution whose logarithm is as wide: its variance is ≈ 1/shape + 1/(2 shape²) (trigamma).
    shape = (1.0 + math.sqrt(1.0 + 2.0 * spread**2)) / (2.0 * spread**2)
    days = shape / rate.per_node_day if rate.per_node_day > 0.0 else 0.0
    after, time = shape + interruptions, days + node_days
    return FailureRate(
        per_node_day=after / time,
        low=gamma_quantile(after, INTERVAL_ENDS[0]) / time,
        high=gamma_quantile(after, INTERVAL_ENDS[1]) / time,
        source=f"{interruptions:g} counted in {node_days:,.0f} node-days of this run; before: {rate.source}",
    )


def gamma_quantile(shape: float, share: float) -> float:
    """Quantile of the Gamma distribution of scale 1, by Wilson and Hilferty's cube root; within 2 % from shape 2 on."""
    ninth = 1.0 / (9.0 * shape)
    return shape * max(1e-3, 1.0 - ninth + NormalDist().inv_cdf(share) * math.sqrt(ninth)) ** 3
