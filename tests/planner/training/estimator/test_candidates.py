"""Dealing layers to stages: every layer lies somewhere once, and alike stages are one class."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, MOE, WINDOWED
from emit_cases import DEEPSEEK_V3, GPT_OSS_20B, LLAMA_70B
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.training.estimator.candidates import LayerKind, PipelineSplit, layer_kinds, split_layers
from meshplan.planner.training.problem.layers import split_layers_evenly


def split_of(shape, stages: int, chunks: int = 1, layers: tuple[int, ...] | None = None) -> PipelineSplit:
    return split_layers(
        shape,
        pipeline_parallel=stages,
        virtual_pipeline_stages=chunks,
        layers_per_chunk=layers or split_layers_evenly(shape.num_hidden_layers, stages * chunks),
        schedule="1f1b",
    )


def test_kinds_of_layers() -> None:
    assert layer_kinds(DENSE) == ((LayerKind(is_moe=False, window=None),), (0,) * 6)
    kinds, which = layer_kinds(DEEPSEEK_V3)
    assert [kind.is_moe for kind in kinds] == [False, True]
    assert which == (0,) * 3 + (1,) * 58
    kinds, which = layer_kinds(GPT_OSS_20B)
    assert [kind.window for kind in kinds] == [128, None]
    assert which == (0, 1) * 12


def test_even_stages_fall_into_three_classes() -> None:
    classes = split_of(LLAMA_70B, 8).classes
    assert [(stage.layers, stage.first_index, stage.count) for stage in classes] == [
        ((10,), 0, 1),
        ((10,), 1, 6),
        ((10,), 7, 1),
    ]
    assert [(stage.has_embedding, stage.has_head) for stage in classes] == [
        (True, False),
        (False, False),
        (False, True),
    ]


def test_first_dense_layers_lie_on_the_first_stage() -> None:
    """DeepSeek-V3 on 16 stages: 61 layers, the first three dense, as 3, 4 × 13, 3 + … with the ends counted."""
    split = split_of(DEEPSEEK_V3, 16)
    assert sum(split.layers_per_chunk) == 61
    first = split.classes[0]
    assert first.has_embedding
    assert first.layers == (3, split.layers_per_chunk[0] - 3)
    assert all(stage.layers[0] == 0 for stage in split.classes[1:])


def test_interleaved_chunks_go_round_the_stages() -> None:
    """Two stages of three chunks: stage 0 holds chunks 0, 2, 4 (layers 0, 2, 4), which are windowed."""
    split = split_of(WINDOWED, 2, 3)
    assert [stage.layers for stage in split.classes] == [(3, 0), (0, 3)]


def test_one_stage_has_both_ends() -> None:
    (stage,) = split_of(MOE, 1).classes
    assert (stage.has_embedding, stage.has_head, stage.layers, stage.count) == (True, True, (1, 3), 1)


@given(st.data())
def test_no_layer_is_lost(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 40))
    shape = replace(
        DENSE,
        num_hidden_layers=layers,
        sliding_windows=tuple(data.draw(st.lists(st.sampled_from((None, 128, 512)), min_size=layers, max_size=layers))),
    )
    stages = data.draw(st.integers(1, layers))
    chunks = data.draw(st.integers(1, layers // stages)) if stages > 1 else 1
    dealt = data.draw(st.lists(st.integers(0, 5), min_size=stages * chunks - 1, max_size=stages * chunks - 1))
    if sum(dealt) > layers:
        dealt = [0] * len(dealt)
    split = split_of(shape, stages, chunks, (*dealt, layers - sum(dealt)))
    kinds, which = layer_kinds(shape)
    for index in range(len(kinds)):
        assert sum(stage.layers[index] * stage.count for stage in split.classes) == which.count(index)
    assert sum(stage.count for stage in split.classes) == stages
    assert sum(stage.count for stage in split.classes if stage.has_embedding) == 1
    assert sum(stage.count for stage in split.classes if stage.has_head) == 1


@pytest.mark.parametrize("layers", [7, 22, 61, 80, 126])
def test_uneven_layers_differ_by_little(layers: int) -> None:
    """Away from the two ends, which carry the embedding and the LM head, stages differ by one layer."""
    for stages in range(2, layers // 2):
        dealt = split_layers_evenly(layers, stages)
        inner = dealt[1:-1]
        assert sum(dealt) == layers
        assert max(inner, default=0) - min(inner, default=0) <= 1
        assert max(dealt) <= -(-(layers + 2) // stages)
