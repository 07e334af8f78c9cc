"""Step-3's published decoding rate beside the best split of attention and FFN devices.

``python tests/benchmarks/attention_ffn.py`` (2 CPU-seconds). Published: up to 4,039 tokens/s a GPU (Hopper, 50 ms a
token, contexts of 4K, FP8, no drafts; abstract of arXiv:2507.19427). How many devices each side had is not in what
could be read, so the best split of 32 and of any number up to 64 is printed. Nothing is fitted to it.

Step-3's attention (MFA) is none of the catalog's: it is taken as 64 query heads over one key/value head of 256. Its
queries have rank 2,048 where those here are full: 169 and 238 million parameters a layer. Other sizes are those of its
configuration (stepfun-ai/step3): 61 layers, 56 of them with three of 48 experts of 5,120 and a shared one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.workers import PricedWorker, priced_workers

PUBLISHED_TOKENS_PER_S = 4039.0
CONTEXT, OUTPUT = 4096, 32  # a short answer holds the context at 4K
MOE_LAYERS = range(4, 60)
STEP3 = ModelShape(
    slug="step3",
    name="Step-3",
    family="step3",
    num_hidden_layers=61,
    hidden_size=7168,
    intermediate_size=18432,
    gated_mlp=True,
    num_attention_heads=64,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=128815,
    tie_word_embeddings=False,
    moe=MixtureOfExperts(
        num_experts=48,
        num_experts_per_token=3,
        expert_intermediate_size=5120,
        shared_intermediate_size=5120,
        moe_layers=tuple(layer in MOE_LAYERS for layer in range(61)),
    ),
)
SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "step3",
    "cluster": {"nodes": [{"type": "h800-sxm-8", "count": 8}]},
    "workload": {"input_length": CONTEXT, "output_length": OUTPUT},
    "slo": {"tpot_p95_s": 0.05},
    "quantization": ["fp8"],
    "kv_cache": "fp8",
    "attention_ffn": "disaggregated",
    "fixed": {"decode": {"tensor_parallel": 1}},
}


def rate(kind: PricedWorker) -> float:
    """Tokens/s a device of one worker at the largest load within the SLO, by its own decode iterations."""
    cost, best = kind.cost, 0.0
    for running in kind.steady.num_seqs.tolist():
        seconds = cost.decode_s(running) + cost.decode_context_s[running] * running * (CONTEXT + OUTPUT / 2.0)
        if seconds <= SPEC["slo"]["tpot_p95_s"]:
            best = max(best, running / seconds / kind.placed.num_devices)
    return best


def main() -> None:
    """Print the best split and its relation to what was published."""
    problem = resolve_serving(read_serving_spec(SPEC), Catalog(open_database()), Path(), shape=STEP3).problem
    kinds = priced_workers(problem, Role.DECODE, Counter())
    for what, some in (
        ("32 devices", [kind for kind in kinds if kind.placed.num_devices == 32]),
        ("up to 64 devices", kinds),
    ):
        best = max(some, key=rate)
        ffn = best.placed.ffn
        if ffn is None:
            raise AssertionError("the question asks for FFN devices")
        own = best.placed.layout.num_devices
        print(
            f"{what}: {rate(best):,.0f} tokens/s a device, {rate(best) / PUBLISHED_TOKENS_PER_S - 1.0:+.0%} of the "
            f"published rate: {own} attention, {ffn.num_devices} FFN, {ffn.micro_batches} micro-batches"
        )


if __name__ == "__main__":
    main()
