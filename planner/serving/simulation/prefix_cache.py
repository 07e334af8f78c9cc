"""Which shared prefixes a worker still holds, on its devices and in a second tier beside them.

*The tier*: a second place for KV cache beside the devices of a worker: host memory, or NVMe behind it.

Whatever prefix a worker computes is written there as well, off the critical path, and the least recently used goes
first when it is full. A prefix that the devices have lost and the tier still holds is not computed again: it comes back
over the worker's link, one after the other, and the request enters the engine's queue when it has come. So TTFT holds
the fetch, and the devices work on meanwhile (vLLM's OffloadingConnector and SGLang's HiCache load asynchronously, too).

Requests that are thrown out while they decode are recomputed, tier or not: so do the engines.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshplan.planner.serving.simulation.request_state import RequestState

# A request that shares its prefix with no other in particular.
NO_PREFIX = -1


class PrefixCache:
    """Least recently used prefixes, together no longer than the KV cache.

    A prefix counts as held from the arrival of the first request that has it. Requests without an identified prefix
    find the cached tokens that they are said to have.

    Args:
        state: the requests with their prefixes and cached tokens.
        capacity_tokens: of the KV cache: prefixes lie in blocks that no running request needs, so this is optimistic.
    """

    def __init__(self, state: RequestState, capacity_tokens: int) -> None:
        self.state, self.capacity_tokens = state, capacity_tokens
        self.held: OrderedDict[int, int] = OrderedDict()
        self.held_tokens = 0

    def holds(self, prefix: int) -> bool:
        """The prefix is here."""
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
    """A tier as one worker sees it.

    Args:
        capacity_tokens: tokens of KV cache that it holds.
        seconds_per_token: to bring one token's cache back, all devices of the worker fetching their shares at once.
        latency_s: of one fetch.
    """

    capacity_tokens: int
    seconds_per_token: float
    latency_s: float = 0.0


class KvTier:
    """The tier of one worker while a run goes on.

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
        """Look for a request's prefix; when it is on the devices, as far as it was found anywhere."""
        near, far = self.devices.find(request), self.held.find(request)
        self.found[request] = max(near, far)
        if far <= near:
            return now_s
        self.link_free_s = max(now_s, self.link_free_s) + (far - near) * self.shape.seconds_per_token
        return self.link_free_s + self.shape.latency_s
