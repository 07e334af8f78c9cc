"""Degrees of parallelism: how layers are dealt to pipeline stages.

A token visits model chunks in order; with p stages and v chunks a stage, chunk c lies on stage c mod p.
"""

from __future__ import annotations


def deal_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk: even where that divides, else the embedding and the LM head count as a layer each.

    Megatron-LM names the second rule ``--account-for-embedding-in-pipeline-split`` and
    ``--account-for-loss-in-pipeline-split``. What is left over goes to the later chunks, which keep fewer
    micro-batches in flight, never to the last one, which computes the loss.

    Args:
        num_layers: transformer layers.
        num_chunks: pipeline stages × chunks a stage, at most ``num_layers`` + 2.

    >>> deal_layers(80, 8)
    (10, 10, 10, 10, 10, 10, 10, 10)
    >>> deal_layers(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    if num_layers % num_chunks == 0:
        return (num_layers // num_chunks,) * num_chunks
    base, extra = divmod(num_layers + 2, num_chunks)
    units = [base] * num_chunks
    for offset in range(extra):
        units[num_chunks - 2 - offset] += 1
    units[0] -= 1
    units[-1] -= 1
    return tuple(units)
