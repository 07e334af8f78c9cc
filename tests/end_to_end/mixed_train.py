"""The small transformer of :mod:`pipeline_train` over stages with degrees of their own, as the plan says.

What ``meshplan emit --target torchrun --script`` launches for a plan on several types of hosts. A rank becomes as slow
as its host once everything is set up: it joins the control group in ``TEST_GROUP``. A micro-batch lies over the
replicas of a stage in order; where two stages have different numbers of them, each sends every peer its part.

``python mixed_train.py FILE`` measures what a device is profiled by instead: seconds of a micro-batch, forward and
backward, through the whole model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from pipeline_train import Stage, joined
from pipeline_train import Trainer as AlikeTrainer
from torch import Tensor, nn

WARM_UP_STEPS = 1
PROFILED_ROWS, PROFILED_IN_A_ROW = 3, 4


class Trainer(AlikeTrainer):
    """One rank; the schedule is that of :class:`pipeline_train.Trainer`."""

    def __init__(self, config: dict[str, object], shape: dict[str, int]) -> None:
        table = stages_of(config)
        firsts = [sum(one["data_parallel"] for one in table[:index]) for index in range(len(table) + 1)]
        self.stages, self.microbatches = len(table), int(config["num_microbatches"])
        self.stage = max(index for index in range(len(table)) if firsts[index] <= dist.get_rank())
        self.place, self.peers = dist.get_rank() - firsts[self.stage], (table, firsts)
        own = table[self.stage]
        self.replicas, self.sequences = own["data_parallel"], own["micro_batch_size"]
        self.tokens_shape = (self.sequences, int(config["sequence_length"]))
        self.first, self.last = self.stage == 0, self.stage == self.stages - 1
        for index in range(len(table)):
            group = dist.new_group(list(range(firsts[index], firsts[index + 1])))
            if index == self.stage:
                self.group = group
        torch.manual_seed(self.stage)
        self.vocabulary, self.hidden = shape["vocab_size"], shape["hidden_size"]
        self.model = Stage(shape, own["num_layers"], first=self.first, last=self.last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.compute_s = 0.0

    def overlaps(self, stage: int) -> list[tuple[int, slice]]:
        """Ranks of another stage that hold some of this rank's sequences, and which of these."""
        table, firsts = self.peers
        size, low = table[stage]["micro_batch_size"], self.place * self.sequences
        high, found = low + self.sequences, []
        for place in range(table[stage]["data_parallel"]):
            begin, end = max(low, place * size), min(high, (place + 1) * size)
            if begin < end:
                found.append((firsts[stage] + place, slice(begin - low, end - low)))
        return found

    def exchange(self, *, send: tuple[Tensor, int] | None = None, receive_from: int | None = None) -> Tensor | None:
        """Send activations or gradients to one stage and receive from another, in 16 bits, both at once."""
        requests, buffer = [], None
        if send is not None:
            tensor, stage = send
            packed = tensor.detach().to(torch.bfloat16).contiguous().view(torch.uint8)
            requests += [dist.P2POp(dist.isend, packed[part], rank) for rank, part in self.overlaps(stage)]
        if receive_from is not None:
            buffer = torch.empty((*self.tokens_shape, self.hidden), dtype=torch.bfloat16).view(torch.uint8)
            requests += [dist.P2POp(dist.irecv, buffer[part], rank) for rank, part in self.overlaps(receive_from)]
        for request in dist.batch_isend_irecv(requests) if requests else []:
            request.wait()
        return None if buffer is None else buffer.view(torch.bfloat16).float()


def stages_of(config: dict[str, object]) -> list[dict[str, int]]:
    """Layers and degrees of each stage, also of a plan that has one set of degrees."""
    if "stages" in config:
        return config["stages"]
    alike = {name: config[name] for name in ("data_parallel", "micro_batch_size")}
    return [{"num_layers": layers, **alike} for layers in config["layers_per_chunk"]]


def join_group() -> None:
    """From here on this process is as fast as its device."""
    Path(os.environ["TEST_GROUP"]).write_text(str(os.getpid()))


def profile(result: Path) -> None:
    """Seconds of a micro-batch: the mean of a few in a row, the shortest of some of these.

    A share of a processor lets a short pass begin with time that is left over and end in debt; in a row it pays.
    """
    shape = json.loads(os.environ["TEST_SHAPE"])
    model = Stage(shape, shape["num_hidden_layers"], first=True, last=True)
    tokens = torch.randint(shape["vocab_size"], json.loads(os.environ["TEST_MICRO_BATCH"]))
    one_pass(model, tokens)
    join_group()
    rows = [[one_pass(model, tokens) for _ in range(PROFILED_IN_A_ROW)] for _ in range(PROFILED_ROWS)]
    result.write_text(json.dumps(min(fmean(row) for row in rows)))


def one_pass(model: nn.Module, tokens: Tensor) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return time.perf_counter() - start


def main() -> None:
    """Train a few steps, write what they took."""
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        profile(Path(sys.argv[1]))
        return
    trainer = joined(Trainer)
    seconds = []
    for number in range(WARM_UP_STEPS + int(os.environ["TEST_STEPS"])):
        if number == WARM_UP_STEPS:
            join_group()
        dist.barrier()
        start = time.perf_counter()
        trainer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        Path(os.environ["TEST_RESULT"]).write_text(json.dumps({"step_s": seconds[WARM_UP_STEPS:]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
