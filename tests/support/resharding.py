"""A real resharding: ranks on CPU that send each other what they lack, through gloo, and count what they receive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moves_cases import LAYERS

from meshplan.planner.training.problem.problem import TrainingConfig

# A side of each layer's square, in elements: the degrees of the tests divide it.
SIDE = 24
RANKS = 4


def square_of(state: Any, number: int) -> Any:
    """The whole states of a layer, as their elements should be afterwards."""
    generator = state.Generator().manual_seed(number + 10)
    return state.rand((SIDE, SIDE), generator=generator)


def held(made: TrainingConfig, rank: int) -> dict[int, tuple[slice, slice]]:
    """Layer → rows and columns of the optimizer states that a rank of FSDP, tensor and pipeline parallelism holds."""
    t, left = rank % made.tensor_parallel, rank // made.tensor_parallel
    d, stage = left % made.data_parallel, left // made.data_parallel
    per_stage = LAYERS // made.pipeline_parallel
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    rows = SIDE // made.data_parallel if made.zero_stage else SIDE
    first = d * rows if made.zero_stage else 0
    columns = SIDE // made.tensor_parallel
    return {layer: (slice(first, first + rows), slice(t * columns, (t + 1) * columns)) for layer in layers}


def work(rank: int, folder: str, old: TrainingConfig, new: TrainingConfig) -> None:
    """One rank: what it has goes where it is lacked, through gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    before = {one: held(old, one) for one in range(old.world_size)}
    after = {one: held(new, one) for one in range(new.world_size)}
    mine = {layer: square_of(torch, layer)[part].clone() for layer, part in before.get(rank, {}).items()}
    received, wanted = 0, after.get(rank, {})
    got = {layer: torch.full((SIDE, SIDE), float("nan")) for layer in wanted}
    for layer in wanted:
        if layer in before.get(rank, {}):
            got[layer][before[rank][layer]] = mine[layer]
    # Each row and column that some rank lacks is sent once by the first rank that holds it, in an order all agree on.
    for receiver, layers in after.items():
        for layer, (rows, columns) in layers.items():
            for row in range(rows.start, rows.stop):
                lacks = [
                    column
                    for column in range(columns.start, columns.stop)
                    if not _inside(before.get(receiver, {}).get(layer), row, column)
                ]
                by_sender: dict[int, list[int]] = {}
                for column in lacks:
                    sender = next(one for one in before if _inside(before[one].get(layer), row, column))
                    by_sender.setdefault(sender, []).append(column)
                for sender, cells in by_sender.items():
                    if rank == sender:
                        own_rows, own_columns = before[rank][layer]
                        local = [column - own_columns.start for column in cells]
                        dist.send(mine[layer][row - own_rows.start, local].contiguous(), receiver)
                    elif rank == receiver:
                        buffer = torch.empty(len(cells))
                        dist.recv(buffer, sender)
                        got[layer][row, cells] = buffer
                        received += len(cells)
    right = all(torch.equal(got[layer][part], square_of(torch, layer)[part]) for layer, part in wanted.items())
    Path(folder, f"{rank}.json").write_text(json.dumps({"received": received, "right": right}))
    dist.barrier()
    dist.destroy_process_group()


def _inside(part: tuple[slice, slice] | None, row: int, column: int) -> bool:
    if part is None:
        return False
    rows, columns = part
    return rows.start <= row < rows.stop and columns.start <= column < columns.stop
