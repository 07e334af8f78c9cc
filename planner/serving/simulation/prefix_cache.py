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

# Prefix of a request that shares none.
NO_PREFIX = -1


class PrefixCache:
    """Least recently used prefixes, together no longer than the KV cache.

    A prefix counts as held from the arrival of the first request that has it. A request without an identified prefix
    finds as many tokens as its ``cached_tokens`` states.

    Args:
        state: the requests with their prefixes and cached tokens.
        capacity_tokens: capacity of the KV cache. Optimistic: prefixes only occupy blocks that no running request
            needs.
    """

    def __init__(self, state: RequestState, capacity_tokens: int) -> None:
        self.state, self.capacity_tokens = state, capacity_tokens
        self.held: OrderedDict[int, int] = OrderedDict()
        self.held_tokens = 0

    def holds(self, prefix: int) -> bool:
        """Whether the prefix is held."""
        return prefix in self.held

    def find(self, request: int) -> int:
        """Tokens that an arriving request finds; its prefix is then the most recently used."""
        tokens = self.state.cached_tokens[request]
        prefix = NO_PREFIX if self.state.prefix is None else self.state.prefix[request]
        if prefix == NO_PREFIX:
            return tokens
        before = self.held.pop(prefix, 0)
        self.held[prefix] = max(before, tokens)
        self.held_tokens += max(before, tokens) - before
        while self.held_tokens > self.capacity_tokens:
            self.held_tokens -= self.held.popitem(last=False)[1]
        return min(before, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    """The second tier of one worker.

    Args:
        capacity_tokens: capacity, tokens of KV cache.
        seconds_per_token: time to fetch one token's cache; all devices of the worker fetch their shares in parallel.
        latency_s: latency of one fetch.
    """

    capacity_tokens: int
    seconds_per_token: float
    latency_s: float = 0.0


class KvTier:
    """The contents of one worker's second tier during a run.

    Args:
        state: the requests with their prefixes.
        shape: see :class:`TierShape`.
        devices: the prefix cache of the worker's devices.
    """

    def __init__(self, state: RequestState, shape: TierShape, devices: PrefixCache) -> None:
        self.shape, self.devices = shape, devices
        self.held = PrefixCache(state, shape.capacity_tokens)
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
