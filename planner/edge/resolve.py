"""From a spec to a problem with every name looked up; all mismatches are reported at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.constants.machines.drives import drives
from meshplan.catalogs.constants.machines.small_machines import SmallMachine, small_machines
from meshplan.catalogs.errors import Problem, UnknownEntryError, closest_names, did_you_mean
from meshplan.catalogs.hardware import Device
from meshplan.planner.cluster.lookup import DRIVE_SHARE, look_up_language_model, unknown_names
from meshplan.planner.core.problems import Problems
from meshplan.planner.edge.problem import USABLE_SHARE, WEIGHT_BYTES, EdgeProblem, MachineKind, Network
from meshplan.planner.edge.spec import EdgeDeviceSpec, EdgeSpec

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

# Attained share of the memory bandwidth of a graphics card while weights of 4 bits are read: Llama 3 8B in q4_k_m (4.6
# GB of products) on an RTX 4090 of 1,008 GB/s, 127.74 tokens/s; in 16 bits it is 0.81 (XiongjieDai's table, 1,024
# tokens: tests/data/published/beyond_memory.yaml), so that wider weights come out too slow.
CARD_SHARE = 0.58
# The same of a processor that is described by its peak alone: the share that was solved for on servers
# (planner/serving/tiers/host.py). Of a Raspberry Pi 4's peak 0.26 is attained, of a Raspberry Pi 5's 0.55.
PEAK_SHARE = 0.42
# Cost of a message to a described machine: the geometric mean of a Raspberry Pi's and a cloud server's.
MESSAGE_S = 16e-6
# Groups of machines that are priced at most: numbers of each kind, multiplied.
MOST_GROUPS = 10_000


def resolve(spec: EdgeSpec, catalog: Catalog, base: Path) -> EdgeProblem:
    """Look up every name of a spec.

    Raises:
        SpecError: unknown names and impossible questions, all at once.
    """
    problems = Problems()
    shape = look_up_language_model(spec.model, catalog, base, problems)
    kinds = [_kind(index, item, catalog, problems) for index, item in enumerate(spec.devices)]
    groups = math.prod(item.count + 1 for item in spec.devices)
    if groups > MOST_GROUPS:
        problems.say("devices", f"these machines make {groups:,} groups; at most {MOST_GROUPS:,}: name fewer kinds")
    problems.check()
    if shape is None:
        raise AssertionError("a missing model is a problem, and problems were checked")
    links = spec.links
    network = None
    if links is not None:
        network = Network(bytes_per_s=links.bandwidth, latency_s=links.latency, shared_air=links.shared_air)
    return EdgeProblem(
        shape=shape,
        kinds=tuple(kind for kind in kinds if kind is not None),
        network=network,
        prompt_tokens=spec.workload.prompt_tokens,
        generated_tokens=spec.workload.generated_tokens,
        formats=tuple(dict.fromkeys(spec.quantization)),
        engines=tuple(spec.constraints.engines),
        most_token_s=spec.constraints.time_per_token,
    )


def _kind(index: int, item: EdgeDeviceSpec, catalog: Catalog, problems: Problems) -> MachineKind | None:
    path = f"devices[{index}]"
    found: SmallMachine | Device | None = None
    if item.type is not None:
        found = small_machines().get(item.type) or _device(item.type, path, catalog, problems)
        if found is None:
            return None
    drive = item.drive_bandwidth if item.drive is None else _drive(item.drive, path, problems)
    bandwidth = item.memory_bandwidth if found is None else found.memory_bandwidth_bytes_per_s
    if bandwidth is None:
        raise AssertionError("the spec requires a bandwidth where it names no type")
    if isinstance(found, Device):
        usable = USABLE_SHARE * (item.memory or found.usable_memory_bytes)  # context and buffers take the rest
        rates = {"bytes_per_s": CARD_SHARE * bandwidth, "weights_per_s": math.inf, "message_s": MESSAGE_S}
    else:
        memory = item.memory if found is None or item.memory is not None else found.memory_bytes
        usable = USABLE_SHARE * float(memory or 0.0)
        attained = None if found is None else found.weights_per_s
        attained = attained if item.attained_bandwidth is None else item.attained_bandwidth / WEIGHT_BYTES["q4_0"]
        rates = {
            "bytes_per_s": bandwidth,
            "weights_per_s": attained or PEAK_SHARE * bandwidth / WEIGHT_BYTES["q4_0"],
            "message_s": MESSAGE_S if found is None else found.message_s,
        }
    return MachineKind(
        name=item.type or f"machine {index + 1}",
        count=item.count,
        usable_bytes=usable,
        drive_bytes_per_s=drive,
        is_accelerator=isinstance(found, Device),
        is_measured=found is not None or item.attained_bandwidth is not None,
        addresses=tuple(item.addresses),
        source=_source(found),
        **rates,
    )


def _device(name: str, path: str, catalog: Catalog, problems: Problems) -> Device | None:
    try:
        return catalog.device(name)
    except UnknownEntryError as error:
        known = small_machines()
        hint = did_you_mean(closest_names(name, known))
        problems.say(
            f"{path}.type",
            f"{error}{hint}; small machines: {', '.join(known)}; or leave the type out and give memory and "
            "memory_bandwidth",
        )
        return None


def _drive(name: str, path: str, problems: Problems) -> float | None:
    if name not in drives():
        hint = did_you_mean(closest_names(name, drives()))
        problems.say(f"{path}.drive", f"unknown drive {name!r}{hint}; known: {', '.join(drives())}")
        return None
    return DRIVE_SHARE * drives()[name].read_bytes_per_s


def unknown_machines(document: Mapping[str, Any], catalog: Catalog) -> list[Problem]:
    """Names that the catalog does not have, in a document that may be malformed elsewhere.

    Args:
        document: the spec as plain data, of any shape.
        catalog: where the names are looked up.
    """
    problems = Problems(unknown_names(document, catalog))
    devices = document.get("devices")
    for index, item in enumerate(devices if isinstance(devices, list) else []):
        path, named = f"devices[{index}]", item if isinstance(item, Mapping) else {}
        machine, drive = named.get("type"), named.get("drive")
        if isinstance(machine, str) and machine not in small_machines():
            _device(machine, path, catalog, problems)
        if isinstance(drive, str):
            _drive(drive, path, problems)
    return problems


def _source(found: SmallMachine | Device | None) -> str:
    if found is None:
        return "the spec"
    if isinstance(found, SmallMachine):
        return found.source
    evidence = found.evidence.get("memory_bandwidth_bytes_per_s")
    return "the catalog" if evidence is None else evidence.source


def sources(problem: EdgeProblem) -> Mapping[str, str]:
    """Item → citation."""
    return {problem.shape.name: problem.shape.source, **{kind.name: kind.source for kind in problem.kinds}}
