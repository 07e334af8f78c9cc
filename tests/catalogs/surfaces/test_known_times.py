"""What a surface tells twice it tells alike, and only for the same sizes."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.catalogs.surfaces.known_times import MOST_KNOWN, KnownTimes


def test_a_time_is_priced_once_for_the_same_sizes_and_again_for_others() -> None:
    known, asked = KnownTimes(), []

    def price(*, batch: object, kv_dtype: str) -> np.ndarray:
        asked.append((batch, kv_dtype))
        return np.asarray(batch, dtype=float) * (2.0 if kv_dtype == "bf16" else 1.0)

    sizes = np.array([1.0, 2.0])
    for _ in range(2):
        assert known.of(price, batch=sizes, kv_dtype="bf16").tolist() == [2.0, 4.0]
    assert len(asked) == 1
    assert known.of(price, batch=sizes, kv_dtype="fp8").tolist() == [1.0, 2.0]
    assert known.of(price, batch=sizes + 1.0, kv_dtype="fp8").tolist() == [2.0, 3.0]
    # The same numbers in another shape are another question.
    assert known.of(price, batch=sizes[:, None], kv_dtype="bf16").shape == (2, 1)
    assert len(asked) == 4


def test_nobody_changes_what_others_were_told() -> None:
    told = KnownTimes().of(lambda batch: 1.0 * batch, batch=np.array([1.0]))
    with pytest.raises(ValueError, match="read-only"):
        told[0] = 2.0


def test_it_keeps_no_more_than_it_may() -> None:
    known, asked = KnownTimes(), []
    for size in [*range(MOST_KNOWN + 1), 0]:
        known.of(lambda batch: np.array([asked.append(batch)], dtype=object), batch=size)
    assert len(asked) == MOST_KNOWN + 2  # all were forgotten
