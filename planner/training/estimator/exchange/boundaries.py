"""What the stages of a pipeline send each other, in bytes of one device.

    forward    T·h/t elements of activations, and with ``sends_attention_mask`` s² elements more
    backward   T·h/t elements of gradients; T·h from every tensor-parallel rank with ``sends_whole_gradients``
    once a step, where the LM head is the embedding's matrix (V·h/t elements): first and last stage each hold a copy,
               and reduce its gradient over both

T tokens of a micro-batch, s tokens of a sequence, h hidden size, V vocabulary, t tensor-parallel ranks. Prices ask for
the mean of both ways, because a round trip over a boundary is one of each.

Sources: Narayanan et al. 2021, arXiv:2104.04473, section 4.1 (activations scattered over tensor-parallel ranks);
Megatron-LM, finalize_model_grads.py (_allreduce_word_embedding_grads); DeepSpeed 0.3.13, runtime/pipe/engine.py
(_exec_send_activations, _exec_send_grads with is_grad_partitioned false, _exec_reduce_tied_grads).

Assumes: a mask without a batch dimension, as Megatron-LM makes it unless documents are kept apart.
"""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.constants.training import FrameworkRecipe
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.problem.problem import TrainingWorkload


def message_bytes(
    split_bytes: FloatArray | float,
    tensor_parallel: IntArray | int,
    recipe: FrameworkRecipe,
    workload: TrainingWorkload,
) -> FloatArray:
    """Mean of what a device sends forward and backward over a boundary for a micro-batch.

    Args:
        split_bytes: its part of the activations, split over the tensor-parallel ranks.
        tensor_parallel: t.
        recipe: what the framework sends.
        workload: length of a sequence.
    """
    if not (recipe.sends_attention_mask or recipe.sends_whole_gradients):
        return np.asarray(split_bytes)
    mask = BYTES_16_BIT * workload.sequence_length**2 if recipe.sends_attention_mask else 0.0
    copies = tensor_parallel if recipe.sends_whole_gradients else 1
    return np.asarray((split_bytes * (1 + copies) + mask) / 2.0)


def waits_of_a_round(recipe: FrameworkRecipe) -> float:
    """Waits of a stage for its exchanges with each micro-batch: one where both ways pass at once, else two."""
    return 2.0 if recipe.sends_in_turn else 1.0


def tied_gradient_bytes(shape: ModelShape, workload: TrainingWorkload, recipe: FrameworkRecipe) -> float:
    """Gradient of a tied embedding before tensor parallelism splits it; 0 where none is trained or tied."""
    if not shape.tie_word_embeddings or workload.phase.has_adapters:
        return 0.0
    return shape.vocab_size * shape.hidden_size * (workload.gradient_bytes or recipe.gradient_bytes)
