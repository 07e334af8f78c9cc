"""The load of a serving plan as its launch files need it: the longest sequence, what a benchmark sends."""

from __future__ import annotations

from dataclasses import dataclass

# How long the load lasts: enough answers for a 99th percentile, bounded so that it ends within the hour.
_LOAD_S, _ROUNDS = 300.0, 10
_FEWEST, _MOST = 300, 5000
# Chat templates and other tokenizers make prompts longer than the nominal length. A choice, not a measurement: the KV
# cache is paged, so that room costs memory only where it is used.
_ROOM_SHARE, _ROOM_STEP = 0.125, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What clients do.

    Args:
        input_length: tokens of the longest prompt.
        output_length: tokens of the longest answer; 0 where an answer is the vector of a text.
        length_ratio: lengths are uniform between this share of the longest and the longest.
        request_rate_per_s: Poisson arrivals; None where ``concurrency`` says how many requests are kept in flight.
        concurrency: see there.
        prefix_hit_rate: share of a prompt that is one of the shared prefixes.
        num_prefixes: how many of them there are.
    """

    input_length: int
    output_length: int
    length_ratio: float = 1.0
    request_rate_per_s: float | None = None
    concurrency: int | None = None
    prefix_hit_rate: float = 0.0
    num_prefixes: int = 1

    @property
    def num_requests(self) -> int:
        """Requests to measure."""
        rate = self.request_rate_per_s
        wanted = _ROUNDS * (self.concurrency or 0) if rate is None else rate * _LOAD_S
        return int(min(_MOST, max(_FEWEST, wanted)))

    @property
    def prefix_length(self) -> int:
        """Tokens of a shared prefix."""
        return round(self.input_length * self.prefix_hit_rate)


def with_room(nominal: int, longest_known: int | None, whole_prompt_budget: int | None) -> int:
    """Tokens of the longest sequence that servers accept: the nominal one and an eighth, in steps of 256.

    Args:
        nominal: longest prompt and answer of the workload.
        longest_known: sequence that the model was trained for; None where that is not known.
        whole_prompt_budget: token budget of an iteration where prompts are not cut; None where they are.

    >>> with_room(5000, 131072, None), with_room(5000, 5120, None), with_room(4000, None, 4096)
    (5632, 5120, 4096)
    """
    room = -(-nominal * (1 + _ROOM_SHARE) // _ROOM_STEP) * _ROOM_STEP
    limits = [limit for limit in (longest_known, whole_prompt_budget) if limit is not None]
    return int(max(nominal, min(room, *limits) if limits else room))
