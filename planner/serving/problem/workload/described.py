"""Requests that a spec describes by stages of rates and by conversations: drawn once, then replayed as a recording.

*Stages*: a Poisson process at each rate for its time, one after the other; their numbers of requests are the expected
ones, and arrivals lie evenly at random in the time of their stage.

*Conversations*: they begin at random, so that all their turns together come at the rate that is asked for, and had
begun before the first request that is counted. Turns follow each other after exponential gaps, whatever answers take,
as in recordings. The prompt of a turn is all that was said before, answers too, and as many new tokens as a prompt is
long; so that its first blocks are those of the turn before. All conversations of one shared prefix begin with its
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.problem.workload.blocks import Blocks
from meshplan.planner.serving.problem.workload.lengths import LengthDistribution, shared_tokens
from meshplan.planner.serving.problem.workload.spec import LengthsSpec, ServingWorkloadSpec

SEED = 0
# Requests that are drawn of conversations where nobody says how many: 80 lie beyond the 99th percentile.
NUM_REQUESTS = 8192
# Turns are drawn for a tenth more time than the number that is asked for takes, and some conversations more, so that
# they suffice wherever they fall.
ROOM, ROOM_TURNS = 1.1, 50
# Tokens of a block by which conversations share: engines' blocks have 16, and four of them are found as well; longer
# ones where there would be more of them than these.
SESSION_BLOCK_TOKENS, MOST_BLOCKS = 64, 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Numbers of one conversation after another, turn after turn.

    Args:
        new: [s, turns] new prompt tokens.
        answers: [s, turns] tokens of answers.
        prefix: [s] which shared prefix each begins with.
        prefix_tokens: of one; 0 without them.
    """

    new: IntArray
    answers: IntArray
    prefix: IntArray
    prefix_tokens: int

    @property
    def prompts(self) -> IntArray:
        """[s, turns] Prompt tokens: what was said before, and what is new."""
        said = np.cumsum(self.new + self.answers, axis=1)
        return self.prefix_tokens + said - self.answers


def described_requests(asked: ServingWorkloadSpec) -> Requests | None:
    """The requests of stages or conversations; None of a workload that has neither."""
    if asked.stages is None and asked.sessions is None:
        return None
    rng = np.random.default_rng(SEED)
    if asked.sessions is not None:
        return _conversations(asked, rng)
    arrival_s = staged_arrivals(rng, [(one.num_requests, one.duration_s) for one in asked.stages or ()])
    num = len(arrival_s)
    inputs, outputs = (lengths_of(asked, name).at(rng.random(num)) for name in ("input_length", "output_length"))
    cached = prefix = None
    if asked.prefix_hit_rate or asked.prefix_tokens is not None:
        cached = shared_tokens(inputs, asked.prefix_hit_rate, asked.prefix_tokens)
        prefix = None if asked.num_prefixes is None else rng.integers(0, asked.num_prefixes, num)
    return Requests(
        arrival_s=arrival_s,
        input_length=inputs,
        output_length=outputs,
        cached_tokens=cached,
        prefix=prefix,
        finds_warm_caches=prefix is not None,
    )


def lengths_of(asked: ServingWorkloadSpec, name: str) -> LengthDistribution:
    """How long prompts or answers are."""
    described: LengthsSpec | None = getattr(asked, f"{name}s")
    if described is not None:
        return described.distribution
    nominal = float(getattr(asked, name))
    return LengthDistribution(shares=(0.0, 1.0), tokens=(asked.length_ratio * nominal, nominal))


def staged_arrivals(rng: np.random.Generator, stages: Sequence[tuple[int, float]]) -> FloatArray:
    """Arrivals, s, of Poisson processes one after the other, given the numbers of their requests.

    Args:
        rng: source of the times.
        stages: requests and seconds of each.
    """
    start, parts = 0.0, []
    for num, duration_s in stages:
        parts.append(start + np.sort(rng.uniform(0.0, duration_s, num)))
        start += duration_s
    return np.concatenate(parts)


def _conversations(asked: ServingWorkloadSpec, rng: np.random.Generator) -> Requests:
    """Turns in order of arrival, those that conversations had before the first one that is counted left out."""
    sessions = asked.sessions
    assert sessions is not None  # noqa: S101  (the caller looked)
    num, stages = None, [(one.request_rate_per_s, one.duration_s) for one in asked.stages or ()]
    if not stages:
        num = asked.num_requests or NUM_REQUESTS
        rate = asked.request_rate_per_s or 1.0
        stages = [(rate, (ROOM * num + ROOM_TURNS * sessions.turns) / rate)]
    before_s, span_s = (sessions.turns - 1) * sessions.gap_s, sum(seconds for _, seconds in stages)
    begun = [(stages[0][0], before_s), *stages]
    counts = [(max(round(rate * seconds / sessions.turns), 1), seconds) for rate, seconds in begun]
    first_s = staged_arrivals(rng, counts) - before_s
    gaps = rng.exponential(sessions.gap_s, (len(first_s), sessions.turns - 1))
    arrivals = first_s[:, None] + np.concatenate([np.zeros((len(first_s), 1)), np.cumsum(gaps, axis=1)], axis=1)
    lengths = (lengths_of(asked, name) for name in ("input_length", "output_length"))
    inputs, outputs = (one.at(rng.random(arrivals.shape)) for one in lengths)
    prefix = rng.integers(0, asked.num_prefixes or 1, len(first_s))
    drawn = Drawn(new=inputs, answers=outputs, prefix=prefix, prefix_tokens=asked.prefix_tokens or 0)
    order = np.argsort(arrivals, axis=None, kind="stable")
    times = arrivals.ravel()[order]
    return _counted(drawn, arrivals.ravel(), order[(times >= 0.0) & (times <= span_s)][:num])


def _counted(drawn: Drawn, arrival_s: FloatArray, counted: IntArray) -> Requests:
    """Some turns as requests.

    Args:
        drawn: all turns of all conversations.
        arrival_s: of each, conversation after conversation.
        counted: numbers of the turns among these, in order of arrival.
    """
    session, turn = np.divmod(counted, drawn.new.shape[1])
    prompts, answers = drawn.prompts[session, turn], drawn.answers[session, turn]
    blocks = _blocks(drawn, session, prompts, answers)
    return Requests(
        arrival_s=arrival_s[counted],
        input_length=prompts,
        output_length=answers,
        cached_tokens=blocks.found_at_most(prompts),
        blocks=blocks,
    )


def _blocks(drawn: Drawn, session: IntArray, prompts: IntArray, answers: IntArray) -> Blocks:
    """Whole blocks of each turn: those of its prefix, which others share, then those of its conversation."""
    each = max(SESSION_BLOCK_TOKENS, -(-int((prompts + answers).sum()) // MOST_BLOCKS))
    shared = drawn.prefix_tokens // each
    whole, of_prompt = (prompts + answers) // each, prompts // each
    ends = np.cumsum(whole)
    place = np.arange(int(whole.sum())) - np.repeat(ends - whole, whole)  # of a block in its request
    # Names: prefixes first, then as many for each conversation as the longest one has.
    first = (int(drawn.prefix.max(initial=0)) + 1) * shared
    own = np.repeat(first + session * (int(whole.max(initial=0)) + 1), whole)
    names = np.where(place < shared, np.repeat(drawn.prefix[session] * shared, whole), own) + place
    return Blocks(names=names, ends=ends, of_prompt=of_prompt, tokens_each=each)
