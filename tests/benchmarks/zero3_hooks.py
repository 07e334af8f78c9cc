"""Host time that DeepSpeed's ZeRO stages add to a layer, measured here: what ``hooks_s_per_layer`` of recipes.yaml is.

    python tests/benchmarks/zero3_hooks.py          (an environment with torch and deepspeed; no GPU; about a minute)

A layer of five matrices and two norms of eight elements takes nothing but host time. The difference between 32 and 8
layers, over 24, leaves out what a step takes once; gradients are accumulated, so that no optimizer runs. One process,
gloo: collectives move nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

WIDTH, MATRICES, NORMS = 8, 5, 2
FEW, MANY = 8, 32
WARM, TIMED = 4, 11


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for recomputes in (False, True):
        for stage in (None, 1, 2, 3):
            few, many = (step_s(stage, layers, recomputes=recomputes) for layers in (FEW, MANY))
            each = (many - few) / (MANY - FEW)
            print(
                f"{'recomputed' if recomputes else 'kept':10}  ZeRO stage {stage}: {1e3 * each:.2f} ms a layer",
                flush=True,
            )


def step_s(stage: int | None, layers: int, *, recomputes: bool) -> float:
    """Median time of a micro-batch, forward and backward, s."""
    import torch

    model = network(layers, recomputes=recomputes)
    engine = model if stage is None else with_zero(model, stage)
    times = []
    for _ in range(WARM + TIMED):
        tokens = torch.randn(1, 4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        start = time.perf_counter()
        loss = engine(tokens)
        if stage is None:
            loss.backward()
        else:
            engine.backward(loss)
            engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM:])


def network(layers: int, *, recomputes: bool) -> Any:
    """Layers that take no device time."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def layer() -> Any:
        matrices = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)]
        return torch.nn.Sequential(*matrices, *(torch.nn.LayerNorm(WIDTH) for _ in range(NORMS)))

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(layer() for _ in range(layers))

        def forward(self, tokens: Any) -> Any:
            for one in self.layers:
                tokens = checkpoint(one, tokens, use_reentrant=True) if recomputes else one(tokens)
            return tokens.float().sum()

    return Network().bfloat16()


def with_zero(model: Any, stage: int) -> Any:
    """The model under DeepSpeed, between optimizer steps."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1000,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": False},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


if __name__ == "__main__":
    main()
