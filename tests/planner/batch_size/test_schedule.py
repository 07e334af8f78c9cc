"""Batches and schedules of them, against closed forms and every schedule there is."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.batch_size.noise import NoiseScale, batches_around, read_noise, tokens_needed
from meshplan.planner.batch_size.schedule import Option, best_schedule

FLAT = NoiseScale(shares=(0.0,), tokens=(4e6,))
PIECES = 6


def rising(draw: random.Random) -> NoiseScale:
    start = 10 ** draw.uniform(5, 7)
    return NoiseScale(shares=(0.0, 1.0), tokens=(start, start * 10 ** draw.uniform(0, 2)))


def options(draw: random.Random, count: int = 3) -> list[Option]:
    batch = 10 ** draw.uniform(5, 6)
    rate = 1e5
    found = []
    for _ in range(count):
        found.append(Option(batch=batch, tokens_per_s=rate))
        batch, rate = batch * draw.uniform(1.5, 4.0), rate * draw.uniform(1.0, 1.8)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_no_schedule_is_better(seed: int) -> None:
    draw = random.Random(seed)
    noise, choices = rising(draw), options(draw)
    reference, tokens, change_s = choices[0].batch, 1e11, 10 ** draw.uniform(2, 5)
    found = best_schedule(choices, reference=reference, tokens=tokens, noise=noise, change_s=change_s, pieces=PIECES)
    middles = [(piece + 0.5) / PIECES for piece in range(PIECES)]
    inverse = [1.0 / float(noise.at(middle)) for middle in middles]
    scale = tokens / PIECES / (1.0 + reference * sum(inverse) / PIECES)
    least = min(
        sum(
            scale * (1.0 + inverse[piece] * choices[one].batch) / choices[one].tokens_per_s
            for piece, one in enumerate(path)
        )
        + change_s * sum(a != b for a, b in pairwise(path))
        for path in product(range(len(choices)), repeat=PIECES)
    )
    assert found.seconds == pytest.approx(least)
    assert found.seconds <= found.fixed_s * (1.0 + 1e-12)
    changes = len(found.parts) - 1
    assert sum(part.seconds for part in found.parts) + change_s * changes == pytest.approx(found.seconds)


def test_at_the_noise_scale_half_of_the_tokens_would_do() -> None:
    small = tokens_needed(1.0, reference=4e6, tokens=1e12, noise=FLAT)
    assert small == pytest.approx(0.5e12, rel=1e-6)
    assert tokens_needed(4e6, reference=4e6, tokens=1e12, noise=FLAT) == pytest.approx(1e12)


def test_a_larger_batch_never_needs_fewer_tokens() -> None:
    noise = read_noise("0:1M,0.5:4M,1:8M")
    needed = [tokens_needed(batch, reference=1e6, tokens=1e12, noise=noise) for batch in (1e5, 1e6, 4e6, 3e7)]
    assert needed == sorted(needed)


def test_noise_between_its_points_is_interpolated_in_its_logarithm() -> None:
    noise = read_noise("0:1M, 1:4M")
    assert float(noise.at(0.5)) == pytest.approx(2 * 2**20)
    assert float(noise.at(0.0)) == 2**20


@pytest.mark.parametrize("text", ["", "many", "0:1M,0:2M", "0.5:1M,0.2:2M", "1.5:1M", "0:0", "0:1M:2M", "-1"])
def test_a_wrong_noise_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--noise"):
        read_noise(text)


def test_batches_are_whole_sequences() -> None:
    sizes = batches_around(24 * 4096, sequence_length=4096, below=5, above=2)
    assert all(size % 4096 == 0 for size in sizes)
    # 24/32 of a sequence is none; 24/16 = 1.5 rounds to 2.
    assert [size // 4096 for size in sizes] == [2, 3, 6, 12, 24, 48, 96]
