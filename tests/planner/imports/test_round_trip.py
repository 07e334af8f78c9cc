"""What an emitter writes, the reader of the same target understands: for random legal plans of every framework."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL, config_for, request_for
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from read_back_cases import FILES, HANDED_OVER, differences, num_devices, read_back

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training.megatron.layers import pipeline_layout, read_layout
from meshplan.planner.emit.training.megatron.terms import TERMS
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.imports.command import read_inputs
from meshplan.planner.launch.registry import emit
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.switches import RECOMPUTE_MODULES, in_order

DEGREES = {
    "tensor_parallel": st.sampled_from((1, 2, 4, 8)),
    "context_parallel": st.sampled_from((1, 1, 2)),
    "data_parallel": st.sampled_from((1, 2, 3, 4, 8)),
    "micro_batch_size": st.sampled_from((1, 2)),
    "num_microbatches": st.sampled_from((4, 8, 12)),
}
MEGATRON_STYLES = ("ring", "all-gather", "all-to-all", "all-to-all+ring")
ZERO_3 = 3
RECOMPUTE = st.sampled_from(("none", "selective", "block", "full"))


@st.composite
def megatron_plans(draw: st.DrawFn) -> tuple[ModelShape, TrainingConfig]:
    shape = draw(st.sampled_from((LLAMA_70B, MIXTRAL, DEEPSEEK_V3)))
    stages, virtual = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    choices: dict[str, Any] = {
        **draw(st.fixed_dictionaries(DEGREES)),
        "pipeline_parallel": stages,
        "virtual_pipeline_stages": virtual if stages > 1 else 1,
        "zero_stage": draw(st.sampled_from((0, 1, 3))),
        "activation_recompute": draw(RECOMPUTE),
        "precision": draw(st.sampled_from(MEGATRON.precisions)),
        "sequence_parallel": draw(st.booleans()),
    }
    if choices["zero_stage"] == 1:
        choices["optimizer_offload"] = draw(st.booleans())
        moments = "default" if choices["optimizer_offload"] else "adamw-bf16-moments"
        choices["optimizer"] = draw(st.sampled_from(("default", moments)))
    if choices["context_parallel"] > 1:
        style = draw(st.sampled_from(MEGATRON_STYLES))
        both = style == "all-to-all+ring"
        choices |= {"context_parallel_style": style, "context_parallel_heads": 2 if both else 1}
        choices["context_parallel"] *= 1 + both
    if choices["activation_recompute"] == "block":
        choices["recompute_num_layers"] = draw(st.integers(1, 9))
    if shape.moe is not None:
        choices["expert_parallel"] = draw(st.sampled_from((1, 2, 8)))
        choices["expert_tensor_parallel"] = draw(st.sampled_from((1, 2)))
        choices["expert_capacity_factor"] = draw(st.sampled_from((0.0, 0.5, 1.0, 1.25)))
        choices["expert_dispatcher"] = draw(st.sampled_from(("alltoall", "deepep", "hybridep")))
        choices["expert_parallel_overlap"] = draw(st.booleans())
    choices["gradient_precision"] = draw(st.sampled_from(("default", "bf16")))
    choices["cuda_graphs"] = draw(st.sampled_from(("none", "partial", "full")))
    if choices["activation_recompute"] == "selective":
        chosen = draw(st.sets(st.sampled_from(RECOMPUTE_MODULES), min_size=1))
        choices["recompute_modules"] = in_order(chosen)
    chunks = stages * choices["virtual_pipeline_stages"]
    if draw(st.booleans()):
        cuts = draw(
            st.lists(st.integers(1, shape.num_hidden_layers - 1), min_size=chunks - 1, max_size=chunks - 1, unique=True)
        )
        edges = [0, *sorted(cuts), shape.num_hidden_layers]
        choices["layers_per_chunk"] = tuple(b - a for a, b in pairwise(edges))
    if choices["zero_stage"]:
        choices["data_parallel_shard"] = draw(st.sampled_from((choices["data_parallel"], 1)))
    if choices["zero_stage"] == ZERO_3 and choices.get("data_parallel_shard", 0) < choices["data_parallel"]:
        choices["outer_zero_stage"] = draw(st.sampled_from((0, 1)))
    return shape, config_for(shape, **choices)


@st.composite
def pytorch_plans(draw: st.DrawFn, target: str) -> tuple[ModelShape, TrainingConfig]:
    rules = FRAMEWORKS[target]
    choices: dict[str, Any] = {
        **draw(st.fixed_dictionaries(DEGREES)),
        "pipeline_parallel": draw(st.sampled_from((1, 2, 4))) if target == "torchtitan" else 1,
        "zero_stage": draw(st.sampled_from((0, 1, 2, 3))),
        "activation_recompute": draw(st.sampled_from(rules.recompute_modes)),
        "precision": draw(st.sampled_from(rules.precisions)),
        "sequence_parallel": draw(st.booleans()) and rules.sequence_parallel,
    }
    if target == "deepspeed" and choices["zero_stage"]:
        choices["optimizer_offload"] = draw(st.booleans())
    if target == "deepspeed" and choices["zero_stage"] == ZERO_3 and choices["data_parallel"] > 2:
        choices["zero_hpz_partition_size"] = draw(st.sampled_from((1, 2)))
    if target == "torchtitan" and choices["context_parallel"] > 1:
        choices["context_parallel_style"] = draw(st.sampled_from(("ring", "ring-plain")))
    if choices["zero_stage"] == 3:
        choices["parameter_offload"] = draw(st.booleans())
        if target == "deepspeed" and (choices["parameter_offload"] or choices["optimizer_offload"]):
            choices["offload_to"] = draw(st.sampled_from(("host", "nvme")))
        elif target != "deepspeed":
            choices["optimizer_offload"] = choices["parameter_offload"]
    if target != "torchtitan" and choices["activation_recompute"] == "full":
        choices["activation_offload"] = draw(st.booleans())
    return LLAMA_70B, config_for(LLAMA_70B, **choices)


def returns(target: str, shape: ModelShape, config: TrainingConfig) -> None:
    """Nothing is changed, nothing contradicts, and the files ask for the plan's devices."""
    assume(not FRAMEWORKS[target].broken(shape, config))
    assume(config.world_size <= 8 or config.world_size % 8 == 0 or target != "accelerate")
    assume(FRAMEWORKS[target].splits_as(config.layers_per_chunk))
    script = "train.py" if target in {"deepspeed", "accelerate"} else ""
    emitted = emit(target, replace(request_for(shape, config, hosts=()), script=script))
    assert num_devices(emitted) == config.world_size
    with tempfile.TemporaryDirectory() as folder:
        for extra in ((), (HANDED_OVER,)) if script else ((),):
            reading = read_back(target, emitted, Path(folder), extra=extra)
            assert reading.problems == []
            assert differences(reading, config, handed=not script or bool(extra)) == {}


@given(plan=megatron_plans())
@settings(max_examples=150, deadline=None)
def test_megatron_plans_read_back_unchanged(plan: tuple[ModelShape, TrainingConfig]) -> None:
    returns("megatron", *plan)


# Those of fine-tuning have a suite of their own: tests/planner/emit/training/test_finetuning.py.
@pytest.mark.parametrize("target", sorted(FILES.keys() - {"megatron", "axolotl", "torchtune"}))
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_plans_of_pytorch_frameworks_read_back_unchanged(target: str, data: st.DataObject) -> None:
    returns(target, *data.draw(pytorch_plans(target)))


@given(layers=st.lists(st.integers(0, 12), min_size=1, max_size=16))
def test_layouts_return(layers: list[int]) -> None:
    config = config_for(LLAMA_70B, pipeline_parallel=len(layers), layers_per_chunk=tuple(layers))
    assert read_layout(pipeline_layout(config, DEEPSEEK_V3)) == tuple(layers)


@pytest.mark.parametrize("text", ["", "E|t|x|L", "(tt", "3*t", "t*99999", "(" * 50 + "t" + ")*9" * 50, "E|t*0|L)"])
def test_layouts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="layout"):
        read_layout(text)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_every_argument_of_a_row_is_one_of_its_keys(term: Any) -> None:
    for zero in (0, 1, 2, 3):
        for recompute in ("none", "selective", "full"):
            for precision in MEGATRON.precisions:
                config = config_for(
                    MIXTRAL,
                    tensor_parallel=2,
                    pipeline_parallel=4,
                    virtual_pipeline_stages=2,
                    data_parallel=4,
                    data_parallel_shard=2 if zero else 1,
                    zero_stage=zero,
                    activation_recompute=recompute,
                    precision=precision,
                )
                assert term.write(config, MIXTRAL).keys() <= set(term.keys)


@pytest.mark.parametrize(("target", "stages", "zero"), [("megatron", 2, 1), ("torchtitan", 1, 2)])
def test_the_written_script_is_read_with_its_flags(target: str, stages: int, zero: int, tmp_path: Path) -> None:
    """The whole launch script, as a user finds it: its flags and processes stand elsewhere than in the command."""
    choices = {"tensor_parallel": 4, "data_parallel": 4, "pipeline_parallel": stages, "zero_stage": zero}
    config = config_for(LLAMA_70B, **choices)
    write_artifacts(emit(target, request_for(LLAMA_70B, config, hosts=())).artifacts, tmp_path, force=True)
    reading = read_inputs([str(tmp_path / "launch.sh")])
    assert (reading.target, reading.problems) == (target, [])
    read = {name: reading.values[name] for name in ("tensor_parallel", "pipeline_parallel")}
    assert read == {"tensor_parallel": 4, "pipeline_parallel": stages}
    assert reading.launch.num_devices == config.world_size
