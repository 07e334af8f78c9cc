"""Nodes without a switch: links between each pair of devices, from the facts of a node type.

``links_per_pair`` holds for every pair, ``pair_links.0-3`` for one; a pair without either has no link of its own. A
node type without such facts has a switch (or a bus) that gives any two devices all that one of them has.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.catalogs.facts import EVERY_PAIR, MOST_MESHED, PAIR_PREFIX


def is_meshed(values: Mapping[str, float]) -> bool:
    """Whether any of a node type's fields describes links between pairs."""
    return any(field == EVERY_PAIR or field.startswith(PAIR_PREFIX) for field in values)


def pair_links(values: Mapping[str, float]) -> tuple[tuple[int, ...], ...]:
    """[device][device] links; empty where a switch joins the devices.

    Args:
        values: field → value of a node type, ``num_hosts`` and ``devices_per_host`` among them.

    Raises:
        ValueError: with the reason, where the pairs make no node.
    """
    if not is_meshed(values):
        return ()
    count = int(values["num_hosts"] * values["devices_per_host"])
    if count > MOST_MESHED:
        raise ValueError(f"links between pairs are priced for at most {MOST_MESHED} devices of a node, not {count}")
    links = [[0 if i == j else int(values.get(EVERY_PAIR, 0)) for j in range(count)] for i in range(count)]
    for field, value in values.items():
        if field.startswith(PAIR_PREFIX):
            first, second = (int(word) for word in field.removeprefix(PAIR_PREFIX).split("-"))
            if second >= count:
                raise ValueError(f"{field}: the node has devices 0 to {count - 1}")
            links[first][second] = links[second][first] = int(value)
    if alone := _apart(links):
        raise ValueError(f"no links lead from device 0 to device {alone[0]}; add {PAIR_PREFIX}I-{alone[0]}")
    return tuple(tuple(row) for row in links)


def _apart(links: list[list[int]]) -> list[int]:
    """Devices that no route joins to the first."""
    reached, ahead = {0}, [0]
    while ahead:
        here = ahead.pop()
        new = [device for device, count in enumerate(links[here]) if count and device not in reached]
        reached.update(new)
        ahead += new
    return [device for device in range(len(links)) if device not in reached]
