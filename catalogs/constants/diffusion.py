"""Constants of diffusion pipelines: what their kernels, exchanges and hosts reach, by hardware generation.

Fitted to measured runs by :mod:`meshplan.planner.diffusion.measured.fit` and shipped as
``seed/diffusion_calibrations.yaml``. Where they enter is written in :mod:`meshplan.planner.diffusion.estimator.latency`
and :mod:`meshplan.planner.diffusion.estimator.power`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from meshplan.catalogs.constants.entries import seed_content

CALIBRATION_FILE = "diffusion_calibrations.yaml"
# The set for generations that nothing was measured on.
ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConstants:
    """One generation's constants; the defaults are where a fit starts.

    Args:
        gemm_efficiency: time of matrix products by the shipped surfaces over their time inside a long run.
        attention_efficiency: share of the bf16 peak that attention reaches, softmax left out.
        exponentials_per_flop: softmax exponentials a second over the bf16 peak, FLOP/s.
        elementwise_efficiency: share of the memory bandwidth that norms, rotations and other small kernels reach.
        link_efficiency: share of the links' bandwidth that all-to-alls and ring hops reach.
        ulysses_passes: reads and writes of a rank's attention tensor that an all-to-all's packing takes.
        ring_passes: the same of a ring, once.
        merge_passes: the same of each further hop of a ring: partial outputs are rescaled and added in fp32.
        launch_s: host time of one kernel.
        exchange_host_s: host time that a split attention adds, whatever the split.
        ulysses_host_s: host time of the all-to-alls of one attention, for each peer.
        hop_host_s: host time of one hop of a ring.
        ulysses_exposed_s: time of one attention's all-to-alls that no kernel hides, whatever their size.
        ring_exposed_s: the same of a ring.
        vae_efficiency: share of the bf16 peak that the decoder's convolutions reach.
        image_host_s: host time of one image after decoding, for each rank that shares the host.
        fixed_s: of a batch, whatever it is.
        waiting_share: power of a device that waits, over the board's limit.
        gemm_share: added while matrix products run.
        attention_share: added while attention runs.
        elementwise_share: added while small kernels run.
        exchange_share: added while tensors are exchanged.
        vae_share: added while the decoder runs.
    """

    gemm_efficiency: float = 0.85
    attention_efficiency: float = 0.4
    exponentials_per_flop: float = 0.006
    elementwise_efficiency: float = 0.5
    link_efficiency: float = 0.5
    ulysses_passes: float = 16.0
    ring_passes: float = 8.0
    merge_passes: float = 8.0
    launch_s: float = 15e-6
    exchange_host_s: float = 5e-4
    ulysses_host_s: float = 3e-5
    hop_host_s: float = 2e-4
    ulysses_exposed_s: float = 4e-4
    ring_exposed_s: float = 2e-4
    vae_efficiency: float = 0.06
    image_host_s: float = 2.5e-3
    fixed_s: float = 0.05
    waiting_share: float = 0.28
    gemm_share: float = 0.6
    attention_share: float = 0.6
    elementwise_share: float = 0.6
    exchange_share: float = 0.6
    vae_share: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionCalibration:
    """A set of constants with what is known of its error.

    Args:
        architecture: hardware generation, such as ``hopper``.
        constants: see :class:`DiffusionConstants`.
        error_p90: metric (``latency power energy``) → 90th percentile of |log(predicted/measured)| with the model
            held out.
        tie: relative difference of two predictions below which the simpler configuration is taken.
        order_error: median error of how two configurations of a held-out model compare, |log|.
        num_runs: runs behind the set; 0 where nothing of the generation was measured.
        devices: catalog devices of these runs.
        source: which observations.
        date: day of the fit, ISO 8601.
    """

    architecture: str
    constants: DiffusionConstants = field(default_factory=DiffusionConstants)
    error_p90: Mapping[str, float] = field(default_factory=dict)
    tie: float = 0.0
    order_error: float = 0.0
    num_runs: int = 0
    devices: tuple[str, ...] = ()
    source: str = ""
    date: str = ""

    def to_document(self) -> dict[str, Any]:
        """Plain JSON, all constants by name."""
        return asdict(self)


@cache
def diffusion_calibrations() -> Mapping[str, DiffusionCalibration]:
    """Generation → its set."""
    content = seed_content(CALIBRATION_FILE)
    shared = {"source": content["source"], "date": str(content["date"])}
    made = [
        DiffusionCalibration(
            **{
                **entry,
                **shared,
                "constants": DiffusionConstants(**entry["constants"]),
                "devices": tuple(entry["devices"]),
            }
        )
        for entry in content["calibrations"]
    ]
    return {one.architecture: one for one in made}


def diffusion_calibration(architecture: str, device: str) -> DiffusionCalibration:
    """The set of a generation; that of :data:`ANY` where none was measured.

    On a device without a run, constants are those of its generation and errors those of :data:`ANY`: how far runs of a
    device are off that the constants have not seen.

    Args:
        architecture: hardware generation.
        device: catalog device.
    """
    known = diffusion_calibrations()
    found = known.get(architecture, known[ANY])
    return found if device in found.devices else replace(found, error_p90=known[ANY].error_p90)
