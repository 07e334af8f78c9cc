"""The time constants that are fitted to measured training runs, and the runs as rows of the fit.

*Notation.* Row i has the measured step y_i and the predicted step f_i(θ); θ are the constants of
:class:`~meshplan.catalogs.constants.training.TimeConstants` in the units of
:class:`~meshplan.planner.validation.fitting.Parameters`.

*Objective.* That of :mod:`meshplan.planner.validation.fitting` for ln y_i − ln f_i, with Huber's loss and
w_i = 1/√(rows of i's group), so that near-duplicates do not outvote others. The derivatives come from pricing a row
under all perturbed constants in one vectorised call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, TimeConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.problem.kernels import kind_of_kernels
from meshplan.planner.validation.fitting import Linear, Loss, Parameters, Prior, gauss_newton, most_probable
from meshplan.planner.validation.held_out import Key

# name → prior standard deviation, in log (logit for fractions) units: how far a framework may be from the literature.
FITTED: Mapping[str, float] = {
    "gemm_efficiency": 0.6,
    "low_precision_efficiency": 0.2,
    "expert_gemm_efficiency": 0.8,
    "attention_kernel_efficiency": 0.3,
    "memory_op_efficiency": 0.6,
    "scale_up_efficiency": 0.6,
    "network_efficiency": 0.6,
    "tensor_parallel_overlap": 0.8,
    "data_parallel_window": 0.8,
    "fully_sharded_overlap": 1.0,
    "expert_parallel_overlap": 1.0,
    "expert_parallel_overlap_inside": 1.0,
    "expert_product_s": 0.4,
    "host_s_per_layer": 0.7,
    "host_s_per_moe_layer": 0.7,
    "graphed_host_share": 0.8,
    "step_overhead_s": 1.0,
    "data_parallel_s_per_rank": 1.0,
}
SPREAD = np.array(list(FITTED.values()))
# The low-precision factor may exceed 1: curves of narrow formats pay for quantisation that a training step fuses away.
# So may attention: releases of a library differ, and one of them was timed.
MAY_EXCEED_ONE = ("low_precision_efficiency", "attention_kernel_efficiency")
FRACTIONS = frozenset(
    name
    for name in FITTED
    if name.endswith(("efficiency", "overlap", "inside", "window", "share")) and name not in MAY_EXCEED_ONE
)
PARAMETERS = Parameters(names=tuple(FITTED), fractions=FRACTIONS)
# How far the constants of a framework on a generation may be from the global ones, and those of one cluster from its
# framework's, relative to how far the global ones may be from the literature. With whole sources left out, shares of
# 0.1 to 0.5 predict alike (7.5 % median error when the share was chosen; later 7.0 % at 0.3 and 7.3 % at 0.5) and 2
# worse (9.1 %): what a source has of its own is not its framework's. Adapted to the other runs of their cluster, groups
# are predicted as well from such a set as from a loose one.
FRAMEWORK_SHARE, CLUSTER_SHARE = 0.3, 1.0
LOCAL_SPREAD = FRAMEWORK_SHARE * SPREAD
REFINED_SPREAD = CLUSTER_SHARE * SPREAD
NOISE = 0.05  # run-to-run and version noise of a measured step, relative (repeat_spread of the observations)
LOSS = Loss(huber=2.0)
STEP = 1e-3  # by which constants are perturbed for derivatives, in fit units
MAX_ITERATIONS = 12
CONVERGED = 0.01
MAX_MOVE = 1.0  # of a constant in one iteration, in fit units


def key_of(run: ObservedRun) -> Key:
    """The set of constants that a run belongs to."""
    return recipe_named(run.framework).calibrated_as, run.architecture


class Row:
    """One run, ready to be priced under many constants at once; those not fitted come from ``unfitted``."""

    def __init__(self, run: ObservedRun, unfitted: TimeConstants | None = None) -> None:
        self.run, self.group = run, run.group
        self.source = run.source
        self.key = key_of(run)
        self.log_measured = float(np.log(run.measured["iteration_s"]))
        self._unfitted = unfitted or TimeConstants()
        self._batch = candidates_of(run.problem, run.config)
        self._recipe = recipe_named(run.framework).recipe
        workload = run.problem.workload
        fuses_attention = workload.practice.fuses_attention(self._recipe.flash_attention)
        self.kernels = kind_of_kernels(workload.precision, fuses_attention=fuses_attention)

    def log_predicted(self, thetas: FloatArray) -> FloatArray:
        """Ln f under each row of ``thetas``, [K]."""
        constants = replace(self._unfitted, **PARAMETERS.values(thetas))
        calibration = Calibration(framework="", architecture="", time=constants, recipe=self._recipe)
        problem = self.run.problem
        estimate = estimate_training(
            problem.shape, problem.machine, problem.workload, self._batch, calibration, with_memory=False
        )
        return np.log(np.broadcast_to(estimate.step_s, (len(thetas),)))


def linearised(rows: Sequence[Row], theta: FloatArray, noise: FloatArray | None = None) -> Linear:
    """The rows priced at ``theta`` and with each constant perturbed; ``noise`` as in :func:`fit`."""
    perturbed = np.vstack([theta, theta + STEP * np.eye(len(theta))])
    logs = np.array([row.log_predicted(perturbed) for row in rows])
    return Linear(
        at=theta,
        residual=np.array([row.log_measured for row in rows]) - logs[:, 0],
        slope=(logs[:, 1:] - logs[:, :1]) / STEP,
        noise=np.full(len(rows), NOISE) if noise is None else noise,
        weight=weights_of(rows),
    )


def weights_of(rows: Sequence[Row]) -> FloatArray:
    """1/√(rows of the group), [n]."""
    counts = Counter(row.group for row in rows)
    return np.array([1.0 / np.sqrt(counts[row.group]) for row in rows])


def fit(
    rows: Sequence[Row],
    prior: Prior,
    *,
    start: FloatArray | None = None,
    iterations: int = MAX_ITERATIONS,
    noise: FloatArray | None = None,
) -> FloatArray:
    """Most probable constants in fit units.

    Args:
        rows: measured runs.
        prior: of the constants.
        start: where the iteration begins; None for the prior's mean.
        iterations: at most so many.
        noise: by how much each row may be off for what the constants are not there to explain, relative, [n]; None for
            :data:`NOISE`.
    """
    return gauss_newton(
        lambda theta: most_probable(linearised(rows, theta, noise), prior, LOSS, rounds=1, max_step=MAX_MOVE),
        prior.mean if start is None else start,
        iterations=iterations,
        converged=CONVERGED,
    )
