"""Interruptions of large training jobs as their operators counted them, and defaults that rest on them."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.goodput.conditions import FailureRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Interruptions of one operator.

    Args:
        name: as in ``run.failures`` of a spec.
        interruptions: how many, or the published rate times its node-days.
        node_days: nodes × days that they were counted in.
        source: publication and what was counted.
    """

    name: str
    interruptions: float
    node_days: float
    source: str

    @property
    def per_node_day(self) -> float:
        """λ₁, interruptions of one node in one day."""
        return self.interruptions / self.node_days


COUNTED = {
    one.name: one
    for one in (
        Counted(
            name="llama3-h100",
            interruptions=419,
            node_days=54 * 2048,
            source="The Llama 3 Herd of Models (arXiv:2407.21783), §3.3.4: 419 unexpected ones in 54 days, 16,384 H100",
        ),
        Counted(
            name="rsc-1",
            interruptions=6.5,
            node_days=1000,
            source="Kokolis et al., HPCA 2025 (arXiv:2410.21680): 6.5 per 1,000 node-days, 16,000 A100, infrastructure",
        ),
        Counted(
            name="rsc-2",
            interruptions=2.34,
            node_days=1000,
            source="Kokolis et al., HPCA 2025 (arXiv:2410.21680): 2.34 per 1,000 node-days, 8,000 A100, infrastructure",
        ),
        Counted(
            name="rsc-1-all-causes",
            interruptions=1,
            node_days=47.7,
            source="Kokolis et al., HPCA 2025 (arXiv:2410.21680), Figure 7: one-node jobs stop after 47.7 days (mean)",
        ),
        Counted(
            name="byterobust-dense",
            interruptions=175,
            node_days=91 * 1200,
            source="ByteRobust, SOSP 2025 (arXiv:2509.16293), Table 4: 175 in three months, 9,600 GPUs",
        ),
        Counted(
            name="byterobust-moe",
            interruptions=125,
            node_days=30 * 1200,
            source="ByteRobust, SOSP 2025 (arXiv:2509.16293), Table 4: 125 in a month, 9,600 GPUs",
        ),
        Counted(
            name="opt-175b",
            interruptions=90,
            node_days=33 * 128,
            source="OPT-175B chronicles (facebookresearch/metaseq): about 90 restarts in 33 days, 1,024 A100",
        ),
    )
}
LOW = min(one.per_node_day for one in COUNTED.values())
HIGH = max(one.per_node_day for one in COUNTED.values())
# Unless said otherwise: what Kokolis et al. call typical; the interval is what the others counted.
TYPICAL = FailureRate(
    per_node_day=5e-3,
    low=LOW,
    high=HIGH,
    source=f"assumed: 5 per 1,000 node-days (Kokolis et al., HPCA 2025); others counted {1e3 * LOW:.1f} to "
    f"{1e3 * HIGH:.0f}",
)
# A rate that somebody counted on another cluster is more than a factor of two off once in ten times (assumed: between
# the clusters of one operator it is 2.8, between two jobs of another 2.2).
OTHER_CLUSTER = 2.0
# A rate that the user states is a count of some dozens (assumed).
STATED = 1.25
# Detection, scheduling, loading and warm-up: the geometric mean of 5 and 20 minutes (Kokolis et al., HPCA 2025, u0).
RESTART_S = 600.0
# Share of interruptions by the hardware of a node: 283 of 419 (The Llama 3 Herd of Models, Table 5: GPU, memory, NIC,
# SSD, power supply, chassis, boards, CPU; without software, network and host maintenance).
BROKEN_SHARE = 283 / 419
# Until a broken node is back: assumed, a day of a technician or of a cloud's replacement.
REPAIR_S = 86_400.0
# A store that takes a whole cluster's checkpoint: 405 B parameters of 14 bytes in 595 s by PyTorch's DCP, 9.5 GB/s.
STORE_BYTES_PER_S = 10e9
# From a device to pinned host memory while training waits: half of PCIe 4.0 ×16 (assumed: copies of many tensors).
SNAPSHOT_BYTES_PER_S = 12e9


def counted_rate(name: str) -> FailureRate:
    """The rate of an operator, as another cluster's.

    Raises:
        KeyError: no such name.
    """
    one = COUNTED[name]
    rate = one.per_node_day
    return FailureRate(per_node_day=rate, low=rate / OTHER_CLUSTER, high=rate * OTHER_CLUSTER, source=one.source)


def stated_rate(per_node_day: float) -> FailureRate:
    """A rate that the user states."""
    return FailureRate(
        per_node_day=per_node_day, low=per_node_day / STATED, high=per_node_day * STATED, source="stated in the spec"
    )
