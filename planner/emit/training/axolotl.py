"""A training plan as an Axolotl YAML: LoRA, QLoRA or every weight, with replicas or FSDP2's shards, split sequences.

torchrun starts ``axolotl.cli.train`` on the YAML; variables of the launch script override what a plan does not decide.
The keys are checked by Axolotl's own schema: tests/conformance/finetuning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.untrusted.quoting import yaml_text
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import Artifact, ParserVerified, commented, stamp
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, count, feature_rows, is_true, nested, stated, write_all
from meshplan.planner.emit.training.adapters import adapters_of, phase_of
from meshplan.planner.emit.training.job import Job, Setting
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.training.terms import ALL_LAYERS_AWAY, TrainingRows, refuse
from meshplan.planner.emit.training.torchrun import RANK_TABLE
from meshplan.planner.training.problem.frameworks.axolotl import AXOLOTL
from meshplan.planner.training.problem.frameworks.rules import training_every_weight
from meshplan.planner.training.problem.problem import Phase, TrainingConfig

TARGET = "axolotl"
CONFIG_FILE = PurePosixPath("axolotl.yaml")
VERIFIED = ParserVerified(
    framework="axolotl",
    version=AXOLOTL.version,
    mode="AxolotlConfigWCapabilities, its schema; no model is loaded and no data read",
)
_rows = TrainingRows("Axolotl's schema")
_KNOWN_NAMES = {"precision": ("bf16", "fp16"), "activation_recompute": ("none", "full")}
_ZERO_SHARDED_GRADIENTS, _ZERO_SHARDED_PARAMETERS = 2, 3
_RESHARD = "fsdp_config.reshard_after_forward"
_RECOMPUTE = (
    "fsdp_config.activation_checkpointing"  # of FSDP: the Trainer's own would gather twice in the backward pass
)
_TRAINERS_RECOMPUTE = "gradient_checkpointing"
_AWAY = "activation_offloading"
_STATES = "fsdp_config.offload_params"
_LOADED_ONCE = "fsdp_config.cpu_ram_efficient_loading"
_OFFLOADED = "offload"
_OLD_PREFIX = "fsdp_config.fsdp_"  # keys are taken with and without it
_SPLITS = "context_parallel_size"
_SPLITS_BEFORE = "sequence_parallel_degree"  # its former name
_EXCHANGE = "ring_attn_func"
_EVENED_OUT = ("batch_zigzag", "batch_stripe")

# What a plan does not decide; the data set is the small one of Axolotl's own examples.
_NO_CHOICES: Mapping[str, Any] = {
    "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}],
    "sample_packing": True,  # full sequences, as the plan counts them
    "pad_to_sequence_len": True,
    "attn_implementation": "flash_attention_2",
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "constant_with_warmup",
    "learning_rate": 1e-4,
    "warmup_steps": 0,
    "weight_decay": 0.1,
    "max_steps": 100,
    "val_set_size": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "output_dir": "output",
}
# Keys that say nothing about a plan, whoever wrote them.
_FSDP_KEYS = ("fsdp_config.auto_wrap_policy", "fsdp_version", "fsdp_config.fsdp_version", _LOADED_ONCE)
NO_CHOICES = frozenset({*_NO_CHOICES, *_FSDP_KEYS})
# Tokens of the example data set: 2,000 short questions with answers, counted as 128 tokens each.
_EXAMPLE_TOKENS = 2_000 * 128
_NO_MODEL = "MODEL"  # stands in the YAML where no published name is known; launch.sh then wants the variable

_PROGRAM = r"""
# --- Axolotl ------------------------------------------------------------------------------------------------------
program=(-m axolotl.cli.train "$here/{config_file}")
{model_check}
[[ -z ${{MODEL:-}} ]] || program+=(--base_model="$MODEL")
if [[ -n ${{DATA:-}} ]]; then
  [[ $DATA$DATA_TYPE != *[\"\'\\]* ]] || fail "DATA and DATA_TYPE must have no quotes and no backslashes"
  program+=(--datasets="[{{\"path\": \"$DATA\", \"type\": \"$DATA_TYPE\"}}]")
fi
[[ -z ${{MAX_STEPS:-}} ]] || program+=(--max_steps="$MAX_STEPS")
[[ -z ${{LR:-}} ]] || program+=(--learning_rate="$LR")
[[ -z ${{WARMUP_STEPS:-}} ]] || program+=(--warmup_steps="$WARMUP_STEPS")
[[ -z ${{WEIGHT_DECAY:-}} ]] || program+=(--weight_decay="$WEIGHT_DECAY")
[[ -z ${{LORA_ALPHA:-}} ]] || program+=(--lora_alpha="$LORA_ALPHA")
[[ -z ${{OUTPUT:-}} ]] || program+=(--output_dir="$OUTPUT")
"""


def _read_zero(arguments: Arguments) -> Mapping[str, Any]:
    """FSDP2 shards parameters unless it keeps them gathered; what FSDP does where this is not said is no statement."""
    for key in (_RESHARD, f"{_OLD_PREFIX}reshard_after_forward"):
        if key in arguments:
            return {"zero_stage": _ZERO_SHARDED_PARAMETERS if is_true(arguments, key) else _ZERO_SHARDED_GRADIENTS}
    return {}


def _recompute(config: TrainingConfig, _: ModelShape) -> Arguments:
    is_full = config.activation_recompute == "full"
    if config.activation_offload_num_layers:  # of adapters: nothing is recomputed, but the schema wants both keys
        return {_TRAINERS_RECOMPUTE: True, _AWAY: True}
    if config.zero_stage:
        return {_RECOMPUTE: is_full}
    return {_TRAINERS_RECOMPUTE: _OFFLOADED if config.activation_offload else is_full}


def _read_recompute(arguments: Arguments) -> Mapping[str, Any]:
    """Offload takes the place of recompute where adapters are trained, but of hidden states alone."""
    switch = str(arguments.get(_TRAINERS_RECOMPUTE, "")).lower()
    away = str(arguments.get(_AWAY, "")).lower()
    if switch.startswith(_OFFLOADED) or away not in {"", "false"}:
        if arguments.get("adapter") and away != "hidden_states":
            return {"activation_recompute": "none", ALL_LAYERS_AWAY: True}
        return {"activation_recompute": "full", "activation_offload": True}
    keys = (_TRAINERS_RECOMPUTE, _RECOMPUTE, f"{_OLD_PREFIX}activation_checkpointing")
    if any(is_true(arguments, key) for key in keys):
        return {"activation_recompute": "full"}
    return {"activation_recompute": "none"} if any(key in arguments for key in keys) else {}


def _read_precision(arguments: Arguments) -> Mapping[str, Any]:
    on = [name for name in ("bf16", "fp16") if str(arguments.get(name, "")).lower() in {"true", "auto", "full"}]
    if len(on) > 1 and not any(str(arguments.get(name, "")).lower() == "auto" for name in on):
        raise ValueError("bf16 and fp16 exclude each other")
    return {"precision": on[0]} if on else {}


def _read_exchange(arguments: Arguments) -> Mapping[str, Any]:
    """Parts of a sequence that lie on the ranks in order, unless it says how causal work is evened out."""
    is_split = (count(arguments, _SPLITS, _SPLITS_BEFORE) or 1) > 1
    is_even = arguments.get(_EXCHANGE) in _EVENED_OUT
    return {"context_parallel_style": AXOLOTL.context_parallel_style} if is_split and not is_even else {}


def _shards(config: TrainingConfig, _: ModelShape) -> Arguments:
    if not config.zero_stage:
        return {}
    return {
        "dp_shard_size": config.data_parallel_shard,
        "dp_replicate_size": config.data_parallel // config.data_parallel_shard,
    }


TERMS = (
    _rows.number("micro_batch_size", "micro_batch_size", is_text=False),
    _rows.term(
        "global_batch_size",
        lambda config, _: {"gradient_accumulation_steps": config.num_microbatches},
        lambda arguments: stated(num_microbatches=count(arguments, "gradient_accumulation_steps")),
        "gradient_accumulation_steps",
    ),
    _rows.number("sequence_len", "sequence_length", is_text=False),
    _rows.term(
        "zero_stage",
        lambda config, _: {_RESHARD: config.zero_stage == _ZERO_SHARDED_PARAMETERS} if config.zero_stage else {},
        _read_zero,
        _RESHARD,
        f"{_OLD_PREFIX}reshard_after_forward",
        expressed_by=f"{_RESHARD} (3: true, 2: false); 0: no fsdp_config; 1 is refused",
    ),
    _rows.term(
        "data_parallel_shard",
        _shards,
        lambda arguments: stated(
            data_parallel_shard=count(arguments, "dp_shard_size"),
            num_shard_groups=count(arguments, "dp_replicate_size"),
        ),
        "dp_shard_size",
        "dp_replicate_size",
    ),
    _rows.term(
        "context_parallel",
        lambda config, _: {_SPLITS: config.context_parallel} if config.context_parallel > 1 else {},
        lambda arguments: stated(context_parallel=count(arguments, _SPLITS, _SPLITS_BEFORE)),
        _SPLITS,
        _SPLITS_BEFORE,
    ),
    _rows.term(
        "context_parallel_style",
        lambda *_: {},
        _read_exchange,
        _EXCHANGE,
        expressed_by=f"{_EXCHANGE}, as Axolotl chooses it for packed sequences (varlen_llama3)",
    ),
    _rows.covered("data_parallel", "dp_shard_size × dp_replicate_size, or the processes that torchrun starts"),
    _rows.term(
        "activation_recompute",
        _recompute,
        _read_recompute,
        _TRAINERS_RECOMPUTE,
        _RECOMPUTE,
        _AWAY,
        f"{_OLD_PREFIX}activation_checkpointing",
        expressed_by=f"{_TRAINERS_RECOMPUTE}; {_RECOMPUTE} with shards",
    ),
    _rows.covered("activation_offload", f"{_TRAINERS_RECOMPUTE}: {_OFFLOADED} (zero_stage 0)"),
    _rows.covered("activation_offload_num_layers", f"{_AWAY}: all layers (adapters, zero_stage 0)"),
    _rows.term(
        "parameter_offload",
        lambda config, _: {_STATES: True} if config.parameter_offload else {},
        lambda arguments: (
            {"parameter_offload": True, "optimizer_offload": True}
            if any(is_true(arguments, key) for key in (_STATES, f"{_OLD_PREFIX}offload_params"))
            else {}
        ),
        _STATES,
        f"{_OLD_PREFIX}offload_params",
        expressed_by=f"{_STATES}: parameters, gradients and optimizer states together (zero_stage 3)",
    ),
    _rows.covered("optimizer_offload", f"{_STATES}, with the parameters"),
    _rows.term(
        "precision",
        lambda config, _: {config.precision: True},
        _read_precision,
        "bf16",
        "fp16",
    ),
)


def _weights(plan: Plan) -> Arguments:
    """What is trained, and how the frozen weights are kept."""
    phase, adapters = phase_of(plan), adapters_of(plan)
    if not adapters:
        return {"reinit_weights": True} if phase is Phase.PRETRAINING else {}
    modules = adapters["target_modules"]
    return {
        "adapter": phase.value,
        "lora_r": adapters["lora_rank"],
        "lora_alpha": 2 * adapters["lora_rank"],
        "lora_dropout": 0.0,
        **({"lora_target_linear": True} if isinstance(modules, str) else {"lora_target_modules": modules}),
        **({"load_in_4bit": True} if phase is Phase.QLORA else {}),
        **({"lora_modules_to_save": adapters["modules_to_save"]} if "modules_to_save" in adapters else {}),
    }


def _fsdp(phase: Phase) -> Arguments:
    """FSDP2, whose first rank alone reads a checkpoint: host memory would else hold the model once for each device.

    Weights in four bits are refused so (the schema: its loading deadlocks); new weights are in no checkpoint.
    """
    reads_whole = phase not in {Phase.QLORA, Phase.PRETRAINING}
    return {
        "fsdp_version": 2,
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **({_LOADED_ONCE: True} if reads_whole else {}),
    }


def configuration(request: TrainingRequest) -> dict[str, Any]:
    """The YAML as a mapping.

    Raises:
        CannotExpressError: Axolotl has no key for a choice.
    """
    rules = AXOLOTL if phase_of(request.plan).has_adapters else training_every_weight(AXOLOTL)
    refuse(rules, request.shape, request.config, _KNOWN_NAMES)
    return nested(
        {
            "base_model": request.published_model or _NO_MODEL,
            **_weights(request.plan),
            **write_all(TERMS, request.config, request.shape),
            **(_fsdp(phase_of(request.plan)) if request.config.zero_stage else {}),
            **_NO_CHOICES,
        }
    )


def job(request: TrainingRequest) -> Job:
    """Axolotl's trainer with its YAML."""
    head = commented(stamp(request.plan, VERIFIED))
    is_known = bool(request.published_model)
    check = "" if is_known else '[[ -n ${MODEL:-} ]] || fail "set MODEL to the folder of the checkpoint"\n'
    return Job(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        rank_order=AXOLOTL.rank_orders[0],
        environment={},
        program=_PROGRAM.format(config_file=CONFIG_FILE, model_check=check + ': "${DATA_TYPE:=alpaca}"'),
        files=(Artifact(path=CONFIG_FILE, content=head + yaml_text(configuration(request))),),
        settings=_settings(request),
        data="the small data set of Axolotl's examples",
        notes=(
            *AXOLOTL.kernel_notes,
            _kernels_note(request.config),
            "Axolotl turns its own kernels for adapters on (lora_*_kernel); the estimate does not count their gain.",
            *_data_notes(request),
        ),
    )


def _kernels_note(config: TrainingConfig) -> str:
    if config.context_parallel == 1:
        return "attn_implementation flash_attention_2 needs the package flash-attn (axolotl[flash-attn])."
    return (
        "context_parallel_size needs flash-attn and ring-flash-attn (axolotl[ring-flash-attn]); ranks hold parts of a "
        "sequence in order, so that of one long document the last has most to do: the estimate counts that."
    )


def _data_notes(request: TrainingRequest) -> tuple[str, ...]:
    """Where the example data set is smaller than a global batch: steps on it are shorter than the plan's."""
    tokens = request.config.global_batch_size * request.config.sequence_length
    if tokens <= _EXAMPLE_TOKENS:
        return ()
    return (
        f"The default DATA is smaller than a global batch of {tokens:,} tokens, and Axolotl then takes shorter steps "
        "than planned: set DATA before you measure one.",
    )


def _settings(request: TrainingRequest) -> tuple[Setting, ...]:
    adapters = adapters_of(request.plan)
    alpha = (
        (Setting(name="LORA_ALPHA", default=str(2 * adapters["lora_rank"]), meaning="scale of the adapters"),)
        if adapters
        else ()
    )
    return (
        Setting(
            name="MODEL",
            default=request.published_model,
            meaning="folder or Hugging Face name",
            required=not request.published_model,
        ),
        Setting(name="DATA", default=_NO_CHOICES["datasets"][0]["path"], meaning="data set: file, folder or name"),
        Setting(
            name="DATA_TYPE", default="alpaca", meaning="how Axolotl reads DATA: alpaca, completion, chat_template"
        ),
        Setting(name="MAX_STEPS", default=str(_NO_CHOICES["max_steps"]), meaning="optimizer steps"),
        Setting(name="LR", default=str(_NO_CHOICES["learning_rate"]), meaning="learning rate"),
        Setting(name="WARMUP_STEPS", default=str(_NO_CHOICES["warmup_steps"]), meaning="steps of warm-up"),
        Setting(name="WEIGHT_DECAY", default=str(_NO_CHOICES["weight_decay"]), meaning="weight decay"),
        *alpha,
        Setting(name="OUTPUT", default=str(_NO_CHOICES["output_dir"]), meaning="where the result is saved"),
    )


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (*feature_rows(TERMS), RANK_TABLE)
