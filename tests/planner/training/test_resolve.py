"""Looking a spec up: names, links, prices, limits and constants; what is wrong, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.hardware import Price
from meshplan.planner.cluster.lookup import choose_price
from meshplan.planner.cluster.spec import PriceSpec
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.training.problem.spec import read_training_spec
from meshplan.planner.training.resolve import Resolved, calibration_for, resolve_training

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}]},
    "workload": {"sequence_length": 8192, "global_batch_size": 64, "num_training_tokens": 1e9},
}


def resolved(catalog: Catalog, **changes: Any) -> Resolved:
    return resolve_training(read_training_spec({**SPEC, **changes}), catalog, Path())


def problems(catalog: Catalog, **changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        resolved(catalog, **changes)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_names_become_numbers(catalog: Catalog) -> None:
    found = resolved(catalog)
    machine = found.problem.machine
    assert (machine.num_devices, machine.domain_size, machine.devices_per_host) == (16, 8, 8)
    assert machine.device.slug == "h100-sxm-80gb"
    assert machine.scale_out_bytes_per_s == pytest.approx(50e9)
    assert found.problem.limits.max_devices == 16
    assert found.problem.limits.memory_bytes <= machine.device.usable_memory_bytes
    assert found.problem.num_steps == pytest.approx(1e9 / (8192 * 64))
    assert found.problem.shape.num_hidden_layers == 32
    assert set(found.sources) >= {"model llama-3.1-8b", "device h100-sxm-80gb", "calibration"}


def test_hardware_in_place_equals_the_catalogued_node(catalog: Catalog) -> None:
    node = catalog.node_type("dgx-h100")
    assert node.scale_out_link is not None
    up, out = node.scale_up_link, node.scale_out_link
    own = resolved(
        catalog,
        cluster={
            "devices": {"type": "h100-sxm-80gb", "per_node": 8, "nodes": 2},
            "links": {
                "intra_node": {"bandwidth": f"{up.bandwidth_bytes_per_s} B/s", "latency": f"{up.latency_s} s"},
                "inter_node": {"bandwidth": f"{out.bandwidth_bytes_per_s} B/s", "latency": f"{out.latency_s} s"},
            },
        },
    ).problem.machine
    named = resolved(catalog).problem.machine
    for field in ("num_devices", "domain_size", "scale_up_bytes_per_s", "scale_out_bytes_per_s", "scale_out_latency_s"):
        assert getattr(own, field) == pytest.approx(getattr(named, field)), field


def test_one_device_alone_needs_no_links(catalog: Catalog) -> None:
    alone = {"type": "rtx-4090", "per_node": 1, "nodes": 1}
    described = resolved(catalog, cluster={"devices": alone}).problem.machine
    catalogued = resolved(catalog, cluster={"nodes": [{"type": "rtx-4090-pcie-1", "count": 1}]}).problem.machine
    for field in ("num_devices", "domain_size", "scale_up_bytes_per_s", "scale_out_bytes_per_s"):
        assert getattr(described, field) == getattr(catalogued, field)
    for more, words in (({"nodes": 2}, r"2 nodes need links\.inter_node"), ({"per_node": 2}, "needs 'links'")):
        with pytest.raises(SpecError, match=words):
            resolved(catalog, cluster={"devices": alone | more})


def test_every_unknown_name_at_once(catalog: Catalog) -> None:
    found = problems(
        catalog,
        model="lama-3.1-8b",
        cluster={"nodes": [{"type": "dgx-h1000", "count": 1}]},
        constraints={"target": "megatronn"},
    )
    assert "llama-3.1-8b" in found["model"]
    assert "dgx-h100" in found["cluster.nodes[0].type"]
    assert "megatron" in found["constraints.target"]


def test_one_node_type_a_job(catalog: Catalog) -> None:
    nodes = [{"type": "dgx-h100", "count": 1}, {"type": "dgx-a100-80gb", "count": 1}]
    assert "one node type" in problems(catalog, cluster={"nodes": nodes})["cluster.nodes"]


def test_choices_that_no_search_could_make_legal(catalog: Catalog) -> None:
    fixed = {"tensor_parallel": 3, "pipeline_parallel": 33, "expert_parallel": 2, "data_parallel": 7}
    found = problems(catalog, fixed=fixed)
    assert set(found) >= {f"fixed.{name}" for name in fixed}


def test_schedules_and_vocabularies_that_the_framework_does_not_run(catalog: Catalog) -> None:
    found = problems(catalog, fixed={"pipeline_schedule": "v-half", "vocabulary_parallel": True})
    assert "megatron runs none, 1f1b, interleaved, not v-half" in found["fixed.pipeline_schedule"]
    assert "constraints.target: any" in found["fixed.pipeline_schedule"]
    assert "megatron does not have it" in found["fixed.vocabulary_parallel"]


def test_a_loss_and_an_optimizer_step_that_only_some_frameworks_have(catalog: Catalog) -> None:
    found = problems(catalog, fixed={"loss": "chunked", "optimizer_in_backward": True})
    for name in ("loss", "optimizer_in_backward"):
        assert found[f"fixed.{name}"] == "plans for megatron are made without; constraints.target: torchtune, any"
    found = problems(catalog, fixed={"optimizer": "adamw-bf16-moments"}, constraints={"target": "torchtitan"})
    assert found["fixed.optimizer"] == "plans for torchtitan are made without; constraints.target: megatron, any"
    workload = {**SPEC["workload"], "phase": "lora", "lora_rank": 8}
    found = problems(
        catalog, workload=workload, fixed={"optimizer_in_backward": True}, constraints={"target": "torchtune"}
    )
    assert "gradients of adapters are small" in found["fixed.optimizer_in_backward"]


def test_layers_that_do_not_add_up(catalog: Catalog) -> None:
    found = problems(catalog, fixed={"layers_per_chunk": [9, 9, 9, 4]})
    assert "9 + 9 + 9 + 4 = 31 layers" in found["fixed.layers_per_chunk"]
    # TorchTitan deals [9, 9, 9, 5] by a weight of 3 for the LM head, and no split that begins with fewer layers so.
    found = problems(catalog, fixed={"layers_per_chunk": [5, 9, 9, 9]}, constraints={"target": "torchtitan"})
    assert "cannot split 32 layers so: give such as [8, 8, 8, 8]" in found["fixed.layers_per_chunk"]
    found = problems(catalog, fixed={"layers_per_chunk": [16, 8, 8], "virtual_pipeline_stages": 2})
    assert "3 chunks are not a multiple of virtual_pipeline_stages 2" in found["fixed.layers_per_chunk"]


def test_stages_of_several_node_types_are_not_pinned_on_one(catalog: Catalog) -> None:
    stages = [{"node_type": "dgx-h100", "num_layers": 32, "data_parallel": 16}]
    assert "several node types" in problems(catalog, fixed={"stages": stages})["fixed.stages"]


def test_a_precision_that_the_device_lacks(catalog: Catalog) -> None:
    found = problems(
        catalog,
        cluster={"nodes": [{"type": "dgx-a100-80gb", "count": 1}]},
        workload={**SPEC["workload"], "precision": "fp8"},
    )
    assert "fp8" in found["workload.precision"]


def priced(**fields: Any) -> Price:
    defaults = {
        "usd_per_hour": 10.0,
        "provider": "a",
        "region": "any",
        "terms": "on-demand",
        "date": "2026-01-01",
        "source": "",
    }
    return Price(**{**defaults, **fields})


def test_the_price_is_the_newest_on_demand_then_the_cheapest() -> None:
    old, new = priced(usd_per_hour=5.0, date="2025-01-01"), priced(usd_per_hour=20.0)
    cheap, spot = priced(usd_per_hour=12.0, provider="b"), priced(usd_per_hour=1.0, terms="spot")
    everything = (old, new, cheap, spot)
    assert choose_price(everything, PriceSpec()) == cheap
    assert choose_price(everything, PriceSpec(provider="a")) == new
    assert choose_price(everything, PriceSpec(terms="spot")) == spot
    assert choose_price(everything, PriceSpec(provider="c")) is None
    assert choose_price((), PriceSpec()) is None
    local = priced(region="eu-1", usd_per_hour=30.0)
    assert choose_price((local,), PriceSpec(region="eu-1")) == local
    assert choose_price((local,), PriceSpec(region="us-1")) is None


def test_constants_come_from_the_framework_its_relatives_or_all(catalog: Catalog) -> None:
    own = calibration_for(catalog, "megatron", "hopper")
    assert (own.framework, own.architecture) == ("megatron", "hopper")
    unseen = calibration_for(catalog, "megatron", "no such generation")
    assert (unseen.framework, unseen.architecture) == ("any", "any")
    stranger = calibration_for(catalog, "no such framework", "hopper")
    assert stranger.framework == "any"
    assert own.recipe == unseen.recipe


def test_what_models_of_a_relative_differ_by_is_not_what_they_differ_by_here(catalog: Catalog) -> None:
    """Models on Composer's clusters are alike to 8 %. With that one own run of Hugging Face left ±12 %; 17 of 74 runs
    on our two GPUs lay outside.
    """
    relative = calibration_for(catalog, "composer", "hopper")
    stranger = calibration_for(catalog, "huggingface-deepspeed", "hopper")
    shared = calibration_for(catalog, "no such framework", "hopper")
    assert stranger.framework == "composer"
    assert stranger.cluster_error_p90 == shared.cluster_error_p90
    assert relative.cluster_error_p90["dense"] < shared.cluster_error_p90["dense"]


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
@pytest.mark.parametrize("generation", ["ampere", "hopper"])
def test_hugging_face_launchers_are_bounded_by_runs_of_hugging_face(
    catalog: Catalog, target: str, generation: str
) -> None:
    """Megatron's bound let plans through that the eager operators of Transformers would not have fitted."""
    taken = calibration_for(catalog, target, generation)
    measured = calibration_for(catalog, "huggingface-deepspeed", "ampere")
    assert taken.memory == measured.memory
    assert taken.memory_basis.endswith("the constants of huggingface-deepspeed")
    # Its typical figure is fitted to those runs, too, where Megatron's is the literature's.
    assert (
        taken.memory.extra_bytes_per_parameter
        > calibration_for(catalog, "megatron", generation).memory.extra_bytes_per_parameter
    )


def test_limits_are_the_tighter_of_two(catalog: Catalog) -> None:
    limits = resolved(
        catalog, constraints={"max_step_time": "100 s", "max_run_time": "1 h", "max_devices": 8}
    ).problem.limits
    steps = 1e9 / (8192 * 64)
    assert limits.max_step_s == pytest.approx(min(100.0, 3600.0 / steps))
    assert limits.max_devices == 8


def test_more_devices_wanted_than_there_are_is_named(catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=r"constraints\.min_devices: 17 wanted, at most 16 may be used"):
        resolved(catalog, constraints={"min_devices": 17})


def test_stated_links_take_the_place_of_the_catalogs(catalog: Catalog) -> None:
    nodes = [{"type": "lambda-8x-b200", "count": 2}]
    bare = resolved(catalog, cluster={"nodes": nodes}).problem.machine
    assert not bare.is_joined
    assert bare.joined_devices == 8
    links = {"inter_node": {"bandwidth": "25 GB/s", "latency": "7 us"}}
    joined = resolved(catalog, cluster={"nodes": nodes, "links": links}).problem.machine
    assert (joined.scale_out_bytes_per_s, joined.scale_out_latency_s) == (25e9, 7e-6)
    assert joined.joined_devices == 16
    assert joined.scale_up_bytes_per_s == bare.scale_up_bytes_per_s
    slow = {"intra_node": {"bandwidth": "100 GB/s", "latency": "9 us"}, **links}
    assert resolved(catalog, cluster={"nodes": nodes, "links": slow}).problem.machine.scale_up_bytes_per_s == 100e9


def test_more_devices_than_links_join_are_refused_with_words(catalog: Catalog) -> None:
    found = problems(
        catalog,
        cluster={"nodes": [{"type": "lambda-8x-b200", "count": 2}]},
        constraints={"min_devices": 16},
    )
    assert "at most 8 may be used: no network is described between nodes" in found["constraints.min_devices"]


@pytest.mark.parametrize("name", [["dgx-h100"], {"a": 1}, None])
def test_a_node_type_of_another_shape_is_refused_in_words(name: object, catalog: Catalog) -> None:
    nodes = [{"type": name, "count": 1}, {"type": "dgx-h100", "count": 1}]
    spec = {
        "kind": "training",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": nodes},
        "workload": {"sequence_length": 4096, "global_batch_size": 64},
    }
    for ask in (make_plan, estimate_plan):
        with pytest.raises(SpecError, match=r"cluster\.nodes\[0\]\.type"):
            ask(spec, catalog)
