"""The gradient noise scale of a run, and how many tokens a batch needs.

Notation
    B     tokens of a global batch           x    progress of the run, 0 … 1
    N(x)  gradient noise scale, tokens       S    steps        D   tokens, D = B S

Law. A step of a batch B gains as much as B/(B + N) steps of an endless batch (McCandlish et al., arXiv:1812.06162,
eq. 2.11), so the tokens for a piece of progress are in proportion to

    1 + B/N(x)

and a run of D₀ tokens at the batch B₀ reaches the same loss at B with

    D(B) = D₀ ∫ (1 + B/N) dx / ∫ (1 + B₀/N) dx

x counts progress, in which all batches agree, not tokens. N is interpolated in its logarithm between the points given.

Assumptions  the learning rate is tuned for each batch; N does not depend on B. Both hold up to a few times N.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.errors import SpecError, UnitError
from meshplan.catalogs.units import parse_tokens
from meshplan.planner.core.arrays import FloatArray

MOST_TOKENS = 10**12
MOST_POINTS = 1000
_POINT = re.compile(r"\s*(?:(?P<share>[0-9.]+)\s*:)?\s*(?P<tokens>[^:]+)")


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """N(x) by its points.

    Args:
        shares: x, ascending.
        tokens: N there.
    """

    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    def at(self, progress: FloatArray) -> FloatArray:
        """N(x), tokens, of any shape."""
        logarithms = np.log(np.asarray(self.tokens))
        return np.asarray(np.exp(np.interp(progress, self.shares, logarithms)))


def read_noise(text: str, path: str = "--noise") -> NoiseScale:
    """A noise scale as users write it: ``4M``, or points ``0:1M,0.5:4M,1:8M``.

    Args:
        text: as written.
        path: where, for what is said of a wrong one.

    Raises:
        SpecError: no numbers, out of range, or points that do not ascend.
    """
    points = []
    for part in text.split(","):
        found = _POINT.fullmatch(part)
        try:
            if found is None:
                raise UnitError(f"{part!r} is no point")
            share = float(found["share"]) if found["share"] else 0.0
            points.append((share, float(parse_tokens(found["tokens"].strip(), least=1, most=MOST_TOKENS))))
        except (UnitError, ValueError) as error:
            raise _wrong(f"{part.strip()!r}: {error}", path) from error
    shares = [share for share, _ in points]
    if len(points) > MOST_POINTS:
        raise _wrong(f"{len(points)} points; at most {MOST_POINTS}", path)
    if any(not 0.0 <= share <= 1.0 for share in shares) or shares != sorted(set(shares)):
        raise _wrong("the shares of the run must ascend from 0 to 1", path)
    return NoiseScale(shares=tuple(shares), tokens=tuple(tokens for _, tokens in points))


def _wrong(why: str, path: str) -> SpecError:
    return SpecError.at(path, f"{why}; write 4M, or 0:1M,0.5:4M,1:8M")


def tokens_needed(batch: float, *, reference: float, tokens: float, noise: NoiseScale, slices: int = 1024) -> float:
    """D(B), tokens to the loss that ``tokens`` reach at the reference batch.

    Args:
        batch: B, tokens.
        reference: B₀, tokens.
        tokens: D₀.
        noise: N.
        slices: of the run, for the integral.
    """
    middles = (np.arange(slices) + 0.5) / slices
    inverse = float(np.mean(1.0 / noise.at(middles)))
    return tokens * (1.0 + batch * inverse) / (1.0 + reference * inverse)


def batches_around(reference: int, *, sequence_length: int, below: int, above: int) -> Sequence[int]:
    """Halves and doubles of a batch that are whole sequences, tokens, ascending."""
    sizes = [reference * 2.0**power for power in range(-below, above + 1)]
    whole = {sequence_length * round(size / sequence_length) for size in sizes if size >= sequence_length}
    return sorted(int(size) for size in whole if math.isfinite(size))


def batches_for(noise: NoiseScale, *, sequence_length: int, devices: int) -> Sequence[int]:
    """Batches to compare where the user names none, tokens, ascending.

    Sequences are the number of devices times powers of two, so that data parallelism divides them; from an eighth of
    the least noise scale, where a batch learns from eight of nine tokens already, to twice the largest, from where
    doubling the batch takes at least five thirds of the tokens. Where an end trains soonest, a study goes on beyond it.

    Args:
        noise: N.
        sequence_length: tokens.
        devices: of the cluster.
    """
    least, most = min(noise.tokens) / 8.0, max(noise.tokens) * 2.0
    counts = {max(1, round(devices * 2.0**power)) for power in range(-12, 21)}
    inside = sorted(count for count in counts if least <= count * sequence_length <= most)
    nearest = min(counts, key=lambda count: abs(math.log(count * sequence_length / math.sqrt(least * most))))
    return [count * sequence_length for count in inside or [nearest]]
