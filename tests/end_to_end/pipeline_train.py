"""A small transformer trained with pipeline × data parallelism over Gloo, as the plan in MESHPLAN_CONFIG says.

What ``meshplan emit --target torchrun --script`` launches in :mod:`test_mapping_netns`. Ranks count data parallelism
before the pipeline; the schedule is 1F1B with messages that block, as Megatron-LM's; gradients are reduced in one
all-reduce of fp32 at the end. Rank 0 writes the seconds of every step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WARM_UP_STEPS = 1


class Layer(nn.Module):
    """Attention and a gated MLP, pre-norm, no biases."""

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class Stage(nn.Module):
    """The layers of one pipeline stage with its ends."""

    def __init__(self, shape: dict[str, int], layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        hidden = shape["hidden_size"]
        self.embedding = nn.Embedding(shape["vocab_size"], hidden) if first else None
        self.layers = nn.ModuleList(
            Layer(hidden, shape["num_attention_heads"], shape["intermediate_size"]) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, shape["vocab_size"], bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Trainer:
    """One rank."""

    def __init__(self, config: dict[str, object], shape: dict[str, int]) -> None:
        self.stages, self.replicas = int(config["pipeline_parallel"]), int(config["data_parallel"])
        self.microbatches = int(config["num_microbatches"])
        self.tokens_shape = (int(config["micro_batch_size"]), int(config["sequence_length"]))
        self.stage, self.replica = divmod(dist.get_rank(), self.replicas)
        self.first, self.last = self.stage == 0, self.stage == self.stages - 1
        for stage in range(self.stages):
            group = dist.new_group([stage * self.replicas + replica for replica in range(self.replicas)])
            if stage == self.stage:
                self.group = group
        torch.manual_seed(self.stage)
        self.vocabulary, self.hidden = shape["vocab_size"], shape["hidden_size"]
        self.model = Stage(shape, config["layers_per_chunk"][self.stage], first=self.first, last=self.last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.compute_s = 0.0

    def exchange(self, *, send: tuple[Tensor, int] | None = None, receive_from: int | None = None) -> Tensor | None:
        """Send activations or gradients to one stage and receive from another, in 16 bits, both at once."""
        requests, buffer = [], None
        if send is not None:
            tensor, stage = send
            packed = tensor.detach().to(torch.bfloat16).contiguous().view(torch.uint8)
            requests.append(dist.P2POp(dist.isend, packed, stage * self.replicas + self.replica))
        if receive_from is not None:
            buffer = torch.empty((*self.tokens_shape, self.hidden), dtype=torch.bfloat16).view(torch.uint8)
            requests.append(dist.P2POp(dist.irecv, buffer, receive_from * self.replicas + self.replica))
        for request in dist.batch_isend_irecv(requests) if requests else []:
            request.wait()
        return None if buffer is None else buffer.view(torch.bfloat16).float()

    def forward(self, x: Tensor | None) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        tokens = torch.randint(self.vocabulary, self.tokens_shape)
        x = tokens if x is None else x.requires_grad_()
        y = self.model(x)
        if self.last:
            y = nn.functional.cross_entropy(y.flatten(0, 1), tokens.flatten()) / self.microbatches
            self.losses.append(y.item())
        self.compute_s += time.perf_counter() - start
        return x, y

    def backward(self, held: tuple[Tensor, Tensor], gradient: Tensor | None) -> Tensor | None:
        start = time.perf_counter()
        held[1].backward(gradient)
        self.compute_s += time.perf_counter() - start
        return None if self.first else held[0].grad

    def step(self) -> None:
        """1F1B: run ahead, one forward and one backward at a time, run out; reduce; update."""
        before, after = (None if self.first else self.stage - 1), (None if self.last else self.stage + 1)
        ahead = min(self.stages - 1 - self.stage, self.microbatches)
        held = []
        for _ in range(ahead):
            held.append(self.forward(self.exchange(receive_from=before)))
            self.exchange(send=(held[-1][1], after))
        x = self.exchange(receive_from=before) if self.microbatches > ahead else None
        for number in range(self.microbatches - ahead):
            held.append(self.forward(x))
            gradient = None if self.last else self.exchange(send=(held[-1][1], after), receive_from=after)
            back = self.backward(held.pop(0), gradient)
            more = number < self.microbatches - ahead - 1
            if not self.first:
                x = self.exchange(send=(back, before), receive_from=before if more else None)
        for _ in range(ahead):
            back = self.backward(held.pop(0), self.exchange(receive_from=after))
            if not self.first:
                self.exchange(send=(back, before))
        flat = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
        if self.replicas > 1:
            dist.all_reduce(flat, group=self.group)
        start = time.perf_counter()
        offset = 0
        for parameter in self.model.parameters():
            parameter.grad.copy_(flat[offset : offset + parameter.numel()].view_as(parameter) / self.replicas)
            offset += parameter.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.compute_s += time.perf_counter() - start


def joined(kind: type[Trainer] = Trainer) -> Trainer:
    """This rank of the plan, among the others; each is on the host that the table of ranks gives it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = json.loads(Path(os.environ["MESHPLAN_CONFIG"]).read_text())["config"]
    table = json.loads(Path(os.environ["MESHPLAN_RANK_TABLE"]).read_text())["rank_table"]
    seen: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, int(os.environ["TEST_HOST"]))
    assert seen == [host for host, _ in table], (seen, table)
    return kind(config, json.loads(os.environ["TEST_SHAPE"]))


def main() -> None:
    """Train a few steps, write what they took."""
    trainer = joined()
    seconds = []
    for number in range(WARM_UP_STEPS + int(os.environ["TEST_STEPS"])):
        dist.barrier()
        start, trainer.compute_s = time.perf_counter(), 0.0
        trainer.step()
        dist.barrier()
        if number >= WARM_UP_STEPS:
            seconds.append((time.perf_counter() - start, trainer.compute_s))
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [busy for _, busy in seconds])
    if dist.get_rank() == 0:
        told = {"step_s": [whole for whole, _ in seconds], "compute_s": everyone}
        Path(os.environ["TEST_RESULT"]).write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
