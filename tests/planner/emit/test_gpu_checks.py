"""Checks of a host's GPUs, run by bash on what ``nvidia-smi`` prints on machines of each type."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.emit.gpu_checks import gpu_checks

HARNESS = """set -eu
fail() {{ echo "$*" >&2; exit 1; }}
hostname=host
device_list=(0)
check() {{
{checks}
}}
check
"""


def refusal(checks: str, folder: Path, *, reported: str, mib: int) -> str:
    """What the checks say of a host with one GPU; empty where they pass."""
    fake = folder / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\necho '0, {reported}, {mib}'\n")
    fake.chmod(0o755)
    script = HARNESS.format(checks=checks)
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    return done.stderr


@pytest.mark.parametrize(
    ("slug", "reported", "other"),
    [
        ("h100-sxm-80gb", "NVIDIA H100 80GB HBM3", "NVIDIA H200"),
        ("a10", "NVIDIA A10", "NVIDIA A10G"),
        ("a10", "NVIDIA A10", "NVIDIA A100-SXM4-80GB"),
        ("a100-sxm-80gb", "NVIDIA A100-SXM4-80GB", "NVIDIA A10"),
        ("l40", "NVIDIA L40", "NVIDIA L40S"),
        ("t4", "Tesla T4", "NVIDIA L4"),
        ("gh200", "NVIDIA GH200 480GB", "NVIDIA H200"),
        ("quadro-rtx-6000", "Quadro RTX 6000", "Tesla T4"),
        ("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX A6000"),
        ("rtx-a6000", "NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation"),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA RTX 6000 Ada Generation"),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"),
        ("rtx-4090d", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_a_host_has_the_planned_gpus_or_the_launch_ends(
    slug: str, reported: str, other: str, catalog: Catalog, tmp_path: Path
) -> None:
    device = catalog.device(slug)
    checks, mib = gpu_checks(device), int(device.usable_memory_bytes / 2**20)
    assert refusal(checks, tmp_path, reported=reported, mib=mib) == ""
    assert f"GPU 0 is {other}, the plan is for" in refusal(checks, tmp_path, reported=other, mib=mib)
    assert "MiB, the plan counts on" in refusal(checks, tmp_path, reported=reported, mib=mib // 2)


def test_a_device_of_the_users_own_is_held_to_its_memory_only(catalog: Catalog, tmp_path: Path) -> None:
    """Its name need not be the driver's."""
    own = replace(catalog.device("h100-sxm-80gb"), slug="ours-big", name="Our big cards")
    checks, mib = gpu_checks(own), int(own.usable_memory_bytes / 2**20)
    assert refusal(checks, tmp_path, reported="NVIDIA H100 80GB HBM3", mib=mib) == ""
    assert "the plan counts on" in refusal(checks, tmp_path, reported="NVIDIA H100 80GB HBM3", mib=mib // 2)
