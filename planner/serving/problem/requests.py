"""The requests of a serving question: how they arrive, how long they are, and what they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from meshplan.catalogs.constants.serving import OwnLoad
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.problem.workload.blocks import Blocks
from meshplan.planner.serving.problem.workload.lengths import LengthDistribution

# Requests simulated under open arrivals where the workload gives no number: ten lie beyond the 99th percentile.
DEFAULT_NUM_REQUESTS = 1024


# Tokens that begin a transcript: start, language, task, no timestamps (arXiv:2212.04356, §2.3).
TRANSCRIPT_PROMPT = 4


def prompt_length(workload: Mapping[str, Any]) -> int | None:
    """Prompt tokens that the workload of a spec states; of a request of sound those that begin it, unless it says more.

    >>> prompt_length({"audio": {"seconds": 30}}), prompt_length({"input_length": 512}), prompt_length({})
    (4, 512, None)
    """
    stated = workload.get("input_length")
    if stated is None and workload.get("audio") is not None:
        return TRANSCRIPT_PROMPT
    return None if stated is None else int(stated)


class Task(Enum):
    """What a request asks for."""

    GENERATE = "generate"  # an answer of tokens
    EMBED = "embed"  # the vector of a text
    RERANK = "rerank"  # the score of a query and a document, which are one text to the model

    @property
    def is_pooled(self) -> bool:
        """The answer comes out of prefill: no token is generated, and no KV cache is kept."""
        return self is not Task.GENERATE


class Arrival(Enum):
    """How requests arrive."""

    CLOSED_LOOP = "closed_loop"  # a constant number in flight; each completion starts the next
    POISSON = "poisson"
    GAMMA = "gamma"  # bursty: gaps of a Gamma distribution with coefficient of variation > 1
    TRACE = "trace"
    ALL_AT_ONCE = "all_at_once"  # all queued at the start: offline throughput
    STATIC_BATCH = "static_batch"  # one batch, from its first token to its last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """When a measured server answered recorded requests, on the clock of their arrivals.

    Args:
        queued_s: [n] when its engine queued a request; None where nobody recorded that, and so below.
        scheduled_s: [n] when the engine first ran it.
        first_token_s: [n] when its first token came.
        finished_s: [n] when its last token came.
    """

    queued_s: FloatArray | None = None
    scheduled_s: FloatArray | None = None
    first_token_s: FloatArray | None = None
    finished_s: FloatArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """The requests of a run, in order of arrival; the same only as itself.

    Args:
        arrival_s: [n] seconds from the start, non-decreasing; in a closed loop only those of the first requests count.
        input_length: [n] prompt tokens, ≥ 1.
        output_length: [n] generated tokens, ≥ 1; the first comes out of prefill.
        concurrency: requests in flight of a closed loop; None for open arrivals.
        think_s: time from a completion to the request that it starts, in a closed loop; [n] of each request that is
            started, or one for all.
        cached_tokens: [n] prompt tokens whose KV a worker may hold already; None for none.
        prefix: [n] identity of the shared prefix, for routing; −1 without one. None for none.
        blocks: what requests have in common block by block, in place of prefixes; ``cached_tokens`` are then those that
            one cache without limit would find.
        priority: [n] smaller goes first; None where all are equal.
        finds_warm_caches: workers hold the prefixes when the run starts, as many as fit: those of a service that has
            run for long, not of a benchmark on fresh servers.
        answered: when the server answered them that they were recorded at; no plan reads it. None where unknown.
    """

    arrival_s: FloatArray
    input_length: IntArray
    output_length: IntArray
    concurrency: int | None = None
    think_s: FloatArray | float = 0.0
    cached_tokens: IntArray | None = None
    prefix: IntArray | None = None
    blocks: Blocks | None = None
    priority: IntArray | None = None
    finds_warm_caches: bool = False
    answered: Answered | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def cached_share(self) -> float:
        """Share of all prompt tokens that workers may hold already."""
        if self.cached_tokens is None or not len(self):
            return 0.0
        return float(self.cached_tokens.sum() / self.input_length.sum())

    def think_times_s(self) -> FloatArray:
        """``think_s`` of each request, [n]."""
        return np.broadcast_to(np.asarray(self.think_s, dtype=np.float64), len(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images of a request.

    Args:
        per_request: how many.
        patches: of one, that the encoder attends over.
        tokens: of one, in the prompt.
    """

    per_request: int
    patches: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How clients have tokens drawn.

    Args:
        top_p: probability that the candidates add up to; 1 keeps all.
        penalties: repetition, frequency or presence is penalised.
    """

    top_p: float = 1.0
    penalties: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWorkload:
    """The load that a deployment must serve.

    Args:
        arrival: see :class:`Arrival`.
        input_length: nominal prompt tokens of a request, those of its images included.
        output_length: nominal generated tokens.
        length_ratio: lengths are uniform between this share of nominal and nominal; 1 for fixed lengths.
        input_lengths: how prompts differ otherwise, ``input_length`` being the longest; None: as the ratio says.
        output_lengths: how answers do.
        request_rate_per_s: rate of open arrivals; None otherwise.
        concurrency: requests in flight of a closed loop, or the size of a static batch; None otherwise.
        think_s: time from a completion in a closed loop to the request that it starts; above 0 that request misses the
            iteration that follows.
        burstiness: coefficient of variation of the gaps between arrivals, for GAMMA.
        num_requests: to simulate; None lets the simulator choose.
        prefix_hit_rate: share of prompt tokens found in the prefix cache, at most.
        prefix_tokens: tokens of a prompt that are its prefix; None: that share of it.
        num_prefixes: distinct prefixes, assigned to the requests at random, so that a prefix is found only where a
            worker still holds it; None: it is always found.
        trace: recorded requests, for TRACE.
        shared_history: tokens that each request attends to beside its own, held once for all that are in flight.
        images: of each request; None: text alone.
        sound_frames: that the encoder reads of each request's window of sound; 0: text alone.
        sampling: how tokens are drawn; None: every token is the likeliest one.
        task: what requests ask for; of an embedding or a score the output is one token long, which prefill yields.
    """

    arrival: Arrival
    input_length: float
    output_length: float
    length_ratio: float = 1.0
    input_lengths: LengthDistribution | None = None
    output_lengths: LengthDistribution | None = None
    request_rate_per_s: float | None = None
    concurrency: int | None = None
    think_s: float = 0.0
    burstiness: float = 1.0
    num_requests: int | None = None
    prefix_hit_rate: float = 0.0
    prefix_tokens: int | None = None
    num_prefixes: int | None = None
    trace: Requests | None = None
    shared_history: float = 0.0
    images: Images | None = None
    sound_frames: int = 0
    sampling: Sampling | None = None
    task: Task = Task.GENERATE

    @property
    def has_front_end(self) -> bool:
        """Requests reach the engine over a server; a static batch is handed to it in its own process.

        No server can be asked for one: benchmarks that print static batches call the engine from a script
        (LLM-Inference-Bench, arXiv:2411.00136; Splitwise, arXiv:2311.18677; gptSessionBenchmark of TensorRT-LLM 0.5).
        """
        return self.arrival is not Arrival.STATIC_BATCH

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """Mean prompt and output tokens of a request: nominal × (1 + length_ratio)/2, or of their distributions."""
        mean = (1.0 + self.length_ratio) / 2.0
        prompt = mean * self.input_length if self.input_lengths is None else self.input_lengths.mean
        return prompt, mean * self.output_length if self.output_lengths is None else self.output_lengths.mean

    @property
    def shortest_prompt(self) -> float:
        """Tokens that every prompt has at least."""
        if self.trace is not None:
            return float(self.trace.input_length.min())
        if self.input_lengths is not None:
            return float(self.input_lengths.shortest)
        return math.floor(self.length_ratio * self.input_length)

    @property
    def finds_what_is_held(self) -> bool:
        """Prefixes are found only where a worker still holds them, not always."""
        shared = self.trace is not None and (self.trace.prefix is not None or self.trace.blocks is not None)
        return shared or self.num_prefixes is not None

    @property
    def open_arrival(self) -> Arrival:
        """How requests come by themselves, whatever brings the rate."""
        return Arrival.GAMMA if self.burstiness > 1.0 else Arrival.POISSON

    def own_load(self, model: str) -> OwnLoad:
        """What own runs of a model with such lengths share: those that are nearest to the same powers of two.

        Args:
            model: slug; of names with an owner the last part.
        """
        prompt, answer = (2 ** round(math.log2(max(mean, 1.0))) for mean in self.mean_lengths)
        return OwnLoad(model.rpartition("/")[2], (prompt, answer))
