"""Which replicas lie on which unit: one that fits on a unit never spans two, a larger one takes units of its own.

Notation      d sizes of replicas and D devices of a unit; a pattern p is a set of replicas that fills a unit as far as
              it goes, a_pd of each size; z_p units are filled by it.

Two cases     Where every size divides the next larger one, and the largest D, replicas fill units without a gap, by
              falling size: Σ d·n_d ≤ D·N says it all. That is so for powers of two on eight devices. Else, as with
              pipelines of three stages on four devices, N ≥ Σ_p z_p and Σ_p a_pd·z_p ≥ n_d: the cutting-stock problem
              by patterns (Gilmore and Gomory 1961).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.milp import Program, solve_program


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica lies.

    Args:
        unit: number of its unit, or of the first where it has several.
        device: number of its first device there.
    """

    unit: int
    device: int


def whole_units(size: int, devices: int) -> int:
    """Units that a replica has to itself; 0 for one that is smaller than a unit and shares it."""
    return -(-size // devices) if size >= devices else 0


def _shared(sizes: Sequence[int], devices: int) -> list[int]:
    """Sizes that share a unit, the largest first."""
    return sorted({size for size in sizes if size < devices}, reverse=True)


def fills_without_gap(sizes: Sequence[int], devices: int) -> bool:
    """Whether replicas of these sizes waste nothing of units of ``devices``, however many there are of each."""
    own = [size for size in sizes if size > devices]
    chain = [*reversed(_shared(sizes, devices)), devices]
    return all(larger % size == 0 for size, larger in pairwise(chain)) and not any(size % devices for size in own)


def patterns(sizes: Sequence[int], devices: int) -> Iterator[tuple[int, ...]]:
    """Replicas of each size on one unit, such that no further one fits; sizes are different, below ``devices``."""
    if not sizes:
        return
    if len(sizes) == 1:
        yield (devices // sizes[0],)
        return
    least = min(sizes)
    for count in range(devices // sizes[0] + 1):
        left = devices - count * sizes[0]
        for rest in patterns(sizes[1:], left):
            used = sum(size * number for size, number in zip(sizes[1:], rest, strict=True))
            if left - used < least:
                yield (count, *rest)


def most_units(sizes: Sequence[int], counts: Sequence[int], devices: int) -> int:
    """Units that suffice for so many replicas of each size, each size on units of its own."""
    total = 0
    for size, count in zip(sizes, counts, strict=True):
        own = whole_units(size, devices)
        total += own * count if own else -(-count // (devices // size))
    return total


def lay_out(program: Program, name: str, units: int, replicas: Sequence[tuple[int, int]], devices: int) -> None:
    """Add rows that hold the units of an offer to what its replicas need.

    Args:
        program: grows.
        name: of the offer, for people.
        units: column of its units.
        replicas: (column, size) of each kind on it.
        devices: of a unit.
    """
    if fills_without_gap([size for _, size in replicas], devices):
        laid = {column: -float(size) for column, size in replicas}
        program.row(f"devices {name}", {units: float(devices), **laid}, low=0.0)
        return
    row = {units: 1.0} | {column: -float(whole_units(size, devices)) for column, size in replicas if size >= devices}
    shared = _shared([size for _, size in replicas], devices)
    filled = [
        (pattern, program.column(f"{name} filled by {pattern}", 0, math.inf, whole=True))
        for pattern in patterns(shared, devices)
    ]
    program.row(f"units {name}", row | {column: -1.0 for _, column in filled}, low=0.0)
    for place, size in enumerate(shared):
        holds = {column: float(pattern[place]) for pattern, column in filled if pattern[place]}
        mine = {column: -1.0 for column, each in replicas if each == size}
        program.row(f"replicas of {size} on {name}", holds | mine, low=0.0)


def places(sizes: Sequence[int], devices: int, units: int) -> list[Place]:
    """A place for each replica, in the order of ``sizes``, on as few units as suffice.

    Args:
        sizes: devices of each replica.
        devices: of a unit.
        units: rented.

    Raises:
        SolverError: they do not suffice.
    """
    found = _largest_first(sizes, devices)
    if _used(found, sizes, devices) > units:
        found = _by_patterns(sizes, devices)
    if _used(found, sizes, devices) > units:
        needed = _used(found, sizes, devices)
        raise SolverError(f"replicas of {', '.join(map(str, sizes))} devices need {needed} units, {units} are rented")
    return found


def _largest_first(sizes: Sequence[int], devices: int) -> list[Place]:
    """Each replica, largest first, on the first unit with room for it."""
    taken: list[int] = []
    found: dict[int, Place] = {}
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size, own = sizes[index], whole_units(sizes[index], devices)
        if own:
            found[index] = Place(len(taken), 0)
            taken += [devices] * own
            continue
        unit = next((u for u, used in enumerate(taken) if used + size <= devices), len(taken))
        taken += [0] * (unit == len(taken))
        found[index] = Place(unit, taken[unit])
        taken[unit] += size
    return [found[index] for index in range(len(sizes))]


def pattern_program(sizes: Sequence[int], devices: int) -> tuple[Program, list[tuple[tuple[int, ...], int]]]:
    """The fewest units that hold replicas smaller than one, as a program: how many are filled by each pattern.

    Args:
        sizes: devices of each replica; those of whole units take no part.
        devices: of a unit.

    Returns:
        The program, and each pattern with its column.
    """
    shared = _shared(sizes, devices)
    program = Program()
    filled = [
        (pattern, program.column(f"units filled by {pattern}", 0, len(sizes), cost=1.0, whole=True))
        for pattern in patterns(shared, devices)
    ]
    for place, size in enumerate(shared):
        row = {column: float(pattern[place]) for pattern, column in filled if pattern[place]}
        program.row(f"replicas of {size}", row, low=float(sum(each == size for each in sizes)))
    return program, filled


def _by_patterns(sizes: Sequence[int], devices: int) -> list[Place]:
    """On the fewest units there are: patterns, by a program of their own."""
    shared = _shared(sizes, devices)
    program, filled = pattern_program(sizes, devices)
    values = solve_program(program).values if filled else ()
    free: dict[int, list[Place]] = {size: [] for size in shared}
    unit = 0
    for pattern, column in filled:
        for _ in range(round(values[column])):
            device = 0
            for size, number in zip(shared, pattern, strict=True):
                for _ in range(number):
                    free[size].append(Place(unit, device))
                    device += size
            unit += 1
    found = []
    for size in sizes:
        own = whole_units(size, devices)
        found.append(Place(unit, 0) if own else free[size].pop(0))
        unit += own
    return found


def _used(found: Sequence[Place], sizes: Sequence[int], devices: int) -> int:
    return max(
        (place.unit + max(whole_units(size, devices), 1) for place, size in zip(found, sizes, strict=True)), default=0
    )
