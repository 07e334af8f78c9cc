"""Pictures of a mapping: well-formed, complete, the links that decide in red and in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.kinds import offered
from meshplan.planner.core.plan import Plan
from meshplan.planner.rank_mapping.pictures import MOST_CELLS, MappingView, mapping_page, mapping_text
from meshplan.planner.service import estimate_plan, make_plan

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {
        "devices": {"type": "h100-sxm-80gb", "per_node": 8, "nodes": 6},
        "links": {
            "intra_node": {"bandwidth": "450 GB/s", "latency": "2 us"},
            "inter_node": {"bandwidth": "50 GB/s", "latency": "5 us"},
            "degraded": [{"from": 0, "to": "1-5", "bandwidth": "1 GB/s"}],
        },
    },
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
    "fixed": {"tensor_parallel": 8, "pipeline_parallel": 2, "data_parallel": 2},
}


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return estimate_plan(SPEC, catalog)


def test_the_page_shows_every_node_and_marks_what_decides(plan: Plan, catalog: Catalog) -> None:
    page = mapping_page(offered(plan, "mapping_view", "mapping to draw")(plan, catalog, Path()))
    ElementTree.fromstring(page.removeprefix("<!doctype html>").replace('<meta charset="utf-8">', ""))
    assert "http://www.w3.org/2000/svg" in page
    assert "<script" not in page
    for node in range(6):
        assert f"node {node}" in page
    assert "#c01c28" in page
    assert "slowest pipeline (*)" in page
    assert "spare: node 0" in page  # the badly connected node is not used


def test_the_terminal_says_the_same_within_its_width(plan: Plan, catalog: Catalog) -> None:
    text = mapping_text(offered(plan, "mapping_view", "mapping to draw")(plan, catalog, Path()), width=80)
    picture = text.split("\n\n")[:3]
    assert all(len(line) <= 80 for part in picture for line in part.splitlines())
    assert "stage 0" in text
    assert "data-parallel" in text
    assert "decides" in text


def test_large_clusters_are_cut_and_say_so() -> None:
    nodes = MOST_CELLS + 10
    rates = np.random.default_rng(0).uniform(1e9, 5e10, (nodes, nodes))
    view = MappingView(
        title="large",
        names=[f"n{number}" for number in range(nodes)],
        bytes_per_s=rates,
        grid=np.arange(nodes).reshape(2, -1),
        critical=[((0, 1), "ring")],
        path=[0, nodes // 2],
        notes=[],
    )
    assert "more nodes are not drawn" in mapping_page(view)
    assert "see the page" in mapping_text(view)


def test_a_stand_alone_mapping_has_a_picture(catalog: Catalog) -> None:
    rates = np.random.default_rng(1).uniform(1e9, 5e10, (4, 4)).tolist()
    document = {
        "kind": "rank-mapping",
        "num_nodes": 4,
        "pipeline_parallel": 2,
        "data_parallel_nodes": 2,
        "pipeline_message_bytes": 1e6,
        "data_parallel_message_bytes": 1e9,
        "num_microbatches_exposed": 4,
        "bandwidth_bytes_per_s": rates,
    }
    made = make_plan(document, catalog)
    text = mapping_text(offered(made, "mapping_view", "mapping to draw")(made, catalog, Path()))
    assert "ring of stage" in text
    assert "pipeline" in text


def test_a_plan_on_even_links_has_no_mapping_to_draw(catalog: Catalog) -> None:
    even = {**SPEC, "cluster": {"nodes": [{"type": "dgx-h100", "count": 4}]}}
    made = estimate_plan(even, catalog)
    with pytest.raises(SpecError, match="all links of its cluster are alike"):
        offered(made, "mapping_view", "mapping to draw")(made, catalog, Path())
