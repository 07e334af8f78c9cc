"""Which batch at which part of a run.

The run is cut into K equal pieces of progress. Piece k at option j takes D₀/K · (1 + B_j/N_k) / ∫(1 + B₀/N) dx tokens,
at the option's rate; changing the option costs a time that depends on both. The least total is found by dynamic
programming over the pieces: exact on this grid, and never above the best fixed batch, which is one of its paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.batch_size.noise import NoiseScale
from meshplan.planner.core.arrays import FloatArray

PIECES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A batch that can be run.

    Args:
        batch: tokens.
        tokens_per_s: of its best plan.
    """

    batch: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the run at one batch.

    Args:
        option: number of the option.
        start, end: of the progress.
        tokens: that it takes.
        seconds: that it takes, without the change before it.
    """

    option: int
    start: float
    end: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The best schedule, and the best fixed batch beside it.

    Args:
        parts: one after the other.
        seconds: of the run, changes included.
        fixed: number of the best single option.
        fixed_s: seconds with it.
    """

    parts: tuple[Part, ...]
    seconds: float
    fixed: int
    fixed_s: float


def best_schedule(
    options: Sequence[Option],
    *,
    reference: float,
    tokens: float,
    noise: NoiseScale,
    change_s: FloatArray | float,
    pieces: int = PIECES,
) -> Schedule:
    """The batch of each part of a run with the least time.

    Args:
        options: batches and their rates.
        reference: B₀, tokens.
        tokens: D₀, tokens that the run would take at the reference batch.
        noise: N.
        change_s: seconds that another batch costs, the same for all or [from, to]: a restart where the layout changes.
        pieces: K.
    """
    need = _tokens(options, reference=reference, tokens=tokens, noise=noise, pieces=pieces)
    rates = np.array([one.tokens_per_s for one in options])
    seconds = need / rates
    fixed = int(np.argmin(seconds.sum(axis=0)))
    costs = np.broadcast_to(np.asarray(change_s, dtype=float), (len(options), len(options))).copy()
    np.fill_diagonal(costs, 0.0)
    best, came_from = seconds[0].copy(), np.zeros((pieces, len(options)), dtype=int)
    for piece in range(1, pieces):
        arrives = best[:, None] + costs
        came_from[piece] = np.argmin(arrives, axis=0)
        best = arrives.min(axis=0) + seconds[piece]
    choice = [int(np.argmin(best))]
    for piece in range(pieces - 1, 0, -1):
        choice.append(int(came_from[piece, choice[-1]]))
    return Schedule(
        parts=_parts(choice[::-1], need, seconds),
        seconds=float(best.min()),
        fixed=fixed,
        fixed_s=float(seconds[:, fixed].sum()),
    )


def _tokens(
    options: Sequence[Option], *, reference: float, tokens: float, noise: NoiseScale, pieces: int
) -> FloatArray:
    """Tokens of each piece at each option, [pieces, options]."""
    inverse = 1.0 / noise.at((np.arange(pieces) + 0.5) / pieces)
    batches = np.array([one.batch for one in options])
    scale = tokens / pieces / (1.0 + reference * float(inverse.mean()))
    return np.asarray(scale * (1.0 + inverse[:, None] * batches[None, :]))


def _parts(choice: Sequence[int], need: FloatArray, seconds: FloatArray) -> tuple[Part, ...]:
    """Neighbouring pieces of one option as one part."""
    parts: list[Part] = []
    pieces, start = len(choice), 0
    for end in range(1, pieces + 1):
        if end == pieces or choice[end] != choice[start]:
            option = choice[start]
            parts.append(
                Part(
                    option=option,
                    start=start / pieces,
                    end=end / pieces,
                    tokens=float(need[start:end, option].sum()),
                    seconds=float(seconds[start:end, option].sum()),
                )
            )
            start = end
    return tuple(parts)
