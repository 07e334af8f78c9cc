"""Shares of a processor as devices of unlike speed: one control group for each (Linux, root).

A share holds in every period of ten milliseconds, whoever else is on the machine, up to what is left of it: the groups
weigh a hundred times as much as others, so that these give way.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 10_000
ROOT = Path("/sys/fs/cgroup/cpu")  # control groups of version 1; a machine with version 2 has no such folder
WEIGHT = 100 * 1024


def missing_shares() -> str | None:
    """Why shares cannot be set here, None where they can."""
    probe = ROOT / "meshplan-probe"
    try:
        probe.mkdir()
        (probe / "cpu.cfs_quota_us").write_text("1000")
    except OSError as error:
        return f"shares of a processor cannot be set in {ROOT}: {error.strerror}"
    finally:
        if probe.is_dir():
            probe.rmdir()
    return None


@contextmanager
def cpu_shares(name: str, shares: Sequence[float], folder: Path) -> Iterator[tuple[Path, ...]]:
    """Files that a process writes its id to, to have a share of one processor from then on; removed again in any case.

    Args:
        name: of the groups, unlike that of other runs.
        shares: of one processor each, such as 0.3.
        folder: where the groups are seen from network namespaces too, which have a /sys of their own.
    """
    folder.mkdir()
    subprocess.run(["mount", "--bind", str(ROOT), str(folder)], check=True)
    groups = [folder / f"{name}-{number}" for number in range(len(shares))]
    try:
        for group, share in zip(groups, shares, strict=True):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
            (group / "cpu.shares").write_text(str(WEIGHT))
        yield tuple(group / "cgroup.procs" for group in groups)
    finally:
        for group in groups:
            if group.is_dir():
                group.rmdir()
        subprocess.run(["umount", str(folder)], check=True)
