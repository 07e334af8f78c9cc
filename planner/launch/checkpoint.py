"""Which checkpoint a serving plan starts: the one that the question names, where its name tells more than its shape.

The catalog knows a model by one address. Who asks for ``Qwen/Qwen3-32B-FP8`` or ``deepseek-ai/DeepSeek-V3-0324`` wants
those weights, and a quantised checkpoint is read as it is: no engine could make 4-bit integers of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.names import scheme_of
from meshplan.planner.emit.text import published_name

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Weights to load.

    Args:
        path: Hugging Face id or folder; empty: as the catalog's entry was published.
        is_quantized: it holds the plan's formats; None: as the model is published.
    """

    path: str = ""
    is_quantized: bool | None = None


def checkpoint_of(written: str, shape: ModelShape, pools: Sequence[Mapping[str, Any]], given: str) -> Checkpoint:
    """The checkpoint of a plan.

    Args:
        written: the model as the spec names it.
        shape: what it was planned as.
        pools: of the plan's configuration: the formats of their weights.
        given: what the user names for these files; it wins, and is a copy of what the spec names if its own name tells
            no format.
    """
    formats = [pool.get("quantization") or {} for pool in pools]
    scheme = scheme_of(given) or scheme_of(written)
    holds = bool(scheme) and all(_made_of(str(one.get("mlp", "")), scheme) for one in formats)
    named = written if _is_named(written, shape) and (holds or not scheme) else ""
    return Checkpoint(path=given or named, is_quantized=True if holds and (given or named) else None)


def _made_of(planned: str, scheme: str) -> bool:
    """``fp8_block`` is what a checkpoint named FP8 may hold: names do not tell the scales."""
    return planned == scheme or planned.startswith(f"{scheme}_")


def _is_named(written: str, shape: ModelShape) -> bool:
    """Whether the spec names a checkpoint on the hub other than the one of the catalog; a path is none."""
    published = published_name(shape.source)
    is_path = not _HUB_ID.fullmatch(written) or written.endswith(".json")
    return bool(published) and not is_path and written.lower() != published.lower()
