"""What the stages of a pipeline send each other, in bytes of one device, and what of that is exposed.

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
from meshplan.planner.training.estimator.candidates import PipelineSplit
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE, CommunicationModel
from meshplan.planner.training.pipeline.orders import stage_of_chunk
from meshplan.planner.training.problem.problem import TrainingWorkload
from meshplan.planner.training.problem.schedules import SCHEDULES


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


def ends_meet(split: PipelineSplit) -> bool:
    """Whether the last chunk is on the stage of the first."""
    return stage_of_chunk(split.schedule, split.pipeline_parallel, split.virtual_pipeline_stages)[-1] == 0


def messages_s(
    links: CommunicationModel,
    split: PipelineSplit,
    payload_bytes: FloatArray,
    stage_devices: IntArray,
    num_microbatches: IntArray,
    *,
    busy_s: FloatArray | None = None,
) -> FloatArray:
    """Exposed messages between the stages of a pipeline, [n], without a tied embedding's gradient.

    The pipeline fills over every boundary once; then each further micro-batch waits for the stage with the slowest
    boundaries. A schedule that hides messages leaves :data:`~.collectives.UNHIDDEN_SHARE` of them exposed, and what
    takes longer than all the work that it could run behind.

    Args:
        links: prices messages.
        split: the pipeline, of two stages or more.
        payload_bytes: what one device sends over a boundary for a micro-batch, one way [n].
        stage_devices: devices of one stage [n].
        num_microbatches: m [n].
        busy_s: work of the slowest stage in a step, [n]; None: as much as there are messages.
    """
    hides = SCHEDULES[split.schedule].hides_neighbour_messages and links.calibration.recipe.overlaps_pipeline
    all_waits = waits_of_a_round(links.calibration.recipe) * (num_microbatches * split.virtual_pipeline_stages - 1)
    waits = UNHIDDEN_SHARE * all_waits if hides else all_waits
    stages = split.pipeline_parallel
    places = stage_of_chunk(split.schedule, stages, split.virtual_pipeline_stages)
    wraps = split.virtual_pipeline_stages > 1 and places[stages] == 0
    exposed = links.pipeline_s(payload_bytes, stages, stage_devices, waits, wraps=wraps)
    if busy_s is None or not hides:
        return exposed
    whole = links.pipeline_s(payload_bytes, stages, stage_devices, all_waits, wraps=wraps)
    return np.maximum(exposed, whole - busy_s)
