"""Price lists: matched to node types by accelerator and count, refused when they are malformed."""

from __future__ import annotations

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.transfer import import_document
from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.importers.prices import ACCELERATORS, PriceList, read_prices

# The columns of both lists; the prices are made up.
SKYPILOT = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice,AvailabilityZone
p5.48xlarge,H100,8.0,192,2048,98.32,us-east-1,,40.5,us-east-1a
m5.large,,,2,8,0.096,us-east-1,,,us-east-1a
x9.large,H900,1,2,8,1.5,us-east-1,,,us-east-1a
"""
GPUHUNT = """\
instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size
p5.48xlarge,us-east-1,98.32,192,2048,8,H100,80,False,
p5.48xlarge,us-east-1,40.5,192,2048,8,H100,80,True,
"""


def read(catalog: Catalog, text: str, provider: str = "aws") -> PriceList:
    return read_prices(
        text, catalog.node_types(), provider=provider, source="test list", date="2026-11-21", name="list.csv"
    )


@pytest.mark.parametrize("text", [SKYPILOT, GPUHUNT])
def test_both_lists_say_the_same(catalog: Catalog, text: str) -> None:
    found = read(catalog, text)
    rows = found.document["node_types"]["aws-p5-48xlarge"]["prices"]
    assert [(row["terms"], row["usd_per_hour"]) for row in rows] == [("on-demand", 98.32), ("spot", 40.5)]
    assert not any(slug.startswith(("gcp", "azure")) for slug in found.document["node_types"])
    assert found.num_unmatched == text.count("H900")


def test_the_prices_reach_the_catalog(catalog: Catalog) -> None:
    import_document(catalog.engine, read(catalog, SKYPILOT).document)
    prices = catalog.node_type("aws-p5-48xlarge").prices
    assert any(price.usd_per_hour == 98.32 and price.source == "test list" for price in prices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Price,Region", "Cost,Region"), "no price list of SkyPilot"),
        (("98.32,us-east-1", "us-east-1,98.32"), "line 2: .*are columns swapped"),
        (("98.32", "-1"), r"line 2: Price: -1 is outside"),
        (("H100,8.0", "H100,eight"), "line 2: AcceleratorCount: 'eight' is not a number"),
        (("40.5", "1e9"), "line 2: SpotPrice: 1e9 is outside"),
    ],
)
def test_a_malformed_list_is_refused(catalog: Catalog, change: tuple[str, str], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read(catalog, SKYPILOT.replace(*change))


def test_every_named_accelerator_is_in_the_catalog(catalog: Catalog) -> None:
    assert set(ACCELERATORS.values()) <= {device.slug for device in catalog.devices()}
