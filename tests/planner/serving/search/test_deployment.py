"""Time outside the engines: it grows with the text of a prompt, and static batches have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_serving import PLANTED, prepared

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.host.front_end import REQUEST_S, FrontEnd
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.requests import Arrival, Images
from meshplan.planner.serving.search.deployment import (
    TOKENIZE_S_PER_TOKEN,
    kv_link,
    outside_s,
    starts_s,
    tokenize_s,
)
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.validation.machines import MachineReader


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    """A closed loop of one server."""
    reader = MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))
    return prepared(reader, (2,), "a")[0]


def test_prompts_are_tokenized_and_a_static_batch_is_not(loop: PreparedRun) -> None:
    run = loop.run
    prompts = np.array([0, 1_000, 37_000])
    site = replace(loop.site, constants=dict.fromkeys(loop.site.constants, PLANTED))
    found = outside_s(site, run.config, run.workload, prompts)
    assert found - PLANTED.first_token_offset_s == pytest.approx([0.0, 1_000 * TOKENIZE_S_PER_TOKEN, 0.164])
    static = replace(run.workload, arrival=Arrival.STATIC_BATCH)
    assert not outside_s(site, run.config, static, prompts).any()


def test_a_front_end_that_hands_servers_tokens_runs_the_tokenizer_alone(loop: PreparedRun) -> None:
    """Dynamo's, in Rust, before either server: nobody reads the prompt again."""
    run, site = loop.run, replace(loop.site, constants=dict.fromkeys(loop.site.constants, PLANTED))
    behind = replace(site, recipe=replace(site.recipe, parses_requests=False))
    of_both = [float(outside_s(one, run.config, run.workload, np.array([1_000_000]))[0]) for one in (site, behind)]
    assert np.array(of_both) - PLANTED.first_token_offset_s == pytest.approx([1e6 * TOKENIZE_S_PER_TOKEN, 1.1])
    pools = tuple(replace(run.config.pools[0], role=role) for role in (Role.PREFILL, Role.DECODE))
    apart = replace(run.config, engine="vllm", pools=pools)
    assert [kv_link(one, apart).reads_prompt_s_per_token for one in (site, behind)] == [TOKENIZE_S_PER_TOKEN, 0.0]


def test_tokens_of_images_are_not_text(loop: PreparedRun) -> None:
    pictures = replace(loop.run.workload, images=Images(per_request=2, patches=1_024, tokens=256))
    assert tokenize_s(pictures, np.array([512, 1_512])) == pytest.approx([0.0, 1_000 * TOKENIZE_S_PER_TOKEN])


def test_clients_see_every_token_later_by_it(loop: PreparedRun) -> None:
    """The time per token is the engine's: first and last token are as late."""
    arrivals = replace(loop.run.workload, arrival=Arrival.POISSON, request_rate_per_s=5.0, concurrency=None)
    open_loop = PreparedRun(replace(loop.run, workload=arrivals))
    free = replace(PLANTED, first_token_offset_s=0.0)
    slow, fast = (open_loop.predicted(constants) for constants in (PLANTED, free))
    assert slow["ttft_s"] - fast["ttft_s"] == pytest.approx(PLANTED.first_token_offset_s)
    assert slow["tpot_s"] == pytest.approx(fast["tpot_s"])


def test_prompts_that_come_together_are_tokenized_one_after_another(loop: PreparedRun) -> None:
    """The client of each waits since it began; those that follow an answer come one by one and wait for no other."""
    run = replace(loop.run, workload=replace(loop.run.workload, concurrency=8, num_requests=24))
    requests = make_requests(run.workload)
    waited_s = starts_s(run.config, run.workload, requests)
    before = np.cumsum(requests.input_length[:7])
    assert waited_s[1:8] == pytest.approx(TOKENIZE_S_PER_TOKEN * before)
    assert not waited_s[[0, *range(8, 24)]].any()
    served = PreparedRun(run).served(PLANTED)
    assert not served.arrival_s[:8].any()
    assert np.all(served.admitted_s[:8] >= waited_s[:8])

    pool = replace(run.config.pools[0], num_workers=4)
    spread_s = starts_s(replace(run.config, pools=(pool,)), run.workload, requests)
    assert not spread_s[:4].any()
    assert spread_s[4:8] == pytest.approx(TOKENIZE_S_PER_TOKEN * requests.input_length[:4])
    static = replace(run.workload, arrival=Arrival.STATIC_BATCH)
    assert not starts_s(run.config, static, requests).any()


@pytest.mark.parametrize("prompt", [100, 20_000])
@pytest.mark.parametrize("servers", [1, 3])
def test_they_are_parsed_first_and_the_slower_of_both_paces_them(loop: PreparedRun, prompt: int, servers: int) -> None:
    """Two stations one after another, by hand: a request is tokenized when it is parsed and the one before it done."""
    workload = replace(loop.run.workload, concurrency=40, num_requests=60, input_length=prompt, length_ratio=0.5)
    config = replace(loop.run.config, pools=(replace(loop.run.config.pools[0], num_workers=servers),))
    requests = make_requests(workload)
    waited_s = starts_s(config, workload, requests, FrontEnd(processes=servers))
    for server in range(servers):
        parsed_s = tokenized_s = 0.0
        for request in range(server, 40, servers):
            begun_s = max(parsed_s, tokenized_s)
            assert waited_s[request] == pytest.approx(begun_s)
            parsed_s += REQUEST_S
            tokenized_s = begun_s + TOKENIZE_S_PER_TOKEN * requests.input_length[request]
    assert not waited_s[40:].any()
    routed = starts_s(config, workload, requests, FrontEnd(processes=servers, parses=False))
    assert (routed <= waited_s).all()


def test_the_next_request_of_a_closed_loop_comes_when_its_client_has_the_answer(loop: PreparedRun) -> None:
    """One in flight: the engine is idle for as long as a request and its answer spend outside of it, on average."""
    one = PreparedRun(replace(loop.run, workload=replace(loop.run.workload, concurrency=1, num_requests=200)))
    run = one.served(replace(PLANTED, first_token_offset_s=0.2))
    outside_each_s = 0.2 + tokenize_s(one.run.workload, run.input_length)
    gaps = run.arrival_s[1:] - (run.finish_s - outside_each_s)[:-1]
    assert gaps.min() > 0.0
    assert gaps.mean() == pytest.approx(outside_each_s.mean(), rel=0.03)


def test_queues_of_a_closed_loop_move_smoothly_with_the_time_outside(loop: PreparedRun) -> None:
    """Requests of one length do not jump into a queue where the time outside exceeds an iteration by a hair."""
    (pool,) = loop.run.config.pools
    one_prompt = replace(pool.limits, max_batched_tokens=int(loop.run.workload.input_length) + 16)
    config = replace(loop.run.config, pools=(replace(pool, limits=one_prompt),))
    workload = replace(loop.run.workload, concurrency=16, num_requests=160, length_ratio=1.0)
    run = PreparedRun(replace(loop.run, config=config, workload=workload))
    offsets = np.linspace(0.002, 0.03, 15)
    waits = [run.predicted(replace(PLANTED, first_token_offset_s=s))["ttft_s"] - s for s in offsets.tolist()]
    assert np.abs(np.diff(waits)).max() < 0.07 * np.mean(waits)  # 0.105 of it where all gaps are alike
