"""Recorded requests from a CSV file or JSON lines, plain or compressed with gzip.

The first line of a CSV names the columns, in any order; JSON lines have them as keys: ``arrival_s`` (seconds,
non-decreasing), ``input_length`` and ``output_length`` (tokens, at least 1), and if known ``prefix`` (identity of a
shared prefix; −1 without one), ``cached_tokens`` (of the prompt, at most all of it) and ``priority`` (smaller goes
first). In place of those two ``hash_ids`` may name the blocks of each prompt, whole numbers between spaces or a list, a
name for the same tokens after the same tokens (Mooncake's recordings: blocks of 512 tokens). Times of the server that
was recorded (:data:`ANSWERED`, seconds on the clock of ``arrival_s``) are read past, unless they are asked for.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.catalogs.untrusted.streams import named_rows
from meshplan.planner.serving.problem.requests import Answered, Requests
from meshplan.planner.serving.problem.workload.blocks import Blocks

ARRIVAL = "arrival_s"
NEEDED = (ARRIVAL, "input_length", "output_length")
HASHES = "hash_ids"
OPTIONAL = ("prefix", "cached_tokens", "priority", HASHES)
# Tokens of a block of ``hash_ids``: those of Mooncake's recordings (arXiv:2407.00079).
BLOCK_TOKENS = 512
# What a recording may say of the answers, in the order in which it happens.
ANSWERED = ("queued_s", "scheduled_s", "first_token_s", "finished_s")
_TIMES = (ARRIVAL, *ANSWERED)
# What recordings of others call a column of ours. They are not read: their units differ (Mooncake's are milliseconds).
_ELSEWHERE = {
    **dict.fromkeys(("prompt_tokens", "input_tokens", "contexttokens", "num_prefill_tokens"), "input_length"),
    **dict.fromkeys(("completion_tokens", "output_tokens", "generatedtokens", "num_decode_tokens"), "output_length"),
    **dict.fromkeys(
        ("timestamp", "time", "arrived_at", "arrival_time"), "arrival_s, in seconds from the first request"
    ),
}
# Problems after which reading stops: the file is probably no trace.
MAX_PROBLEMS = 10
LEAST = {
    ARRIVAL: 0.0,
    "input_length": 1,
    "output_length": 1,
    "prefix": -1,
    "cached_tokens": 0,
    "priority": -math.inf,
    **dict.fromkeys(ANSWERED, 0.0),
}
_BETWEEN, _NAME = re.compile(r"[\s;,]+"), re.compile(r"[0-9]{1,40}")
# Whole numbers below this are exact as a float and as a NumPy integer.
MOST = 2.0**53


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS, *, with_answers: bool = False) -> Requests:
    """The requests of a file; asked again of the same file, as it last was, they are not read again.

    Args:
        path: of the file.
        block_tokens: tokens of a block, where it names blocks.
        with_answers: also what it says of the answers; their times must then be in order.

    Raises:
        SpecError: unreadable, without requests, or with malformed lines: each with its number.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(state.st_mode):  # a pipe says something else each time
        return _read.__wrapped__(path, (), block_tokens, with_answers)
    return _read(path, (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size), block_tokens, with_answers)


# Of a study, one trace under many deployments: half a million requests take 4 s to read, and 12 MB to keep.
@lru_cache(maxsize=1)
def _read(path: Path, _state: tuple[int, ...], block_tokens: int, with_answers: bool) -> Requests:
    where = f"the trace {path}"
    try:
        reader, first_line = named_rows(path)
        header = [name.strip() for name in next(reader, [])]
        problems = _header_problems(header)
        if problems:
            raise SpecError(problems, of=where)
        ordered = [name for name in _TIMES if with_answers and name in header]
        rows, problems = _rows(header, reader, first_line, block_tokens, ordered)
    except (OSError, DocumentError) as error:
        raise _unreadable(path, error) from error
    if not rows and not problems:
        problems = [Problem(path="", message="there are no requests; give at least one line below the header")]
    if problems:
        raise SpecError(problems, of=where)
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    numbers = {name: values for name, values in columns.items() if name not in (*_TIMES, HASHES)}
    whole = {name: np.array(values, dtype=np.int64) for name, values in numbers.items()}
    blocks = _blocks(columns[HASHES], block_tokens) if HASHES in columns else None
    if blocks is not None:
        whole["cached_tokens"] = blocks.found_at_most(whole["input_length"])
    arrival_s = np.array(columns[ARRIVAL], dtype=float)
    answered = {name: np.array(columns[name], dtype=float) for name in ordered if name != ARRIVAL}
    for array in (arrival_s, *whole.values(), *answered.values()):
        array.flags.writeable = False  # others may hold the same requests
    return Requests(
        arrival_s=arrival_s,
        input_length=whole["input_length"],
        output_length=whole["output_length"],
        cached_tokens=whole.get("cached_tokens"),
        prefix=whole.get("prefix"),
        blocks=blocks,
        priority=whole.get("priority"),
        answered=Answered(**answered) if answered else None,
    )


def _blocks(prompts: Sequence[tuple[int, ...]], tokens_each: int) -> Blocks:
    """The blocks of prompts, named in the order in which they come: recorded hashes may be longer than an integer."""
    names: dict[int, int] = {}
    numbered = [[names.setdefault(name, len(names)) for name in prompt] for prompt in prompts]
    return Blocks.of_prompts(numbered, tokens_each)


def _unreadable(path: Path, error: Exception) -> SpecError:
    return SpecError.at("", f"cannot be read: {error}", of=f"the trace {path}")


def _header_problems(header: Sequence[str]) -> list[Problem]:
    known = (*NEEDED, *OPTIONAL, *ANSWERED)
    twice = [name for name in ("prefix", "cached_tokens") if name in header and HASHES in header]
    meant = {name: _ELSEWHERE[name.lower()] for name in header if name.lower() in _ELSEWHERE}
    said = {text.partition(",")[0] for text in meant.values()}
    missing = [name for name in NEEDED if name not in header and name not in said]
    found = [Problem(path="line 1", message=f"column {name!r} is missing") for name in missing]
    found += [Problem(path="line 1", message=f"hash_ids say what {name} says: keep one of both") for name in twice]
    for name in dict.fromkeys(header):
        if name in meant:
            found.append(Problem(path="line 1", message=f"column {name!r}: write {meant[name]}"))
        elif name not in known:
            found.append(Problem(path="line 1", message=f"unknown column {name!r}; known: {', '.join(known)}"))
        elif header.count(name) > 1:
            found.append(Problem(path="line 1", message=f"column {name!r} comes {header.count(name)} times"))
    return found


def _rows(
    header: Sequence[str], lines: Iterable[list[str]], first_line: int, block_tokens: int, ordered: Sequence[str]
) -> tuple[list[tuple[Any, ...]], list[Problem]]:
    """Values of every line in order of the header, and the problems; ``ordered`` names times that follow each other."""
    rows: list[tuple[Any, ...]] = []
    problems: list[Problem] = []
    arrival, before = header.index(ARRIVAL), 0.0
    successive = [((a, header.index(a)), (b, header.index(b))) for a, b in pairwise(ordered)]
    for number, line in enumerate(lines, start=first_line):
        if not line:
            continue
        try:
            row = _values(header, line, block_tokens)
            if row[arrival] < before:
                raise ValueError(f"arrival_s is {row[arrival]:g}, after {before:g} on the line before; sort by arrival")
            for (earlier, first), (later, then) in successive:
                if row[then] < row[first]:
                    raise ValueError(
                        f"{later} is {row[then]:.10g}, before {earlier}, {row[first]:.10g}: give all times in seconds "
                        "on the clock of arrival_s"
                    )
        except ValueError as error:
            problems.append(Problem(path=f"line {number}", message=str(error)))
            if len(problems) == MAX_PROBLEMS:
                return rows, problems
            continue
        before = row[arrival]
        rows.append(row)
    return rows, problems


def _values(header: Sequence[str], line: Sequence[str], block_tokens: int) -> tuple[Any, ...]:
    """The numbers of one line; of blocks a tuple of them.

    Raises:
        ValueError: too many or too few of them, or one that is invalid for its column.
    """
    if len(line) != len(header):
        raise ValueError(f"{len(line)} values for {len(header)} columns")
    named = zip(header, line, strict=True)
    row: tuple[Any, ...] = tuple(_names(word) if name == HASHES else _value(name, word) for name, word in named)
    if HASHES in header:
        count, prompt = len(row[header.index(HASHES)]), row[header.index("input_length")]
        if not prompt // block_tokens <= count <= -(-prompt // block_tokens):
            raise ValueError(
                f"hash_ids names {count} blocks of {block_tokens} tokens of a prompt of {prompt}: give one for each, "
                f"or say how long they are (workload.block_tokens)"
            )
    if "cached_tokens" in header:
        cached, prompt = row[header.index("cached_tokens")], row[header.index("input_length")]
        if cached > prompt:
            raise ValueError(f"cached_tokens is {cached}, more than the prompt's {prompt}")
    return row


def _names(word: str) -> tuple[int, ...]:
    """The names of blocks, between spaces, semicolons or commas, or as a list."""
    words = _BETWEEN.split(word.strip(" []"))
    if not all(_NAME.fullmatch(one) for one in words if one):
        raise ValueError(f"hash_ids is {word.strip()[:40]!r}: give whole numbers between spaces, none below 0")
    return tuple(int(one) for one in words if one)


def _value(name: str, word: str) -> float:
    try:
        value = float(word) if name in _TIMES else int(word)
    except ValueError:
        value = math.nan
    if math.isnan(value) or not LEAST[name] <= value < MOST:
        kind = "a number of seconds" if name in _TIMES else "a whole number"
        least = "" if LEAST[name] == -math.inf else f", at least {LEAST[name]:g}"
        raise ValueError(f"{name} is {word.strip()!r}: give {kind}{least}")
    return value
