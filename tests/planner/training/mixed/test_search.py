"""The search over pools against an enumeration that shares nothing with it but prices; bounds; clusters at random."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from core_cases import DENSE, machine_with, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_cases import pooled

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.budget import Budget
from meshplan.planner.training.mixed.estimator import price_mixed
from meshplan.planner.training.mixed.options import FIRST, MIDDLE, pool_options
from meshplan.planner.training.mixed.pinned import pinned_stages
from meshplan.planner.training.mixed.search import Found, MixedSearch
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Share, Stage
from meshplan.planner.training.problem.spec import StageSpec

# What a search may leave on the table (search.CLOSE), and rounding.
CLOSE = 0.0101


def cluster(sizes, slower, *, batch: int = 8, rate: float = 5e9, memory: float = 80e9, pins=None) -> MixedProblem:
    """Pools of so many devices, each so many times slower than the first could be."""
    pools = []
    for size, factor in zip(sizes, slower, strict=True):
        machine = machine_with(size, domain_size=min(size, 8), devices_per_host=min(size, 8))
        device = replace(
            machine.device,
            gemm_curves={},
            peak_flops_per_s={name: peak / factor for name, peak in machine.device.peak_flops_per_s.items()},
        )
        machine = replace(machine, device=device)
        limits = {"memory_bytes": memory}
        pools.append(problem_of(num_devices=size, global_batch_size=batch, machine=machine, limits=limits))
    return pooled(pools, bytes_per_s=rate, latency_s=1e-5, pins=pins or {})


def compositions(total: int, parts: int):
    """Every way to write ``total`` as ``parts`` positive numbers in order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield [second - first for first, second in itertools.pairwise(edges)]


def enumerated(problem: MixedProblem, mode: str = "none"):
    """Every plan of 1F1B stages with one tensor and data parallelism per pool, micro-batches of one sequence."""
    batch, layers = problem.any.workload.global_batch_size, DENSE.num_hidden_layers
    for data in (one for one in range(1, batch + 1) if batch % one == 0):
        kinds = {}
        for pool, own in enumerate(problem.pools):
            devices = own.machine.num_devices
            kinds[pool] = [
                (pool, tensor, count)
                for tensor in (1, 2, 4)
                for count in range(1, layers + 1)
                if tensor * data * count <= devices and tensor <= own.machine.domain_size
            ]
        for used in range(1, len(kinds) + 1):
            for order in itertools.permutations(kinds, used):
                for blocks in itertools.product(*(kinds[pool] for pool in order)):
                    places = [(pool, tensor) for pool, tensor, count in blocks for _ in range(count)]
                    if len(places) > layers:
                        continue
                    for split in compositions(layers, len(places)):
                        stages = tuple(
                            Stage(
                                num_layers=count,
                                tensor_parallel=tensor,
                                shares=(Share(pool=pool, data_parallel=data, micro_batch_size=1),),
                                activation_recompute=mode,
                            )
                            for (pool, tensor), count in zip(places, split, strict=True)
                        )
                        yield MixedConfig(stages=stages, num_microbatches=batch // data)


def answered(search: MixedSearch, pools) -> Found:
    """The best plan on any of the pools, and the bound of all."""
    alone = [search.alone(pool) for pool in pools]
    found = [*alone, *([search.best(pools)] if len(pools) > 1 else [])]
    best = min(found, key=lambda one: one.step_s)
    return replace(best, bound_s=min(one.bound_s for one in found))


PINS = {"micro_batch_size": 1, "activation_recompute": "none"}


@pytest.mark.parametrize(("sizes", "slower"), [((2, 2), (1.0, 2.0)), ((1, 3), (1.0, 3.0)), ((2, 1), (2.0, 1.0))])
def test_no_enumerated_plan_is_better(sizes, slower) -> None:
    problem = cluster(sizes, slower, pins=PINS)
    search = MixedSearch(problem, Budget())
    found = answered(search, range(2))
    priced = [price_mixed(problem, config) for config in enumerated(problem)]
    best = min(one.step_s for one in priced if one.fits)
    assert found.step_s <= best * (1 + CLOSE)
    assert found.bound_s <= best
    assert price_mixed(problem, found.config).step_s == pytest.approx(found.step_s, rel=1e-12)


def unjoined(problem: MixedProblem) -> MixedProblem:
    """The same pools in machines of one device, which a network joins to those of other pools alone."""
    lone = {"domain_size": 1, "devices_per_host": 1, "scale_out_bytes_per_s": 0.0, "scale_out_latency_s": 0.0}
    pools = [replace(pool, machine=replace(pool.machine, **lone)) for pool in problem.pools]
    return replace(problem, pools=tuple(pools))


def test_pinned_stages_need_a_network_within_their_type() -> None:
    problem = unjoined(cluster((2, 2), (1.0, 2.0)))
    layers = DENSE.num_hidden_layers
    both = [StageSpec(node_type=name, num_layers=layers // 2, data_parallel=1) for name in problem.names]
    assert pinned_stages(problem, both).devices_of(0) == 1
    wide = [one.model_copy(update={"data_parallel": 2}) for one in both]
    with pytest.raises(SpecError, match=r"2 devices of type-0: no network .* say cluster.links.inter_node"):
        pinned_stages(problem, wide)


@pytest.mark.parametrize(("sizes", "slower"), [((1, 1), (1.0, 1.5)), ((2, 3), (1.0, 2.0))])
def test_pools_whose_own_nodes_nothing_joins_work_with_each_other(sizes, slower) -> None:
    """Machines of one GPU each, say, with a cable to a machine of another type: a network within a type is not stated.

    One machine of each type can take part; both do where that is faster, as if there were no other machines.
    """
    ones, several = (cluster(count, slower, batch=8, pins=PINS) for count in ((1, 1), sizes))
    search = MixedSearch(unjoined(several), Budget())
    found, best = answered(search, range(2)), answered(MixedSearch(ones, Budget()), range(2))
    assert found.config is not None
    assert [found.config.devices_of(pool) for pool in range(2)] == [1, 1]
    assert found.step_s == pytest.approx(best.step_s, rel=1e-9)
    assert found.bound_s == pytest.approx(best.bound_s, rel=1e-9)


@pytest.mark.parametrize("memory", [8.2e9, 9.3e9])
def test_no_enumerated_plan_is_better_where_memory_binds(memory: float) -> None:
    problem = cluster((2, 1), (1.0, 1.5), batch=4, memory=memory, pins={"micro_batch_size": 1})
    found = answered(MixedSearch(problem, Budget()), range(2))
    modes = ("none", "selective", "full")
    priced = [price_mixed(problem, config) for mode in modes for config in enumerated(problem, mode)]
    fitting = [one.step_s for one in priced if one.fits]
    assert 0 < len(fitting) < len(priced)
    assert found.step_s <= min(fitting) * (1 + CLOSE)
    assert found.bound_s <= min(fitting)


@settings(max_examples=4, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=2),
    st.sampled_from([1.0, 2.0]),
    st.sampled_from([1e9, 50e9]),
    st.integers(0, 1),
)
def test_more_devices_of_a_type_do_not_hurt(sizes, slower, rate, more) -> None:
    few = answered(MixedSearch(cluster(sizes, (1.0, slower), batch=16, rate=rate), Budget()), range(2))
    larger = [2 * size if pool == more else size for pool, size in enumerate(sizes)]
    many = answered(MixedSearch(cluster(larger, (1.0, slower), batch=16, rate=rate), Budget()), range(2))
    assert many.bound_s <= few.step_s
    assert many.step_s <= few.step_s * (1 + CLOSE)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=3),
    st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=3, max_size=3),
    st.sampled_from([0.2e9, 5e9, 50e9]),
    st.sampled_from([6e9, 80e9]),
)
def test_together_is_never_worse_than_a_part_and_fits(sizes, slower, rate, memory) -> None:
    problem = cluster(sizes, slower[: len(sizes)], batch=16, rate=rate, memory=memory)
    search = MixedSearch(problem, Budget())
    alone = [search.alone(pool) for pool in range(len(sizes))]
    together = answered(search, range(len(sizes)))
    for pool, one in enumerate(alone):
        assert search.least_alone_s(pool) <= one.step_s
        assert together.bound_s <= one.step_s
        assert together.step_s <= one.step_s
    if together.config is not None:
        assert price_mixed(problem, together.config).fits


@pytest.mark.parametrize("slower", [(1.5, 1.0, 1.0, 1.0), (2.0, 1.5, 1.2, 3.0)])
def test_no_other_order_of_the_chosen_pools_is_faster(slower) -> None:
    problem = cluster((1, 1, 1, 1), slower, pins=PINS)
    search = MixedSearch(problem, Budget())
    found = search.best(range(4))
    assert found.config is not None
    blocks = [list(run) for _, run in itertools.groupby(found.config.stages, key=lambda one: one.shares[0].pool)]
    assert len(blocks) > 1
    for order in itertools.permutations(blocks):
        stages = tuple(itertools.chain.from_iterable(order))
        priced = price_mixed(problem, replace(found.config, stages=stages))
        assert not priced.fits or found.step_s <= priced.step_s * (1 + 1e-9)


def test_options_say_what_single_prices_say() -> None:
    problem = cluster((8, 8), (1.0, 2.0), batch=16)
    options = pool_options(problem, 1)
    assert options is not None
    for row in range(0, len(options), 7):
        share = Share(
            pool=1,
            data_parallel=int(options.data_parallel[row]),
            micro_batch_size=int(options.micro_batch_size[row]),
        )
        mode = ("none", "selective", "block", "full")[int(options.recompute[row])]
        stages = tuple(
            Stage(
                num_layers=layers,
                tensor_parallel=int(options.tensor_parallel[row]),
                shares=(share,),
                activation_recompute=mode,
            )
            for layers in (1, 3, 2)
        )
        priced = price_mixed(problem, MixedConfig(stages=stages, num_microbatches=int(options.num_microbatches[row])))
        flying = [min(one, options.num_microbatches[row]) for one in (3, 2)]
        for place, stage, layers, in_flight in ((FIRST, 0, 1, flying[0]), (MIDDLE, 1, 3, flying[1])):
            seconds = options.layer_s[row] * layers + options.ends_s[place, row]
            assert seconds == pytest.approx(priced.shares[stage].seconds, rel=1e-9)
            constant, layer, kept, kept_layer = options.memory[place][:, row]
            safe = constant + layer * layers + in_flight * (kept + kept_layer * layers)
            assert safe == pytest.approx(priced.shares[stage].safe_bytes, rel=1e-9)
