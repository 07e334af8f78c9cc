"""Least time of a worker for a request: the bound on rates with which the search prunes.

:mod:`~meshplan.planner.serving.estimator.steady_state` *estimates* a worker whose iterations are all alike, one prompt
at a time. An engine may do better: several short prompts in one iteration share the read of the weights and the launch
of the kernels. Nothing that its scheduler may do is faster than what follows.

*Bound.* Let iteration i take t_i seconds, for m_i decodes and prompt tokens of q_i requests, and let a request need
D = (o − 1)/s decode iterations (o output tokens, s gained per iteration). For any price α of a decode::

    Σ t_i = α·Σ m_i + Σ (t_i − α·m_i) ≥ N·(α·D + β(α))            for N requests

as long as an iteration without prompts costs at least its decodes, α ≤ min d(m)/m over m ≤ n, and β(α) is the least
that iterations with prompts cost beyond theirs, per prompt. So 1/(αD + β(α)) bounds the rate for every α (weak
duality), and the best of several prices is taken: the highest where decode-only iterations fill the time, lower ones
where every iteration has prompts.

*What an iteration with prompts may hold.* Chunks are filled in order of arrival, so that an iteration fills the token
budget b (less the decodes' tokens) or finishes every prompt it has. With p new tokens of a prompt and h(x) the least
reduced cost t − αm of an iteration with x prompt tokens, over all m that leave room for q = x/p prompts among n::

    p ≤ b:   β = min( h(x)·p/x over p ≤ x ≤ b,  (h(b) + h(x))·p/(b + x) over x < p )
    p > b:   β = min over 0 ≤ x ≤ b of  h(x) + max(p − x, 0)·h(b)/b

A prompt no longer than the budget ends in an iteration of at least p tokens, or leaves a rest x after a full one; a
longer one has full iterations and at most one that is not. Of w batches in flight each is such an iteration and takes
its share.

*Assumed.* Lengths are their means, which costs no more than unequal lengths as far as times are convex in the tokens
(at what graphs were captured for they jump). A decoding request holds its mean context. x is sampled where h bends: at
whole prompts, at what graphs were captured for, at the budget; m at shares of n. Nothing waits and no block is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import Role

# Prices of a decode that are tried, as shares of the highest one.
PRICES = np.array([1.0, 0.9, 0.75, 0.5, 0.25, 0.0])
# Decodes of an iteration with prompts, as shares of the most, or of a number about which others are tried.
SHARES = np.array([1.0, 0.75, 0.5, 0.25, 0.0])
AROUND = np.array([4.0, 2.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
# Prompt tokens of an iteration, as multiples of a prompt's.
PARTS = np.array([0.125, 0.25, 0.5, 0.75])
WHOLE = np.array([*range(1, 9), *(2.0 ** np.arange(3.5, 10.5, 0.5)).tolist()])
# Numbers of requests for which β is computed: it changes slowly with them. Per doubling beyond the first.
FIRST, PER_DOUBLING = 8, 2
# Times are divided by.
LEAST_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request asks of a worker.

    Args:
        role: a decode worker prefills nothing, a prefill worker decodes nothing.
        prompt: tokens of its prompt.
        output: tokens of its answer; the first comes from the prefill.
        cached: prompt tokens found in the prefix cache.
        budget: most new tokens of one iteration, in each batch in flight.
        chunked: decodes go on in iterations with prompts.
    """

    role: Role
    prompt: float
    output: float
    cached: float = 0.0
    budget: int
    chunked: bool = True

    @property
    def new_tokens(self) -> float:
        """Prompt tokens that are computed, at least one."""
        return max(self.prompt - self.cached, 1.0)

    def decodes(self, cost: StepCost) -> float:
        """D: iterations in which a request decodes."""
        return 0.0 if self.role is Role.PREFILL else max(self.output - 1.0, 0.0) / cost.tokens_per_step

    def context(self, cost: StepCost) -> float:
        """Tokens that a decoding request reads, on average over its iterations."""
        return self.prompt + max((self.output + 1.0 - cost.tokens_per_step) / 2.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterations:
    """Iterations with prompts by n, by share of decodes and by kind; the last kind fills the budget.

    Args:
        tokens: [N, shares, kinds] prompt tokens of one batch.
        seconds: [N, shares, kinds] of all batches.
        decoding: [N, shares, kinds] decoding requests.
        batches: [N] batches in flight that have prompts.
    """

    tokens: FloatArray
    seconds: FloatArray
    decoding: FloatArray
    batches: IntArray


def least_request_s(cost: StepCost, work: Work, counts: IntArray, *, in_flight: bool = True) -> FloatArray:
    """[N] Least time of a worker per finished request, s: the inverse bounds its rate.

    Args:
        cost: times of its iterations.
        work: of one request.
        counts: [N] n, rising.
        in_flight: n counts all requests of the worker, those in prefill too; else decoding ones.
    """
    decodes = work.decodes(cost)
    price = np.minimum.accumulate(_decode_s(cost, work, counts) / _filled(cost, counts)) if decodes else 0.0 * counts
    floor = max(cost.request_s, LEAST_S)
    if work.role is Role.DECODE:
        return np.maximum(price * decodes, floor)
    sampled = counts[_sampled(counts)]
    prices = np.interp(sampled, counts, price)
    iterations = _iterations(cost, work, sampled, in_flight=in_flight)
    total = [share * prices * decodes + _prompt_s(cost, work, iterations, share * prices) for share in PRICES]
    beyond = np.maximum.reduce(total) - prices * decodes
    return np.maximum(price * decodes + _between(counts, sampled, beyond), floor)


def least_within_s(cost: StepCost, work: Work, counts: IntArray, tpot_limit_s: float) -> float:
    """Least time per request, s, where the mean time per token is limited, however requests fall in step.

    All may prefill together while none decodes, so that prompts delay no token. With L the limit, Σ t·m ≤ N·(o − 1)·L,
    which has a price μ ≥ 0 too: T ≥ α·D + β − μ·(o − 1)·L with every t scaled by 1 + μ·m. Prices are tried at which n
    decodes are the cheapest, for each sampled n. ∞ where one request alone exceeds the limit.
    """
    decodes, steps = work.decodes(cost), max(work.output - 1.0, 0.0)
    decode_s, filled = _decode_s(cost, work, counts), _filled(cost, counts)
    if decode_s.min() > tpot_limit_s * cost.tokens_per_step:
        return float("inf")
    sampled = _sampled(counts)
    slope = np.maximum(np.gradient(decode_s, counts) if len(counts) > 1 else np.zeros(1), LEAST_S)[sampled]
    each = decode_s[sampled] / counts[sampled]
    weight = np.concatenate([[0.0], np.maximum(each / slope - 1.0, 0.0) / counts[sampled]])
    price = np.min(decode_s * (1.0 / filled + weight[:, None]), axis=1)
    least = price * decodes
    if work.role is not Role.DECODE:
        around = np.concatenate([counts[-1:], counts[sampled]])
        batches = min(int(counts[-1]), cost.concurrent_batches)
        iterations = _iterations(cost, work, around, in_flight=False, shares=AROUND, batches=batches)
        scaled = replace(iterations, seconds=iterations.seconds * (1.0 + weight[:, None, None] * iterations.decoding))
        least = np.maximum.reduce(
            [share * price * decodes + _prompt_s(cost, work, scaled, share * price) for share in PRICES]
        )
    return max(float(np.max(least - weight * steps * tpot_limit_s)), cost.request_s, LEAST_S)


def least_at_random_s(cost: StepCost, work: Work, counts: IntArray, tpot_limit_s: float) -> float:
    """The same under Poisson arrivals, which see the time average of the decoding requests: prompts delay as many.

    With n decoding on average tpot = n·T/(o − 1), by Little's law, so that each n is a point (tpot, T). Loads may
    mix: the least T at the limit lies on the lower convex hull of the points.
    """
    request_s = least_request_s(cost, work, counts, in_flight=False)
    tpot_s = counts * request_s / (work.output - 1.0)
    low, high = tpot_s <= tpot_limit_s, tpot_s > tpot_limit_s
    if not low.any():
        return float(request_s[0])
    (x, t), (y, u) = (tpot_s[low][:, None], request_s[low][:, None]), (tpot_s[high], request_s[high])
    mixed = t + (u - t) * (tpot_limit_s - x) / (y - x)
    return float(min(request_s[low].min(), mixed.min(initial=np.inf)))


def least_tpot_s(cost: StepCost, work: Work, counts: IntArray, request_s: FloatArray) -> FloatArray:
    """[N] Least mean time per output token with n requests kept in flight, each of ``request_s`` [N] at least.

    By Little's law n = rate·(time to first token + (o − 1)·tpot), and no request waits for its first token longer than
    all n prompts take one after the other. Of more requests than a budget of verified tokens has room for, the others
    wait outside.
    """
    if work.role is Role.PREFILL or work.output <= 1.0:
        return np.zeros(len(counts))
    least = least_token_s(cost, work, counts)
    wait = np.zeros(len(counts))
    if work.role is Role.MIXED:
        full = _iterations(cost, work, counts, in_flight=False, fullest=True)
        batches = np.minimum(counts, cost.concurrent_batches)
        number = np.ceil(counts * work.new_tokens / (batches * full.tokens[:, 0, -1]))
        number = np.maximum(number, -(-counts // batches) * (work.new_tokens > full.tokens[:, 0, -1]))
        wait = (number + 1.0 + cost.admission_steps) * full.seconds[:, 0, -1]
    slots = max(work.budget // cost.verified_tokens * cost.concurrent_batches, 1)
    return np.maximum((np.minimum(counts, slots) * request_s - wait) / (work.output - 1.0), least)


def least_token_s(cost: StepCost, work: Work, counts: IntArray) -> float:
    """Least time between two tokens of a request, s: in iterations without prompts, of the best number of requests."""
    return float(_decode_s(cost, work, counts).min()) / cost.tokens_per_step


def _decode_s(cost: StepCost, work: Work, counts: IntArray) -> FloatArray:
    """[N] d: seconds of an iteration without prompts, of requests filled up to as many in each batch."""
    decoding = _filled(cost, counts)
    none = np.zeros_like(decoding)
    return cost.steps_s(decoding, decoding * work.context(cost), none, none, none.astype(np.float64))


def _between(counts: IntArray, sampled: IntArray, values: FloatArray) -> FloatArray:
    """[N] Values at numbers between the sampled ones: linear in n or in 1/n, whichever is less."""
    inverse = np.interp(-1.0 / counts, -1.0 / sampled, values)
    return np.asarray(np.minimum(np.interp(counts, sampled, values), inverse))


def _filled(cost: StepCost, counts: IntArray) -> IntArray:
    """Requests rounded up to as many in each batch in flight, which cost the same: no more per request."""
    batches = cost.concurrent_batches
    filled = np.where(counts < batches, counts, -(-counts // batches) * batches)
    return np.asarray(np.minimum(filled, cost.max_num_seqs))


def _sampled(counts: IntArray) -> NDArray[np.int64]:
    """Positions of the numbers of requests for which β is computed."""
    octaves = np.arange(np.log2(FIRST), np.log2(max(counts[-1], FIRST)) + 1.0, 1.0 / PER_DOUBLING)
    wanted = np.minimum([*range(1, FIRST), *(2.0**octaves).tolist()], counts[-1])
    return np.unique(np.searchsorted(counts, np.round(wanted)))


def _prompt_s(cost: StepCost, work: Work, iterations: Iterations, price: FloatArray) -> FloatArray:
    """[N] β: least that iterations with prompts cost beyond their decodes at a price, per prompt."""
    prompt, tokens = work.new_tokens, iterations.tokens
    credit = price[:, None, None] * iterations.decoding if work.chunked else 0.0
    least = (iterations.seconds - credit) / iterations.batches[:, None, None]
    full, room = least[..., -1:], tokens[..., -1:]
    rate = np.min(full / room, axis=(1, 2), keepdims=True)  # h(b)/b
    is_short = np.min(room, axis=(1, 2), keepdims=True) >= prompt
    rest = np.where(is_short, (rate * room + least) * prompt / (room + tokens), least + (prompt - tokens) * rate)
    found = np.where(tokens >= prompt, least * prompt / tokens, rest).min(axis=(1, 2))
    none_left = np.where(is_short, np.inf, rate * prompt)[:, 0, 0]
    return np.asarray(np.minimum(found, none_left))


def _iterations(
    cost: StepCost,
    work: Work,
    counts: IntArray,
    *,
    in_flight: bool,
    shares: FloatArray = SHARES,
    batches: int | None = None,
    fullest: bool = False,
) -> Iterations:
    """Iterations with prompts that n requests allow.

    Args:
        cost: times of iterations.
        work: of one request.
        counts: [N] n.
        in_flight: prompts and decodes are together no more than n.
        shares: decodes over the most.
        batches: in flight with prompts; None: as many as n allows.
        fullest: only those with most decodes that fill the budget: one share and one kind.
    """
    prompt, verified, in_all = work.new_tokens, cost.verified_tokens, cost.concurrent_batches
    kinds = np.concatenate([PARTS * prompt, WHOLE * prompt, [cost.graphed_tokens, work.budget]])
    if fullest:
        shares, kinds = shares[:1], kinds[-1:]
    shape = (len(counts), len(shares), len(kinds))
    most = np.broadcast_to(counts[:, None, None].astype(np.float64), shape)
    most_batches = np.minimum(counts, in_all) if batches is None else np.full(len(counts), batches)
    spread = most_batches[:, None, None]
    largest = np.minimum(most * prompt / spread, work.budget) if in_flight else np.full(shape, float(work.budget))
    wanted = np.minimum(np.broadcast_to(kinds, shape), largest)
    decoding = np.zeros(shape, dtype=np.int64)
    if work.chunked and work.decodes(cost):
        prompts = spread * np.maximum(wanted / prompt, 1.0) if in_flight else 0.0
        shared = np.floor(np.maximum(most - prompts, 0.0) * shares[None, :, None]).astype(np.int64)
        decoding = np.where(shared > 0, _filled(cost, np.maximum(shared, 1)), 0)
    used = verified * -(-decoding // in_all)
    # Graphs are captured for all tokens of a batch, and the budget is that of decodes and prompts.
    wanted = np.where(np.arange(len(kinds)) >= len(kinds) - 2, np.minimum(kinds - used, largest), wanted)
    tokens = np.maximum(np.minimum(wanted, work.budget - used), 1.0)
    prompts = np.floor(spread * np.maximum(tokens / prompt, 1.0)).astype(np.int64)
    pairs = spread * tokens * (work.cached + (prompt + 1.0) / 2.0)
    whole = np.floor(tokens).astype(np.int64)
    seconds = cost.steps_s(decoding, decoding * work.context(cost), prompts, spread * whole, pairs)
    return Iterations(tokens=tokens, seconds=seconds, decoding=decoding.astype(np.float64), batches=most_batches)
