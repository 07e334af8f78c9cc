"""Softmax attention of some of a model's layers, where not all layers have the same.

A form is described by what estimators need: its weight matrices and how tensor parallelism divides each, the widths of
a query, a key and a value, how many entries a sequence caches, and which of them a token attends to. One file of this
folder reads each form; estimators read these numbers and know no family.

Entries: without compression one a token. With compression r, one for each r tokens, of which a token sees all or the
``top_k`` that an indexer selects, beside the last ``window`` tokens, which are cached one by one as well.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One weight matrix that is applied to every token, or ``count`` alike ones side by side.

    Args:
        inputs: rows.
        outputs: columns.
        count: matrices.
        divides: what tensor parallelism divides: ``inputs``, ``outputs``, ``count``; empty: each device has all.
        at_most: devices that divide it; more hold copies (key/value heads); 0: no limit.
    """

    inputs: int
    outputs: int
    count: int = 1
    divides: str = ""
    at_most: int = 0

    @property
    def parameters(self) -> int:
        """Elements of all ``count`` matrices."""
        return self.inputs * self.outputs * self.count

    def on_device(self, tensor_parallel: float) -> tuple[float, float, float]:
        """(inputs, outputs, count) on one of ``tensor_parallel`` devices.

        >>> Matrix(inputs=8, outputs=4, divides="outputs", at_most=2).on_device(4)
        (8.0, 2.0, 1.0)
        """
        parts = min(tensor_parallel, self.at_most) if self.at_most else tensor_parallel
        return (
            self.inputs / (parts if self.divides == "inputs" else 1.0),
            self.outputs / (parts if self.divides == "outputs" else 1.0),
            self.count / (parts if self.divides == "count" else 1.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Softmax attention of one layer.

    Args:
        name: as reports call it.
        matrices: its weights.
        vector_parameters: norms, sinks, position biases.
        num_heads: query heads.
        num_key_value_heads: heads of the cache.
        key_dim: elements of a query and of a key.
        value_dim: elements of a value.
        shares_cache: one cached entry is both key and value.
        compression: tokens for which one entry is cached.
        window: last tokens that are cached one by one beside compressed entries, 0 without.
        top_k: compressed entries that a token sees; 0: all.
        index_heads: heads of the indexer that selects them, 0 without.
        index_dim: elements of its heads and of the key that it caches for each entry.
        streamed_elements: activations that it reads and writes per token beside those of a plain layer.
    """

    name: str
    matrices: tuple[Matrix, ...]
    vector_parameters: int
    num_heads: int
    num_key_value_heads: int
    key_dim: int
    value_dim: int
    shares_cache: bool = False
    compression: int = 1
    window: int = 0
    top_k: int = 0
    index_heads: int = 0
    index_dim: int = 0
    streamed_elements: int = 0

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(matrix.parameters for matrix in self.matrices) + self.vector_parameters

    def parameters_on_device(self, tensor_parallel: int) -> float:
        """Matrix elements on one tensor-parallel device."""
        parts = [matrix.on_device(tensor_parallel) for matrix in self.matrices]
        return sum(inputs * outputs * count for inputs, outputs, count in parts)

    @property
    def attention_width(self) -> int:
        """Multiply-adds per (query, entry) pair over all heads: scores and weighted values."""
        return self.num_heads * (self.key_dim + self.value_dim)

    @property
    def entry_elements(self) -> int:
        """Elements of one cached entry, over all heads."""
        return self.num_key_value_heads * (self.key_dim if self.shares_cache else self.key_dim + self.value_dim)

    def cached_elements_per_token(self, tensor_parallel: int = 1) -> float:
        """Elements that one token adds to the cache of one tensor-parallel device: its entry's, and the indexer's key.

        An attention window of the layer is not counted here, nor is :attr:`kept_elements`.
        """
        heads = -(-self.num_key_value_heads // tensor_parallel)
        entry = self.entry_elements / self.num_key_value_heads * heads
        return (entry + self.index_dim) / self.compression

    @property
    def kept_elements(self) -> int:
        """Elements that a sequence holds whatever its length: the window of a compressed layer."""
        return self.window * self.entry_elements if self.compression > 1 else 0
