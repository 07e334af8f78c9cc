"""How Megatron-LM writes the split of layers over pipeline stages: by a number where even, else by a layout."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.terms import Arguments, count, stated
from meshplan.planner.emit.training.megatron.hybrid import PATTERN, has_pattern, letters
from meshplan.planner.emit.training.terms import TrainingRows
from meshplan.planner.training.problem.problem import TrainingConfig

_LAYOUT = re.compile(r"[EtmL|()*0-9]+")
_PATTERN = re.compile(r"[M*|E-]{1,10000}")
_REPEATED = re.compile(r"(?P<unit>[EtmL|]|\([EtmL|]*\))\*(?P<times>[0-9]{1,4})")
_LONGEST_LAYOUT = 10_000  # letters; layers of the deepest models are in the hundreds
_rows = TrainingRows("parser")


def pipeline_layout(config: TrainingConfig, shape: ModelShape) -> str:
    """``--pipeline-model-parallel-layout``: E embedding, t layer, m multi-token prediction, L loss, | next chunk.

    Chunks are listed in the order in which a token visits them, which is the order of ``layers_per_chunk``.
    """
    chunks = [f"t*{layers}" if layers > 1 else "t" * layers for layers in config.layers_per_chunk]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * shape.num_nextn_predict_layers + "L"
    return "|".join(chunks)


def hybrid_pattern(config: TrainingConfig, shape: ModelShape) -> str:
    """``--hybrid-layer-pattern``: a letter for each block, | between the chunks as a token visits them."""
    each, chunks = iter(letters(shape)), []
    for layers in config.layers_per_chunk:
        chunks.append("".join(itertools.islice(each, layers)))
    return "|".join(chunks)


def read_layout(layout: str) -> tuple[int, ...]:
    """Layers of each chunk, from a layout: letters, ``x*n`` and ``(…)*n``; commas are ignored.

    >>> read_layout("E|(t|)*3,tm|L")
    (0, 1, 1, 1, 1, 0)

    Raises:
        ValueError: it is no layout, or longer than any model.
    """
    text = layout.replace(",", "")
    if not _LAYOUT.fullmatch(text):
        raise ValueError(f"the layout {layout!r} has signs other than E t m L | ( ) * and numbers")
    while (repeated := _REPEATED.search(text)) is not None:
        times, unit = int(repeated["times"]), repeated["unit"].strip("()")
        if times * len(unit) > _LONGEST_LAYOUT:
            raise ValueError(f"the layout {layout!r} is longer than {_LONGEST_LAYOUT} letters")
        text = text[: repeated.start()] + unit * times + text[repeated.end() :]
        if len(text) > _LONGEST_LAYOUT:
            raise ValueError(f"the layout {layout!r} is longer than {_LONGEST_LAYOUT} letters")
    if not set(text) <= set("EtmL|"):
        raise ValueError(f"the layout {layout!r} has a parenthesis or a number that belongs to nothing")
    return tuple(chunk.count("t") for chunk in text.split("|"))


def read_pattern(pattern: str) -> tuple[int, ...]:
    """Blocks of each chunk, from a pattern of letters.

    >>> read_pattern("M-M-|*-ME")
    (4, 4)

    Raises:
        ValueError: it has other signs, such as those of a draft's blocks.
    """
    if not _PATTERN.fullmatch(pattern):
        raise ValueError(f"{PATTERN} {pattern!r} has signs other than M * - E |")
    return tuple(map(len, pattern.split("|")))


def _layers(config: TrainingConfig, shape: ModelShape) -> Arguments:
    """The split of the layers, which also determines the number of virtual stages; of a hybrid its blocks, too."""
    if has_pattern(shape):
        return {PATTERN: hybrid_pattern(config, shape)}
    if len(set(config.layers_per_chunk)) > 1:
        return {"--pipeline-model-parallel-layout": pipeline_layout(config, shape)}
    if config.virtual_pipeline_stages > 1:
        return {"--num-virtual-stages-per-pipeline-rank": str(config.virtual_pipeline_stages)}
    return {}


def _read_layers(arguments: Arguments) -> Mapping[str, Any]:
    layout, pattern = arguments.get("--pipeline-model-parallel-layout"), arguments.get(PATTERN)
    stages = count(arguments, "--pipeline-model-parallel-size") or 1
    if layout is not None:
        chunks = read_layout(layout)
        if len(chunks) % stages:
            raise ValueError(f"the layout {layout!r} has {len(chunks)} chunks for {stages} stages")
        return {"layers_per_chunk": chunks, "virtual_pipeline_stages": len(chunks) // stages}
    if pattern is not None and len(blocks := read_pattern(str(pattern))) > 1:
        if len(blocks) % stages:
            raise ValueError(f"{PATTERN} has {len(blocks)} chunks for {stages} stages")
        return {"blocks_per_chunk": blocks, "virtual_pipeline_stages": len(blocks) // stages}
    layers_per_chunk = count(arguments, "--num-layers-per-virtual-pipeline-stage")
    if layers_per_chunk is None:
        return stated(virtual_pipeline_stages=count(arguments, "--num-virtual-stages-per-pipeline-rank"))
    layers = count(arguments, "--num-layers")
    if layers is None or layers % (stages * layers_per_chunk):
        raise ValueError(f"{layers_per_chunk} layers a virtual stage × {stages} stages do not divide {layers} layers")
    return {"virtual_pipeline_stages": layers // (stages * layers_per_chunk)}


LAYERS_PER_CHUNK = _rows.term(
    "layers_per_chunk",
    _layers,
    _read_layers,
    "--pipeline-model-parallel-layout",
    PATTERN,
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
    expressed_by="--pipeline-model-parallel-layout (uneven), --num-virtual-stages-per-pipeline-rank (even), "
    f"{PATTERN} (hybrids with Mamba-2)",
)
