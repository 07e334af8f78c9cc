"""How the layers of a model are split into chunks, in the order in which a token visits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Weights of the embedding and of the LM head, in layers, that are planned (torchtitan's own default is one each): a
# head of 128,256 tokens costs an 8B model two to three layers.
FIRST_WEIGHTS, LAST_WEIGHTS = (0, 1), (0, 1, 2, 3)


def split_layers_evenly(num_layers: int, num_chunks: int, *, num_nextn_predict_layers: int = 0) -> tuple[int, ...]:
    """Layers of each chunk: even where that divides, else the embedding and the LM head count as a layer each.

    Megatron-LM names the second rule ``--account-for-embedding-in-pipeline-split`` and
    ``--account-for-loss-in-pipeline-split``. What is left over goes to the later chunks, which keep fewer
    micro-batches in flight, never to the last one, which computes the loss.

    A multi-token-prediction layer lies on the last chunk and has a loss of its own: it counts as two layers there. The
    embedding counts where the rest does not divide anyway.

    Args:
        num_layers: transformer layers.
        num_chunks: pipeline stages × chunks per stage, at most ``num_layers`` + 2.
        num_nextn_predict_layers: multi-token-prediction layers.

    >>> split_layers_evenly(80, 8)
    (10, 10, 10, 10, 10, 10, 10, 10)
    >>> split_layers_evenly(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    >>> split_layers_evenly(61, 16, num_nextn_predict_layers=1)
    (4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1)
    """
    if num_nextn_predict_layers:
        return _assign_to_least_loaded(num_layers, num_chunks, at_end=1 + 2 * num_nextn_predict_layers)
    if num_layers % num_chunks == 0:
        return (num_layers // num_chunks,) * num_chunks
    base, extra = divmod(num_layers + 2, num_chunks)
    units = [base] * num_chunks
    for offset in range(extra):
        units[num_chunks - 2 - offset] += 1
    units[0] -= 1
    units[-1] -= 1
    return tuple(units)


def split_layers_ignoring_ends(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk without regard to embedding and LM head, what is left over to the last chunks.

    >>> split_layers_ignoring_ends(32, 6)
    (5, 5, 5, 5, 6, 6)
    """
    base, extra = divmod(num_layers, num_chunks)
    return (base,) * (num_chunks - extra) + (base + 1,) * extra


def equal_layers(num_layers: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """The one split into chunks of equal length; none where it does not divide.

    >>> equal_layers(32, 4), equal_layers(30, 4)
    (((8, 8, 8, 8),), ())
    """
    return () if num_layers % num_chunks else ((num_layers // num_chunks,) * num_chunks,)


def layers_by_weights(num_layers: int, num_chunks: int, first: int, last: int) -> tuple[int, ...] | None:
    """TorchTitan's split: embedding and LM head count as ``first`` and ``last`` layers, what is left over comes early.

    Source: torchtitan 0.3.0, distributed/pipeline_parallel.py (_generate_llm_fqn_per_model_part).

    Returns:
        Layers of each chunk; None where a weight is more than a chunk.

    >>> layers_by_weights(126, 8, 1, 1), layers_by_weights(32, 4, 1, 3)
    ((15, 16, 16, 16, 16, 16, 16, 15), (8, 9, 9, 6))
    """
    if num_chunks == 1:
        return (num_layers,)
    base, extra = divmod(num_layers + first + last, num_chunks)
    if base == 0 or max(first, last) > base:
        return None
    layers = [base + (chunk < extra) for chunk in range(num_chunks)]
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def weights_of_splits(num_layers: int, num_chunks: int) -> Mapping[tuple[int, ...], tuple[int, int]]:
    """Every split by weights, the usual one first → weights of embedding and LM head.

    Left out are those into a number of chunks that no ``pipeline_parallel_layers_per_stage`` gives: TorchTitan divides
    by it and rounds up.

    >>> weights_of_splits(126, 16)[7, *[8] * 14, 7], len(weights_of_splits(32, 4))
    ((1, 1), 6)
    """
    pairs = [(first, last) for first in FIRST_WEIGHTS for last in LAST_WEIGHTS]
    usual = (0, 0) if num_layers % num_chunks == 0 else (1, 1)
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for first, last in sorted(pairs, key=lambda pair: pair != usual):
        split = layers_by_weights(num_layers, num_chunks, first, last)
        total = num_layers + first + last
        if split is not None and -(-total // -(-total // num_chunks)) == num_chunks:
            found.setdefault(split, (first, last))
    return found


def splits_by_weights(num_layers: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Every split that TorchTitan makes of small weights (:func:`weights_of_splits`), the usual one first."""
    return tuple(weights_of_splits(num_layers, num_chunks))


def _assign_to_least_loaded(num_layers: int, num_chunks: int, *, at_end: int) -> tuple[int, ...]:
    """Even where ``at_end`` layers' worth of other work lies on the last chunk; what is left over to later chunks."""
    at_start = 1 if (num_layers + at_end) % num_chunks else 0
    loads = [at_start, *[0] * (num_chunks - 2), at_end]
    layers = [0] * num_chunks
    preferred = [*range(num_chunks - 2, -1, -1), num_chunks - 1]
    for _ in range(num_layers):
        chunk = min(preferred, key=lambda index: loads[index])
        loads[chunk] += 1
        layers[chunk] += 1
    return tuple(layers)


def layers_problem(
    layers_per_chunk: Sequence[int], num_layers: int, *, pipeline_parallel: int | None, virtual_pipeline_stages: int
) -> str | None:
    """What is wrong with a list of layers for each chunk; None where nothing is.

    Args:
        layers_per_chunk: as given.
        num_layers: transformer layers of the model.
        pipeline_parallel: stages; None where the list decides.
        virtual_pipeline_stages: chunks per stage.

    >>> layers_problem([10, 12], 24, pipeline_parallel=2, virtual_pipeline_stages=1)
    '10 + 12 = 22 layers, the model has 24: add 2'
    """
    given, total = len(layers_per_chunk), sum(layers_per_chunk)
    if pipeline_parallel is None and given % virtual_pipeline_stages:
        return f"{given} chunks are not a multiple of virtual_pipeline_stages {virtual_pipeline_stages}"
    chunks = given if pipeline_parallel is None else pipeline_parallel * virtual_pipeline_stages
    if given != chunks:
        return (
            f"{given} numbers for {pipeline_parallel} stages × {virtual_pipeline_stages} chunks: give {chunks}, one "
            "per chunk, in the order of a token"
        )
    if total == num_layers:
        return None
    difference = f"add {num_layers - total}" if total < num_layers else f"remove {total - num_layers}"
    return f"{' + '.join(map(str, layers_per_chunk))} = {total} layers, the model has {num_layers}: {difference}"
