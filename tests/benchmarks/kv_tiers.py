"""Tiers of prefix cache on a recorded trace: what each serves, how large a tier is worth having, and when it pays.

    python tests/benchmarks/kv_tiers.py mooncake-conversation.csv.gz

The trace has the hashes of each prompt's blocks of 512 tokens. Sizes are those of Llama-3.1-70B's cache in 16 bits over
one cache for all requests; the same figures come from caches simulated block by block.
"""

from __future__ import annotations

import csv
import gzip
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from tier_caches import blocks_served

from meshplan.planner.serving.tiers.prefix_reuse import break_even_bytes_per_s, prefix_reuse

BLOCK_TOKENS = 512
KV_BYTES_PER_TOKEN = 327_680.0  # Llama-3.1-70B: 2·8·128·2·80
PREFILL_TOKENS_PER_S = 10_000.0  # assumed of a worker of four H100; only the break-even rate uses it
GIB = 2.0**30
TIERS_GIB = (100.0, 1_000.0, 5_000.0)  # device, host, NVMe


def read_prompts(path: Path) -> list[list[int]]:
    """The hashes of each prompt."""
    with gzip.open(path, "rt") as file:
        return [[int(one) for one in row["hash_ids"].replace(";", " ").split()] for row in csv.DictReader(file)]


def main(path: Path) -> None:
    prompts = read_prompts(path)
    start = time.process_time()
    reuse = prefix_reuse(prompts)
    print(
        f"{len(prompts):,} prompts, {reuse.num_blocks:,} blocks, {time.process_time() - start:.1f} CPU-s for all sizes"
    )
    print(f"a cache without limit finds {reuse.hit_rate(np.inf):.1%} of the blocks")
    block_bytes = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    for share in (0.5, 0.9, 1.0):
        size = reuse.size_for(share)
        print(f"{share:.0%} of that: {size:,.0f} blocks, {size * block_bytes / GIB:,.0f} GiB")
    capacities = [int(size * GIB / block_bytes) for size in TIERS_GIB]
    rates, served = reuse.tier_rates(capacities), blocks_served(prompts, capacities)
    for size, rate, blocks in zip(TIERS_GIB, rates, served, strict=True):
        exact = "the same" if round(rate * reuse.num_blocks) == blocks else "NOT the same"
        print(f"tier of {size:,.0f} GiB serves {rate:.2%} ({blocks:,} blocks simulated block by block: {exact})")
    rate = break_even_bytes_per_s(KV_BYTES_PER_TOKEN, PREFILL_TOKENS_PER_S)
    print(f"fetching pays above {rate / 1e9:.2f} GB/s where {PREFILL_TOKENS_PER_S:,.0f} tokens/s are prefilled")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
