"""What generates text on several small machines, and what each of them takes.

- *llama.cpp* on one machine; what its memory lacks is read from its drive (tools/server/README.md, ``--load-mode``).
- *llama.cpp with RPC servers*: whole layers on each machine, one after the other (tools/rpc/README.md).
- *distributed-llama* 0.16: every matrix over all machines; 1, 2, 4 … 2ⁿ of them, at most one for each head of keys and
  values; q40 weights exchange q80 vectors, f32 weights f32 ones; Llama, Qwen3 and Qwen3-MoE (README.md, src/app.cpp).
- *TPI-LLM*: every matrix over all machines, f32, blocks of layers read from the drive ahead of their use in a sliding
  window (``--memory_window``); Llama (README.md at 0c444fb; arXiv:2410.00531).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.edge.problem import MachineKind

LLAMA_CPP, RPC, DISTRIBUTED_LLAMA, TPI_LLM = "llama.cpp", "llama.cpp-rpc", "distributed-llama", "tpi-llm"


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeEngine:
    """One way to generate.

    Args:
        name: as in a spec.
        splits: ``nothing``, ``layers`` or ``matrices`` over machines.
        formats: of weights that it takes.
        families: Hugging Face ``model_type`` that it takes; empty for any with softmax attention in every layer.
        needs_power_of_two: machines in a group.
        uses_accelerators: graphics cards can be its machines.
        cache_bytes: of one key or value.
        is_compared: a published run of it was held against the plan's figures.
    """

    name: str
    splits: str
    formats: tuple[str, ...]
    families: tuple[str, ...] = ()
    needs_power_of_two: bool = False
    uses_accelerators: bool = False
    cache_bytes: float = 4.0
    is_compared: bool = True

    def refuses_model(self, shape: ModelShape) -> str:
        """Why it does not generate with a model; empty where it does."""
        if self.families and shape.family not in self.families:
            return f"{self.name} takes {', '.join(self.families)}, not {shape.family}"
        if shape.num_attention_layers < shape.num_hidden_layers or shape.latent is not None:
            return "layers other than softmax attention with keys and values are not priced here"
        return ""

    def refuses_group(self, shape: ModelShape, kinds: Sequence[MachineKind], machines: int) -> str:
        """Why a group of machines cannot run it; empty where it can."""
        if not self.uses_accelerators and any(kind.is_accelerator for kind in kinds):
            return f"{self.name} is planned for processors, not for graphics cards"
        if self.splits != "matrices":
            return ""
        if self.needs_power_of_two and machines & (machines - 1):
            return f"{self.name} runs on 1, 2, 4 … 2ⁿ machines"
        if shape.num_key_value_heads % machines:
            heads = shape.num_key_value_heads
            return f"{self.name} gives each machine as many of the {heads} heads of keys and values"
        return ""


_LLAMA = ("llama",)
ENGINES = (
    EdgeEngine(
        name=LLAMA_CPP,
        splits="nothing",
        formats=("q4_0", "q8_0", "f16", "f32"),
        uses_accelerators=True,
        cache_bytes=2.0,
    ),
    EdgeEngine(
        name=RPC,
        splits="layers",
        formats=("q4_0", "q8_0", "f16", "f32"),
        uses_accelerators=True,
        cache_bytes=2.0,
    ),
    EdgeEngine(
        name=DISTRIBUTED_LLAMA,
        splits="matrices",
        formats=("q4_0", "f32"),
        families=(*_LLAMA, "qwen3", "qwen3_moe"),
        needs_power_of_two=True,
    ),
    EdgeEngine(name=TPI_LLM, splits="matrices", formats=("f32",), families=_LLAMA, is_compared=False),
)
BY_NAME = {engine.name: engine for engine in ENGINES}
