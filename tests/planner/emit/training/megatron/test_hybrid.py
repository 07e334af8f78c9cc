"""Hybrids as Megatron-LM flags: sizes come back from a mixer's totals, letters are the blocks, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from emit_cases import config_for, request_for

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.config import shape_from_config
from meshplan.catalogs.models.layers import gated_delta, mamba2
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training.megatron import job as emitter
from meshplan.planner.emit.training.megatron.hybrid import letters, missing_part
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON

COUNTS = Path(__file__).parents[4] / "catalogs" / "models" / "hybrid_parameter_counts.json"
FAMILIES = json.loads(COUNTS.read_text(encoding="utf-8"))["families"]


def read(name: str, **changes: Any) -> ModelShape:
    return shape_from_config(FAMILIES[name]["config"] | changes, slug="test")


def test_sizes_come_back_from_the_totals() -> None:
    for case in FAMILIES.values():
        config = case["config"]
        shape = shape_from_config(config, slug="test")
        assert shape.blocks is not None
        mixer = shape.blocks.recurrent
        if mixer is not None and mixer.kind == "mamba-2":
            found = mamba2.sizes(mixer)
            state = config.get("ssm_state_size", config.get("mamba_d_state"))
            groups = config.get("n_groups", config.get("mamba_n_groups"))
            heads = config.get("mamba_num_heads", config.get("mamba_n_heads"))
            assert (found.num_heads, found.state_size, found.num_groups) == (heads, state, groups)
        if mixer is not None and mixer.kind == "gated-delta" and "linear_num_key_heads" in config:
            delta = gated_delta.sizes(mixer)
            names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
            assert [getattr(delta, name) for name in names] == [config[f"linear_{name}"] for name in names]
            assert delta.kernel == config["linear_conv_kernel_dim"]


def test_letters_are_the_blocks() -> None:
    assert "".join(letters(read("nemotron_h"))).replace("*", "").strip("M-E") == ""
    granite = read("granitemoehybrid")
    assert all(len(layer) == 2 for layer in letters(granite))
    assert "".join(letters(granite)).count("M") == granite.num_recurrent_layers


@pytest.mark.parametrize(
    ("name", "part"),
    [("jamba", "mamba-1"), ("falcon_h1", "side by side"), ("lfm2", "short-convolution"), ("minimax", "lightning")],
)
def test_what_has_no_flags(name: str, part: str) -> None:
    assert part in missing_part(read(name))


def test_pattern_takes_the_place_of_layers_and_layout() -> None:
    shape = read("nemotron_h")
    layers = (shape.num_hidden_layers - 3, 3)
    config = config_for(shape, pipeline_parallel=2, layers_per_chunk=layers)
    flags = {flag[0]: flag[1:] for flag in emitter.unchecked_flags(config, shape)}
    assert not {"--num-layers", "--pipeline-model-parallel-layout", "--moe-layer-freq"} & set(flags)
    (pattern,) = flags["--hybrid-layer-pattern"]
    assert [len(part) for part in pattern.split("|")] == list(layers)
    assert 'program=("$MEGATRON_LM/pretrain_hybrid.py")' in emitter.job(request_for(shape, config)).program


def test_context_and_tensor_parallelism_of_recurrent_layers() -> None:
    """Whole groups of heads on a rank; whole sequences but on Megatron-LM, which exchanges heads for tokens."""
    shape = read("granitemoehybrid")
    split = config_for(shape, context_parallel=2)
    assert not MEGATRON.broken(shape, split)
    assert ("--context-parallel-size", "2") in emitter.unchecked_flags(split, shape)
    assert "recurrent_layers_keep_whole_sequences" in {rule.name for rule in ANY_FRAMEWORK.broken(shape, split)}
    wide = {rule.name for rule in MEGATRON.broken(shape, config_for(shape, tensor_parallel=16))}
    assert "state_space_groups_divisible_by_tensor_parallel" in wide
    with pytest.raises(CannotExpressError, match="heads of the recurrent layers"):
        emitter.arguments(request_for(shape, config_for(shape, context_parallel=3)))
