"""The sources of ``meshplan import``: one line each. A source has ``recognises(given)`` and ``read(given)``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from meshplan.catalogs.errors import Problem, SpecError, closest_names, did_you_mean
from meshplan.planner.imports.reading import Given, Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Something that people run today.

    Args:
        name: as in ``import --from``.
        module: with ``recognises(given) -> bool`` and ``read(given) -> Reading``.
        summary: what is read.
    """

    name: str
    module: str
    summary: str

    def recognises(self, given: Given) -> bool:
        """Whether the input is this source's."""
        asked: Callable[[Given], bool] = importlib.import_module(self.module).recognises
        return asked(given)

    def read(self, given: Given) -> Reading:
        """What it says."""
        reader: Callable[[Given], Reading] = importlib.import_module(self.module).read
        return reader(given)


_PACKAGE = "meshplan.planner.imports.sources"
# A file is asked for before the flags of a script: a Trainer script has flags of every kind.
SOURCES = (
    Source(name="deepspeed", module=f"{_PACKAGE}.deepspeed", summary="DeepSpeed's JSON, with its launcher's command"),
    Source(name="accelerate", module=f"{_PACKAGE}.accelerate", summary="Accelerate's YAML, with accelerate launch"),
    Source(name="torchtitan", module=f"{_PACKAGE}.torchtitan", summary="a TorchTitan command line, or an older TOML"),
    Source(name="megatron", module=f"{_PACKAGE}.megatron", summary="a Megatron-LM command line or launch script"),
    Source(name="vllm", module=f"{_PACKAGE}.vllm", summary="a vLLM command line"),
    Source(name="sglang", module=f"{_PACKAGE}.sglang", summary="an SGLang command line"),
)


def source_of(given: Given, name: str | None = None) -> Source | None:
    """The source by its name, else the first that recognises the input; None where none does.

    Raises:
        SpecError: no source has that name.
    """
    if name is None:
        return next((source for source in SOURCES if source.recognises(given)), None)
    found = next((source for source in SOURCES if source.name == name), None)
    if found is None:
        names = [source.name for source in SOURCES]
        hint = did_you_mean(closest_names(name, names))
        message = f"unknown source {name!r}{hint}; known: {', '.join(names)}"
        raise SpecError([Problem(path="--from", message=message)], of="the command")
    return found
