"""Schema of ``workload`` in a serving spec: what requests are, how they come, and what they share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from meshplan.planner.core.reading.spec_fields import SpecModel, TimeInSeconds, Whole
from meshplan.planner.serving.problem.requests import Arrival, prompt_length
from meshplan.planner.serving.problem.workload.lengths import (
    LengthDistribution,
    histogram_lengths,
    lengths_at,
    normal_lengths,
)

MAX_TOKENS = 16_777_216
MAX_CONCURRENCY = 1_000_000
MAX_RATE_PER_S = 1e6
MAX_REQUESTS = 10_000_000
MAX_LATENCY_S = 1e5
MAX_IMAGES, MAX_PIXELS = 1_000, 65_536
MAX_STAGES, MAX_STAGE_S, MAX_BINS, MAX_TURNS = 1_000, 1e6, 10_000, 1_000
# Most requests that rate stages may bring: each is drawn and simulated.
MAX_DRAWN = 1_000_000

Tokens = Annotated[int, Whole(most=MAX_TOKENS, tokens=True)]
Rate = Annotated[float, Field(gt=0, le=MAX_RATE_PER_S, allow_inf_nan=False)]
TokenNumber = Annotated[float, Field(gt=0, le=MAX_TOKENS, allow_inf_nan=False)]


class ImagesSpec(SpecModel):
    """Images of each request; their tokens come on top of input_length."""

    per_request: Annotated[int, Whole(most=MAX_IMAGES)] = Field(default=1, description="images of a request")
    width: Annotated[int, Whole(most=MAX_PIXELS)] = Field(description="pixels")
    height: Annotated[int, Whole(most=MAX_PIXELS)] = Field(description="pixels")


class AudioSpec(SpecModel):
    """Sound of each request, which an encoder reads (Whisper)."""

    seconds: Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False)] = Field(
        default=30.0, description="of a request; a window (30 s of Whisper) is padded, what is longer asked in windows"
    )


class SamplingSpec(SpecModel):
    """How clients have tokens drawn at random; without it every token is the likeliest one (temperature 0)."""

    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="probability that the candidates add up to; below 1 some engines sort the vocabulary"
    )
    penalties: bool = Field(default=False, description="repetition, frequency or presence is penalised")


class LengthsSpec(SpecModel):
    """Lengths that differ: by mean and std, by percentiles, or by a histogram."""

    mean: TokenNumber | None = Field(
        default=None, description="tokens on average; with percentiles or counts they are scaled to it"
    )
    std: Annotated[float, Field(ge=0, le=MAX_TOKENS, allow_inf_nan=False)] | None = Field(
        default=None, description="standard deviation of a normal distribution; draws beyond min and max are these"
    )
    min: Tokens = Field(default=1, description="tokens of the shortest")
    p50: Tokens | None = Field(default=None, description="half are at most so long")
    p90: Tokens | None = None
    p99: Tokens | None = None
    max: Tokens | None = Field(default=None, description="tokens of the longest; needed but with std")
    counts: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, max_length=MAX_BINS, description="requests in bins of one width between min and max"
    )

    @model_validator(mode="after")
    def _one_form(self) -> LengthsSpec:
        percentiles = {name: value for name in ("p50", "p90", "p99") if (value := getattr(self, name)) is not None}
        forms = (self.std is not None, bool(percentiles), self.counts is not None)
        if sum(forms) != 1:
            raise ValueError("give one of std (with mean), percentiles (p50, p90, p99), or counts")
        if self.std is not None and self.mean is None:
            raise ValueError("std needs mean")
        if self.std is None and self.max is None:
            raise ValueError("say max, the tokens of the longest")
        if self.max is not None and self.max < self.min:
            raise ValueError(f"min is {self.min}, above max, {self.max}")
        known = [self.min, *percentiles.values(), *([] if self.max is None else [self.max])]
        if percentiles and sorted(known) != known:
            raise ValueError(f"min, {', '.join(percentiles)} and max do not rise: {', '.join(map(str, known))}")
        if self.counts is not None and (not sum(self.counts) or self.max == self.min):
            raise ValueError("counts need a request in some bin, and max above min")
        if self.std is not None and self.mean is not None:
            self._check_normal(self.mean)
        return self

    def _check_normal(self, mean: float) -> None:
        if mean < self.min or (self.max is not None and mean > self.max):
            raise ValueError(f"mean is {mean:g}, outside min and max")

    @property
    def distribution(self) -> LengthDistribution:
        """What it describes."""
        if self.std is not None and self.mean is not None:
            return normal_lengths(self.mean, self.std, least=float(self.min), most=self.max)
        most = float(self.max or self.min)
        if self.counts is not None:
            found = histogram_lengths(self.counts, least=float(self.min), most=most)
        else:
            known = {0.5: self.p50, 0.9: self.p90, 0.99: self.p99}
            stated = {share: float(value) for share, value in known.items() if value is not None}
            found = lengths_at({0.0: float(self.min), **stated, 1.0: most})
        return found if self.mean is None else found.scaled_to(self.mean)


class StageSpec(SpecModel):
    """A time with one rate of arrivals."""

    request_rate_per_s: Rate = Field(description="Poisson arrivals")
    duration_s: Annotated[float, Field(gt=0, le=MAX_STAGE_S, allow_inf_nan=False), TimeInSeconds()]

    @property
    def num_requests(self) -> int:
        """Expected number of its requests, at least one."""
        return max(round(self.request_rate_per_s * self.duration_s), 1)


class SessionsSpec(SpecModel):
    """Conversations: each prompt is all that was said before and something new."""

    turns: Annotated[int, Field(ge=2, le=MAX_TURNS)] = Field(description="requests of each")
    gap_s: Annotated[float, Field(gt=0, le=MAX_STAGE_S, allow_inf_nan=False), TimeInSeconds()] = Field(
        description="from one request of a conversation to its next, on average (exponential)"
    )


class ServingWorkloadSpec(SpecModel):
    """The load that the service must handle."""

    task: Literal["generate", "embed", "rerank"] = Field(
        default="generate",
        description="what a request asks for: tokens, the vector of a text, or the score of a query with one document",
    )
    input_length: Tokens | None = Field(
        default=None,
        description="prompt tokens of a request; of a text to embed, of a query and a document together; in sessions "
        "the new ones of each turn",
    )
    output_length: Tokens | None = Field(default=None, description="generated tokens of a request")
    input_lengths: LengthsSpec | None = Field(default=None, description="in place of input_length, where they differ")
    output_lengths: LengthsSpec | None = Field(default=None, description="in place of output_length")
    length_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="lengths are uniform between this share of nominal and nominal"
    )
    request_rate_per_s: Rate | None = None
    stages: list[StageSpec] | None = Field(
        default=None, min_length=1, max_length=MAX_STAGES, description="rates one after the other, in place of one"
    )
    concurrency: Annotated[int, Whole(most=MAX_CONCURRENCY)] | None = Field(
        default=None, description="requests in flight, where clients wait for answers before they ask again"
    )
    arrival: Literal["poisson", "gamma", "closed_loop", "all_at_once", "trace"] | None = None
    burstiness: Annotated[float, Field(ge=1, le=100)] = Field(
        default=1.0, description="coefficient of variation of the gaps between arrivals (arrival: gamma)"
    )
    num_requests: Annotated[int, Whole(most=MAX_REQUESTS)] | None = Field(default=None, description="to simulate")
    prefix_hit_rate: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of prompt tokens found in the prefix cache"
    )
    prefix_tokens: Tokens | None = Field(
        default=None, description="tokens that prompts begin with and share, in place of prefix_hit_rate"
    )
    num_prefixes: Annotated[int, Whole(most=MAX_REQUESTS)] | None = Field(
        default=None,
        description="distinct prefixes that the requests share; a worker finds one where it still holds it, "
        "and begins with as many as fit (default: it always does)",
    )
    sessions: SessionsSpec | None = Field(default=None, description="conversations of several turns")
    trace: str | None = Field(default=None, description="CSV or JSON lines of arrival_s,input_length,output_length")
    block_tokens: Annotated[int, Whole(most=MAX_TOKENS)] | None = Field(
        default=None, description="tokens of a block that hash_ids of the trace names (default: 512)"
    )
    images: ImagesSpec | None = Field(default=None, description="of each request, for models that see (default: none)")
    audio: AudioSpec | None = Field(
        default=None,
        description="of each request, for models that hear; input_length is then 4 unless said: start, language, task, "
        "no timestamps",
    )

    sampling: SamplingSpec | None = Field(default=None, description="of tokens (default: always the likeliest one)")

    @model_validator(mode="after")
    def _consistent(self) -> ServingWorkloadSpec:
        if self.task != "generate":
            self._check_pooled()
        if self.audio is not None:
            self._check_heard()
        self._check_lengths()
        self._check_trace()
        if self.request_rate_per_s is not None and self.concurrency is not None:
            raise ValueError("give request_rate_per_s (open arrivals) or concurrency (closed loop), not both")
        if self.arrival in ("poisson", "gamma") and self.concurrency is not None:
            raise ValueError(f"arrival: {self.arrival} goes with request_rate_per_s, not with concurrency")
        if self.arrival == "closed_loop" and self.request_rate_per_s is not None:
            raise ValueError("arrival: closed_loop goes with concurrency, not with request_rate_per_s")
        self._check_prefixes()
        self._check_drawn()
        self._check_burstiness()
        return self

    def _check_lengths(self) -> None:
        """Each length is stated once, as a number or a distribution, or a trace brings both."""
        for name in ("input_length", "output_length"):
            if getattr(self, name) is not None and getattr(self, f"{name}s") is not None:
                raise ValueError(f"give {name} or {name}s, not both")
        if self.task != "generate" or self.audio is not None:
            return
        stated = (self.input_length or self.input_lengths, self.output_length or self.output_lengths)
        if self.trace is not None and stated != (None, None):
            raise ValueError("give input_length and output_length, or a trace: a trace brings its lengths")
        if self.trace is None and None in stated:
            raise ValueError("give input_length and output_length, or a trace")
        differ = self.input_lengths is not None or self.output_lengths is not None
        if differ and self.length_ratio < 1.0:
            raise ValueError("length_ratio is of nominal lengths: leave it out beside input_lengths and output_lengths")

    def _check_trace(self) -> None:
        if self.block_tokens is not None and self.trace is None:
            raise ValueError("block_tokens are those of a trace's hash_ids: give the trace, or leave it out")
        if self.trace is None:
            if self.arrival == "trace":
                raise ValueError("arrival: trace needs trace: FILE")
            return
        if self.images is not None:
            raise ValueError("a trace states whole prompts: leave images out, or give lengths in its place")
        if self.arrival not in (None, "trace"):
            raise ValueError(f"a trace brings its own arrivals; drop arrival: {self.arrival}")
        others = ("length_ratio", "prefix_hit_rate", "prefix_tokens", "num_prefixes", "stages", "sessions")
        if said := [name for name in others if getattr(self, name) != type(self).model_fields[name].default]:
            raise ValueError(
                "a trace brings its lengths, its arrivals and, in its columns prefix and cached_tokens, or hash_ids, "
                f"its prefixes: leave {', '.join(said)} out"
            )

    def _check_prefixes(self) -> None:
        if self.prefix_tokens is not None and self.prefix_hit_rate:
            raise ValueError("give prefix_hit_rate (a share of prompts) or prefix_tokens, not both")
        if self.num_prefixes is not None and not self.prefix_hit_rate and self.prefix_tokens is None:
            raise ValueError("num_prefixes goes with a prefix_hit_rate above 0, or with prefix_tokens")

    def _check_drawn(self) -> None:
        """Stages and sessions are drawn once, as a recording: they bring their arrivals."""
        for name, brings in (("stages", "their rates"), ("sessions", "their arrivals")):
            if getattr(self, name) is None:
                continue
            if self.concurrency is not None or self.arrival not in (None, "poisson"):
                raise ValueError(f"{name} bring {brings}: leave concurrency and arrival out")
            if self.task != "generate" or self.audio is not None or self.images is not None:
                raise ValueError(f"{name} are of generated text alone: leave task, audio and images out, or {name}")
        if self.stages is not None and (self.request_rate_per_s is not None or self.num_requests is not None):
            raise ValueError("stages bring their rates and numbers: leave request_rate_per_s and num_requests out")
        if self.sessions is not None and self.stages is None and self.request_rate_per_s is None:
            raise ValueError("sessions need request_rate_per_s, of all turns together (or stages)")
        if self.sessions is not None and self.prefix_hit_rate:
            raise ValueError("sessions share what was said before, and prefix_tokens at most: no prefix_hit_rate")
        if self.num_drawn > MAX_DRAWN:
            brings = "stages" if self.sessions is None else "conversations, those that have begun before them included,"
            raise ValueError(f"{brings} bring {self.num_drawn:,} requests; at most {MAX_DRAWN:,} are drawn")

    @property
    def num_drawn(self) -> int:
        """Requests of all stages, and those of conversations that begin before the first that is counted."""
        num = sum(one.num_requests for one in self.stages or ())
        if self.sessions is None:
            return num
        rate = self.stages[0].request_rate_per_s if self.stages else self.request_rate_per_s or 0.0
        return num + (self.num_requests or 0) + round(rate * (self.sessions.turns - 1) * self.sessions.gap_s)

    def _check_burstiness(self) -> None:
        """Gaps between arrivals are drawn at a rate, given or to be found, alone."""
        if self.arrival == "gamma" and self.burstiness == 1.0:
            raise ValueError("arrival: gamma needs burstiness above 1 (1 is poisson)")
        if self.burstiness > 1.0 and self.process is not None and self.process is not Arrival.GAMMA:
            raise ValueError(
                f"burstiness is of gaps between arrivals at a rate (arrival: gamma), not of {self.process.value}: "
                "leave it out"
            )

    def _check_heard(self) -> None:
        """A request of sound is a window and a short prompt; nothing of it is shared or recorded."""
        if self.output_length is None:
            raise ValueError("audio needs output_length, the tokens of a transcript (about 100 of 30 s of speech)")
        if self.task != "generate" or self.trace is not None or self.images is not None or self.prefix_hit_rate:
            raise ValueError("audio goes with task: generate alone: leave trace, images and prefix_hit_rate out")

    def _check_pooled(self) -> None:
        """Fields of generation have no meaning where nothing is generated."""
        if self.output_length is not None or self.output_lengths is not None:
            raise ValueError(f"task: {self.task} generates no tokens: leave output_length out")
        if self.trace is not None or (self.input_length is None and self.input_lengths is None):
            raise ValueError(f"task: {self.task} needs input_length, the tokens of one text, and no trace (of answers)")
        if self.images is not None:
            raise ValueError(f"task: {self.task} is planned for text alone: leave images out")
        if self.sampling is not None:
            raise ValueError(f"task: {self.task} generates no tokens: leave sampling out")

    @property
    def prompt_length(self) -> int | None:
        """Tokens of the longest prompt of a conversation's first turn; of sound those that begin every transcript,
        unless more are said.
        """
        return prompt_length(self._longest())

    @property
    def answer_length(self) -> int | None:
        """Tokens of the longest answer."""
        return self.output_length if self.output_lengths is None else self.output_lengths.distribution.longest

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer, of a conversation's last turn; 0 where a trace says it."""
        return ((self.prompt_length or 0) + (self.answer_length or 0)) * (self.sessions.turns if self.sessions else 1)

    def _longest(self) -> dict[str, Any]:
        known: dict[str, Any] = self.model_dump(include={"input_length", "audio"})
        if self.input_lengths is not None:
            known["input_length"] = self.input_lengths.distribution.longest
        return known

    @property
    def process(self) -> Arrival | None:
        """How requests arrive; None where the plan chooses the load (neither rate nor concurrency is given)."""
        if self.stages is not None or self.sessions is not None:
            return Arrival.TRACE
        if self.arrival is not None:
            return Arrival(self.arrival)
        if self.trace is not None:
            return Arrival.TRACE
        if self.request_rate_per_s is not None:
            return Arrival.GAMMA if self.burstiness > 1.0 else Arrival.POISSON
        return Arrival.CLOSED_LOOP if self.concurrency is not None else None
