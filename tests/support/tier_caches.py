"""Tiers of a prefix cache, simulated block by block: what stack distances are held to."""

from __future__ import annotations

from collections import OrderedDict


def blocks_served(prompts: list[list[int]], capacities: list[int]) -> list[int]:
    """Blocks that each tier serves: separate LRU caches, a block is served by the first that holds it.

    Walks a prompt from its first block and stops at the first that no tier holds, as engines do.
    """
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
    served = [0] * len(capacities)
    for prompt in prompts:
        for block in prompt:
            tier = next((which for which, cache in enumerate(caches) if block in cache), None)
            if tier is None:
                break
            served[tier] += 1
        for cache, size in zip(caches, capacities, strict=True):
            for block in reversed(prompt):
                cache.pop(block, None)
                cache[block] = None
            while len(cache) > size:
                cache.popitem(last=False)
    return served
