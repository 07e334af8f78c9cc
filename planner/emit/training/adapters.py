"""What a launch of LoRA or QLoRA needs in addition to the framework's arguments: the script makes the adapters.

PEFT is a library of the script, so the choices of adapters are handed over in ``training_config.json``; ``train.py`` of
this package makes them, and the README says what another script must set. Trainers of every weight refuse such plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.core.plan import Plan
from meshplan.planner.training.problem.problem import Phase

TRAINERS_OF_EVERY_WEIGHT = frozenset({"megatron", "torchtitan"})
_VOCABULARY = ("embed_tokens", "lm_head")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# PEFT's name for every linear layer but the LM head.
_ALL_LINEAR = "all-linear"


def adapters_of(plan: Plan) -> dict[str, Any]:
    """Phase, rank and place of the adapters, how frozen weights are kept; empty where all weights are trained."""
    workload = plan.spec.get("workload", {})
    phase = workload.get("phase")
    whole = {"modules_to_save": list(_VOCABULARY)} if workload.get("trains_vocabulary") else {}
    if phase == Phase.QLORA.value and workload.get("frozen_weights") == "gptq":
        raise CannotExpressError(
            "PEFT", "weights frozen in GPTQ's format: they come from a checkpoint", "workload.frozen_weights: nf4"
        )
    made = {"phase": phase, "lora_rank": workload.get("lora_rank"), "target_modules": _targets(phase, workload)}
    if phase == Phase.QLORA.value:
        weights = {"quant_type": "nf4", "use_double_quant": True, "compute_dtype": workload.get("precision", "bf16")}
        return {**made, "frozen_weights": weights, **whole}
    return {**made, **whole} if phase == Phase.LORA.value else {}


def _targets(phase: str | None, workload: Mapping[str, Any]) -> str | list[str]:
    """PEFT's target modules: what the spec says, else as the estimate of the phase counts them."""
    usual = _ALL_LINEAR if phase == Phase.QLORA.value else "attention"
    return _ALL_LINEAR if workload.get("lora_targets", usual) == _ALL_LINEAR else list(_ATTENTION)


def phase_of(plan: Plan) -> Phase:
    """What is trained."""
    return Phase(plan.spec.get("workload", {}).get("phase", Phase.PRETRAINING.value))


def refuse_adapters(plan: Plan, target: str) -> None:
    """Stop where the target's own trainer trains every weight, and the plan only adapters.

    Raises:
        CannotExpressError: it does: the weights' states would need memory that the plan has not counted.
    """
    if adapters_of(plan):
        raise no_adapters(target, phase_of(plan))


def no_adapters(target: str, phase: Phase) -> CannotExpressError:
    """The refusal of a target whose own trainer trains every weight."""
    return CannotExpressError(
        target,
        f"adapters (phase {phase.value}): its own trainer trains every weight",
        "target axolotl or torchtune; or accelerate or deepspeed, whose train.py makes the adapters with PEFT",
    )


def adapter_notes(plan: Plan, *, script: str) -> tuple[str, ...]:
    """What the user's script must do, for the README; nothing where there is no script of his."""
    adapters = adapters_of(plan)
    if not adapters or not script:
        return ()
    rank, modules = adapters["lora_rank"], adapters["target_modules"]
    where = modules if isinstance(modules, str) else ", ".join(modules)
    saved = f", modules_to_save {', '.join(_VOCABULARY)}" if "modules_to_save" in adapters else ""
    made = (
        f"Only adapters are trained: the script must wrap the model with PEFT, LoraConfig(r {rank}, target_modules "
        f"{where}{saved}); the choices are under adapters in training_config.json."
    )
    if "frozen_weights" not in adapters:
        return (made,)
    kept = (
        "The frozen weights must be loaded with BitsAndBytesConfig(load_in_4bit, nf4, double quantisation, compute "
        "type and bnb_4bit_quant_storage of the plan's precision): FSDP shards only weights stored like the rest."
    )
    return (made, kept)
