"""What groups of ranks can use of a node whose devices are joined pairwise, without a switch between them.

*Notation.* The mesh has n_ij links between devices i and j, each of bandwidth b. A device drives at most L = max_i Σ_j
n_ij links, and L·b is the bandwidth of one device that the catalog states. A *route* between devices without a link
passes through the devices in between that leave most links: r_ij = max over paths of min over their hops n (r_ij = n_ij
where there are links). The members M of a group on one node have the cut c(A) = Σ n_ij between A ⊂ M and the others, or
Σ r_ij where their own links leave some of them apart.

- ring: the members have R rings of one link each (:mod:`~meshplan.planner.cluster.rings`), at most min_A c(A), as every
  ring passes every cut: the rate of a device is R / L of its bandwidth (8 V100: 6, a quad of them: 4, a pair: 1 or 2;
  8 dies of MI250X: 4, though 5 links leave each package).
- all-to-all: a device sends x bytes to each of the |M| − 1 others; the cut that is crowded most decides,
  max_A |A|·|M∖A|·x / (c(A)·b).
- neighbours, stage boundaries: what one device sends another passes the route between the two, r_ij·b.

The slowest group of a kind decides, as for links between nodes.

Sources: the V100 cube and its rings: Li et al., Evaluating Modern GPU Interconnect (IEEE TPDS 31, 2020,
arXiv:1903.04611), section 2; routes through another device: NCCL's NVB paths (src/graph/paths.cc).

Assumes: ranks on the devices of a node in the order of their numbers; groups of a kind share no link; a pair that
has a link of its own uses it, however wide a route beside it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Links between the devices of one node.

    Args:
        links: [device][device] number of direct links; symmetric, 0 on the diagonal, the devices connected.
        device_links: links that the bandwidth of one device is the sum of, L; more than ``links`` has where a job uses
            a part of the node.
    """

    links: tuple[tuple[int, ...], ...]
    device_links: int

    def ring_share(self, size: IntArray, stride: IntArray, world_size: IntArray) -> FloatArray:
        """Share of a device's bandwidth that the slowest ring of a kind has inside a node, [n]; 1 without one.

        Args:
            size: members of a group [n].
            stride: distance between members in ranks [n].
            world_size: ranks of the job [n].
        """
        return self._each("ring", size, stride, world_size)

    def all_to_all_share(self, size: IntArray, stride: IntArray, world_size: IntArray) -> FloatArray:
        """The same for what a device sends to the other members on its node in equal parts, [n]."""
        return self._each("all-to-all", size, stride, world_size)

    def neighbour_share(self, size: IntArray, stride: IntArray, world_size: IntArray) -> FloatArray:
        """The same for what each member sends to the next one on its node, [n]."""
        return self._each("neighbours", size, stride, world_size)

    def boundary_share(self, distance: IntArray) -> FloatArray:
        """Share of a device's bandwidth to the device ``distance`` ranks farther on its node, the worst pair, [n]."""
        return np.array([_boundary_share(self, int(one)) for one in np.ravel(distance)]).reshape(np.shape(distance))

    @property
    def least_pair_share(self) -> float:
        """The same between the two devices that are joined worst, whatever their distance."""
        return min(_boundary_share(self, distance) for distance in range(1, max(len(self.links), 2)))

    def _each(self, kind: str, size: IntArray, stride: IntArray, world_size: IntArray) -> FloatArray:
        groups = np.stack(np.broadcast_arrays(size, stride, world_size), axis=-1)
        distinct, which = np.unique(groups.reshape(-1, 3), axis=0, return_inverse=True)
        shares = [_share(self, kind, *(int(number) for number in group)) for group in distinct]
        return np.array(shares)[which.ravel()].reshape(groups.shape[:-1])


@lru_cache(maxsize=256)
def _routes(mesh: Mesh) -> IntArray:
    """[D, D] links of the widest route between each pair."""
    widest = np.array(mesh.links, dtype=np.int64)
    for between in range(len(widest)):
        widest = np.maximum(widest, np.minimum(widest[:, between, None], widest[None, between]))
    np.fill_diagonal(widest, 0)
    return np.maximum(np.array(mesh.links, dtype=np.int64), np.where(np.array(mesh.links) > 0, 0, widest))


@lru_cache(maxsize=4096)
def _share(mesh: Mesh, kind: str, size: int, stride: int, world_size: int) -> float:
    """Share of the slowest group of a kind; see :class:`Mesh`."""
    links, routes, most = np.array(mesh.links), _routes(mesh), mesh.device_links
    least = 1.0
    for members in _members_on_nodes(size, stride, world_size, len(links)):
        place = np.array(members)
        if kind == "neighbours":
            beside = routes[place[:-1], place[1:]]
            closes = len(members) == size and size > 2  # noqa: PLR2004  (a ring of two has one pair)
            last = routes[place[-1], place[0]] if closes else beside.min()
            least = min(least, float(min(beside.min(), last)) / most)
            continue
        own = links[np.ix_(place, place)]
        inside, cuts = _cuts(own)
        if not cuts.all():
            own = routes[np.ix_(place, place)]
            inside, cuts = _cuts(own)
        if kind == "ring":
            # start-up: most machines have a switch, and this loads the solver's model
            from meshplan.planner.cluster.rings import num_rings

            least = min(least, num_rings(own, int(cuts.min())) / most)
        else:
            crowded = (inside * (len(members) - inside) / cuts).max()
            least = min(least, (len(members) - 1) / (most * float(crowded)))
    return least


def _cuts(links: IntArray) -> tuple[IntArray, IntArray]:
    """[2^(k−1) − 1] members on one side, and links, of every cut of k members (the catalog admits 16 devices)."""
    count = len(links)
    numbers = np.arange(1, 2 ** (count - 1), dtype=np.int64)
    side = (numbers[:, None] >> np.arange(count)) & 1
    return side.sum(axis=1), ((side @ links) * (1 - side)).sum(axis=1)


@lru_cache(maxsize=4096)
def _boundary_share(mesh: Mesh, distance: int) -> float:
    pairs = np.diagonal(_routes(mesh), offset=distance) if distance < len(mesh.links) else np.array([])
    return float(pairs.min()) / mesh.device_links if len(pairs) else 1.0


@lru_cache(maxsize=4096)
def _members_on_nodes(size: int, stride: int, world_size: int, num_devices: int) -> frozenset[tuple[int, ...]]:
    """Places of the members of a group on one node, two or more of them, for every way in which groups lie."""
    block = size * stride
    # After so many blocks groups start at the same device of a node again.
    blocks = min(max(world_size // block, 1), num_devices)
    starts = (np.arange(blocks) * block)[:, None] + np.arange(min(stride, num_devices))
    found = set()
    for start in starts.ravel().tolist():
        ranks = start + stride * np.arange(size, dtype=np.int64)
        if stride >= num_devices:
            continue
        for node in np.unique(ranks // num_devices).tolist():
            places = tuple((ranks[ranks // num_devices == node] % num_devices).tolist())
            if len(places) > 1:
                found.add(places)
    return frozenset(found)


def mesh_of(links: tuple[tuple[int, ...], ...], num_devices: int) -> Mesh | None:
    """The mesh of the devices of a node that a job uses; None where a switch joins them.

    Args:
        links: of the node type; empty where a switch joins its devices.
        num_devices: devices of a node that the job uses, the first ones.
    """
    if not links or num_devices > len(links):
        return None
    used = tuple(row[:num_devices] for row in links[:num_devices])
    return Mesh(links=used, device_links=max(sum(row) for row in links))
