"""Which shared prefixes a worker still holds."""

from __future__ import annotations

from collections import OrderedDict

from meshplan.planner.serving.simulation.ledger import Ledger

# A request that shares its prefix with no other in particular.
NO_PREFIX = -1


class PrefixCache:
    """Least recently used prefixes, together no longer than the KV cache.

    A prefix counts as held from the arrival of the first request that has it. Requests without an identified prefix
    find the cached tokens that they are said to have.

    Args:
        ledger: the requests with their prefixes and cached tokens.
        capacity_tokens: of the KV cache: prefixes lie in blocks that no running request needs, so this is optimistic.
    """

    def __init__(self, ledger: Ledger, capacity_tokens: int) -> None:
        self.ledger, self.capacity_tokens = ledger, capacity_tokens
        self.held: OrderedDict[int, int] = OrderedDict()
        self.held_tokens = 0

    def holds(self, prefix: int) -> bool:
        """The prefix is here."""
        return prefix in self.held

    def find(self, request: int) -> int:
        """Tokens that an arriving request finds; its prefix is then the most recently used."""
        tokens = self.ledger.cached_tokens[request]
        prefix = NO_PREFIX if self.ledger.prefix is None else self.ledger.prefix[request]
        if prefix == NO_PREFIX:
            return tokens
        before = self.held.pop(prefix, 0)
        self.held[prefix] = max(before, tokens)
        self.held_tokens += max(before, tokens) - before
        while self.held_tokens > self.capacity_tokens:
            self.held_tokens -= self.held.popitem(last=False)[1]
        return min(before, tokens)
