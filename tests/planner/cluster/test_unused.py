"""Fields of a cluster that a question has no use for are named: what is ignored looks answered."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.service import make_plan

ONE_NODE = {"nodes": [{"type": "dgx-h100", "count": 1}]}
TRAINING: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "workload": {"sequence_length": 8192, "global_batch_size": 64},
}
SERVING: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-8b",
    "workload": {"input_length": 512, "output_length": 64, "request_rate_per_s": 2.0},
}
DIFFUSION: dict[str, Any] = {"kind": "diffusion", "model": "flux.1-dev"}
BETWEEN = {"types": ["dgx-h100", "dgx-a100-80gb"], "bandwidth": "10 GB/s", "latency": "3 us"}
HOST = {"host_memory": "1 TiB", "host_memory_bandwidth": "600 GB/s", "host_processor": "xeon-gold-6454s"}
DRIVES = {"drive": "samsung-990-pro", "drives_per_host": 2}


def named(catalog: Catalog, spec: dict[str, Any], **cluster: Any) -> set[str]:
    """Paths of the problems of a question whose cluster says more."""
    with pytest.raises(SpecError) as caught:
        make_plan({**spec, "cluster": {**ONE_NODE, **cluster}}, catalog)
    return {problem.path for problem in caught.value.problems}


@pytest.mark.parametrize("spec", [TRAINING, DIFFUSION], ids=["training", "diffusion"])
def test_what_hosts_read_and_compute_with_is_of_serving(spec: dict[str, Any], catalog: Catalog) -> None:
    asked = {**HOST, **DRIVES, "host_sockets": 2}
    paths = {f"cluster.{name}" for name in asked} - {"cluster.host_memory"}
    assert named(catalog, spec, **asked) - {"cluster.host_memory"} == paths


def test_no_weights_of_diffusion_models_lie_on_hosts(catalog: Catalog) -> None:
    assert named(catalog, DIFFUSION, host_memory="1 TiB") == {"cluster.host_memory"}


@pytest.mark.parametrize("spec", [TRAINING, SERVING, DIFFUSION], ids=["training", "serving", "diffusion"])
def test_networks_between_node_types_are_of_jobs_on_several(spec: dict[str, Any], catalog: Catalog) -> None:
    assert named(catalog, spec, links={"between_types": [BETWEEN]}) == {"cluster.links.between_types"}


def test_what_the_search_over_several_node_types_does_not_vary_is_named(catalog: Catalog) -> None:
    nodes = [{"type": "dgx-h100", "count": 1}, {"type": "dgx-a100-80gb", "count": 1}]
    asked = {"search_over": ["context_parallel_style"], "unvalidated_schedules": True}
    paths = {f"constraints.{name}" for name in asked}
    assert named(catalog, {**TRAINING, "constraints": asked}, nodes=nodes) == paths


def test_drives_hold_what_exceeds_a_hosts_memory_or_prefixes(catalog: Catalog) -> None:
    assert named(catalog, SERVING, **DRIVES) == {"cluster.drive"}
    prefixes = {**SERVING["workload"], "prefix_hit_rate": 0.5, "num_prefixes": 8}
    assert make_plan({**SERVING, "workload": prefixes, "cluster": {**ONE_NODE, **DRIVES}}, catalog).config


@pytest.mark.parametrize("spec", [TRAINING, SERVING, DIFFUSION], ids=["training", "serving", "diffusion"])
def test_a_price_filter_that_no_price_passes_is_named(spec: dict[str, Any], catalog: Catalog) -> None:
    with pytest.raises(
        SpecError, match=r"constraints.price: no price of dgx-h100 .*provider nobody.*known: .*on-demand"
    ):
        make_plan({**spec, "cluster": ONE_NODE, "constraints": {"price": {"provider": "nobody"}}}, catalog)
