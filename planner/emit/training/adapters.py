"""What a launch of LoRA or QLoRA needs in addition to the framework's arguments: the script makes the adapters.

No framework here has arguments for adapters (PEFT is a library of the script), so their choices are handed over in
``training_config.json`` and the README says what the script must set.
"""

from __future__ import annotations

from typing import Any

from meshplan.planner.core.plan import Plan
from meshplan.planner.training.problem.problem import Phase

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# PEFT's name for every linear layer but the LM head.
_ALL_LINEAR = "all-linear"


def adapters_of(plan: Plan) -> dict[str, Any]:
    """Phase, rank and place of the adapters, how frozen weights are kept; empty where all weights are trained."""
    workload = plan.spec.get("workload", {})
    phase = workload.get("phase")
    if phase == Phase.QLORA.value:
        weights = {"quant_type": "nf4", "use_double_quant": True, "compute_dtype": workload.get("precision", "bf16")}
        return {
            "phase": phase,
            "lora_rank": workload["lora_rank"],
            "target_modules": _ALL_LINEAR,
            "frozen_weights": weights,
        }
    if phase == Phase.LORA.value:
        return {"phase": phase, "lora_rank": workload["lora_rank"], "target_modules": list(_ATTENTION)}
    return {}


def without_adapters(plan: Plan, trainer: str) -> tuple[str, ...]:
    """The README of a target whose own trainer trains every weight."""
    if not adapters_of(plan):
        return ()
    return (f"The plan trains adapters only; {trainer} trains every weight and will need far more memory and time.",)


def adapter_notes(plan: Plan) -> tuple[str, ...]:
    """What the script must do, for the README."""
    adapters = adapters_of(plan)
    if not adapters:
        return ()
    rank, modules = adapters["lora_rank"], adapters["target_modules"]
    where = modules if isinstance(modules, str) else ", ".join(modules)
    made = (
        f"Only adapters are trained: the script must wrap the model with PEFT, LoraConfig(r {rank}, target_modules "
        f"{where}); the choices are under adapters in training_config.json."
    )
    if "frozen_weights" not in adapters:
        return (made,)
    kept = (
        "The frozen weights must be loaded with BitsAndBytesConfig(load_in_4bit, nf4, double quantisation, compute "
        "type and bnb_4bit_quant_storage of the plan's precision): FSDP shards only weights stored like the rest."
    )
    return (made, kept)
