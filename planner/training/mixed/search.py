"""Which pools take part in which order, and what each of their stages is.

*Space.* 1F1B pipelines. Each pool in use holds consecutive stages with one tensor and data parallelism, micro-batch
size and recompute; pools stand in any order; layers are split in any way; any micro-batch count; any of the pools.

*Method.* For each S (sequences of a micro-batch over all replicas) decisions are taken pool by pool, breadth first, and
dropped where their bound (:mod:`.bounds`) is no better than the best plan known. What is left is put in every order,
split (:mod:`.partition`) and priced, the best bound first, until no bound is better than the best plan by more than
:data:`CLOSE`.

*Bound.* The least bound among decisions that were dropped or left, and of those that were priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.training.mixed.bounds import Relaxed, relaxed
from meshplan.planner.training.mixed.estimator import price_mixed
from meshplan.planner.training.mixed.least_messages import least_messages_s
from meshplan.planner.training.mixed.options import MIDDLE, WHOLE, PoolOptions, pool_options, zero_stage
from meshplan.planner.training.mixed.partition import Block, Split, partitions
from meshplan.planner.training.mixed.polish import polished
from meshplan.planner.training.mixed.quick import QuickPrice
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Share, Stage
from meshplan.planner.training.problem.choice import RECOMPUTE_MODES

# A search ends where no bound is better than the best plan by more than this share of it.
CLOSE = 0.01
# Most partial decisions that are kept of one S, and most decisions that are split and priced; what is beyond counts in
# the bound.
WIDEST, MOST_PRICED = 1_000, 30
# The same where a first good plan is looked for.
NARROW, FEW_PRICED = 24, 3
# Orders, recomputes and splits of one decision that are priced.
ORDERS = 4
# Up to so many pools, each may have its own recompute; of more, all have the least or the most that could help.
FEW_POOLS = 2
# Decisions that are priced without a better plan before the search of an S ends.
PATIENCE = 8


class MixedSearch:
    """Searches plans of one question on any of its pools.

    Args:
        problem: the question.
        budget: what it may spend.
    """

    def __init__(self, problem: MixedProblem, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        self.options: list[PoolOptions | None] = [pool_options(problem, pool) for pool in range(len(problem.pools))]
        self.considered = 0
        self._quick = QuickPrice(problem)

    def best(self, pools: Sequence[int], known: Found | None = None) -> Found:
        """The best plan on some pools (any of them may stay idle), and the bound of all such plans.

        Args:
            pools: that may be used.
            known: a plan that is known.
        """
        found = Found() if known is None else Found(config=known.config, step_s=known.step_s)
        sizes = sorted({int(size) for one in pools if (own := self.options[one]) is not None for size in own.sequences})
        rough = []
        for size in sizes:
            table = self._table(size, pools, found.step_s)
            if table is not None:
                rough.append((float(table.bounds([None] * len(self.options))[0]), size))
        for bound, size in sorted(rough):
            table = self._table(size, pools, found.step_s) if bound < found.step_s else None
            if table is not None:
                self._search_size(table, found, NARROW, FEW_PRICED)
        found.bound_s = float("inf")
        for bound, size in sorted(rough):
            table = self._table(size, pools, found.step_s) if bound < found.step_s * (1.0 - CLOSE) else None
            if table is None:
                found.drop(np.array([bound]))
            else:
                self._search_size(table, found, WIDEST, MOST_PRICED)
        if found.config is not None:
            found.config, found.step_s = polished(
                found.config,
                found.step_s,
                price=self._quick.step_s,
                weight=self._quick.seconds,
                fits=lambda config: price_mixed(self.problem, config).fits,
                budget=self.budget,
            )
        found.bound_s = min(found.bound_s, found.step_s)
        return found

    def least_alone_s(self, pool: int) -> float:
        """Lower bound of every plan on one pool, whatever its degrees: all devices work without a pause, each layer as
        the option with the least device time computes it.
        """
        own, problem = self.options[pool], self.problem.pools[pool]
        if own is None:
            return float("inf")
        per_sequence = float((own.layer_s * own.devices / own.sequences).min())
        sequences = problem.workload.global_batch_size * problem.shape.num_hidden_layers
        return sequences * per_sequence / problem.limits.max_devices

    def least_layer_bytes(self, pool: int) -> float | None:
        """Least safe memory of a stage of one layer; None where no degrees are legal."""
        own = self.options[pool]
        return None if own is None else float(own.memory[MIDDLE].sum(axis=0).min())

    def _table(self, size: int, pools: Sequence[int], ceiling_s: float) -> Relaxed | None:
        overheads = [self.problem.pools[pool].calibration.time.step_overhead_s for pool in pools]
        return relaxed(
            self.options,
            size,
            self.problem.any.shape.num_hidden_layers,
            pools,
            overhead_s=min(float(np.asarray(one)) for one in overheads),
            ceiling_s=ceiling_s,
        )

    def _search_size(self, table: Relaxed, found: Found, width: int, most_priced: int) -> None:
        """Decide the pools of one S, and price what is left."""
        ceiling = found.step_s * (1.0 - CLOSE)
        if np.isfinite(ceiling):
            table.without(ceiling)
            found.drop(np.array([ceiling]) if table.left_out else np.zeros(0))
        chosen: list[IntArray | None] = [None] * len(self.options)
        bounds = np.array([-np.inf])
        for pool in sorted(range(len(chosen)), key=lambda pool: -len(table.pools[pool].rows)):
            count, length = len(table.pools[pool].rows), len(bounds)
            chosen = [None if one is None else np.repeat(one, count) for one in chosen]
            chosen[pool] = np.tile(np.arange(count), length)
            bounds = table.bounds(chosen)
            self.considered += len(bounds)
            keep = bounds < ceiling
            if keep.sum() > width:
                keep &= bounds <= np.partition(bounds[keep], width)[width]
            found.drop(bounds[~keep])
            chosen = [None if one is None else one[keep] for one in chosen]
            bounds = bounds[keep]
            if not len(bounds):
                return
        bounds = bounds + least_messages_s(self.problem, self.options, table, chosen)
        keep = bounds < ceiling
        found.drop(bounds[~keep])
        chosen = [None if one is None else one[keep] for one in chosen]
        self._price(table, chosen, bounds[keep], found, most_priced)

    def _price(
        self,
        table: Relaxed,
        chosen: Sequence[IntArray | None],
        bounds: FloatArray,
        found: Found,
        most_priced: int,
    ) -> None:
        """Split and price decisions, the best bound first."""
        patience = PATIENCE
        for priced, index in enumerate(np.argsort(bounds, kind="stable").tolist()):
            found.drop(bounds[index : index + 1])
            if (
                bounds[index] >= found.step_s * (1.0 - CLOSE)
                or priced >= most_priced
                or not patience
                or self.budget.stopped
            ):
                return
            blocks = []
            for pool, rows in enumerate(chosen):
                own = self.options[pool]
                option = -1 if rows is None else int(table.pools[pool].rows[rows[index]])
                if option >= 0 and own is not None:
                    blocks.append(Block(pool=pool, row=option, stages=int(own.most_stages[option])))
            before = found.step_s
            self._orders(blocks, found)
            patience = PATIENCE if found.step_s < before else patience - 1

    def _orders(self, blocks: Sequence[Block], found: Found) -> None:
        """The pools of a decision in every order; those that take least by their slowest stage are priced."""
        layers = self.problem.any.shape.num_hidden_layers
        splits: list[Split] = []
        every = list(product(*(self._modes(block, blocks, found) for block in blocks)))
        few = every if len(blocks) <= FEW_POOLS else [every[0], *every[-1:]] if len(every) > 1 else every
        for modes in few:
            for order in permutations(modes):
                splits += partitions(self.options, order, layers)
        for split in sorted(splits, key=lambda one: one.about_s)[:ORDERS]:
            if split.least_s >= found.step_s:
                continue
            config = self._config(split.stages)
            seconds = self._quick.step_s(config)
            if seconds < found.step_s * (1.0 - 1e-12) and price_mixed(self.problem, config).fits:
                found.config, found.step_s = config, seconds

    def _modes(self, block: Block, blocks: Sequence[Block], found: Found) -> list[Block]:
        """A block with each recompute; with the least alone where memory does not bind it, however early it stands."""
        own = self.options[block.pool]
        if own is None:
            raise AssertionError("a block is on a pool that has options")
        flying = float(min(sum(one.stages for one in blocks), int(own.num_microbatches[block.row])))
        modes = []
        for row in own.recomputes(block.row).tolist():
            modes.append(Block(pool=block.pool, row=row, stages=block.stages))
            layers = found.step_s / float(own.num_microbatches[row] * own.layer_s[row])
            if float(own.most_layers(WHOLE, flying, slice(row, row + 1))[0]) >= layers:
                break
        return modes

    def _config(self, split: Sequence[tuple[Block, int]]) -> MixedConfig:
        stages, rounds = [], 1
        for block, layers in split:
            own = self.options[block.pool]
            if own is None:
                raise AssertionError("a block is on a pool that has options")
            row, rounds = block.row, int(own.num_microbatches[block.row])
            share = Share(
                pool=block.pool,
                data_parallel=int(own.data_parallel[row]),
                micro_batch_size=int(own.micro_batch_size[row]),
            )
            stages.append(
                Stage(
                    num_layers=layers,
                    tensor_parallel=int(own.tensor_parallel[row]),
                    shares=(share,),
                    activation_recompute=RECOMPUTE_MODES[int(own.recompute[row])],
                )
            )
        return MixedConfig(
            stages=tuple(stages),
            num_microbatches=rounds,
            zero_stage=zero_stage(self.problem),
            sequence_parallel=self.problem.any.rules.sequence_parallel,
        )


@dataclass(slots=True)
class Found:
    """The best plan so far, and the least bound of what was not priced.

    Args:
        config: None while there is none.
        step_s: of it, ∞ while there is none.
        bound_s: least bound of all decisions, s.
    """

    config: MixedConfig | None = None
    step_s: float = float("inf")
    bound_s: float = float("inf")

    def drop(self, bounds: FloatArray) -> None:
        """Count decisions' bounds."""
        if len(bounds):
            self.bound_s = min(self.bound_s, float(bounds.min()))
