"""What a training framework's own rules allow, beyond what the mathematics of parallelism asks.

Each rule is a named predicate over a model and the columns of a training configuration (the fields of
:class:`~meshplan.planner.training.problem.problem.TrainingConfig`). The predicates use only ``% == <= & |``, so
``config`` may be one configuration or a struct of NumPy arrays with the same field names: the enumeration filters whole
batches with the very rules that the emitters check one plan against.
A rule is listed only where the framework was seen to refuse, or where its source raises at run time although its
parser accepts (``stage``). tests/conformance/megatron holds them against the framework itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.choice import Choice
from meshplan.planner.training.problem.layers import split_layers_evenly

ONE_BY_ONE = (
    "The estimate has PyTorch's operators run one by one, as this target's files run them; with torch.compile a step "
    "takes less time and memory than predicted."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRules:
    """A training framework as the planner sees it.

    Args:
        name: as in ``constraints.target`` of a spec.
        version: the release that the rules were checked against.
        rules: every rule that can refuse a configuration.
        rank_orders: parallel dimensions from the fastest-varying to the slowest, the default first.
        layer_splits: (layers, chunks) → how they may be split, the usual way first; None: in every way.
        pipeline_schedules: what it can run, as named in
            :data:`meshplan.planner.training.problem.schedules.SCHEDULES`.
        shards_over_context_parallel: sharded states are split over data × context parallel devices, not data alone.
        vocab_multiple_per_tensor_parallel: the vocabulary is padded to this multiple × tensor_parallel.
        notes: pitfalls that no rule expresses.
        recompute_modes: what ``activation_recompute`` may be.
        precisions: number formats of matrix products.
        scales_rows: its fp8 tensors have one scale for each row or column, not one for the tensor.
        sequence_parallel: norms may be split over the tensor-parallel devices; off where there is no flag for it.
        quantised_weights: frozen weights may be kept in four bits.
        document_rules: rules that come in addition where attention keeps to documents of a sequence.
        full_rules: rules that come in addition where every weight is trained, not adapters.
        context_parallel_style: how it exchanges within a context-parallel group where nobody says otherwise.
        one_queue_architectures: of devices on which tensor and context parallelism want one hardware queue, and its
            sharded gradients and parameters several: together they lose overlap that the estimate counts.
        is_eager: what is written for it runs PyTorch's operators one by one; otherwise they are compiled or fused.
    """

    name: str
    version: str
    rules: tuple[LegalityRule, ...]
    rank_orders: tuple[tuple[str, ...], ...]
    layer_splits: Callable[[int, int], tuple[tuple[int, ...], ...]] | None
    pipeline_schedules: tuple[str, ...]
    shards_over_context_parallel: bool
    vocab_multiple_per_tensor_parallel: int
    notes: tuple[str, ...] = ()
    recompute_modes: tuple[str, ...] = ("none", "selective", "full")
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp8")
    scales_rows: bool = False
    sequence_parallel: bool = True
    quantised_weights: bool = False
    document_rules: tuple[LegalityRule, ...] = ()
    full_rules: tuple[LegalityRule, ...] = ()
    context_parallel_style: str = "ring"
    one_queue_architectures: frozenset[str] = frozenset()
    is_eager: bool = False

    @property
    def kernel_notes(self) -> tuple[str, ...]:
        """What a plan's reader should know of its kernels; empty where they are compiled or fused."""
        return (ONE_BY_ONE,) if self.is_eager else ()

    def broken(self, shape: ModelShape, config: Any) -> tuple[LegalityRule, ...]:
        """The rules that ONE configuration breaks; empty when the framework takes it."""
        return tuple(rule for rule in self.rules if not rule.holds(shape, config))

    def refusing(self, choices: Mapping[str, Any], shape: ModelShape | None = None) -> tuple[LegalityRule, ...]:
        """The rules that some choices break whatever the others are; a rule that looks at another one is left out.

        Args:
            choices: name of the configuration's field → value.
            shape: the model; None: whatever the model is.
        """
        return tuple(self._refusing(choices, shape))

    def refuses(self, choices: Mapping[str, Any], shape: ModelShape | None = None) -> bool:
        """Whether there is such a rule."""
        return any(True for _ in self._refusing(choices, shape))

    def takes_other(self, choice: Choice, than: Any) -> bool:
        """Whether some value of ``choice`` other than ``than`` is not refused whatever else is chosen."""
        others = (value for value in choice.tried if value != than)
        return any(not self.refuses({**choice.probe_with, choice.name: value}) for value in others)

    def _refusing(self, choices: Mapping[str, Any], shape: ModelShape | None) -> Iterator[LegalityRule]:
        alone = SimpleNamespace(**choices)
        return (rule for rule in self.rules if _breaks(rule, shape, alone))

    def usual_layers(self, num_layers: int, num_chunks: int) -> tuple[int, ...] | None:
        """Layers of each chunk where nobody says otherwise; None where the framework has no split into so many."""
        if self.layer_splits is None:
            return split_layers_evenly(num_layers, num_chunks)
        return next(iter(self.layer_splits(num_layers, num_chunks)), None)

    def splits_as(self, layers_per_chunk: Sequence[int]) -> bool:
        """Whether the framework can split a model into chunks of these lengths."""
        if self.layer_splits is None:
            return True
        return tuple(layers_per_chunk) in self.layer_splits(sum(layers_per_chunk), len(layers_per_chunk))

    def padded_vocab_size(self, vocab_size: int, tensor_parallel: int) -> int:
        """Rows of the embedding and of the LM head as the framework allocates them."""
        multiple = self.vocab_multiple_per_tensor_parallel * tensor_parallel
        return -(-vocab_size // multiple) * multiple


def _breaks(rule: LegalityRule, shape: ModelShape | None, alone: SimpleNamespace) -> bool:
    try:
        return not np.all(rule.holds(cast("ModelShape", shape), alone))
    except AttributeError:  # it looks at what is not said: at another choice, or at the model
        return False


def without_layer_recompute(rules: FrameworkRules) -> FrameworkRules:
    """The framework with expert_parallel_overlap, which excludes recompute of whole layers.

    Source: megatron-core 0.19.2, core/transformer/transformer_config.py.
    """
    left = tuple(mode for mode in rules.recompute_modes if mode in ("none", "selective"))
    return replace(rules, recompute_modes=left)


def keeping_to_documents(rules: FrameworkRules) -> FrameworkRules:
    """The framework where several documents share a sequence and attention keeps to each."""
    return replace(rules, rules=(*rules.rules, *rules.document_rules), document_rules=())


def training_every_weight(rules: FrameworkRules) -> FrameworkRules:
    """The framework where no adapters are trained in place of the weights."""
    return replace(rules, rules=(*rules.rules, *rules.full_rules), full_rules=())
