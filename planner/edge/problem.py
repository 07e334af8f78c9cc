"""A question with every name looked up: kinds of machines, their network, the model, how long texts are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.catalogs.models.shapes import ModelShape

# Bytes of a stored weight: blocks of 32 values with a 16-bit scale (ggml-common.h; Q40 and Q80 of distributed-llama are
# alike).
WEIGHT_BYTES: Mapping[str, float] = {"q4_0": 18.0 / 32.0, "q8_0": 34.0 / 32.0, "f16": 2.0, "f32": 4.0}
BYTES_F32 = 4.0
# Share of a machine's memory that a model may take; the rest is the system's. Assumed: no published run is tighter, and
# the six configurations for which distributed-llama's README says "Not enough RAM" exceed it.
USABLE_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKind:
    """Machines that are alike.

    Args:
        name: as tables show it.
        count: how many there are.
        usable_bytes: of one machine's memory, for weights and cache.
        bytes_per_s: at which one reads its memory.
        weights_per_s: weights of 4 bits that its processor multiplies with, each once; infinite where reading decides.
        message_s: what one message costs the machine that handles it.
        drive_bytes_per_s: at which weights beyond its memory are read; None without a drive.
        is_accelerator: a graphics card in a host, which llama.cpp alone drives here.
        is_measured: its rates are from published runs, not from a description.
        addresses: of the machines; empty where none are stated.
        source: citation.
    """

    name: str
    count: int
    usable_bytes: float
    bytes_per_s: float
    weights_per_s: float
    message_s: float
    drive_bytes_per_s: float | None
    is_accelerator: bool
    is_measured: bool
    addresses: tuple[str, ...]
    source: str

    def weight_s(self, weight_format: str) -> float:
        """Time of one weight: read, and multiplied with."""
        return max(WEIGHT_BYTES[weight_format] / self.bytes_per_s, 1.0 / self.weights_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins the machines.

    Args:
        bytes_per_s: of one machine's link, each direction.
        latency_s: of a message from one machine to another.
        shared_air: one medium for all, which every message passes twice: to the access point and from it.
    """

    bytes_per_s: float
    latency_s: float
    shared_air: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeProblem:
    """One question.

    Args:
        shape: of the model.
        kinds: of machines, at least one.
        network: None for a single machine.
        prompt_tokens: of the request.
        generated_tokens: of the answer.
        formats: of weights that may be chosen.
        engines: that may be chosen; empty for all.
        most_token_s: longest time of a token that is allowed; None for any.
    """

    shape: ModelShape
    kinds: tuple[MachineKind, ...]
    network: Network | None
    prompt_tokens: int
    generated_tokens: int
    formats: tuple[str, ...]
    engines: tuple[str, ...]
    most_token_s: float | None

    @property
    def context_tokens(self) -> int:
        """Longest context: prompt and answer."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def mean_context_tokens(self) -> float:
        """Context that a generated token reads, mean over the answer."""
        return self.prompt_tokens + self.generated_tokens / 2.0
