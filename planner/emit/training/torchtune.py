"""A training plan as a torchtune recipe: LoRA, QLoRA or every weight of a model that torchtune builds, with FSDP2.

torchrun starts the recipe that comes with torchtune, for one device or for several, on a YAML of ours. The YAML's
components are built, and their parameters counted, in tests/conformance/finetuning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.untrusted.quoting import yaml_text
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import Artifact, ParserVerified, commented, stamp
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, count, feature_rows, is_true, nested, stated, write_all
from meshplan.planner.emit.training.adapters import adapters_of, phase_of
from meshplan.planner.emit.training.job import Job, Setting
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.training.terms import TrainingRows, refuse
from meshplan.planner.emit.training.torchrun import RANK_TABLE
from meshplan.planner.training.problem.frameworks.torchtune import TORCHTUNE, TORCHTUNE_BUILDERS
from meshplan.planner.training.problem.problem import Phase
from meshplan.planner.training.problem.switches import CHUNKED, WHOLE

TARGET = "torchtune"
CONFIG_FILE = PurePosixPath("torchtune.yaml")
VERIFIED = ParserVerified(
    framework="torchtune",
    version=TORCHTUNE.version,
    mode="its recipes' configuration: components built without weights; nothing is trained",
)
_rows = TrainingRows("the recipe's own reading of its configuration")
_KNOWN_NAMES = {"precision": ("bf16",), "activation_recompute": ("none", "full")}
_ZERO_SHARDED_GRADIENTS, _ZERO_SHARDED_PARAMETERS = 2, 3
_RESHARD = "fsdp_reshard_after_forward"
_OUTPUT = "output"
# torchtune's names of PEFT's modules.
_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the models of one package of ``torchtune.models`` share.

    Args:
        tokenizer: its component.
        files: the tokenizer's arguments → where the file lies in a checkpoint of Hugging Face's form.
        model_type: of the checkpointer.
    """

    tokenizer: str
    files: Mapping[str, str]
    model_type: str


_LLAMA_3 = {"path": "original/tokenizer.model"}
_QWEN = {"path": "vocab.json", "merges_file": "merges.txt"}
# As the recipes of torchtune 0.6.1 have them (recipes/configs/*/*_lora.yaml).
FAMILIES = {
    "llama2": Family(tokenizer="llama2.llama2_tokenizer", files={"path": "tokenizer.model"}, model_type="LLAMA2"),
    "llama3": Family(tokenizer="llama3.llama3_tokenizer", files=_LLAMA_3, model_type="LLAMA3"),
    "llama3_1": Family(tokenizer="llama3.llama3_tokenizer", files=_LLAMA_3, model_type="LLAMA3"),
    "llama3_2": Family(tokenizer="llama3.llama3_tokenizer", files=_LLAMA_3, model_type="LLAMA3_2"),
    "llama3_3": Family(tokenizer="llama3.llama3_tokenizer", files=_LLAMA_3, model_type="LLAMA3"),
    "qwen2": Family(tokenizer="qwen2.qwen2_tokenizer", files=_QWEN, model_type="QWEN2"),
    "qwen2_5": Family(tokenizer="qwen2_5.qwen2_5_tokenizer", files=_QWEN, model_type="QWEN2"),
}
_NO_CHOICES: Mapping[str, Any] = {
    "output_dir": _OUTPUT,
    "seed": None,
    "shuffle": True,
    "resume_from_checkpoint": False,
    "epochs": 1,
    "max_steps_per_epoch": 100,
    "clip_grad_norm": None,
    "compile": True,  # the plan assumes compiled kernels
    "device": "cuda",
    "log_every_n_steps": 1,
    "log_peak_memory_stats": True,
    "dataset._component_": "torchtune.datasets.alpaca_cleaned_dataset",
    "dataset.packed": True,  # full sequences, as the plan counts them
    "optimizer._component_": "torch.optim.AdamW",
    "optimizer.fused": True,
    "optimizer.lr": 1e-4,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler._component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps": 0,
    "metric_logger._component_": "torchtune.training.metric_logging.DiskLogger",
    "metric_logger.log_dir": "${output_dir}/logs",
    "checkpointer._component_": "torchtune.training.FullModelHFCheckpointer",
    "checkpointer.checkpoint_dir": "MODEL",
    "checkpointer.checkpoint_files": [],
    "checkpointer.recipe_checkpoint": None,
    "checkpointer.output_dir": "${output_dir}",
}
# Keys that say nothing about a plan.
NO_CHOICES = frozenset(
    {
        *_NO_CHOICES,
        "checkpointer.model_type",
        "tokenizer._component_",
        "tokenizer.path",
        "tokenizer.merges_file",
        "model.lora_alpha",
        "model.lora_dropout",
        "save_adapter_weights_only",
    }
)

_PROGRAM = r"""
# --- torchtune ----------------------------------------------------------------------------------------------------
: "${{MODEL:?set MODEL to the folder of the checkpoint (tune download)}}"
recipe=$("${{PYTHON:-python3}}" -c 'import pathlib, torchtune
print(pathlib.Path(torchtune.__file__).parent.parent / "recipes" / "{recipe}.py")') || fail "torchtune is not installed"
weights=("$MODEL"/*.safetensors)
[[ -e ${{weights[0]}} ]] || fail "no *.safetensors in MODEL=$MODEL"
weights=("${{weights[@]##*/}}")
program=(
  "$recipe" --config "$here/{config_file}"
  checkpointer.checkpoint_dir="$MODEL"
  checkpointer.checkpoint_files="[$(IFS=,; printf '%s' "${{weights[*]}}")]"
  {tokenizer}
)
[[ -z ${{DATA:-}} ]] || program+=(dataset.source="$DATA")
[[ -z ${{MAX_STEPS:-}} ]] || program+=(max_steps_per_epoch="$MAX_STEPS")
[[ -z ${{LR:-}} ]] || program+=(optimizer.lr="$LR")
[[ -z ${{WARMUP_STEPS:-}} ]] || program+=(lr_scheduler.num_warmup_steps="$WARMUP_STEPS")
[[ -z ${{WEIGHT_DECAY:-}} ]] || program+=(optimizer.weight_decay="$WEIGHT_DECAY")
[[ -z ${{LORA_ALPHA:-}} ]] || program+=(model.lora_alpha="$LORA_ALPHA")
[[ -z ${{OUTPUT:-}} ]] || program+=(output_dir="$OUTPUT")
"""


# ``loss`` → torchtune's component; its recipes' own is the chunked one.
_CHUNKED_LOSS, _WHOLE_LOSS = "torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss"
_LOSS, _IN_BACKWARD = "loss._component_", "optimizer_in_bwd"


def _read_loss(arguments: Arguments) -> Mapping[str, Any]:
    component = arguments.get(_LOSS)
    if component is None:
        return {}
    known = {_CHUNKED_LOSS: CHUNKED, _WHOLE_LOSS: WHOLE}
    if component not in known:
        raise ValueError(f"{_LOSS} {component!r} is not modelled; known: {', '.join(known)}")
    return {"loss": known[str(component)]}


def _switch(key: str, name: str, on: Any, off: Any) -> Any:
    """A key that is always written, and states either value."""
    return _rows.term(
        name,
        lambda config, _: {key: getattr(config, name) == on},
        lambda arguments: {name: on if is_true(arguments, key) else off} if key in arguments else {},
        key,
    )


TERMS = (
    _rows.number("batch_size", "micro_batch_size", is_text=False),
    _rows.term(
        "global_batch_size",
        lambda config, _: {"gradient_accumulation_steps": config.num_microbatches},
        lambda arguments: stated(num_microbatches=count(arguments, "gradient_accumulation_steps")),
        "gradient_accumulation_steps",
    ),
    _rows.number("tokenizer.max_seq_len", "sequence_length", is_text=False, note=", dataset.packed"),
    _rows.term(
        "zero_stage",
        lambda config, _: {_RESHARD: config.zero_stage == _ZERO_SHARDED_PARAMETERS} if config.zero_stage else {},
        lambda arguments: (
            {"zero_stage": _ZERO_SHARDED_PARAMETERS if is_true(arguments, _RESHARD) else _ZERO_SHARDED_GRADIENTS}
            if _RESHARD in arguments
            else {}
        ),
        _RESHARD,
        expressed_by=f"{_RESHARD} (3: true, 2: false); 0: the recipe for one device; 1 is refused",
    ),
    _rows.covered("data_parallel", "the processes that torchrun starts; all of them share one copy of the states"),
    _rows.covered("data_parallel_shard", "all of data_parallel"),
    _switch("enable_activation_checkpointing", "activation_recompute", "full", "none"),
    _switch("enable_activation_offloading", "activation_offload", on=True, off=False),
    _rows.term(
        "loss",
        lambda config, _: {_LOSS: _WHOLE_LOSS if config.loss == WHOLE else _CHUNKED_LOSS},
        _read_loss,
        _LOSS,
        expressed_by=f"{_LOSS}: CEWithChunkedOutputLoss (chunked, its own), CrossEntropyLoss (whole)",
    ),
    _rows.term(
        "optimizer_in_backward",
        lambda config, _: {_IN_BACKWARD: True} if config.optimizer_in_backward else {},
        lambda arguments: {"optimizer_in_backward": True} if is_true(arguments, _IN_BACKWARD) else {},
        _IN_BACKWARD,
        expressed_by=f"{_IN_BACKWARD}: true (every weight trained, one micro-batch a step)",
    ),
    _rows.term(
        "parameter_offload",
        lambda config, _: {"fsdp_cpu_offload": True} if config.parameter_offload else {},
        lambda arguments: (
            {"parameter_offload": True, "optimizer_offload": True} if is_true(arguments, "fsdp_cpu_offload") else {}
        ),
        "fsdp_cpu_offload",
        expressed_by="fsdp_cpu_offload: parameters, gradients and optimizer states together (zero_stage 3)",
    ),
    _rows.covered("optimizer_offload", "fsdp_cpu_offload, with the parameters"),
    _rows.term(
        "precision",
        lambda config, _: {"dtype": config.precision},
        lambda arguments: (
            {"precision": {"bf16": "bf16", "fp16": "fp16"}.get(str(arguments["dtype"]), "fp32")}
            if "dtype" in arguments
            else {}
        ),
        "dtype",
        expressed_by="dtype: bf16",
    ),
)


def _model(plan: Plan, package: str, builder: str) -> Arguments:
    """The model's component, with its adapters where only they are trained."""
    adapters = adapters_of(plan)
    if not adapters:
        return {"model._component_": f"torchtune.models.{package}.{builder}"}
    modules = adapters["target_modules"]
    return {
        "model._component_": f"torchtune.models.{package}.{phase_of(plan).value}_{builder}",
        "model.lora_attn_modules": [_MODULES[name] for name in (_MODULES if isinstance(modules, str) else modules)],
        "model.apply_lora_to_mlp": isinstance(modules, str),
        "model.lora_rank": adapters["lora_rank"],
        "model.lora_alpha": 2 * adapters["lora_rank"],
        "model.lora_dropout": 0.0,
        "save_adapter_weights_only": False,
    }


def recipe_of(request: TrainingRequest) -> str:
    """The recipe of torchtune that runs the plan."""
    kind = "lora" if phase_of(request.plan).has_adapters else "full"
    return f"{kind}_finetune_{'distributed' if request.config.world_size > 1 else 'single_device'}"


def no_pretraining() -> CannotExpressError:
    """The refusal of a plan that starts from random weights."""
    return CannotExpressError(TARGET, "pre-training: its recipes start from a checkpoint", "workload.phase: sft")


def configuration(request: TrainingRequest) -> dict[str, Any]:
    """The recipe's YAML as a mapping.

    Raises:
        CannotExpressError: torchtune has no key for a choice.
    """
    refuse(TORCHTUNE, request.shape, request.config, _KNOWN_NAMES)
    if phase_of(request.plan) is Phase.PRETRAINING:
        raise no_pretraining()
    if "modules_to_save" in adapters_of(request.plan):
        raise CannotExpressError(
            TARGET, "embedding and LM head trained whole beside adapters", "workload.trains_vocabulary: false"
        )
    if adapters_of(request.plan) and request.config.optimizer_in_backward:
        raise CannotExpressError(
            TARGET, "the optimizer's step in the backward pass of adapters", "fixed.optimizer_in_backward: false"
        )
    package, builder = TORCHTUNE_BUILDERS[request.shape.slug]
    family = FAMILIES[package]
    return nested(
        {
            **_model(request.plan, package, builder),
            "tokenizer._component_": f"torchtune.models.{family.tokenizer}",
            **{f"tokenizer.{key}": f"MODEL/{name}" for key, name in family.files.items()},
            **write_all(TERMS, request.config, request.shape),
            **_NO_CHOICES,
            "checkpointer.model_type": family.model_type,
        }
    )


def job(request: TrainingRequest) -> Job:
    """A recipe of torchtune with its YAML."""
    head = commented(stamp(request.plan, VERIFIED))
    content = head + yaml_text(configuration(request))
    package, _ = TORCHTUNE_BUILDERS[request.shape.slug]
    tokenizer = "\n  ".join(f'tokenizer.{key}="$MODEL/{name}"' for key, name in FAMILIES[package].files.items())
    return Job(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        rank_order=TORCHTUNE.rank_orders[0],
        environment={},
        program=_PROGRAM.format(config_file=CONFIG_FILE, recipe=recipe_of(request), tokenizer=tokenizer),
        files=(Artifact(path=CONFIG_FILE, content=content),),
        settings=_settings(request),
        data="yahma/alpaca-cleaned, as torchtune's own recipes do",
        notes=(
            "MODEL and the tokenizer's paths in the YAML are filled in by launch.sh; further arguments are key=value.",
            "torchtune keeps weights, gradients and Adam's states in 16 bits, without a copy in 32 bits.",
            "The plan assumes compiled kernels (compile: true).",
        ),
    )


def _settings(request: TrainingRequest) -> tuple[Setting, ...]:
    rank = adapters_of(request.plan).get("lora_rank")
    alpha = (
        () if rank is None else (Setting(name="LORA_ALPHA", default=str(2 * rank), meaning="scale of the adapters"),)
    )
    return (
        Setting(name="MODEL", default="", meaning="folder of the checkpoint, in Hugging Face's form", required=True),
        Setting(name="DATA", default="", meaning="data set in Alpaca's form; unset: yahma/alpaca-cleaned"),
        Setting(name="MAX_STEPS", default=str(_NO_CHOICES["max_steps_per_epoch"]), meaning="optimizer steps"),
        Setting(name="LR", default=str(_NO_CHOICES["optimizer.lr"]), meaning="learning rate"),
        Setting(name="WARMUP_STEPS", default="0", meaning="steps of warm-up"),
        Setting(name="WEIGHT_DECAY", default=str(_NO_CHOICES["optimizer.weight_decay"]), meaning="weight decay"),
        *alpha,
        Setting(name="OUTPUT", default=_OUTPUT, meaning="where the result is saved"),
        Setting(name="PYTHON", default="python3", meaning="Python that torchtune is installed in"),
    )


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (*feature_rows(TERMS), RANK_TABLE)
