"""Which shared prefixes a worker still holds, on its devices and in a second tier of KV cache (host memory or NVMe).

Every prefix that a worker computes is also written to the tier, off the critical path; both evict the least recently
used prefix first. A prefix that the devices have evicted and the tier still holds is fetched over the worker's link,
one after the other, and the request enters the engine's queue when the fetch is done. TTFT thus includes the fetch, and
the devices keep working meanwhile (vLLM's OffloadingConnector and SGLang's HiCache load asynchronously, too).

Requests preempted during decode are recomputed with or without a tier, as in the engines.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshplan.planner.serving.simulation.request_state import RequestState

# Prefix of a request that shares none. Numbers below it name what requests have of their own.
NO_PREFIX = -1


class PrefixCache:
    """Least recently used prefixes among all that requests write, together no longer than the KV cache.

    What a request has of its own, its prompt beyond the prefix and its answer, is cached like any prefix, though nobody
    asks for it again: until it is the least recently used, it keeps older prefixes out. So a prefix is found if what
    was written since its last use fits the cache beside it. Engines free the end of a request before its beginning, so
    that its own part goes first.

    It begins empty, or with as many prefixes as fit (:attr:`~.request_state.RequestState.warm_tokens`). A prefix counts
    as held from the arrival of the first request that has it. A request without an identified prefix
    finds as many tokens as its ``cached_tokens`` states.

    Args:
        state: the requests with their prefixes and cached tokens.
        capacity_tokens: capacity of the KV cache. Running requests are the most recently used; that the oldest of them
            cannot be evicted is not seen.
        holds_answers: answers are written to this cache: not where workers only prefill.
    """

    def __init__(self, state: RequestState, capacity_tokens: int, *, holds_answers: bool = True) -> None:
        self.state, self.capacity_tokens, self.holds_answers = state, capacity_tokens, holds_answers
        self.held: OrderedDict[int, int] = OrderedDict()
        self.held_tokens = 0
        for prefix, tokens in state.warm_tokens.items():
            if self.held_tokens + tokens <= capacity_tokens:
                self._use(prefix, tokens)

    def matched(self, request: int) -> int:
        """Tokens of a request that are held; nothing is used by that."""
        prefix = NO_PREFIX if self.state.prefix is None else self.state.prefix[request]
        return min(self.held.get(prefix, 0), self.state.cached_tokens[request])

    def find(self, request: int) -> int:
        """Tokens that an arriving request finds; its prefix is then the most recently used."""
        state = self.state
        tokens = state.cached_tokens[request]
        if state.prefix is None:
            return tokens
        own = state.input_length[request] - tokens
        self._use(NO_PREFIX - 1 - request, own + (state.output_length[request] if self.holds_answers else 0))
        prefix = state.prefix[request]
        found = tokens if prefix == NO_PREFIX else min(self._use(prefix, tokens), tokens)
        self._evict()
        return found

    def _evict(self) -> None:
        """Drop what was used least recently until the rest fits."""
        while self.held_tokens > self.capacity_tokens:
            self.held_tokens -= self.held.popitem(last=False)[1]

    def _use(self, name: int, tokens: int) -> int:
        """Make an entry the most recently used, with at least so many tokens; returns those that it had."""
        before = self.held.pop(name, 0)
        self.held[name] = max(before, tokens)
        self.held_tokens += self.held[name] - before
        return before


class BlockCache(PrefixCache):
    """Least recently used blocks of the requests (:class:`~meshplan.planner.serving.problem.workload.blocks.Blocks`).

    A request finds the first blocks of its prompt up to one that is not held. All of its blocks, those of its answer
    too, are then the most recently used, its first one most of all: no block outlives one that it follows. What no
    block names, the rest of an answer, is kept as :class:`PrefixCache` keeps a request's own part.
    """

    def matched(self, request: int) -> int:
        """Tokens of a request that are held; nothing is used by that."""
        state = self.state
        prompt = state.chains[request][: state.prompt_blocks[request]]
        known = next((i for i, name in enumerate(prompt) if name not in self.held), len(prompt))
        return min(known * state.block_tokens, state.input_length[request])

    def find(self, request: int) -> int:
        """Tokens that an arriving request finds; its blocks are then the most recently used."""
        state, found = self.state, self.matched(request)
        chain, written = state.chains[request], state.input_length[request]
        if self.holds_answers:
            written += state.output_length[request]
        else:
            chain = chain[: state.prompt_blocks[request]]
        unnamed = written - len(chain) * state.block_tokens
        if unnamed > 0:
            self._use(NO_PREFIX - 1 - request, unnamed)
        for name in reversed(chain):
            self._use(name, state.block_tokens)
        self._evict()
        return found


def empty_cache(state: RequestState, capacity_tokens: int, *, holds_answers: bool = True) -> PrefixCache:
    """The cache of requests as they share: blocks, or prefixes."""
    kind = BlockCache if state.block_tokens else PrefixCache
    return kind(state, capacity_tokens, holds_answers=holds_answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    """The second tier of one worker, or of all workers of a pool together.

    Args:
        capacity_tokens: capacity, tokens of KV cache.
        seconds_per_token: time to fetch one token's cache; all devices of the worker fetch their shares in parallel.
        latency_s: latency of one fetch.
        is_shared: what one worker stores the others of its pool find; each fetches over its own link.
    """

    capacity_tokens: int
    seconds_per_token: float
    latency_s: float = 0.0
    is_shared: bool = False


class KvTier:
    """The contents of one worker's second tier during a run.

    Args:
        state: the requests with their prefixes.
        shape: see :class:`TierShape`.
        devices: the prefix cache of the worker's devices.
        held: what another worker of the pool shares with it; None for a tier of its own, or the first worker.
    """

    def __init__(
        self, state: RequestState, shape: TierShape, devices: PrefixCache, held: PrefixCache | None = None
    ) -> None:
        self.shape, self.devices = shape, devices
        self.held = held or empty_cache(state, shape.capacity_tokens, holds_answers=devices.holds_answers)
        self.link_free_s = 0.0
        self.found: dict[int, int] = {}

    def arrive(self, request: int, now_s: float) -> float:
        """Look up a request's prefix; returns the time at which what was found is on the devices, s."""
        on_device, in_tier = self.devices.find(request), self.held.find(request)
        self.found[request] = max(on_device, in_tier)
        if in_tier <= on_device:
            return now_s
        self.link_free_s = max(now_s, self.link_free_s) + (in_tier - on_device) * self.shape.seconds_per_token
        return self.link_free_s + self.shape.latency_s
