"""The facts that ship with meshplan: complete, sourced, dated and sane."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from meshplan.catalogs.database.document import problems_of
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.seeds import seed_digest, seed_document
from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.facts import LEVEL_RANK
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.catalogs.seed import SEED_FOLDER

SEED_FILES = ("devices.yaml", "links.yaml", "nodes.yaml", "prices.yaml")


def test_the_seeds_have_no_problem() -> None:
    assert problems_of(seed_document(), {}) == []


def test_the_issue_asks_for_25_devices_and_15_priced_node_types(catalog: Catalog) -> None:
    assert len(catalog.devices()) >= 25
    priced = [node for node in catalog.node_types() if node.prices]
    assert len(priced) >= 15
    generations = {device.architecture for device in catalog.devices()}
    assert generations >= {"volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "cdna4"}
    assert generations >= {"gaudi2", "gaudi3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"}


def test_every_number_has_a_source_a_level_and_a_date(catalog: Catalog) -> None:
    subjects = (
        *(("device", device.slug, device.evidence) for device in catalog.devices()),
        *(("link", link.slug, link.evidence) for link in catalog.links()),
        *(("node_type", node.slug, node.evidence) for node in catalog.node_types()),
    )
    for kind, slug, evidence in subjects:
        assert evidence, slug
        for fact in catalog.facts(kind, slug):
            assert len(fact.evidence.source) > 20, (slug, fact)
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", fact.evidence.date), (slug, fact)
    for node in catalog.node_types():
        for price in node.prices:
            assert "://" in price.source
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", price.date)


@pytest.mark.parametrize("name", SEED_FILES)
def test_every_source_is_used_and_complete(name: str) -> None:
    content = yaml.safe_load((SEED_FOLDER / name).read_text(encoding="utf-8"))
    sources = content["sources"]
    text = (SEED_FOLDER / name).read_text(encoding="utf-8").partition("\n\n")[2]
    for key, source in sources.items():
        assert set(source) == {"level", "date", "citation"}, key
        assert source["level"] in LEVEL_RANK, key
        assert len(re.findall(rf"\b{re.escape(key)}\b", text)) >= 2, f"{key} is never used"


@pytest.mark.parametrize("name", SEED_FILES)
def test_no_yaml_key_is_written_twice(name: str) -> None:
    # YAML readers keep the last of two equal keys without a word; a second `dgx-h100:` would vanish.
    keys = re.findall(r"^  ([a-z0-9.-]+):$", (SEED_FOLDER / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert [key for key, count in Counter(keys).items() if count > 1] == []


def test_device_numbers_are_sane(catalog: Catalog) -> None:
    for device in catalog.devices():
        assert 1e11 <= device.memory_bandwidth_bytes_per_s <= 2e13, device.slug
        assert 10e9 <= device.memory_bytes <= 400e9, device.slug
        assert 0.85 * device.memory_bytes <= device.usable_memory_bytes <= device.memory_bytes, device.slug
        assert device.tdp_w is None or 50 <= device.tdp_w <= 2000, device.slug
        half = [device.peak_flops_per_s[dtype] for dtype in ("bf16", "fp16") if dtype in device.peak_flops_per_s]
        assert half, device.slug
        assert 5e13 <= max(half) <= 5e15, device.slug


def test_narrower_types_are_never_slower(catalog: Catalog) -> None:
    for device in catalog.devices():
        peaks = device.peak_flops_per_s
        order = [peaks[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8", "fp6", "fp4") if dtype in peaks]
        assert order == sorted(order), device.slug


def test_node_types_are_sane(catalog: Catalog) -> None:
    for node in catalog.node_types():
        assert 1 <= node.num_devices <= 72, node.slug
        assert (node.scale_out_link is None) == (node.nics_per_host == 0), node.slug
        if node.scale_out_link is not None:
            assert 1e8 <= node.scale_out_bytes_per_s_per_device <= 2e11, node.slug
            assert node.scale_out_bytes_per_s_per_device <= node.scale_up_link.bandwidth_bytes_per_s, node.slug
        for price in node.prices:
            assert 0.2 <= price.usd_per_hour / node.num_devices <= 15, (node.slug, price)


@pytest.mark.parametrize(
    ("slug", "num_hosts", "num_devices", "gigabytes_per_s_per_device"),
    [
        ("dgx-h100", 1, 8, 50.0),
        ("gb200-nvl72", 18, 72, 50.0),
        ("gb300-nvl72", 18, 72, 100.0),
        ("aws-p4d-24xlarge", 1, 8, 6.25),
        ("aws-p5-48xlarge", 1, 8, 50.0),
        ("gcp-a3-highgpu-8g", 1, 8, 12.5),
        ("gcp-a3-megagpu-8g", 1, 8, 25.0),
        ("azure-nd96isr-mi300x-v5", 1, 8, 50.0),
    ],
)
def test_well_known_node_types(
    catalog: Catalog, slug: str, num_hosts: int, num_devices: int, gigabytes_per_s_per_device: float
) -> None:
    node = catalog.node_type(slug)
    assert (node.num_hosts, node.num_devices) == (num_hosts, num_devices)
    assert node.scale_out_bytes_per_s_per_device == pytest.approx(gigabytes_per_s_per_device * 1e9)


def test_well_known_device(catalog: Catalog) -> None:
    device = catalog.device("h100-sxm-80gb")
    assert device.memory_bytes == 80 * 2**30
    assert device.peak_flops_per_s["bf16"] == 989e12
    assert device.memory_bandwidth_bytes_per_s == 3.35e12
    assert device.evidence["peak_flops_per_s.bf16"].level is EvidenceLevel.DATASHEET
    assert device.evidence["usable_memory_bytes"].level is EvidenceLevel.ASSUMED
    assert catalog.device("b200-sxm-180gb").evidence["usable_memory_bytes"].level is EvidenceLevel.IMPORTED


def _broken(tmp_path: Path, replacement: tuple[str, str]) -> Path:
    for name in (*SEED_FILES, "calibrations.yaml", "serving_calibrations.yaml", "efficiency.yaml", "models.yaml"):
        text = (SEED_FOLDER / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace(*replacement), encoding="utf-8")
    return tmp_path


def test_a_number_without_a_known_source_is_refused(tmp_path: Path) -> None:
    folder = _broken(tmp_path, ("      gpu-catalog:\n        peak", "      hearsay:\n        peak"))
    with pytest.raises(CatalogError, match="unknown source 'hearsay'"):
        seed_document(folder)


def test_a_price_of_nothing_is_refused(tmp_path: Path) -> None:
    folder = _broken(tmp_path, ("  gb200-nvl72:\n    - {usd", "  gb2000-nvl72:\n    - {usd"))
    with pytest.raises(CatalogError, match="gb2000-nvl72"):
        seed_document(folder)


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    folder = _broken(tmp_path, ("989 TFLOP/s", "990 TFLOP/s"))
    assert seed_digest(folder) != seed_digest()
