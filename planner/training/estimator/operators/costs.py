"""What one operator of a layer takes on a device: a product with a weight matrix, or bytes through memory.

Notation: T tokens of one micro-batch on one device (micro_batch_size·sequence/context_parallel). Products:
:mod:`.products`; backward = input gradient (m, k, n) + weight gradient (n, k, m). Memory-bound operators: bytes moved
over the calibrated share of the memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from meshplan.catalogs.constants.training import Calibration, Constant
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.operators.memory_bound import ROW_SCALING_EXTRA_BYTES
from meshplan.planner.training.estimator.operators.products import (
    ELEMENT_BYTES,
    LOW_PRECISION,
    Cost,
    activation_bytes,
    gemm_curve,
    gemm_s,
)
from meshplan.planner.training.estimator.states import DEQUANTISE_BYTES, GPTQ_UNPACK_BYTES, is_quantised
from meshplan.planner.training.problem.problem import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class OperatorCosts:
    """Operators of a batch of candidates.

    Args:
        shape: the model.
        device: the accelerator.
        workload: sequence length, precision, phase.
        candidates: the batch.
        calibration: the constants.
    """

    shape: ModelShape
    device: Device
    workload: TrainingWorkload
    candidates: Candidates
    calibration: Calibration

    @property
    def activation_bytes(self) -> float:
        """Bytes of one element of the activations."""
        return activation_bytes(self.workload)

    @cached_property
    def tokens(self) -> FloatArray:
        """T, tokens of a micro-batch on one device, [n]."""
        batch = self.candidates
        return batch.micro_batch_size * self.workload.decoder_length / batch.context_parallel

    @cached_property
    def of_encoder(self) -> Self:
        """The same of the layers of the encoder in front."""
        if self.shape.encoder is None:
            raise AssertionError(f"{self.shape.name} has no encoder")
        return replace(self, shape=self.shape.encoder, workload=self.workload.of_encoder)

    @cached_property
    def sharded_tokens(self) -> FloatArray:
        """Tokens that one device normalises: T/t with sequence parallelism, else T, [n]."""
        batch = self.candidates
        return self.tokens / np.where(batch.sequence_parallel, batch.tensor_parallel, 1)

    def gemm(
        self,
        m: FloatArray,
        n: FloatArray,
        k: FloatArray,
        *,
        precision: str | None = None,
        factor: Constant = 1.0,
        whole: bool = False,
        is_trained: bool = False,
    ) -> Cost:
        """Forward and backward of one weight matrix; weights frozen beside adapters have no weight gradient.

        4-bit weights are dequantised first (:mod:`.states`), unless the matrix is a ``whole`` 16-bit one. One that
        ``is_trained`` has a weight gradient even so.
        """
        name = precision or self.workload.precision
        constants = self.calibration.time
        efficiency = constants.gemm_efficiency * factor
        if name in LOW_PRECISION:
            efficiency = efficiency * constants.low_precision_efficiency
        curve, width = gemm_curve(self.device, name), ELEMENT_BYTES[name]
        forward = gemm_s(curve, m, n, k, efficiency=efficiency, element_bytes=width)
        backward = gemm_s(curve, m, k, n, efficiency=efficiency, element_bytes=width)
        if is_trained or not self.workload.phase.has_adapters:
            backward = backward + gemm_s(curve, n, k, m, efficiency=efficiency, element_bytes=width)
        cost = Cost(forward_s=forward, backward_s=backward)
        if is_quantised(self.workload) and not whole:
            cost = cost + self._dequantisation(n * k)
        if name in LOW_PRECISION and self.workload.scales_rows:
            cost = cost + self._row_scaling(m, n, k)
        return cost

    def _dequantisation(self, parameters: FloatArray) -> Cost:
        """Cost of bringing a matrix of frozen 4-bit weights to 16 bits (:mod:`.states`)."""
        if self.workload.frozen_weights == "gptq":
            return self.memory_op(GPTQ_UNPACK_BYTES * parameters, backward_ratio=0.0)
        return self.memory_op(DEQUANTISE_BYTES * parameters, backward_ratio=1.0)

    def _row_scaling(self, m: FloatArray, n: FloatArray, k: FloatArray) -> Cost:
        """Cost of per-row scales for one weight matrix: inputs and weights forward, output gradients backward."""
        forward = self.memory_op(ROW_SCALING_EXTRA_BYTES * (m * k + n * k), backward_ratio=0.0)
        gradients = self.memory_op(ROW_SCALING_EXTRA_BYTES * m * n, backward_ratio=1.0)
        return Cost(forward_s=forward.forward_s, backward_s=gradients.backward_s)

    def memory_op(self, forward_bytes: FloatArray, *, backward_ratio: float = 2.0) -> Cost:
        """A memory-bound operator that moves ``forward_bytes`` in its forward."""
        rate = self.device.memory_bandwidth_bytes_per_s * self.calibration.time.memory_op_efficiency
        return Cost(forward_s=forward_bytes / rate, backward_s=backward_ratio * forward_bytes / rate)

    @property
    def no_work(self) -> Cost:
        """Nothing, [n]."""
        return Cost(forward_s=np.zeros_like(self.tokens), backward_s=np.zeros_like(self.tokens))
