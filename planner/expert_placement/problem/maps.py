"""A placement as a file: JSON with the one key ``physical_to_logical_map``, [layers][slots], the expert in each slot.

It is what ``meshplan experts --emit sglang`` writes and what SGLang's ``--init-expert-location`` loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.untrusted.documents import DocumentError, parse, read_text
from meshplan.catalogs.untrusted.limits import MAX_JSON_BYTES
from meshplan.planner.core.arrays import IntArray

MAP_KEY = "physical_to_logical_map"
_AXES = 2  # [layers, slots]


def read_map(path: Path, *, num_experts: int) -> IntArray:
    """The [L, S] map of a file.

    Args:
        path: of the file.
        num_experts: experts of a layer; each has at least one slot in every layer.

    Raises:
        SpecError: unreadable, of another form, or a layer lacks an expert.
    """
    try:
        document = parse(read_text(path, MAX_JSON_BYTES), is_json=True, name="it")
    except (OSError, DocumentError) as error:
        raise _error(path, f"cannot be read: {error}") from error
    if not isinstance(document, dict) or set(document) != {MAP_KEY}:
        raise _error(path, f"is no map of experts: a JSON object with the one key {MAP_KEY!r} is expected")
    try:
        slots = np.asarray(document[MAP_KEY])
    except ValueError as error:
        raise _error(path, f"has layers of different lengths: {error}") from error
    return sound_map(slots, num_experts=num_experts, where=str(path))


def sound_map(slots: NDArray[Any], *, num_experts: int, where: str) -> IntArray:
    """The map as whole numbers.

    Args:
        slots: what was read.
        num_experts: experts of a layer.
        where: for the message.

    Raises:
        SpecError: other than two axes or whole numbers, an unknown expert, or a layer that lacks one.
    """
    if slots.ndim != _AXES or slots.size == 0 or slots.dtype.kind not in "iu":
        raise _error(Path(where), f"has shape {list(slots.shape)} of {slots.dtype}; whole numbers [layers][slots]")
    if slots.min() < 0 or slots.max() >= num_experts:
        raise _error(Path(where), f"holds experts outside 0..{num_experts - 1}")
    for layer, row in enumerate(slots):
        missing = np.setdiff1d(np.arange(num_experts), row)
        if missing.size:
            raise _error(Path(where), f"layer {layer} has no slot for expert {missing[0]}")
    return slots.astype(np.int64)


def _error(path: Path, message: str) -> SpecError:
    return SpecError.at(str(path), message, of="the map of experts")
