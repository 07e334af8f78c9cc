"""Which pools take part in which order, and what each of their stages is.

*Space.* 1F1B pipelines. Each pool in use holds consecutive stages with one tensor and data parallelism, micro-batch
size and recompute; pools stand in any order; layers are split in any way; any micro-batch count; any of the pools.

*Method.* Branch and bound. A part of the space is one S (sequences of a micro-batch over all replicas) and a cell of
:mod:`.bounds`: how long the slowest stage takes, and the messages. The part with the least bound comes first: the
decision that its bound likes best is put in every order, split (:mod:`.partition`) and priced, and the part is halved,
until no bound is less than the best plan by more than :data:`CLOSE`, or the parts are as narrow as they get.

*Bound.* The least bound of any part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from meshplan.planner.core.budget import Budget
from meshplan.planner.training.mixed.bounding.bounds import Choice, Field, field_of
from meshplan.planner.training.mixed.bounding.parts import Parts
from meshplan.planner.training.mixed.estimator import price_mixed
from meshplan.planner.training.mixed.options import MIDDLE, WHOLE, PoolOptions, pool_options, zero_stage
from meshplan.planner.training.mixed.partition import Block, Split, fastest_first, partitions
from meshplan.planner.training.mixed.polish import polished
from meshplan.planner.training.mixed.quick import QuickPrice
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Share, Stage
from meshplan.planner.training.problem.choice import RECOMPUTE_MODES
from meshplan.planner.training.search.report import TIE_WIDTH

# A search ends where no bound is better than the best plan by more than this share of it.
CLOSE = 0.01
# Where halving ends further away than this, decisions are listed: a little nearer than plans that count as tied.
TIED = 0.98 * TIE_WIDTH
# Most parts that are bounded; what is left counts in the bound.
MOST_PARTS = 900
# Most decisions that are split and priced.
MOST_PRICED = 80
# Most orders, recomputes and splits of one decision that are priced: all of four pools in two modes.
ORDERS = 100
# Up to so many pools, each may have its own recompute; of more, all have the least or the most that could help.
FEW_POOLS = 2


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

    def best(self, pools: Sequence[int]) -> Found:
        """The best plan that uses some pools, at least two of them where several may be used, and a bound of all such.

        Args:
            pools: that may be used.
        """
        found = Found()
        parts = Parts(self._fields(pools))
        priced: set[tuple[tuple[int, int], ...]] = set()
        while parts.count < MOST_PARTS and not self.budget.stopped:
            ceiling = found.step_s * (1.0 - CLOSE)
            if not parts.can_improve(ceiling):
                break
            for decision in parts.halve_least(ceiling, found.step_s * (1.0 - TIED)):
                self._price(decision, priced, found)
        self.considered += parts.count
        self._polish(found)
        found.bound_s = min(parts.bound_s, found.step_s)
        return found

    def alone(self, pool: int) -> Found:
        """A good plan on one pool, every option with all, a half, a quarter … of the stages that it can have.

        Its bound is :meth:`least_alone_s`, which holds for every plan on the pool.
        """
        found, own, layers = Found(), self.options[pool], self.problem.any.shape.num_hidden_layers
        if own is None:
            return found
        several = []
        for row in np.unique(np.column_stack([own.sequences, own.alike]), axis=0, return_index=True)[1].tolist():
            stages, rounds = min(int(own.most_stages[row]), layers), int(own.num_microbatches[row])
            while stages:
                about = (rounds - 1 + stages) * float(own.layer_s[row]) * layers / stages
                several.append((about, Block(pool=pool, row=row, stages=stages)))
                stages //= 2
        for _, block in sorted(several, key=lambda one: one[0])[:MOST_PRICED]:
            if self.budget.stopped:
                break
            self._orders([block], found)
        self.considered += len(several)
        self._polish(found)
        found.bound_s = min(self.least_alone_s(pool), found.step_s)
        return found

    def _polish(self, found: Found) -> None:
        """Move single layers of the best plan as long as it gets faster."""
        if found.config is not None:
            found.config, found.step_s = polished(
                found.config,
                found.step_s,
                price=self._quick.step_s,
                weight=self._quick.seconds,
                fits=lambda config: price_mixed(self.problem, config).fits,
                budget=self.budget,
            )

    def least_alone_s(self, pool: int) -> float:
        """Lower bound of every plan on one pool, whatever its degrees: all devices work without a pause, each layer as
        the option with the least device time computes it.
        """
        own, problem = self.options[pool], self.problem.pools[pool]
        if own is None:
            return float("inf")
        per_sequence = float((own.layer_s * own.devices / own.sequences).min())
        sequences = problem.workload.global_batch_size * problem.shape.num_hidden_layers
        return sequences * per_sequence / problem.most_devices

    def least_layer_bytes(self, pool: int) -> float | None:
        """Least safe memory of a stage of one layer; None where no degrees are legal."""
        own = self.options[pool]
        return None if own is None else float(own.memory[MIDDLE].sum(axis=0).min())

    def _fields(self, pools: Sequence[int]) -> list[Field]:
        """The space of each S."""
        sizes = sorted({int(size) for one in pools if (own := self.options[one]) is not None for size in own.sequences})
        overheads = [self.problem.pools[pool].calibration.time.step_overhead_s for pool in pools]
        least = min(float(np.asarray(one)) for one in overheads)
        fields = (field_of(self.problem, self.options, pools, size, overhead_s=least) for size in sizes)
        return [one for one in fields if one is not None]

    def _price(self, decision: Sequence[Choice], priced: set[tuple[tuple[int, int], ...]], found: Found) -> None:
        """Split and price a decision that was not priced yet."""
        key = tuple((one.pool, one.row) for one in decision)
        if key in priced or len(priced) >= MOST_PRICED:
            return
        priced.add(key)
        blocks = []
        for one in decision:
            own = self.options[one.pool]
            if own is None:
                raise AssertionError("a decision names pools that have options")
            blocks.append(Block(pool=one.pool, row=one.row, stages=min(int(own.most_stages[one.row]), one.layers)))
        self._orders(blocks, found)

    def _orders(self, blocks: Sequence[Block], found: Found) -> None:
        """The pools of a decision in every order; those whose pipelines take least are priced."""
        layers = self.problem.any.shape.num_hidden_layers
        splits: list[Split] = []
        every = list(product(*(self._modes(block, blocks, found) for block in blocks)))
        few = every if len(blocks) <= FEW_POOLS else [every[0], *every[-1:]] if len(every) > 1 else every
        for modes in few:
            for order in permutations(modes):
                splits += partitions(self.options, order, layers)
        for pipeline_s, split in fastest_first(splits)[:ORDERS]:
            if pipeline_s >= found.step_s:
                break
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
    """The best plan so far, and the least bound of all.

    Args:
        config: None while there is none.
        step_s: of it, ∞ while there is none.
        bound_s: least bound of all plans, s.
    """

    config: MixedConfig | None = None
    step_s: float = float("inf")
    bound_s: float = float("inf")
