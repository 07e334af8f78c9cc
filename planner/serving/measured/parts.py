"""What the constants of an engine on a hardware generation are a sum of, and how large each part is expected to be.

The logarithms θ of the constants of release r of engine e on generation a are

    θ_ra = μ + φ_e + α_r + β_a + γ_ra

μ is shared by all; φ is what an engine does in all of its releases, α what one of them (or of those that behave alike,
an entry of ``engines.yaml``) does everywhere, β what a generation does under every engine, γ the rest. Every part is
normal about 0, μ about the literature. So a release that nobody measured is expected to be like its engine's others, an
engine that nobody measured like all, and few runs move only what they depend on.

φ was chosen inside the folds (2026-11-26): with any one source left out, seven of eight sets of the others predict each
other better with it than without, and the eighth with half of its spread. A trend of host times with the day of the
release, which was tried beside it, would have lowered the error of the largest source (time per token 9.6 / 13.9 to
8.7 / 13.2 %), but the other sources never chose it: it is not in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshplan.catalogs.constants.engine_recipes import engine_of_constants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.validation.held_out import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Prior standard deviations of a constant's logarithm, by part of the model.

    Args:
        prior: the shared part μ, about the literature.
        engine: the parts of an engine φ and of a release α, in units of :data:`ENGINE_SHARE` × ``prior``.
        generation: the hardware generation's part β, in units of :data:`GENERATION_SHARE` × ``prior``.
        own: a single server, about the set of its engine and generation.
    """

    prior: float
    engine: float = 1.0
    generation: float = 1.0
    own: float


# The time before an engine starts on a request depends mostly on flags and front ends, so its prior is wide; an engine
# prepares one or two iterations ahead. Engines differ in host time far more than in kernel time: where kernel times
# seem to differ, the models do, which does not carry over to other models. The hardware generation matters little for
# host time and not at all for the front end. One measured point of a server cannot separate steps and offset before the
# first token, so both stay near the catalog's. Spreads, shares and the loss were chosen among some dozens by the
# held-out error.
FITTED: Mapping[str, Spread] = {
    "decode_factor": Spread(prior=0.07, engine=0.5, own=0.15),
    "prefill_factor": Spread(prior=0.2, engine=0.3, generation=0.5, own=0.3),
    "host_step_s": Spread(prior=0.5, engine=3.0, generation=0.5, own=0.8),
    "host_s_per_seq": Spread(prior=0.5, engine=3.0, generation=0.5, own=0.8),
    "launch_s_per_layer": Spread(prior=0.5, generation=0.5, own=0.8),
    "first_token_steps": Spread(prior=0.5, generation=0.2, own=0.3),
    "first_token_offset_s": Spread(prior=2.0, generation=0.2, own=0.3),
}
# Spread of each part of the model over that of μ.
ENGINE_SHARE, GENERATION_SHARE, REST_SHARE = 0.5, 0.2, 0.3
SPREAD = np.array([spread.prior for spread in FITTED.values()])
OF_ENGINE = np.array([spread.engine for spread in FITTED.values()])
OF_GENERATION = np.array([spread.generation for spread in FITTED.values()])
OWN_SPREAD = np.array([spread.own for spread in FITTED.values()])


class Kind(StrEnum):
    """Which of the parts."""

    SHARED = "μ"
    ENGINE = "φ"
    RELEASE = "α"
    GENERATION = "β"
    REST = "γ"


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One term of the sum.

    Args:
        kind: which one.
        name: whose; empty where it is everybody's.
    """

    kind: Kind
    name: str = ""


SHARED = Part(Kind.SHARED)


def parts_of(key: Key) -> tuple[Part, ...]:
    """The parts whose sum is the constants of a key; an engine or generation without a name has none of its own.

    >>> [f"{part.kind} {part.name}".strip() for part in parts_of(("vllm-v0", "hopper"))]
    ['μ', 'φ vllm', 'α vllm-v0', 'β hopper', 'γ vllm-v0 on hopper']
    """
    name, generation = key
    found = [SHARED]
    if name:
        found += [Part(Kind.ENGINE, engine_of_constants(name)), Part(Kind.RELEASE, name)]
    if generation:
        found.append(Part(Kind.GENERATION, generation))
    if name and generation:
        found.append(Part(Kind.REST, f"{name} on {generation}"))
    return tuple(found)


def spread_of(part: Part) -> FloatArray:
    """Prior standard deviation of a part, by constant."""
    return {
        Kind.SHARED: SPREAD,
        Kind.ENGINE: ENGINE_SHARE * OF_ENGINE * SPREAD,
        Kind.RELEASE: ENGINE_SHARE * OF_ENGINE * SPREAD,
        Kind.GENERATION: GENERATION_SHARE * OF_GENERATION * SPREAD,
        Kind.REST: REST_SHARE * SPREAD,
    }[part.kind]
