"""Models and machines of which iterations are priced."""

from __future__ import annotations

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine, machine_of


@pytest.fixture(scope="module")
def llama(catalog: Catalog) -> ModelShape:
    return catalog.model_shape("llama-3.1-70b")


@pytest.fixture(scope="module")
def deepseek(catalog: Catalog) -> ModelShape:
    return catalog.model_shape("deepseek-v3")


@pytest.fixture(scope="module")
def hybrid(catalog: Catalog) -> ModelShape:
    return catalog.model_shape("qwen3-next-80b-a3b")


@pytest.fixture(scope="module")
def machine(catalog: Catalog) -> Machine:
    node = catalog.node_type("dgx-h100")
    return machine_of(Cluster(name="two", groups=(NodeGroup(node=node, count=2),)))
