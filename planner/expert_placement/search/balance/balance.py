"""The most balanced placement of one load, or of the worst of several, for all layers at once.

Layers are independent under this objective, so every step below works on all of them as rows of one array, and a row
is finished as soon as it meets its bound. The members of the portfolio, in the order in which they run:

1. the counts and the packing of EPLB (largest piece first), made legal;
2. exchanges between the busiest devices and several others (``exchange.py``);
3. for rows still above their bound, other replica counts, packed and exchanged anew;
4. for rows still above it, generations of single replica moves from the best placement, exchanged again;
5. instead of 4, with two slots on each of equal devices, a search over the counts alone (``pairing.py``);
6. instead of 3 and 4, the exact search where layers are small (``exact.py``).

Each keeps the best of what came before, so the answer is never worse than the first. Work is counted in exchanges
looked at, not in seconds, so that the same seed gives the same answer on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.expert_placement.search.balance.exact import best_layer, is_small
from meshplan.planner.expert_placement.search.balance.exchange import PairBalancer
from meshplan.planner.expert_placement.search.balance.packing import longest_first
from meshplan.planner.expert_placement.search.balance.pairing import SLOTS_PER_DEVICE, fold, search_counts
from meshplan.planner.expert_placement.search.balance.replicas import filling_counts, greedy_counts

# Exchanges go on until a row is this close to its bound; they are cheap.
CLOSE_ENOUGH = 2e-5
# Other replica counts are tried on rows further than this from it: a quarter of the 0.1 % that one may measure.
WORTH_OTHER_COUNTS = 2.5e-4
HALVING_ROUNDS = 8  # rounds in which all devices are paired, before the busiest ones get several partners each
BUSIEST_FRACTION = 8  # afterwards the busiest 1 / 8 of the devices …
PARTNERS = 7  # … are each tried with this many partners per round
PATIENCE = 6  # rounds without gain after which a row is finished …
SHORT_PATIENCE = 3  # … and after which one of many trials of a row is
MOST_ROUNDS = 200
COUNT_SHIFTS = (0.5, 0.25, 0.1, 1.0)
FILLING_PIECES = (1, 2, 3)
MOST_TRIALS = 200  # rows of one generation of replica moves …
MOST_TRIALS_PER_ROW = 40  # … and copies of one layer among them
SWAPS_PER_PERTURBATION = 3  # where no expert has a spare copy, a trial swaps this many pairs of pieces instead
FROM_THE_BUSIEST = 0.5  # share of the moves that give a copy to an expert of the busiest device
MOVE_AGAIN = 0.3  # chance that a trial makes one more move
TRIAL_OVERHEAD_SLOTS = 10  # setting up a trial costs as much as one pair of devices per this many slots
MOST_GENERATIONS = 200
# Exchanges evaluated before the search ends: a constant plus a number per slot, at most what takes about 0.4 s on one
# core of a 2020s server.
WORK_AT_LEAST = 1.5e7
WORK_PER_SLOT = 5e3
WORK_AT_MOST = 1.4e8
# Without an exact pairing (``pairing.py``), three pieces per device average out least and the search improves longest:
# it may spend this many times as much.
SLOTS_THAT_GAIN_LONGEST = 3
PATIENCE_THERE = 2.0


@dataclass(slots=True)
class Effort:
    """What a search may still spend: counted work, and the budget of the question."""

    work: float
    budget: Budget | None = None

    def spend(self, amount: float) -> None:
        """Count ``amount`` exchanges."""
        self.work -= amount

    @property
    def exhausted(self) -> bool:
        """Whether the search should end."""
        return self.work <= 0 or (self.budget is not None and bool(self.budget.stopped))

    def part(self, share: float) -> Effort:
        """A part of what is left, to be given to one stage."""
        return replace(self, work=self.work * share)


@dataclass(slots=True, kw_only=True)
class Best:
    """The best placement of each row so far.

    Args:
        slots: [L, G, s].
        counts: [L, E].
        time: [L] time of the busiest device, in units of the ideal time.
    """

    slots: IntArray
    counts: IntArray
    time: FloatArray

    def take(self, row: IntArray, slots: IntArray, counts: IntArray, busiest: FloatArray) -> None:
        """Keep the candidates (several may share a row) that are better than what the row has."""
        order = np.lexsort((busiest, row))
        lead = order[np.flatnonzero(np.diff(row[order], prepend=-1))]
        lead = lead[busiest[lead] < self.time[row[lead]]]
        where = row[lead]
        self.slots[where], self.counts[where], self.time[where] = slots[lead], counts[lead], busiest[lead]


def default_work(num_cases: int, num_layers: int, num_slots: int, slots_per_device: int) -> float:
    """Work that is proportionate to a problem."""
    work = min(num_cases * (WORK_AT_LEAST + WORK_PER_SLOT * num_layers * num_slots), WORK_AT_MOST)
    return work * (PATIENCE_THERE if slots_per_device == SLOTS_THAT_GAIN_LONGEST else 1.0)


def normalised(load: FloatArray, speed: FloatArray) -> FloatArray:
    """[…, E] loads over the ideal time of their layer; zero where the layer has no load."""
    ideal = load.sum(axis=-1, keepdims=True) / speed.sum()
    share: FloatArray = np.divide(load, ideal, out=np.zeros_like(load), where=ideal > 0)
    return share


def balance(
    load: FloatArray, num_redundant: int, speed: FloatArray, bound: FloatArray, effort: Effort, seed: int
) -> Best:
    """Run the portfolio.

    Args:
        load: [C, L, E] load cases, normalised.
        num_redundant: spare slots of a layer.
        speed: [G].
        bound: [L] time that no placement can beat, in the same unit.
        effort: what to spend.
        seed: random seed of the replica moves.
    """
    mean = load.mean(axis=0)
    counts = greedy_counts(mean, num_redundant, speed.size)
    best = pack_and_exchange(load, counts, speed, bound, effort)
    one_case = load.shape[0] == 1 and bool(np.all(speed == speed[0]))
    if one_case and is_small(load.shape[2], num_redundant, speed.size):
        prove_small_layers(best, load[0], num_redundant, bound)
    elif one_case and best.slots.shape[2] == SLOTS_PER_DEVICE and not num_redundant:
        take_fold(best, load[0], best.counts)
        bound[:] = np.maximum(bound, best.time)  # without copies there is only this one choice of counts
    elif best.slots.shape[2] > 1 and speed.size > 1:
        goal = bound * (1.0 + WORTH_OTHER_COUNTS)
        if num_redundant:
            goal = np.maximum(bound * (1.0 + CLOSE_ENOUGH), np.minimum(goal, eplb_time(load, num_redundant, speed)))
            try_other_counts(best, load, num_redundant, speed, bound, goal, effort)
        rng = np.random.default_rng(seed)
        if one_case and best.slots.shape[2] == SLOTS_PER_DEVICE:
            pair_up(best, load[0], goal, effort, rng)
            return best
        perturb(best, load, speed, bound, goal, effort, rng)
    return best


def eplb_time(load: FloatArray, num_redundant: int, speed: FloatArray) -> FloatArray:
    """[L] time of the busiest device under EPLB's own placement, which need not be legal.

    EPLB may put two copies of an expert on one device and so split a load unevenly, which sometimes balances better
    than the legal placement derived from it. The search goes on for rows worse than this, however close to their bound.
    """
    mean = load.mean(axis=0)
    counts = greedy_counts(mean, num_redundant, mean.shape[1] + num_redundant)
    slots = longest_first(mean, counts, np.ones(speed.size), copies_may_meet=True)
    rows = np.arange(mean.shape[0])[:, None, None]
    times: FloatArray = ((load / counts)[:, rows, slots].sum(axis=3) / speed).max(axis=(0, 2))
    return times


def prove_small_layers(best: Best, load: FloatArray, num_redundant: int, bound: FloatArray) -> None:
    """Member 6: the exact search; raises ``bound`` to what it proves."""
    num_devices = best.slots.shape[1]
    for layer in range(load.shape[0]):
        found, proven = best_layer(load[layer], num_redundant, num_devices, best.time[layer], bound[layer])
        bound[layer] = max(bound[layer], proven)
        if found is not None:
            counts = np.bincount(found.ravel(), minlength=load.shape[1])
            best.slots[layer], best.counts[layer] = found, counts
            best.time[layer] = (load[layer] / counts)[found].sum(axis=1).max()


def take_fold(best: Best, load: FloatArray, counts: IntArray) -> None:
    """Keep the exact pairing for the counts where it is better.

    Args:
        best: changed.
        load: [L, E], normalised.
        counts: [L, E] replicas, all in two slots a device.
    """
    slots = fold(load, counts)
    rows = np.arange(load.shape[0])
    busiest = (load / counts)[rows[:, None, None], slots].sum(axis=2).max(axis=1)
    best.take(rows, slots, counts, busiest)


def pair_up(best: Best, load: FloatArray, goal: FloatArray, effort: Effort, rng: np.random.Generator) -> None:
    """Member 5: search the counts, the pairing being exact for each."""
    if effort.exhausted:
        return
    counts, spent = search_counts(load, best.counts, goal, effort.work, rng)
    effort.spend(spent)
    take_fold(best, load, counts)


def try_other_counts(
    best: Best,
    load: FloatArray,
    num_redundant: int,
    speed: FloatArray,
    bound: FloatArray,
    goal: FloatArray,
    effort: Effort,
) -> None:
    """Member 3: counts that spend fewer copies on the heaviest experts, for rows above their goal."""
    hard = np.flatnonzero(best.time > goal)
    if not hard.size or effort.exhausted:
        return
    worst_case, devices = load[:, hard].max(axis=0), speed.size
    variants = [greedy_counts(worst_case, num_redundant, devices, shift=shift) for shift in COUNT_SHIFTS]
    variants += [
        filling_counts(worst_case, num_redundant, devices, pieces_per_device=pieces) for pieces in FILLING_PIECES
    ]
    row = np.repeat(hard, len(variants))
    counts = np.stack(variants, axis=1).reshape(row.size, -1)
    found = pack_and_exchange(load[:, row], counts, speed, bound[row], effort, patience=SHORT_PATIENCE)
    best.take(row, found.slots, found.counts, found.time)


def pack_and_exchange(
    load: FloatArray,
    counts: IntArray,
    speed: FloatArray,
    bound: FloatArray,
    effort: Effort,
    *,
    patience: int = PATIENCE,
) -> Best:
    """Members 1 and 2: longest piece first, then exchanges."""
    balancer = PairBalancer(longest_first(load.mean(axis=0), counts, speed), load / counts, speed)
    exchange_until_stalled(balancer, bound, effort, halving_rounds=HALVING_ROUNDS, patience=patience)
    return Best(slots=balancer.slots, counts=counts, time=balancer.time.max(axis=1))


def exchange_until_stalled(
    balancer: PairBalancer, bound: FloatArray, effort: Effort, *, halving_rounds: int, patience: int = PATIENCE
) -> None:
    """Exchange until every row is close to its bound or has had ``patience`` rounds without gain.

    In the first rounds the busiest device meets the least busy one, the second busiest the second least, and so on;
    afterwards the busiest few each look at several partners, which rotate from round to round.
    """
    num_rows, num_devices, per_device = balancer.slots.shape
    if num_devices == 1 or per_device == 1:
        return
    target = bound * (1.0 + CLOSE_ENOUGH)
    busiest = balancer.time.max(axis=1)
    idle_rounds = np.zeros(num_rows, dtype=np.int64)
    active = np.flatnonzero(busiest > target)
    for turn in range(MOST_ROUNDS):
        if not active.size or effort.exhausted:
            return
        few = turn >= halving_rounds
        heads = max(1, num_devices // BUSIEST_FRACTION) if few else num_devices // 2
        partners = min(PARTNERS, (num_devices - heads) // heads) if few else 1
        row, first, second = pairs(balancer.time[active], heads, partners, turn if few else 0)
        balancer.improve(active[row], first, second, partners=partners)
        effort.spend(balancer.work_of(row.size))
        now = balancer.time[active].max(axis=1)
        idle_rounds[active] = np.where(now < busiest[active], 0, idle_rounds[active] + 1)
        busiest[active] = now
        patient = (idle_rounds[active] < patience) | (turn < halving_rounds)
        active = active[(now > target[active]) & patient]


def pairs(busy: FloatArray, heads: int, partners: int, turn: int) -> tuple[IntArray, IntArray, IntArray]:
    """Row, first and second device of the pairs of one round.

    Args:
        busy: [B, G] time of each device.
        heads: the busiest devices that are to shed load.
        partners: others that each of them looks at; no device is looked at twice.
        turn: rotates the partners, least busy first.
    """
    num_rows, num_devices = busy.shape
    order = np.argsort(-busy, axis=1, kind="stable")
    others = num_devices - heads
    rank = (np.arange(heads)[:, None] + heads * np.arange(partners)[None, :] + turn * heads * partners // 2) % others
    second = order[:, ::-1][:, rank.ravel()]
    first = np.repeat(order[:, :heads], partners, axis=1)
    return np.repeat(np.arange(num_rows), heads * partners), first.ravel(), second.ravel()


def perturb(
    best: Best,
    load: FloatArray,
    speed: FloatArray,
    bound: FloatArray,
    goal: FloatArray,
    effort: Effort,
    rng: np.random.Generator,
) -> None:
    """Member 4: on each row above its goal, try replica moves from its best placement and keep what gains."""
    for _ in range(MOST_GENERATIONS):
        hard = np.flatnonzero(best.time > goal)
        if not hard.size or effort.exhausted:
            return
        # The mean over layers counts, so the rows with the largest gaps get the most trials.
        gap = best.time[hard] / bound[hard] - 1.0
        trials = np.ceil(np.minimum(gap / gap.sum() * MOST_TRIALS, MOST_TRIALS_PER_ROW)).astype(np.int64)
        row = np.repeat(hard, trials)
        slots, counts = best.slots[row], best.counts[row]
        changed = swap_pieces(slots, rng) if counts.shape[1] == slots[0].size else np.zeros(row.size, dtype=bool)
        moving = np.arange(row.size if counts.shape[1] < slots[0].size else 0)
        while moving.size:
            part_slots, part_counts = slots[moving], counts[moving]
            moved = move_one_replica(part_slots, part_counts, load[:, row[moving]], best.time[row[moving]], speed, rng)
            slots[moving], counts[moving] = part_slots, part_counts
            changed[moving[moved]] = True
            moving = moving[rng.random(moving.size) < MOVE_AGAIN]
        row, slots, counts = row[changed], slots[changed], counts[changed]
        if not row.size:
            return
        balancer = PairBalancer(slots, load[:, row] / counts, speed)
        exchange_until_stalled(balancer, bound[row], effort, halving_rounds=2, patience=SHORT_PATIENCE)
        best.take(row, balancer.slots, counts, balancer.time.max(axis=1))
        effort.spend(balancer.work_of(balancer.slots.size // TRIAL_OVERHEAD_SLOTS))


def swap_pieces(slots: IntArray, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Swap a few random pieces in each row, where every expert has one copy; [B] which rows changed."""
    num_rows, num_devices, per_device = slots.shape
    flat = slots.reshape(num_rows, -1)
    rows = np.arange(num_rows)
    for _ in range(SWAPS_PER_PERTURBATION):
        one, two = rng.integers(num_devices * per_device, size=(2, num_rows))
        flat[rows, one], flat[rows, two] = flat[rows, two], flat[rows, one]
    return np.ones(num_rows, dtype=bool)


def move_one_replica(
    slots: IntArray,
    counts: IntArray,
    load: FloatArray,
    busiest: FloatArray,
    speed: FloatArray,
    rng: np.random.Generator,
) -> IntArray:
    """In each row turn one copy of some expert into a copy of another; rows that cannot are left out of the answer.

    The expert that loses a copy must have two, and still fit where its copies are; the one that gains it is taken
    from the busiest device every other time, else from anywhere.
    """
    num_rows, num_devices, per_device = slots.shape
    rows = np.arange(num_rows)
    spare = np.take_along_axis(counts, slots.reshape(num_rows, -1), axis=1) > 1
    after_loss = np.where(counts > 1, load.max(axis=0) / np.maximum(counts - 1, 1), np.inf)
    spare &= np.take_along_axis(after_loss, slots.reshape(num_rows, -1), axis=1) < (busiest * speed.max())[:, None]
    slot = (rng.random(spare.shape) * spare).argmax(axis=1)
    device, place = np.divmod(slot, per_device)
    loser = slots[rows, device, place]

    wish = rng.random(counts.shape) * (counts < num_devices)
    time_now = ((load / counts)[:, rows[:, None, None], slots].sum(axis=3) / speed).max(axis=0)
    top = slots[rows, time_now.argmax(axis=1)]
    every_other = np.flatnonzero(rng.random(num_rows) < FROM_THE_BUSIEST)
    wish[every_other[:, None], top[every_other]] += wish[every_other[:, None], top[every_other]] > 0
    wish[rows[:, None], slots[rows, device]] = 0.0  # no second copy on the same device, and no move onto itself
    winner = wish.argmax(axis=1)
    legal = spare[rows, slot] & (wish[rows, winner] > 0)
    slots[rows[legal], device[legal], place[legal]] = winner[legal]
    counts[rows[legal], loser[legal]] -= 1
    counts[rows[legal], winner[legal]] += 1
    return np.flatnonzero(legal)
