"""The sources of ``meshplan import``: one line each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, cast

from meshplan.catalogs.errors import SpecError, closest_names, did_you_mean
from meshplan.planner.imports.reading import Given, Reading

_PACKAGE = "meshplan.planner.imports.sources"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A framework or engine whose configuration can be imported.

    Args:
        name: as in ``import --from``.
        module: below ``imports.sources``, with ``recognises(given) -> bool`` and ``read(given) -> Reading``.
        summary: what is read.
        reader: an object of the module that has both instead.
    """

    name: str
    module: str
    summary: str
    reader: str = ""

    def recognises(self, given: Given) -> bool:
        """Whether the input is this source's."""
        return cast(bool, self._reader().recognises(given))

    def read(self, given: Given) -> Reading:
        """What it states."""
        return cast(Reading, self._reader().read(given))

    def _reader(self) -> Any:
        module = importlib.import_module(f"{_PACKAGE}.{self.module}")
        return getattr(module, self.reader) if self.reader else module


# A file is asked for before the flags of a script: a Trainer script has flags of every kind.
SOURCES = (
    Source(name="deepspeed", module="deepspeed", summary="DeepSpeed's JSON, with its launcher's command"),
    Source(name="axolotl", module="axolotl", summary="an Axolotl YAML"),
    Source(name="torchtune", module="torchtune", summary="a torchtune recipe's YAML or tune run"),
    Source(name="accelerate", module="accelerate", summary="Accelerate's YAML or accelerate launch"),
    Source(name="torchtitan", module="torchtitan", summary="a TorchTitan command line, or an older TOML"),
    Source(name="megatron", module="megatron", summary="a Megatron-LM command line or launch script"),
    Source(name="nemo", module="nemo", summary="overrides of a NeMo 1 pre-training script"),
    Source(name="vllm", module="engines", reader="VLLM", summary="a vLLM command line"),
    Source(name="sglang", module="engines", reader="SGLANG", summary="an SGLang command line"),
    Source(name="trtllm", module="engines", reader="TRTLLM", summary="a trtllm-serve command line"),
    Source(name="llama.cpp", module="engines", reader="LLAMA_CPP", summary="a llama-server command line"),
    Source(name="trainer", module="trainer", summary="flags of a script with the Hugging Face Trainer"),
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
        raise SpecError.at("--from", message, of="the command")
    return found
