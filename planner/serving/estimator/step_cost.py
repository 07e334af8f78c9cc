"""Time of one iteration of an engine by the composition of its batch: tables for searches and simulations.

An iteration of a worker holds n decoding requests that read C tokens of KV cache in total, and q prompts of which p
tokens are prefilled, with P attended (query, key) pairs. A worker keeps w = pipeline stages × attention data-parallel
ranks batches in flight (*concurrent batches*); requests are split evenly over them, and the ranks of a stage exchange
tokens in the expert layers. One traversal of all stages takes::

    t = host + dense[v·⌈n/w⌉ + p'] + experts[(v·n + p)/pipeline] + outputs[⌈(n + q)/w⌉]
        + decode_fixed[n] + decode_context[n]·C              where n > 0
        + prefill_fixed + prefill_pair·P'                    where p > 0

A prompt lies on one rank, and ranks wait for each other in the expert layers: p' and P' are the prompt tokens of the
fullest batch and the pairs of the batch with most. Nothing is faster than the even split p' = ⌈p/min(q, w)⌉ and
P' = P/min(q, w), which is taken where they are not said.

Where p > 0 and a batch has more tokens than graphs were captured for, it is combined with prefill_least, the time to
launch its kernels one by one, by the smooth maximum (t⁴ + least⁴)^¼: host and device overlap, except that each waits
for the other where both take about as long. A host that prepares iterations beside the device (``launches_ahead``)
begins to launch when the device begins the iteration before, so that of prefill_least what the same decodes take
without a prompt is over by then: least = prefill_least − decode, at least 0. So are iterations without prompts of an
engine that has no graphs at all, or whose host prepares the next iteration meanwhile (:func:`beside_the_host`); t holds
no host then. A front end (API server) that works s for each decoding request bounds iterations in the same way, to
(t⁴ + (n·s)⁴)^¼, with prompts or without (:func:`beside_the_front_end`). Of each decoding request v tokens are verified
(1 without speculation), of which it gains ``tokens_per_step``. The terms in n alone are
one table, so that K iterations of an unchanged decode batch, with C growing by n·tokens_per_step in each, sum in closed
form::

    Σ = K·(decode[n] + decode_context[n]·C) + decode_context[n]·n·tokens_per_step·K·(K − 1)/2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.estimator.table import Table
from meshplan.planner.serving.problem.config import Speculation

# Exponent of the smooth maximum of device and kernel-launch time: 19 % above either where they are equal, 1.5 % where
# one is twice the other. A plain maximum would hide the launch time from a fit that starts below it.
OVERLAP_POWER = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Device time over that at full clocks, by the tokens of one batch: :mod:`~.power_cap` makes it.

    Args:
        tokens: [N] rising.
        factor: [N] at least 1, not falling; beyond the ends as there.
    """

    tokens: FloatArray
    factor: FloatArray

    def at(self, tokens: FloatArray) -> FloatArray:
        """Interpolated.

        >>> Slowdown(tokens=np.array([1.0, 3.0]), factor=np.array([1.0, 1.2])).at(np.array([2.0, 9.0])).tolist()
        [1.1, 1.2]
        """
        return np.asarray(np.interp(tokens, self.tokens, self.factor))


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Iteration times of one worker; see the module's text for the notation.

    Args:
        concurrent_batches: w, pipeline stages × attention data-parallel ranks; the ranks alone where one batch passes
            all stages before the next starts.
        pipeline_parallel: stages, over which an iteration's tokens are split in micro-batches; 1 where they are not.
        dense_s: by tokens of one batch: all stages' weights, norms, tensor-parallel collectives, host time.
        experts_s: by tokens of one micro-batch over all attention data-parallel ranks: routed experts and their
            exchange.
        outputs_s: by sequences of one batch that yield a token: LM head, sampling, scheduler.
        decode_fixed_s: by n: decode attention at no context.
        decode_context_s: by n: its growth per token of KV cache that the whole worker reads.
        prefill_fixed_s: prefill attention at no attended pair.
        prefill_pair_s: per attended pair of one batch.
        prefill_least_s: time to launch the kernels of an iteration with prompt tokens one by one.
        graphed_tokens: an iteration with prompts is not launched kernel by kernel where no batch has more tokens.
        launches_ahead: the host launches it while the device is at the iteration before. Assumed: one of the same
            decodes and no prompt. *To doubt*: where prompts follow each other, the host is not so far ahead.
        front_end_s: s, that the front end works for each decoding request of an iteration; the decodes' tables hold it.
        request_s: between two requests that the front end lets pass.
        shortest_context: tokens of KV cache that every decoding request holds at least.
        admission_steps: mean number of iterations that start before one can include an arrived request, because
            engines prepare iterations ahead.
        tokens_per_step: tokens that a decoding request gains in one iteration: 1, or more with speculation.
        verified_tokens: v, tokens of a decoding request in one iteration: 1, or drafted + 1.
    """

    concurrent_batches: int
    pipeline_parallel: int
    dense_s: Sequence[float]
    experts_s: Sequence[float]
    outputs_s: Sequence[float]
    decode_fixed_s: Sequence[float]
    decode_context_s: Sequence[float]
    prefill_fixed_s: float
    prefill_pair_s: float
    prefill_least_s: float = 0.0
    graphed_tokens: int = 0
    launches_ahead: bool = False
    front_end_s: float = 0.0
    request_s: float = 0.0
    shortest_context: float = 0.0
    admission_steps: float = 0.0
    tokens_per_step: float = 1.0
    verified_tokens: int = 1

    @cached_property
    def _decode_fixed_s(self) -> FloatArray:
        return np.array(self.decode_fixed_s)

    @cached_property
    def _decode_context_s(self) -> FloatArray:
        return np.array(self.decode_context_s)

    @property
    def max_num_seqs(self) -> int:
        """Most decoding requests that the tables cover."""
        return len(self.decode_fixed_s) - 1

    def decode_s(self, num_seqs: int) -> float:
        """A decode-only iteration of ``num_seqs`` requests without the part that grows with their context."""
        batch, verified = -(-num_seqs // self.concurrent_batches), self.verified_tokens
        together = -(-num_seqs * verified // self.pipeline_parallel)
        seconds = self.dense_s[batch * verified] + self.experts_s[together] + self.outputs_s[batch]
        return seconds + self.decode_fixed_s[num_seqs]

    @property
    def attention_ranks(self) -> int:
        """Attention data-parallel ranks: batches in flight over stages."""
        return self.concurrent_batches // self.pipeline_parallel

    def attending_to(self, tokens: float) -> StepCost:
        """The same where each decoding request reads so many tokens of KV cache beside those that it holds.

        What prompts attend to beside their own is not counted.
        """
        if not tokens:
            return self
        slopes = np.array(self.decode_context_s)
        return replace(
            self, decode_fixed_s=(np.array(self.decode_fixed_s) + slopes * np.arange(len(slopes)) * tokens).tolist()
        )

    def step_s(
        self,
        num_seqs: int,
        context: float,
        num_prompts: int,
        prompt_tokens: int,
        pairs: float,
        fullest: tuple[int, float] | None = None,
    ) -> float:
        """One iteration of any composition.

        Args:
            num_seqs: n, decoding requests.
            context: C, tokens of KV cache that they read.
            num_prompts: q, prompts in prefill.
            prompt_tokens: p, their tokens in this iteration.
            pairs: P, Σ new·(already cached + (new + 1)/2) over the prompts.
            fullest: (p', P') of the fullest batch; None: prompts are split evenly.
        """
        if not num_prompts:
            return self.decode_s(num_seqs) + self.decode_context_s[num_seqs] * context
        if fullest is None:
            spread = min(num_prompts, self.concurrent_batches)
            fullest = -(-prompt_tokens // spread), pairs / spread
        batch = -(-num_seqs // self.concurrent_batches) * self.verified_tokens + fullest[0]
        together = -(-(num_seqs * self.verified_tokens + prompt_tokens) // self.pipeline_parallel)
        outputs = -(-(num_seqs + num_prompts) // self.concurrent_batches)
        seconds = self.dense_s[batch] + self.experts_s[together] + self.outputs_s[outputs]
        seconds += self.prefill_fixed_s + self.prefill_pair_s * fullest[1]
        if num_seqs:
            seconds += self.decode_fixed_s[num_seqs] + self.decode_context_s[num_seqs] * context
            if self.front_end_s:
                seconds = self._beside_prompts_s(seconds, num_seqs, context)
        if not self.prefill_least_s or batch <= self.graphed_tokens:
            return seconds
        least = self._left_to_launch_s(num_seqs, context)
        return float((seconds**OVERLAP_POWER + least**OVERLAP_POWER) ** (1.0 / OVERLAP_POWER))

    def _beside_prompts_s(self, seconds: float, num_seqs: int, context: float) -> float:
        """An iteration with prompts in which the front end works beside all of it.

        Args:
            seconds: what it takes if prompts come on top of decodes that wait for the front end.
            num_seqs: n.
            context: C.
        """
        decodes = self.decode_s(num_seqs) + self.decode_context_s[num_seqs] * context
        streamed = (num_seqs * self.front_end_s) ** OVERLAP_POWER
        alone = max(decodes**OVERLAP_POWER - streamed, 0.0) ** (1.0 / OVERLAP_POWER)
        return float(((seconds - decodes + alone) ** OVERLAP_POWER + streamed) ** (1.0 / OVERLAP_POWER))

    def _left_to_launch_s(self, num_seqs: int, context: float) -> float:
        """What is left of the launches of an iteration with prompts once the device begins it."""
        if not self.launches_ahead or not num_seqs:
            return self.prefill_least_s
        return max(self.prefill_least_s - (self.decode_s(num_seqs) + self.decode_context_s[num_seqs] * context), 0.0)

    def chunks_s(self, num_seqs: int, context: float, chunk: int, done: int) -> Iterator[float]:
        """Successive iterations that go on with one prompt, :meth:`step_s` of each to the bit.

        Args:
            num_seqs: n, decoding requests.
            context: C of the first; it grows by the tokens that they gain.
            chunk: tokens of the prompt in each.
            done: tokens of it that are cached before the first.
        """
        batch = -(-num_seqs // self.concurrent_batches) * self.verified_tokens + chunk
        together = -(-(num_seqs * self.verified_tokens + chunk) // self.pipeline_parallel)
        outputs = -(-(num_seqs + 1) // self.concurrent_batches)
        tokens_s = self.dense_s[batch] + self.experts_s[together] + self.outputs_s[outputs]
        fixed_s, context_s = self.decode_fixed_s[num_seqs], self.decode_context_s[num_seqs]
        prompt_s, pair_s = self.prefill_fixed_s, self.prefill_pair_s
        is_launched = self.prefill_least_s and batch > self.graphed_tokens
        grows, attended = num_seqs * self.tokens_per_step, (chunk + 1) / 2
        while True:
            seconds = tokens_s + (prompt_s + pair_s * (chunk * (done + attended)))
            if num_seqs:
                seconds += fixed_s + context_s * context
                if self.front_end_s:
                    seconds = self._beside_prompts_s(seconds, num_seqs, context)
            if is_launched:
                launch = self._left_to_launch_s(num_seqs, context) ** OVERLAP_POWER
                seconds = (seconds**OVERLAP_POWER + launch) ** (1.0 / OVERLAP_POWER)
            yield seconds
            context += grows
            done += chunk

    def steps_s(
        self, num_seqs: IntArray, context: FloatArray, num_prompts: IntArray, prompt_tokens: IntArray, pairs: FloatArray
    ) -> FloatArray:
        """Many iterations whose prompts are split evenly: :meth:`step_s` of arrays of one shape, or less.

        It is less where a host launches ahead: nothing is left of its launches, so that more decodes never make an
        iteration shorter, as bounds take for granted. It is less where a front end works beside prompts, too: what they
        add grows with what decodes take, so that here they add as much as to decodes of the shortest context, and
        iterations stay linear in it.
        """
        batches, verified = self.concurrent_batches, self.verified_tokens
        spread = np.clip(num_prompts, 1, batches)
        batch = -(-num_seqs // batches) * verified + -(-prompt_tokens // spread)
        seconds = _at(self.dense_s, batch) + _at(self.outputs_s, -(-(num_seqs + num_prompts) // batches))
        seconds = seconds + _at(self.experts_s, -(-(num_seqs * verified + prompt_tokens) // self.pipeline_parallel))
        has_prompts = num_prompts > 0
        seconds = seconds + np.where(has_prompts, self.prefill_fixed_s + self.prefill_pair_s * (pairs / spread), 0.0)
        decodes = _at(self._decode_fixed_s, num_seqs) + _at(self._decode_context_s, num_seqs) * context
        seconds = seconds + np.where(num_seqs > 0, decodes, 0.0)
        if self.front_end_s:
            spared = self._spared_beside_prompts_s(seconds, num_seqs, context)
            seconds = seconds - np.where(has_prompts & (num_seqs > 0), spared, 0.0)
        launched = longer(seconds, 0.0 if self.launches_ahead else self.prefill_least_s)
        return np.asarray(np.where(has_prompts & (batch > self.graphed_tokens), launched, seconds))

    def _spared_beside_prompts_s(self, seconds: FloatArray, num_seqs: IntArray, context: FloatArray) -> FloatArray:
        """What :meth:`_beside_prompts_s` takes off, at most: as much as from decodes of the shortest context."""
        batch, slope = -(-num_seqs // self.concurrent_batches), _at(self._decode_context_s, num_seqs)
        decodes = _at(self.dense_s, batch * self.verified_tokens) + _at(self.outputs_s, batch)
        decodes = decodes + _at(self.experts_s, -(-num_seqs * self.verified_tokens // self.pipeline_parallel))
        decodes = decodes + _at(self._decode_fixed_s, num_seqs) + slope * (num_seqs * self.shortest_context)
        prompts = seconds - decodes - slope * (context - num_seqs * self.shortest_context)
        streamed = num_seqs * self.front_end_s
        alone = np.maximum(decodes**OVERLAP_POWER - streamed**OVERLAP_POWER, 0.0) ** (1.0 / OVERLAP_POWER)
        return np.asarray(np.maximum(decodes, streamed) + prompts - longer(prompts + alone, streamed))


def longer(seconds: FloatArray, least_s: float | FloatArray) -> FloatArray:
    """Iterations of ``seconds`` on the device in which the host works for ``least_s`` at the same time."""
    return np.asarray((seconds**OVERLAP_POWER + least_s**OVERLAP_POWER) ** (1.0 / OVERLAP_POWER))


def _at(table: Sequence[float] | FloatArray, index: IntArray) -> FloatArray:
    """Entries of a table, those beyond its end as there."""
    if isinstance(table, Table):
        return table.at(index)
    return np.asarray(np.asarray(table)[np.minimum(index, len(table) - 1)])


def beside_the_host(
    cost: StepCost, least_s: tuple[float | FloatArray, float | FloatArray], contexts: tuple[float, float]
) -> StepCost:
    """The tables of an engine whose host works while decodes run: an iteration of time t takes (t⁴ + least⁴)^¼.

    That is nearly linear in the context: its chord between the shortest and the longest context of a request, which
    lies above it by at most some per cent, takes the place of the decodes' line.

    Args:
        cost: with what decodes take of the device.
        least_s: of the host, at either context, [N] by requests where it grows with them: what it prepares of the next
            iteration, or the launch of all kernels where no graphs were captured.
        contexts: of a decoding request at its first token, and at its last, which is longer.
    """
    shortest, longest = contexts
    counts = np.arange(1, cost.max_num_seqs + 1)
    none, fixed = np.zeros_like(counts), np.array(cost.decode_fixed_s)[1:]
    slope, ends = np.array(cost.decode_context_s)[1:], (counts * shortest, counts * longest)
    alone = [cost.steps_s(counts, held, none, none, none.astype(np.float64)) for held in ends]
    low, high = (longer(seconds, least) for seconds, least in zip(alone, least_s, strict=True))
    rest = alone[0] - fixed - slope * ends[0]
    grows = np.minimum(high - low, (low - rest) * (longest - shortest) / shortest) / (ends[1] - ends[0])
    starts = low - rest - grows * ends[0]
    return replace(cost, decode_fixed_s=[0.0, *starts.tolist()], decode_context_s=[0.0, *grows.tolist()])


def beside_the_front_end(
    cost: StepCost, each_s: float, contexts: tuple[float, float], *, shortest: float = 0.0
) -> StepCost:
    """The tables of a worker whose front end works ``each_s`` for every decoding request of an iteration.

    It hands on the tokens of one iteration while the next runs. The engine waits for none of it, but requests end for
    their clients when it has: where it has more to do than the devices, as many tokens reach clients as it hands on.

    Args:
        cost: the engine's own.
        each_s: s for each decoding request; 0 where there is no front end.
        contexts: of a decoding request at its first token, and at its last.
        shortest: that any request has at its first token.
    """
    if not each_s:
        return cost
    streamed = each_s * np.arange(1.0, cost.max_num_seqs + 1.0)
    beside = beside_the_host(cost, (streamed, streamed), contexts)
    return replace(beside, front_end_s=each_s, shortest_context=shortest)


def with_draft(cost: StepCost, speculation: Speculation) -> StepCost:
    """The tables with the draft model's steps added to every decode iteration."""
    share = speculation.num_draft_tokens * speculation.draft_cost
    counts = np.arange(1, cost.max_num_seqs + 1)
    none = np.zeros_like(counts)
    alone = cost.steps_s(counts, none.astype(np.float64), none, none, none.astype(np.float64))
    return replace(cost, decode_fixed_s=[0.0, *(np.array(cost.decode_fixed_s)[1:] + share * alone).tolist()])
