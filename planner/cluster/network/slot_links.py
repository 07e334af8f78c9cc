"""The directed links between slots that all groups of one kind use, one by one: for links that differ.

See :mod:`~meshplan.planner.cluster.network.rank_layout` for slots, groups and what each kind sends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshplan.planner.cluster.network.rank_layout import ALL_TO_ALL, RING, fewest_on_a_slot
from meshplan.planner.core.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All groups of ranks of one kind.

    Args:
        kind: :data:`~meshplan.planner.cluster.network.rank_layout.RING`, ``NEIGHBOURS`` or ``ALL_TO_ALL``.
        size: members of one group.
        stride: distance between members in ranks.
        world_size: ranks of the job.
        domain_size: devices of a slot, D.
    """

    kind: str
    size: int
    stride: int
    world_size: int
    domain_size: int

    @property
    def slots(self) -> int:
        """Slots in use by the whole job."""
        return -(-self.world_size // self.domain_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotLinks:
    """Links between slots, each once.

    Args:
        senders: [l] slots.
        receivers: [l] slots.
        shares: [l] bytes that a device sends over the link for each byte of its group.
        volume: [l] bytes of all groups over the link for each byte of a group.
        leaving: [l] bytes that a device of the sender sends over all its links for each byte (all-to-all).
        num_parts: sets of slots that groups join, directly or through others.
        least_part: slots in the smallest of them.
    """

    senders: IntArray
    receivers: IntArray
    shares: FloatArray
    volume: FloatArray
    leaving: FloatArray
    num_parts: int
    least_part: int


@lru_cache(maxsize=65536)  # every batch of candidates asks for the same few again
def group_of(kind: str, *, size: int, stride: int, world_size: int, domain_size: int) -> Group | None:
    """The groups; None where each lies inside one node."""
    fewest = fewest_on_a_slot(np.array([size]), np.array([stride]), np.array([world_size]), domain_size)
    if int(fewest[0]) >= size:
        return None
    return Group(kind=kind, size=size, stride=stride, world_size=world_size, domain_size=domain_size)


@lru_cache(maxsize=4096)
def slot_links(group: Group) -> SlotLinks:
    """All directed links that groups of one kind use, in all stages."""
    # Ranks in cells of gcd(s, D) behave alike: whole nodes where the stride is a multiple of D.
    alike = math.gcd(group.stride, group.domain_size)
    stride, domain = group.stride // alike, group.domain_size // alike
    block = group.size * stride
    bases = np.arange(0, group.world_size // alike // block, dtype=np.int64) * block
    starts = (bases[:, None] + np.arange(stride, dtype=np.int64)).ravel()
    slots = (starts[:, None] + stride * np.arange(group.size, dtype=np.int64)) // domain
    # Members of a group on one slot follow each other: a run starts where the slot or the group changes.
    new = np.ones(slots.shape, dtype=bool)
    new[:, 1:] = slots[:, 1:] != slots[:, :-1]
    first = np.flatnonzero(new.ravel())
    members = np.diff(np.append(first, slots.size))
    places, number = slots.ravel()[first], first // group.size
    of_group = np.searchsorted(number, np.arange(len(slots) + 1))
    if group.kind == ALL_TO_ALL:
        senders, receivers, shares, volume, leaving = _pairs(places, members, of_group, group.size)
    else:
        senders, receivers, shares, volume, leaving = _rings(places, members, of_group, group.kind)
    return _merged(senders, receivers, shares, alike * volume, leaving, group.slots)


def _rings(places: IntArray, members: IntArray, of_group: IntArray, kind: str) -> tuple[IntArray, ...]:
    """From each run to the next of its group, and from the last to the first."""
    following = np.arange(1, len(places) + 1)
    following[of_group[1:] - 1] = of_group[:-1]
    crosses = places != places[following]
    rails = np.minimum(members, members[following]) if kind == RING else np.ones(len(places))
    return (
        places[crosses],
        places[following][crosses],
        1.0 / rails[crosses],
        np.ones(int(crosses.sum())),
        np.zeros(int(crosses.sum())),
    )


def _pairs(places: IntArray, members: IntArray, of_group: IntArray, size: int) -> tuple[IntArray, ...]:
    """From each run to every other one of its group."""
    counts = np.diff(of_group)
    senders, receivers = [], []
    for count in np.unique(counts).tolist():
        near, far = np.nonzero(~np.eye(count, dtype=bool))
        first = of_group[:-1][counts == count][:, None]
        senders.append((first + near).ravel())
        receivers.append((first + far).ravel())
    source, target = np.concatenate(senders), np.concatenate(receivers)
    shares = members[target] / size
    return places[source], places[target], shares, members[source] * shares, 1.0 - members[source] / size


def _merged(
    senders: IntArray, receivers: IntArray, shares: FloatArray, volume: FloatArray, leaving: FloatArray, slots: int
) -> SlotLinks:
    """Each link once, with the largest share and the whole volume."""
    links, which = np.unique(senders * slots + receivers, return_inverse=True)
    most, leaves = np.zeros(len(links)), np.zeros(len(links))
    np.maximum.at(most, which, shares)
    np.maximum.at(leaves, which, leaving)
    sizes = _part_sizes(links // slots, links % slots, slots)
    return SlotLinks(
        senders=links // slots,
        receivers=links % slots,
        shares=most,
        volume=np.bincount(which, weights=volume, minlength=len(links)),
        leaving=leaves,
        num_parts=len(sizes),
        least_part=int(sizes.min(initial=slots)),
    )


def _part_sizes(senders: IntArray, receivers: IntArray, slots: int) -> IntArray:
    """Sizes of the sets of slots that links join, of two and more slots."""
    part = np.arange(slots)
    while True:
        low = np.minimum(part[senders], part[receivers])
        before = part.copy()
        np.minimum.at(part, senders, low)
        np.minimum.at(part, receivers, low)
        part = part[part]
        if (part == before).all():
            break
    sizes = np.bincount(part)
    return np.asarray(sizes[sizes > 1])
