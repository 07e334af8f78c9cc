"""The decode batch of a worker: :class:`~meshplan.planner.serving.simulation.decode_batch.DecodeBatch`, compiled."""

from __future__ import annotations

import math
from typing import Any

from meshplan.planner.serving.simulation import decode_batch
from meshplan.planner.serving.simulation.compiled.heaps import discard, push
from meshplan.planner.serving.simulation.compiled.jit import machine_code
from meshplan.planner.serving.simulation.compiled.memory import FINISHING, Memory


@machine_code
def hold_prompt(worker: Any, length: int) -> None:
    """Reserve blocks for a whole prompt."""
    worker.prompt_blocks -= -length // worker.block
    worker.room = (worker.num_blocks - worker.prompt_blocks) * worker.block


@machine_code
def release_prompt(worker: Any, length: int) -> None:
    """Free the blocks of a prompt, or hand them over to the decode batch."""
    worker.prompt_blocks += -length // worker.block
    worker.room = (worker.num_blocks - worker.prompt_blocks) * worker.block


@machine_code
def blocks_at(m: Memory, worker: Any, grown: int) -> int:
    """Blocks held at a common progress of ``grown`` tokens."""
    whole, part = grown // worker.block, grown % worker.block
    found = worker.whole_blocks + worker.num_decoding * (whole + 1)
    residues = m.residues[worker.number]
    if part == 0:
        return found - residues[0]
    for residue in range(worker.block + 1 - part, worker.block):
        found += residues[residue]
    return found


@machine_code
def given(worker: Any, steps: int) -> int:
    """Tokens that each decoding request gains in ``steps`` iterations from the start."""
    return int(worker.speed * steps)


@machine_code
def join(m: Memory, worker: Any, number: int, generated: int) -> None:
    """Add a request with its KV cache and ``generated`` tokens to the decode batch."""
    request = m.requests[number]
    held = request.input_length + generated - 1
    request.target = worker.grown + request.output_length - generated
    heap = m.batches[worker.number, FINISHING]
    push(heap, worker.num_decoding, request.target * len(m.requests) + number)
    worker.num_decoding += 1
    worker.context += held + 1
    request.anchor = held + 1 - worker.speed * worker.steps
    request.offset = held - worker.grown
    worker.whole_blocks += request.offset // worker.block
    m.residues[worker.number, request.offset % worker.block] += 1


@machine_code
def remove(m: Memory, worker: Any, number: int) -> None:
    """Remove a request that is no longer in the heap of ends from the rest of the decode batch."""
    request = m.requests[number]
    worker.num_decoding -= 1
    worker.context -= request.anchor + worker.speed * worker.steps
    worker.whole_blocks -= request.offset // worker.block
    m.residues[worker.number, request.offset % worker.block] -= 1


@machine_code
def forget_end(m: Memory, worker: Any, number: int) -> None:
    """Take a request from the heap of ends."""
    key = m.requests[number].target * len(m.requests) + number
    discard(m.batches[worker.number, FINISHING], worker.num_decoding, key)


@machine_code
def youngest_decoding(m: Memory, worker: Any) -> int:
    """The largest rank in the decode batch, −1 without one."""
    heap, found = m.batches[worker.number, FINISHING], -1
    for place in range(worker.num_decoding):
        found = max(found, m.requests[heap[place] % len(m.requests)].rank)
    return found


@machine_code
def steps_to_finish(m: Memory, worker: Any) -> int:
    """Iterations until the first request is done."""
    target = m.batches[worker.number, FINISHING, 0] // len(m.requests)
    if worker.is_plain:
        return target - worker.steps
    steps = math.ceil(target / worker.speed)
    while given(worker, steps) < target:
        steps += 1
    while given(worker, steps - 1) >= target:
        steps -= 1
    return steps - worker.steps


@machine_code
def steps_that_fit(m: Memory, worker: Any, most: int) -> int:
    """The most iterations, at least one, after which the decodes' blocks still fit."""
    free = worker.num_blocks - worker.prompt_blocks
    if blocks_at(m, worker, given(worker, worker.steps + most)) <= free:
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        if blocks_at(m, worker, given(worker, worker.steps + middle)) <= free:
            low = middle
        else:
            high = middle
    return low


# The same lines as in Python: a function of numbers alone.
steps_to_reach = machine_code(decode_batch.steps_to_reach)
