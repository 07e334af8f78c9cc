"""The search over pools against an enumeration that shares nothing with it but prices; bounds; clusters at random."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from core_cases import DENSE, machine_with, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_cases import pooled

from meshplan.planner.core.budget import Budget
from meshplan.planner.training.mixed.estimator import price_mixed
from meshplan.planner.training.mixed.options import FIRST, MIDDLE, pool_options
from meshplan.planner.training.mixed.search import MixedSearch
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Share, Stage

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


PINS = {"micro_batch_size": 1, "activation_recompute": "none"}


@pytest.mark.parametrize(("sizes", "slower"), [((2, 2), (1.0, 2.0)), ((1, 3), (1.0, 3.0)), ((2, 1), (2.0, 1.0))])
def test_no_enumerated_plan_is_better(sizes, slower) -> None:
    problem = cluster(sizes, slower, pins=PINS)
    found = MixedSearch(problem, Budget()).best(range(2))
    priced = [price_mixed(problem, config) for config in enumerated(problem)]
    best = min(one.step_s for one in priced if one.fits)
    assert found.step_s <= best * (1 + CLOSE)
    assert found.bound_s <= best
    assert price_mixed(problem, found.config).step_s == pytest.approx(found.step_s, rel=1e-12)


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
    alone = [search.best([pool]) for pool in range(len(sizes))]
    best = min(alone, key=lambda one: one.step_s)
    together = search.best(range(len(sizes)), best)
    assert together.step_s <= best.step_s
    for pool, one in enumerate(alone):
        assert one.step_s >= search.least_alone_s(pool)
        assert together.bound_s <= one.step_s
    if together.config is not None:
        assert price_mixed(problem, together.config).fits


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
