"""Power by load: work counted by hand, the curve's shape, published watts, and two ways to the same utilisation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.constants.power import PowerConstants, power_calibration
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.seeds import seed_model_shape
from meshplan.catalogs.surfaces.experts import distinct_experts
from meshplan.planner.cluster.power import DeviceWork, average_power_w, power_share
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.estimator.memory import kv_bytes_per_token, weights_bytes
from meshplan.planner.serving.estimator.power.work import iteration_work, request_work
from meshplan.planner.serving.estimator.sampling import SamplingCost
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Role
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.resolve import serving_calibration
from meshplan.planner.validation.machines import MachineReader, read_rows

MEASURED = Path(__file__).parents[3] / "validation" / "serving-power.jsonl"
PROMPT, OUTPUT = 1000.0, 200.0


@pytest.fixture(scope="module")
def runs(catalog: Catalog) -> dict[str, PreparedRun]:
    reader = MachineReader(catalog)
    return {row["id"]: PreparedRun(served_run(row, reader)) for row in read_rows(MEASURED)}


@pytest.fixture(scope="module")
def worker(runs: dict[str, PreparedRun]) -> Worker:
    """Llama-3.1-8B on one H100."""
    machine = next(run for name, run in runs.items() if "Llama-3.1-8B" in name).run.machine
    return Worker(
        shape=seed_model_shape("llama-3.1-8b"),
        machine=machine,
        engine="vllm",
        layout=Layout(),
        limits=EngineLimits(),
        quantization=Quantization.uniform("bf16"),
        constants=ServingConstants(),
        contexts=ContextRange(prompt=PROMPT, least=PROMPT, most=PROMPT + OUTPUT),
    )


def one(**counts: float) -> dict[str, np.ndarray]:
    return {name: np.array([float(counts.get(name, 0))]) for name in ("decodes", "cached_tokens", "prompt_tokens")}


def one_of(decodes: float) -> dict[str, np.ndarray]:
    return one(decodes=decodes, cached_tokens=1000.0 * decodes)


def use(wide: float = 0.0, narrow: float = 0.0, compute: float = 0.0, bulk: float = 0.0) -> DeviceWork:
    return DeviceWork(**{f"{name}_s": np.array(part) for name, part in locals().items()})


# --- work -----------------------------------------------------------------------------------------------------------


def test_a_decode_iteration_reads_every_weight_once_and_the_cache(worker: Worker) -> None:
    work = iteration_work(worker, **one(decodes=8, cached_tokens=8000))
    shape, device = worker.shape, worker.machine.device
    embedding = 2.0 * shape.embedding_parameters  # looked up, not read
    weights = weights_bytes(shape, worker.quantization, worker.layout) - embedding
    cache = 8000 * kv_bytes_per_token(shape, worker.quantization)
    assert work.wide_s * device.memory_bandwidth_bytes_per_s == pytest.approx(weights + cache, rel=0.001)
    assert work.narrow_s == 0.0


def test_a_token_multiplies_by_every_parameter_twice(worker: Worker) -> None:
    shape, peak = worker.shape, worker.machine.device.peak_flops_per_s["bf16"]
    used = shape.num_parameters - shape.embedding_parameters
    attended = 4.0 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers * 8000
    work = iteration_work(worker, **one(decodes=8, cached_tokens=8000))
    assert work.compute_s * peak == pytest.approx(2.0 * 8 * used + attended, rel=0.001)
    prompts = iteration_work(worker, **one(prompt_tokens=PROMPT))
    assert prompts.compute_s * peak > 2.0 * PROMPT * (used - shape.vocab_size * shape.hidden_size)
    assert prompts.compute_s > prompts.wide_s  # a prompt is bound by compute, a decode by memory
    assert work.compute_s < work.wide_s


def test_narrow_weights_are_counted_by_themselves(worker: Worker) -> None:
    narrow = replace(worker, quantization=Quantization.uniform("fp8"))
    wide_work, narrow_work = (iteration_work(item, **one(decodes=8)) for item in (worker, narrow))
    head = 2.0 * worker.shape.vocab_size * worker.shape.hidden_size / worker.machine.device.memory_bandwidth_bytes_per_s
    assert narrow_work.wide_s == pytest.approx(head)  # the LM head stays in 16 bits
    assert narrow_work.narrow_s == pytest.approx((wide_work.wide_s - head) / 2.0)


def test_every_device_moves_all_logits_that_it_samples_from(worker: Worker) -> None:
    """vLLM 0.11 with top-p and penalties: 40 + 85 bytes a logit and four passes of a sort over keys and places."""
    cost = SamplingCost(bytes_per_logit=125.0, kernels=18.0, sorted_logits_per_s=8.1e9)
    bandwidth = worker.machine.device.memory_bandwidth_bytes_per_s
    for layout in (Layout(), Layout(tensor_parallel=2)):
        greedy = replace(worker, layout=layout)
        plain, drawn = (iteration_work(one, **one_of(64)) for one in (greedy, replace(greedy, sampling=cost)))
        moved = (drawn.wide_s - plain.wide_s) * bandwidth
        assert moved == pytest.approx(64 * worker.shape.vocab_size * (125.0 + 4 * 2 * 12.0))
        assert drawn.compute_s == plain.compute_s
    unsorted = iteration_work(replace(worker, sampling=replace(cost, sorted_logits_per_s=None)), **one_of(64))
    assert unsorted.wide_s < iteration_work(replace(worker, sampling=cost), **one_of(64)).wide_s


def test_experts_are_read_where_they_are_hit(worker: Worker) -> None:
    moe = replace(worker, shape=seed_model_shape("qwen3-30b-a3b"))
    few, many = (iteration_work(moe, **one(decodes=count)) for count in (1, 10_000))
    each = 2.0 * moe.shape.expert_parameters * moe.shape.num_moe_layers
    hit = distinct_experts(np.array([1.0, 10_000.0]), top_k=8, num_experts=128)
    read = (many.wide_s - few.wide_s) * moe.machine.device.memory_bandwidth_bytes_per_s
    assert read == pytest.approx(each * (hit[1] - hit[0]), rel=0.001)


def test_devices_share_the_work(worker: Worker) -> None:
    alone = iteration_work(worker, **one(decodes=64, cached_tokens=64_000, prompt_tokens=100))
    for layout in (Layout(tensor_parallel=4), Layout(pipeline_parallel=4)):
        split = iteration_work(
            replace(worker, layout=layout), **one(decodes=64, cached_tokens=64_000, prompt_tokens=100)
        )
        assert 4.0 * split.compute_s == pytest.approx(alone.compute_s)
        # Every micro-batch reads its stage's weights again.
        passes = layout.pipeline_parallel
        cache = 64_000 * kv_bytes_per_token(worker.shape, worker.quantization)
        cache_s = cache / worker.machine.device.memory_bandwidth_bytes_per_s
        assert 4.0 * split.wide_s == pytest.approx(passes * (alone.wide_s - cache_s) + cache_s)


def test_padded_ranks_compute_as_many_tokens_as_the_fullest(worker: Worker) -> None:
    """Of four attention ranks one has the only prompt, and the others compute as many tokens: not so without padding,
    or where each has a prompt.
    """
    ranks, shape = replace(worker, layout=Layout(attention_data_parallel=4), pads_ranks=True), worker.shape
    even = iteration_work(ranks, **one(prompt_tokens=PROMPT))
    alone, four = (iteration_work(ranks, **one(prompt_tokens=PROMPT), num_prompts=np.array([n])) for n in (1.0, 4.0))
    products = shape.num_parameters - shape.embedding_parameters - shape.vocab_size * shape.hidden_size
    padding = (alone.compute_s - even.compute_s) * worker.machine.device.peak_flops_per_s["bf16"]
    assert padding == pytest.approx(3 * 2.0 * PROMPT / 4 * products, rel=0.001)
    unpadded = iteration_work(replace(ranks, pads_ranks=False), **one(prompt_tokens=PROMPT), num_prompts=np.ones(1))
    assert four.compute_s == unpadded.compute_s == even.compute_s
    few, many = np.array([1.0]), np.array([4.0 * OUTPUT])  # so many that four prompts share each iteration
    for running, factor in ((few, 1.0), (many, 0.0)):
        plain, padded = (request_work(ranks, running, padded=padded) for padded in (False, True))
        assert (padded.compute_s - plain.compute_s) / (alone.compute_s - even.compute_s) == pytest.approx(
            factor, abs=0.01
        )


def test_all_that_an_iteration_with_prompts_multiplies_has_many_rows(worker: Worker) -> None:
    decodes, both = (iteration_work(worker, **one(decodes=8, cached_tokens=8000, prompt_tokens=p)) for p in (0, PROMPT))
    assert decodes.bulk_s == 0.0
    assert both.bulk_s == both.compute_s


def test_a_request_shares_one_iteration_for_each_chunk_of_its_prompt(worker: Worker) -> None:
    """Of its other iterations nothing has many rows; where requests end in each, all has."""
    chunk, running = int(PROMPT / 4), np.array([8.0, 4.0 * OUTPUT])
    chunked = replace(worker, limits=replace(worker.limits, max_batched_tokens=chunk))
    context = (worker.contexts.least + worker.contexts.most) / 2.0
    alone = iteration_work(worker, **one(decodes=8, cached_tokens=8 * context)).compute_s
    prompt = request_work(replace(worker, role=Role.PREFILL), running).compute_s[0]
    for number, served in ((1, worker), (4, chunked)):
        work = request_work(served, running)
        assert work.bulk_s[0] == pytest.approx(prompt + number * alone, rel=0.02)
        assert work.bulk_s[1] == pytest.approx(work.compute_s[1])
    assert (request_work(replace(worker, role=Role.DECODE), running).bulk_s == 0.0).all()


def test_a_request_takes_less_work_the_more_run(worker: Worker) -> None:
    running = np.array([1.0, 8.0, 64.0, 256.0])
    for role in (Role.MIXED, Role.DECODE):
        work = request_work(replace(worker, role=role), running)
        assert (np.diff(work.wide_s) < 0).all()
    assert work.compute_s == pytest.approx(np.full(4, work.compute_s[0]))  # multiplications are not shared
    prefill = request_work(replace(worker, role=Role.PREFILL), running)
    assert prefill.compute_s[0] < request_work(worker, running).compute_s[0]


# --- the curve ------------------------------------------------------------------------------------------------------


def test_power_rises_with_every_use_and_stays_below_the_limit() -> None:
    constants = power_calibration().constants
    idle = float(power_share(constants, use(), 5e9))
    assert idle == pytest.approx(constants.waiting_share, rel=0.01)
    for name in ("wide", "narrow", "compute", "bulk"):
        shares = [float(power_share(constants, use(**{name: u}), 5e9)) for u in (0.0, 0.1, 0.3, 1.0, 5.0)]
        assert shares == sorted(shares)
        assert shares[1] > idle
    assert float(power_share(constants, use(1.0, 1.0, 1.0, 1.0), 5e9)) <= 1.0


def test_unknown_limits_give_no_watts(worker: Worker) -> None:
    device = worker.machine.device
    assert average_power_w(device, PowerConstants(waiting_share=0.25), use()) == pytest.approx(0.25 * 700.0)
    assert average_power_w(replace(device, tdp_w=None), PowerConstants(), use()) is None


def test_a_byte_takes_the_same_energy_on_every_device(catalog: Catalog) -> None:
    """Far below the limit: what a half busy memory adds is its bytes times their energy, whatever the board's limit."""
    constants = PowerConstants(waiting_share=0.1, memory_pj_per_bit=2.5)
    for slug in ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb"):
        device = catalog.device(slug)
        idle, busy = (average_power_w(device, constants, use(wide=wide)) for wide in (0.0, 0.5))
        assert idle is not None
        assert busy is not None
        assert busy - idle == pytest.approx(0.5 * 2.5 * 8e-12 * device.memory_bandwidth_bytes_per_s, rel=1e-3)


def test_narrow_bytes_are_bytes_too(catalog: Catalog) -> None:
    device, constants = catalog.device("h100-sxm-80gb"), PowerConstants(narrow_share=0.2)
    wide, narrow = (average_power_w(device, constants, one) for one in (use(wide=0.3), use(narrow=0.3)))
    assert wide is not None
    assert narrow == pytest.approx(wide + 0.3 * 0.2 * 700.0, rel=1e-3)


# --- measurements ---------------------------------------------------------------------------------------------------


def test_published_watts_are_met(catalog: Catalog, runs: dict[str, PreparedRun]) -> None:
    """ML.ENERGY leaderboard v3.0, six of the rows that were fitted to; the bound is p90 of groups held out."""
    bound = np.expm1(power_calibration().error_p90["power"])
    for prepared in runs.values():
        constants = serving_calibration(catalog, *prepared.key).constants
        predicted = prepared.predicted(constants)["power_w"]
        assert predicted == pytest.approx(prepared.run.measured["power_w"], rel=bound), prepared.run.id


def test_watts_follow_the_load(catalog: Catalog, runs: dict[str, PreparedRun]) -> None:
    """Measured from 8 to 256 requests in flight: 486 to 691 W."""
    few, many = (
        next(run for name, run in runs.items() if "Llama-3.1-8B" in name and name.endswith(load))
        for load in ("b8", "b256")
    )
    watts = [run.predicted(serving_calibration(catalog, *run.key).constants)["power_w"] for run in (few, many)]
    assert watts[1] / watts[0] > 1.25
