"""The best balance that few moves from the present placement can reach.

Each layer has a choice of (moves, time) points; a knapsack over the layers spends the moves where they gain most.
The points of a layer come from repairs with several targets: until no device is busier than the target, the busiest one

* swaps a slot with another device (two moves, fewer where an expert returns to where it was), or
* has one of its experts copied onto a slot whose expert has a copy to spare (one move that relieves every device with
  a copy of the expert),

whichever removes most excess over the target for each move. Every state on the way is a point. So are the present
placement and the best placement without regard to moves, its devices renamed to keep as many experts as possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.expert_placement.problem.objectives import LEAST_GAIN, balance_of_time, residency
from meshplan.planner.expert_placement.search.locality.assignment import reassign

# Targets, as parts of the way from perfect balance to the present time of the busiest device.
TARGETS = (0.0, 0.02, 0.05, 0.09, 0.14, 0.22, 0.4)
# A move that undoes an earlier one costs nothing; this keeps the ratio "excess removed for each move" finite.
FREE_MOVE = 0.5
ROWS_PER_BLOCK = 64
FORBIDDEN = np.inf


@dataclass(slots=True, kw_only=True, eq=False)
class Repairs:
    """B repairs under way, each of one layer towards one target.

    Args:
        slots: [B, G, s].
        counts: [B, E].
        load: [B, E], normalised.
        before: [L, G, E] which expert lies where at present.
        layer: [B] the layer of each repair.
        target: [B] time above which a device is too busy.
        speed: [G].
    """

    slots: IntArray
    counts: IntArray
    load: FloatArray
    before: BoolArray
    layer: IntArray
    target: FloatArray
    speed: FloatArray

    def take(self, rows: IntArray) -> Repairs:
        """Some of the rows (copies)."""
        return Repairs(
            slots=self.slots[rows],
            counts=self.counts[rows],
            load=self.load[rows],
            before=self.before,
            layer=self.layer[rows],
            target=self.target[rows],
            speed=self.speed,
        )

    def times(self) -> FloatArray:
        """[B, G] time of each device."""
        rows = np.arange(self.slots.shape[0])[:, None, None]
        times: FloatArray = (self.load / self.counts)[rows, self.slots].sum(axis=2) / self.speed
        return times

    def moves(self) -> IntArray:
        """[B] experts that are not where they were."""
        devices = np.arange(self.speed.size)[None, :, None]
        moves: IntArray = (~self.before[self.layer[:, None, None], devices, self.slots]).sum(axis=(1, 2))
        return moves


@dataclass(slots=True, eq=False)
class Options:
    """The choices of one layer: points (moves, time) and their placements."""

    moves: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    slots: list[IntArray] = field(default_factory=list)

    def add(self, moves: int, time: float, slots: IntArray) -> None:
        """One more point."""
        self.moves.append(moves)
        self.time.append(time)
        self.slots.append(slots.copy())

    def pareto(self, most_moves: int) -> tuple[IntArray, FloatArray, list[IntArray]]:
        """The points that no other one beats in both, by rising moves."""
        order = np.lexsort((self.time, self.moves))
        kept: list[int] = []
        for index in order:
            if self.moves[index] <= most_moves and (not kept or self.time[index] < self.time[kept[-1]] - 1e-12):
                kept.append(int(index))
        return (
            np.array([self.moves[index] for index in kept], dtype=np.int64),
            np.array([self.time[index] for index in kept]),
            [self.slots[index] for index in kept],
        )


def migrate(
    current: IntArray, ideal: IntArray, load: FloatArray, speed: FloatArray, most_moves: int
) -> IntArray | None:
    """[L, G, s] a placement of high balancedness within the budget of moves; None when a legal one needs more.

    Args:
        current: [L, G, s] present placement; may hold duplicates or lack experts, which is repaired first.
        ideal: [L, G, s] best placement without regard to moves.
        load: [L, E], normalised.
        speed: [G].
        most_moves: budget over all layers.
    """
    num_layers, num_devices, _ = current.shape
    before = residency(current.reshape(num_layers, -1), load.shape[1], num_devices)
    options = [Options() for _ in range(num_layers)]
    for layer, (moves, busiest, slots) in enumerate(
        measured(rename_devices(ideal, before, speed), load, before, speed)
    ):
        options[layer].add(moves, busiest, slots)
    legal = np.stack([mend(current[layer], load[layer]) for layer in range(num_layers)])
    explore(legal, load, before, speed, most_moves, options)
    return spend(options, most_moves)


def measured(
    slots: IntArray, load: FloatArray, before: BoolArray, speed: FloatArray
) -> list[tuple[int, float, IntArray]]:
    """(moves, time of the busiest device, slots) of each layer."""
    counts = counts_of(slots, load.shape[1])
    state = Repairs(
        slots=slots,
        counts=counts,
        load=load,
        before=before,
        layer=np.arange(len(slots)),
        target=np.ones(len(slots)),
        speed=speed,
    )
    return list(zip(state.moves().tolist(), state.times().max(axis=1).tolist(), slots, strict=True))


def counts_of(slots: IntArray, num_experts: int) -> IntArray:
    """[B, E] replicas in [B, G, s] slots."""
    num_rows = slots.shape[0]
    flat = slots.reshape(num_rows, -1) + num_experts * np.arange(num_rows)[:, None]
    return np.bincount(flat.ravel(), minlength=num_rows * num_experts).reshape(num_rows, num_experts)


def rename_devices(slots: IntArray, before: BoolArray, speed: FloatArray) -> IntArray:
    """[L, G, s] whole devices' contents handed to the devices that hold most of them; nothing if speeds differ."""
    if not np.all(speed == speed[0]):
        return slots
    num_layers, num_devices, _ = slots.shape
    # Overlap of what the new device i holds with what the old device d held: the gain of giving content i to device d.
    overlap = np.zeros((num_layers, num_devices, num_devices))
    for device in range(num_devices):
        overlap[:, :, device] = before[np.arange(num_layers)[:, None, None], device, slots].sum(axis=2)
    content = np.tile(np.arange(num_devices), (num_layers, 1))[:, :, None]
    reassign(content, overlap)
    return slots[np.arange(num_layers)[:, None], content[:, :, 0]]


def mend(slots: IntArray, load: FloatArray) -> IntArray:
    """[G, s] the present layer without duplicates and with every expert, by as few replacements as it takes."""
    slots = slots.copy()
    num_experts = load.size
    counts = np.bincount(slots.ravel(), minlength=num_experts)
    duplicate = [
        (device, place) for device, row in enumerate(slots) for place in range(row.size) if row[place] in row[:place]
    ]
    for device, place in duplicate:
        here = np.isin(np.arange(num_experts), slots[device])
        urgency = np.where(counts == 0, np.inf, load / np.maximum(counts, 1))
        winner = int(np.where(here, -1.0, urgency).argmax())
        counts[slots[device, place]] -= 1
        slots[device, place] = winner
        counts[winner] += 1
    for missing in np.flatnonzero(counts == 0):
        spare = np.where(counts[slots] > 1, -(load / np.maximum(counts - 1, 1))[slots], -np.inf)
        device, place = divmod(int(spare.argmax()), slots.shape[1])
        counts[slots[device, place]] -= 1
        slots[device, place] = missing
        counts[missing] += 1
    return slots


def explore(
    slots: IntArray, load: FloatArray, before: BoolArray, speed: FloatArray, most_moves: int, options: list[Options]
) -> None:
    """Repair every layer towards every target; note each state as a point of its layer."""
    num_layers = slots.shape[0]
    for layer, (moves, busiest, present) in enumerate(measured(slots, load, before, speed)):
        options[layer].add(moves, busiest, present)
    keep = np.array([option.time[-1] for option in options])
    layer_of = np.repeat(np.arange(num_layers), len(TARGETS))
    share = np.tile(np.array(TARGETS), num_layers)
    state = Repairs(
        slots=slots[layer_of],
        counts=counts_of(slots, load.shape[1])[layer_of],
        load=load[layer_of],
        before=before,
        layer=layer_of,
        target=1.0 + (keep[layer_of] - 1.0) * share,
        speed=speed,
    )
    active = np.flatnonzero(keep[layer_of] > 1.0 + LEAST_GAIN)
    # Blocks of rows keep the temporary arrays in the processor's cache.
    for block in np.array_split(active, -(-active.size // ROWS_PER_BLOCK)) if active.size else []:
        explore_block(state, block, most_moves, options)


def explore_block(state: Repairs, active: IntArray, most_moves: int, options: list[Options]) -> None:
    """Repair some rows until they meet their targets, stop gaining or spend the budget."""
    for _ in range(state.slots[0].size):
        if not active.size:
            return
        part = state.take(active)
        gained = step(part)
        state.slots[active], state.counts[active] = part.slots, part.counts
        spent, times = part.moves(), part.times().max(axis=1)
        for row in np.flatnonzero(gained):
            options[part.layer[row]].add(int(spent[row]), float(times[row]), part.slots[row])
        active = active[gained & (spent < most_moves) & (times > part.target + LEAST_GAIN)]


def step(state: Repairs) -> BoolArray:
    """One swap or copy in each row; [B] whether it removed excess. Rows that did not improve are left as they were."""
    rows = np.arange(state.slots.shape[0])
    times = state.times()
    busy = times.argmax(axis=1)
    held = np.zeros((rows.size, *state.before.shape[1:]), dtype=bool)
    held[rows[:, None, None], np.arange(state.speed.size)[None, :, None], state.slots] = True
    swap, swap_at = best_swap(state, times, busy, held)
    copy, copy_at = best_copy(state, times, busy, held)
    excess = np.maximum(times - state.target[:, None], 0.0).sum(axis=1)
    old_slots, old_counts = state.slots.copy(), state.counts.copy()
    per_device = state.slots.shape[2]
    flat = state.slots.reshape(rows.size, -1)

    use_swap = swap >= copy
    chosen = rows[use_swap & np.isfinite(swap)]
    place, other = np.divmod(swap_at[chosen], flat.shape[1])
    own = busy[chosen] * per_device + place
    flat[chosen, own], flat[chosen, other] = flat[chosen, other], flat[chosen, own]

    chosen = rows[~use_swap & np.isfinite(copy)]
    place, other = np.divmod(copy_at[chosen], flat.shape[1])
    winner = old_slots[chosen, busy[chosen], place]
    state.counts[chosen, flat[chosen, other]] -= 1
    state.counts[chosen, winner] += 1
    flat[chosen, other] = winner

    now = np.maximum(state.times() - state.target[:, None], 0.0).sum(axis=1)
    gained: BoolArray = now < excess - LEAST_GAIN
    state.slots[~gained], state.counts[~gained] = old_slots[~gained], old_counts[~gained]
    return gained


def excess_over(times: FloatArray, target: FloatArray) -> FloatArray:
    """Time above the target."""
    return np.maximum(times - target, 0.0)


def best_swap(state: Repairs, times: FloatArray, busy: IntArray, held: BoolArray) -> tuple[FloatArray, IntArray]:
    """[B] excess removed for each move by the best swap of a slot of the busiest device, and [B] which (i * S + j)."""
    num_rows, _, per_device = state.slots.shape
    rows = np.arange(num_rows)
    flat = state.slots.reshape(num_rows, -1)
    home = np.arange(flat.shape[1]) // per_device
    mine = state.slots[rows, busy]
    piece = state.load / state.counts
    shift = piece[rows[:, None], flat][:, None, :] - piece[rows[:, None], mine][:, :, None]  # [B, s, S]
    target = state.target[:, None, None]
    busy_time = times[rows, busy][:, None, None]
    their_time = times[:, home][:, None, :]
    removed = excess_over(busy_time, target) + excess_over(their_time, target)
    removed = removed - excess_over(busy_time + shift / state.speed[busy][:, None, None], target)
    removed -= excess_over(their_time - shift / state.speed[home], target)

    was, layer = state.before, state.layer
    cost = 1.0 * ~was[layer[:, None, None], home[None, None, :], mine[:, :, None]]
    cost -= ~was[layer[:, None], busy[:, None], mine][:, :, None]
    theirs = 1.0 * ~was[layer[:, None], busy[:, None], flat] - ~was[layer[:, None], home[None, :], flat]
    cost += theirs[:, None, :]
    ratio = removed / np.maximum(cost, FREE_MOVE)

    illegal = held[rows[:, None, None], home[None, None, :], mine[:, :, None]]
    illegal |= held[rows[:, None], busy[:, None], flat][:, None, :]
    ratio[illegal] = -FORBIDDEN
    ratio = ratio.reshape(num_rows, -1)
    pick = ratio.argmax(axis=1)
    return ratio[rows, pick], pick


def best_copy(state: Repairs, times: FloatArray, busy: IntArray, held: BoolArray) -> tuple[FloatArray, IntArray]:
    """[B] excess removed for each move by the best copy of an expert of the busiest device, and [B] which (i * S + j).

    A device that holds both the expert that gains a copy and the one that loses it is counted for each separately; the
    caller checks the outcome.
    """
    num_rows, _, per_device = state.slots.shape
    num_experts = state.load.shape[1]
    rows = np.arange(num_rows)
    flat = state.slots.reshape(num_rows, -1)
    home = np.arange(flat.shape[1]) // per_device
    mine = state.slots[rows, busy]
    piece = state.load / state.counts
    smaller = state.load / (state.counts + 1)
    larger = np.where(state.counts > 1, state.load / np.maximum(state.counts - 1, 1), np.inf)
    target = state.target[:, None]

    # What every device that holds an expert saves when the expert gains a copy, and pays when it loses one: [B, E].
    slot_time = times[:, home]
    over = excess_over(slot_time, target)
    relief = over - excess_over(slot_time + (smaller - piece)[rows[:, None], flat] / state.speed[home], target)
    grown = np.where(np.isfinite(larger), larger - piece, 0.0)[rows[:, None], flat] / state.speed[home]
    burden = excess_over(slot_time + grown, target) - over
    saved, paid = np.zeros((2, num_rows, num_experts))
    np.add.at(saved, (rows[:, None], flat), relief)
    np.add.at(paid, (rows[:, None], flat), burden)

    # The device of the slot that changes: it loses the piece of one expert and takes the smaller piece of the other.
    gain_here = smaller[rows[:, None], mine][:, :, None] - piece[rows[:, None], flat][:, None, :]  # [B, s, S]
    here = over[:, None, :] - excess_over(slot_time[:, None, :] + gain_here / state.speed[home], target[:, :, None])
    removed = here + saved[rows[:, None], mine][:, :, None] - (paid[rows[:, None], flat] - burden)[:, None, :]

    was, layer = state.before, state.layer
    cost = 1.0 * ~was[layer[:, None, None], home[None, None, :], mine[:, :, None]]
    cost -= ~was[layer[:, None], home[None, :], flat][:, None, :]
    ratio = removed / np.maximum(cost, FREE_MOVE)
    illegal = held[rows[:, None, None], home[None, None, :], mine[:, :, None]]
    illegal |= (state.counts[rows[:, None], flat] <= 1)[:, None, :]
    ratio[illegal] = -FORBIDDEN
    ratio = ratio.reshape(num_rows, -1)
    pick = ratio.argmax(axis=1)
    return ratio[rows, pick], pick


def spend(options: list[Options], most_moves: int) -> IntArray | None:
    """Choose one point for each layer: most total balancedness within the budget (multiple-choice knapsack, exact)."""
    fronts = [option.pareto(most_moves) for option in options]
    if any(front[0].size == 0 for front in fronts):
        return None
    budget = min(most_moves, sum(int(front[0].max()) for front in fronts))
    value = np.zeros(budget + 1)
    choices: list[IntArray] = []
    for moves, times, _ in fronts:
        balance = balance_of_time(times)
        table = np.full((moves.size, budget + 1), -np.inf)
        for index, cost in enumerate(moves):
            if cost <= budget:
                table[index, cost:] = value[: budget + 1 - cost] + balance[index]
        choices.append(table.argmax(axis=0))
        value = table.max(axis=0)
    if not np.isfinite(value[budget]):
        return None
    left = budget
    picked = []
    for (moves, _, slots), choice in zip(reversed(fronts), reversed(choices), strict=True):
        index = int(choice[left])
        picked.append(slots[index])
        left -= int(moves[index])
    return np.stack(picked[::-1])
