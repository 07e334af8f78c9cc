"""Keys of a measured run that say nothing to its prediction: a user who wrote them should hear so.

What is left out without a word looks as if it had been heeded: a latency in ``tpot_ms``, a network as "400 Gb/s",
degrees beside ``parallelism``. Keys of ``model`` are Hugging Face's and are not listed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from meshplan.planner.validation.fields import misnamed
from meshplan.planner.validation.machines import network_bytes_per_s

# Keys of a row: its sections, its names, and remarks of whoever made it.
ROW = frozenset(
    {"id", "task", "group", "source", "source_kind", "model", "hardware", "precision", "framework", "parallelism"}
    | {"workload", "measured", "derived", "caveats", "converted", "repeat_spread", "failure", "float8_scaling"}
)
FRAMEWORK = frozenset({"name", "version"})
# Read of ``hardware``, and names that ask for nothing.
HARDWARE_READ = frozenset(
    {"device", "num_devices", "devices_per_node", "inter_node", "slices", "pools", "device_counts", "slice", "system"}
    | {"cpu", "cross_pool_bandwidth_bytes_per_s"}
)
# Not read, and not the misspelt name of a key that is: the links inside a node are the catalog's.
_OWN_MEANING = frozenset({"intra_node"})
# What a row may state as measured beside numbers that are predicted: how the run ended.
ENDINGS = frozenset({"oom", "failed"})


def unused_keys(
    row: Mapping[str, Any], *, workload: Collection[str], parallelism: Collection[str], predicted: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Keys of a row that nothing reads, with their section → those that they may mean.

    Args:
        row: the observation.
        workload: keys of this section that its kind reads.
        parallelism: likewise.
        predicted: metrics that measured values are held against.
    """
    known = {
        "workload": workload,
        "parallelism": parallelism,
        "hardware": HARDWARE_READ,
        "framework": FRAMEWORK,
        "measured": {*predicted, *ENDINGS},
        "derived": predicted,
    }
    found = {key: _elsewhere(key, workload=workload, parallelism=parallelism) for key in sorted(set(row) - ROW)}
    for section, read in known.items():
        values = row.get(section)
        if isinstance(values, Mapping):
            for key in sorted(values.keys() - set(read)):
                meant = () if key in _OWN_MEANING else misnamed(key, values, read)
                found[f"{section}.{key}"] = tuple(f"{section}.{name}" for name in meant)
    if _is_unread_network(row):
        found["hardware.inter_node"] = ()
    return found


def _elsewhere(key: str, **sections: Collection[str]) -> tuple[str, ...]:
    """Where a key that a row has beside its sections would be read."""
    return tuple(f"{section}.{key}" for section, read in sections.items() if key in read)


def _is_unread_network(row: Mapping[str, Any]) -> bool:
    """Whether a network is stated with a number, of which no bandwidth was made out: the catalog's was taken."""
    hardware = row.get("hardware")
    text = str(hardware.get("inter_node") or "") if isinstance(hardware, Mapping) else ""
    return any(map(str.isdigit, text)) and network_bytes_per_s(text, per_host=1) is None
