"""Vision encoder in front of the language model: time of a prompt's images, and its weights on a device.

With N images of P patches each, an encoder of L layers of width h and MLP width f on t tensor-parallel devices takes::

    L·(qkv[N·P] + out[N·P] + mlp[N·P]) + attention + merger + 2·L·all_reduce[N·P·h]

Products come from the device's surfaces, as those of the language model; attention does its 4·h FLOPs a (query, key)
pair at the rate that the layers' products attain (assumption: no kernel of an encoder was timed); the first product
and norms are left out. Engines run the encoder on the first stage, before the prompt is prefilled, its matrices split
over the tensor-parallel devices (vLLM: ``--mm-encoder-tp-mode weights``, the default), in 16 bits whatever the model's
format. No run with images was compared.
"""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.models.vision import VisionTower
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.exchange.collectives import Exchange
from meshplan.planner.serving.estimator.operators import Operators
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.requests import Images

_FORMAT = "bf16"


def encoder_bytes(shape: ModelShape, images: Images | None, layout: Layout) -> float:
    """Weights of the encoder on one device of the first stage; 0 where no request has images."""
    if images is None or shape.vision is None:
        return 0.0
    return BYTES_16_BIT * shape.vision.parameters / layout.tensor_parallel


def encode_s(
    tower: VisionTower, images: Images, *, operators: Operators, exchange: Exchange, tensor_parallel: int
) -> float:
    """Seconds that the first stage of a worker spends on the images of one prompt."""
    t = tensor_parallel
    h, layers = tower.hidden_size, tower.num_layers
    rows = np.array([float(images.per_request * images.patches)])
    entering = (2.0 if tower.gated_mlp else 1.0) * tower.intermediate_size / t
    sizes = ((3.0 * h / t, h), (h, h / t), (entering, h), (h, tower.intermediate_size / t))
    products = layers * float(sum(operators.gemm_s(_FORMAT, rows, n, k)[0] for n, k in sizes))
    flops = layers * 2.0 * float(rows[0]) * sum(n * k for n, k in sizes)
    seconds_per_flop = products / flops
    pairs = images.per_request * tower.attended_pairs(images.patches)
    attention = 4.0 * pairs * h / t * seconds_per_flop
    merger = 2.0 * images.per_request * images.tokens * tower.merger_parameters / t * seconds_per_flop
    reduced = 2.0 * layers * float(exchange.all_reduce_s(rows * h * BYTES_16_BIT, t)[0]) if t > 1 else 0.0
    return products + attention + merger + reduced
