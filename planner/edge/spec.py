"""What may be asked of machines at home; keys: planner/SPEC.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from meshplan.planner.core.reading.spec_fields import Bytes, BytesPerS, Latency, Seconds, SpecModel, Whole
from meshplan.planner.core.reading.spec_reader import read_spec
from meshplan.planner.core.reading.words import Patterned

MAX_MACHINES = 32
MAX_TOKENS = 1_000_000
Format = Literal["q4_0", "q8_0", "f16", "f32"]
EngineName = Literal["llama.cpp", "llama.cpp-rpc", "distributed-llama", "tpi-llm"]
Host = Annotated[
    str,
    Patterned(
        r"^[A-Za-z0-9][A-Za-z0-9.:-]{0,252}$",
        "a host's name or address, such as 192.168.1.20 or pi-3.local: letters, digits, dots, hyphens and colons",
    ),
]
Tokens = Annotated[int, Whole(most=MAX_TOKENS, tokens=True)]


class EdgeDeviceSpec(SpecModel):
    """Machines of one kind: a type of the catalog, or described."""

    type: str | None = Field(
        default=None, description="small machine or device of the catalog, such as raspberry-pi-5 or rtx-4090"
    )
    count: Annotated[int, Whole(most=MAX_MACHINES)] = 1
    memory: Bytes | None = Field(default=None, description="of one machine; the catalog's where left out")
    memory_bandwidth: BytesPerS | None = Field(default=None, description="of one machine, peak, where it has no type")
    attained_bandwidth: BytesPerS | None = Field(
        default=None, description="measured: size of a 4-bit model times tokens/s that the machine alone generates"
    )
    drive: str | None = Field(default=None, description="drive of the catalog; weights beyond memory are read from it")
    drive_bandwidth: BytesPerS | None = Field(default=None, description="measured, in place of drive")
    addresses: list[Host] = Field(
        default_factory=list, description="host names or IP addresses, for the launcher files"
    )

    @model_validator(mode="after")
    def _described(self) -> EdgeDeviceSpec:
        if self.type is None and (self.memory is None or self.memory_bandwidth is None):
            raise ValueError("needs a type of the catalog, or memory and memory_bandwidth")
        if self.type is not None and self.memory_bandwidth is not None:
            raise ValueError("memory_bandwidth is the type's: leave it out, or leave the type out")
        if self.drive is not None and self.drive_bandwidth is not None:
            raise ValueError("give drive or drive_bandwidth, not both")
        if self.addresses and len(self.addresses) != self.count:
            raise ValueError(f"addresses has {len(self.addresses)} entries for {self.count} machines")
        return self


class EdgeLinksSpec(SpecModel):
    """The network that joins the machines: each hangs on it by a link of its own."""

    bandwidth: BytesPerS = Field(description="of one machine's link, per direction, such as '1 Gb/s'")
    latency: Latency = Field(description="one way, half of what ping prints, such as '0.1 ms'")
    shared_air: bool = Field(
        default=False, description="Wi-Fi: all machines share the bandwidth, and what one sends passes the air twice"
    )


class EdgeWorkloadSpec(SpecModel):
    """One request at a time."""

    prompt_tokens: Tokens = 128
    generated_tokens: Tokens = 128


class EdgeConstraintsSpec(SpecModel):
    """Limits of the answer."""

    engines: list[EngineName] = Field(default_factory=list, description="only these; all where left out")
    time_per_token: Seconds | None = Field(default=None, description="at most so long for each generated token")


class EdgeSpec(SpecModel):
    """Text generation on machines at home."""

    kind: Literal["edge"]
    model: str = Field(min_length=1, description="model of the catalog, such as llama-3.1-8b")
    devices: list[EdgeDeviceSpec] = Field(min_length=1, max_length=8)
    links: EdgeLinksSpec | None = Field(default=None, description="may be left out of a single machine")
    workload: EdgeWorkloadSpec = EdgeWorkloadSpec()
    quantization: list[Format] = Field(
        default=["q4_0"], min_length=1, description="formats of weights that are good enough; the fastest is chosen"
    )
    constraints: EdgeConstraintsSpec = EdgeConstraintsSpec()

    @model_validator(mode="after")
    def _joined(self) -> EdgeSpec:
        number = sum(device.count for device in self.devices)
        if number > MAX_MACHINES:
            raise ValueError(f"devices has {number} machines; at most {MAX_MACHINES}")
        if number > 1 and self.links is None:
            raise ValueError(f"{number} machines need links: their bandwidth and latency")
        return self


def read_edge_spec(document: Mapping[str, object]) -> EdgeSpec:
    """Validate a document; every problem at once.

    Raises:
        SpecError: with the path and the fix of each problem.
    """
    return read_spec(EdgeSpec, document)
