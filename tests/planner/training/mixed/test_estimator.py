"""A mixed cluster of equal devices costs what the uniform one costs; what is slower never makes a step shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, MOE, WINDOWED, configured, machine_with, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_cases import as_stages, pooled

from meshplan.catalogs.constants.training import FrameworkRecipe
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.mixed.estimator import price_mixed
from meshplan.planner.training.mixed.stages import MixedConfig, Share, Stage

NODES = 8
# Between stages as DeepSpeed of 2021 sends.
IN_TURN = FrameworkRecipe(sends_whole_gradients=True, sends_attention_mask=True, sends_in_turn=True)


@st.composite
def uniform_cases(draw: st.DrawFn):
    """A uniform question of whole nodes, a configuration of it, and a cut between two stages."""
    shape = draw(st.sampled_from([DENSE, MOE, WINDOWED, replace(DENSE, tie_word_embeddings=True)]))
    tensor, data, stages = (draw(st.sampled_from(values)) for values in ((1, 2, 4), (1, 2, 4), (1, 2, 4)))
    micro, rounds = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4, 8]))
    batch = micro * data * rounds
    problem = problem_of(shape, num_devices=8 * NODES, global_batch_size=batch, machine=machine_with(8 * NODES))
    problem = replace(
        problem, calibration=replace(problem.calibration, recipe=draw(st.sampled_from([FrameworkRecipe(), IN_TURN])))
    )
    layers = shape.num_hidden_layers
    cuts = [layers // stages] * stages
    cuts[0] += layers - sum(cuts)
    config = configured(
        problem,
        tensor_parallel=tensor,
        data_parallel=data,
        pipeline_parallel=stages,
        layers_per_chunk=tuple(cuts),
        micro_batch_size=micro,
        zero_stage=draw(st.sampled_from([0, 1])),
        sequence_parallel=tensor > 1,
        activation_recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )
    return problem, config, draw(st.integers(0, stages))


@settings(max_examples=40, deadline=None)
@given(uniform_cases())
def test_one_pool_costs_what_the_uniform_estimator_says(case) -> None:
    problem, config, _ = case
    uniform = price(problem, config)
    mixed = price_mixed(pooled([problem]), as_stages(config, [0] * config.pipeline_parallel))
    assert mixed.step_s == pytest.approx(uniform.step_s, rel=1e-12)
    assert max(one.safe_bytes for one in mixed.shares) == pytest.approx(uniform.safe_bytes, rel=1e-12)
    for name, seconds in uniform.breakdown_s.items():
        assert float(mixed.estimate.breakdown_s[name][0]) == pytest.approx(seconds, rel=1e-9, abs=1e-15)


@settings(max_examples=40, deadline=None)
@given(uniform_cases())
def test_two_equal_pools_cost_what_one_costs(case) -> None:
    problem, config, cut = case
    # A node belongs to one pool: the cut is where the uniform pipeline crosses nodes, too.
    if config.tensor_parallel * config.data_parallel % problem.machine.domain_size:
        return
    pools = [int(stage >= cut) for stage in range(config.pipeline_parallel)]
    mixed = price_mixed(pooled([problem, problem]), as_stages(config, pools))
    assert mixed.step_s == pytest.approx(price(problem, config).step_s, rel=1e-12)


def _two_types(slower: float = 2.0, **links: float):
    problem = problem_of(num_devices=8, global_batch_size=16)
    device = problem.machine.device
    weak = replace(
        device,
        gemm_curves={},
        peak_flops_per_s={name: peak / slower for name, peak in device.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / slower,
    )
    strong = replace(problem, machine=replace(problem.machine, device=replace(device, gemm_curves={})))
    return pooled([strong, replace(problem, machine=replace(problem.machine, device=weak))], **links)


def _split(first: int, second: int, *, micro: int = 1) -> MixedConfig:
    shares = [Share(pool=pool, data_parallel=4, micro_batch_size=micro) for pool in (0, 1)]
    stages = tuple(
        Stage(num_layers=layers, tensor_parallel=2, shares=(share,))
        for layers, share in zip((first, second), shares, strict=True)
    )
    return MixedConfig(stages=stages, num_microbatches=16 // (4 * micro))


def test_a_slower_device_takes_its_stage_longer() -> None:
    problem = _two_types()
    priced = price_mixed(problem, _split(DENSE.num_hidden_layers // 2, DENSE.num_hidden_layers // 2))
    fast, slow = (one.seconds for one in priced.shares)
    assert slow > 1.5 * fast


def test_less_bandwidth_between_pools_is_never_faster() -> None:
    half = DENSE.num_hidden_layers // 2
    steps = [price_mixed(_two_types(bytes_per_s=rate), _split(half, half)).step_s for rate in (50e9, 5e9, 0.5e9)]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


def test_a_boundary_between_pools_takes_their_own_link_not_the_networks_of_either() -> None:
    problem, half = _two_types(bytes_per_s=5e9, latency_s=1e-5), DENSE.num_hidden_layers // 2
    alone = [
        replace(pool, machine=replace(pool.machine, scale_out_bytes_per_s=0.0, scale_out_latency_s=0.0))
        for pool in problem.pools
    ]
    joined = price_mixed(replace(problem, pools=tuple(alone)), _split(half, half)).step_s
    assert joined == price_mixed(problem, _split(half, half)).step_s


def test_data_parallel_ranks_of_two_types_wait_for_the_slower_one_and_for_its_network() -> None:
    problem = _two_types(bytes_per_s=1e9)
    layers = DENSE.num_hidden_layers

    def one_stage(first: int, second: int) -> MixedConfig:
        shares = (
            Share(pool=0, data_parallel=8, micro_batch_size=first),
            Share(pool=1, data_parallel=8, micro_batch_size=second),
        )
        return MixedConfig(
            stages=(Stage(num_layers=layers, tensor_parallel=1, shares=shares),), num_microbatches=1, zero_stage=0
        )

    even = price_mixed(problem, one_stage(1, 1))
    slow = price_mixed(problem, one_stage(1, 2))
    assert even.estimate.pipeline_s[0] == pytest.approx(max(one.seconds for one in even.shares))
    assert slow.estimate.pipeline_s[0] > even.estimate.pipeline_s[0]
    alone = price_mixed(pooled(problem.pools[:1]), _alone(layers))
    assert even.estimate.gradient_reduce_s[0] > alone.estimate.gradient_reduce_s[0]


def _alone(layers: int) -> MixedConfig:
    share = Share(pool=0, data_parallel=8, micro_batch_size=1)
    return MixedConfig(
        stages=(Stage(num_layers=layers, tensor_parallel=1, shares=(share,)),), num_microbatches=1, zero_stage=0
    )
