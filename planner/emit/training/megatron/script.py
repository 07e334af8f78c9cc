"""The part of the launch script that starts Megatron-LM: its arguments, and what a plan does not decide.

Learning rate, data, tokenizer and checkpoints come from environment variables (:data:`SETTINGS`). Their defaults
train on synthetic data, so that the files run as they are and a first step can be timed.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from meshplan.planner.emit.training.job import Setting
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON

SETTINGS = (
    Setting(
        name="MEGATRON_LM",
        default="",
        meaning=f"REQUIRED: checkout of Megatron-LM, core_v{MEGATRON.version}",
        required=True,
    ),
    Setting(name="TRAIN_ITERS", default="100", meaning="optimizer steps", flag="--train-iters"),
    Setting(name="LR", default="1.0e-4", meaning="learning rate", flag="--lr"),
    Setting(name="MIN_LR", default="1.0e-5", meaning="learning rate at the end", flag="--min-lr"),
    Setting(name="LR_DECAY_STYLE", default="cosine", meaning="shape of the decay", flag="--lr-decay-style"),
    Setting(name="LR_WARMUP_ITERS", default="0", meaning="steps of warm-up", flag="--lr-warmup-iters"),
    Setting(name="WEIGHT_DECAY", default="0.1", meaning="weight decay", flag="--weight-decay"),
    Setting(name="CLIP_GRAD", default="1.0", meaning="largest norm of the gradient", flag="--clip-grad"),
    Setting(name="SEED", default="1234", meaning="random seed", flag="--seed"),
    Setting(name="LOG_INTERVAL", default="1", meaning="steps between log lines", flag="--log-interval"),
    Setting(name="EVAL_ITERS", default="0", meaning="validation steps", flag="--eval-iters"),
    Setting(
        name="DATA_PATH", default="", meaning="data prefixes, split at spaces; unset: synthetic data (--mock-data)"
    ),
    Setting(name="DATA_SPLIT", default="99,1,0", meaning="train, validation, test; only with DATA_PATH"),
    Setting(name="TOKENIZER_TYPE", default="NullTokenizer", meaning="Megatron tokenizer type"),
    Setting(name="TOKENIZER_MODEL", default="", meaning="its model; needed with any other TOKENIZER_TYPE"),
    Setting(name="SAVE_DIR", default="", meaning="where to save checkpoints; unset: nowhere"),
    Setting(name="SAVE_INTERVAL", default="1000", meaning="steps between checkpoints; only with SAVE_DIR"),
)
# Conversations have no synthetic data, and a tokenizer with their format.
_CONVERSATIONS = {
    one.name: one
    for one in (
        Setting(name="DATA_PATH", default="", meaning="REQUIRED: conversations, a file of JSON lines", required=True),
        Setting(name="TOKENIZER_TYPE", default="SFTTokenizer", meaning="Megatron tokenizer type"),
        Setting(name="TOKENIZER_MODEL", default="", meaning="REQUIRED: its model", required=True),
    )
}
_PROMPT_FORMAT = Setting(
    name="PROMPT_FORMAT",
    default="nemotron-h-aligned",
    meaning="how a conversation is written as text, one that SFTTokenizer knows",
)
_LOAD = Setting(name="LOAD_DIR", default="", meaning="checkpoint to start from; unset: random weights")
_LOAD_ALWAYS = Setting(name="LOAD_DIR", default="", meaning="REQUIRED: checkpoint that is fine-tuned", required=True)

_PROGRAM = r"""
# --- Megatron-LM --------------------------------------------------------------------------------------------------
: "${{MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM (core_v{version})}}"
[[ -f $MEGATRON_LM/{script} ]] || fail "MEGATRON_LM=$MEGATRON_LM has no {script}"
program=("$MEGATRON_LM/{script}")
while read -r -a words; do
  [[ ${{words[0]:-}} == --* ]] || continue
  program+=("${{words[@]}}")
done < "$here/{arguments_file}"

# Not decided by the plan: environment variables, see README.md.
program+=(
{settings}
)
{data}
tokenizer_type=${{TOKENIZER_TYPE:-{tokenizer_type}}}
program+=(--tokenizer-type "$tokenizer_type")
if [[ $tokenizer_type == NullTokenizer ]]; then
  program+=(--vocab-size {vocab_size})
else
  program+=(--tokenizer-model "${{TOKENIZER_MODEL:?set TOKENIZER_MODEL for TOKENIZER_TYPE=$tokenizer_type}}")
fi
if [[ -n ${{SAVE_DIR:-}} ]]; then
  program+=(--save "$SAVE_DIR" --save-interval "${{SAVE_INTERVAL:-1000}}")
fi
{load}
"""
_DATA = """\
if [[ -n ${DATA_PATH:-} ]]; then
  read -r -a data_paths <<< "$DATA_PATH"
  program+=(--data-path "${data_paths[@]}" --split "${DATA_SPLIT:-99,1,0}")
else
  program+=(--mock-data)
fi"""
_CONVERSATION_DATA = """\
read -r -a data_paths <<< "${DATA_PATH:?set DATA_PATH to conversations, a file of JSON lines}"
program+=(--data-path "${data_paths[@]}" --split "${DATA_SPLIT:-99,1,0}")
program+=(--sft-tokenizer-prompt-format "${PROMPT_FORMAT:-nemotron-h-aligned}")"""
_START_FROM = """\
if [[ -n ${LOAD_DIR:-} ]]; then
  program+=(--load "$LOAD_DIR")
fi"""
# --finetune: the weights of the checkpoint, neither its optimizer states nor its step.
_FINE_TUNE = 'program+=(--load "${LOAD_DIR:?set LOAD_DIR to the checkpoint that is fine-tuned}" --finetune)'


def settings(*, is_fine_tuned: bool, has_conversations: bool = False) -> tuple[Setting, ...]:
    """Variables of the script; fine-tuning needs a checkpoint, conversations need data and a tokenizer."""
    load = _LOAD_ALWAYS if is_fine_tuned else _LOAD
    if not has_conversations:
        return (*SETTINGS, load)
    return (*(_CONVERSATIONS.get(setting.name, setting) for setting in SETTINGS), _PROMPT_FORMAT, load)


def program(
    arguments_file: PurePosixPath,
    vocab_size: int,
    *,
    is_fine_tuned: bool = False,
    has_conversations: bool = False,
    script: str = "pretrain_gpt.py",
) -> str:
    """Bash that fills the array ``program``: the script and its arguments, one element each.

    Args:
        arguments_file: the flags that the plan decides, beside the script.
        vocab_size: tokens of the model, for the tokenizer that makes no text.
        is_fine_tuned: training starts from a checkpoint.
        has_conversations: the data are lines of conversations (``--sft``).
        script: of Megatron-LM.
    """
    lines = "\n".join(
        f'  {setting.flag} "${{{setting.name}:-{setting.default}}}"' for setting in SETTINGS if setting.flag
    )
    return _PROGRAM.format(
        version=MEGATRON.version,
        script=script,
        arguments_file=arguments_file,
        settings=lines,
        vocab_size=vocab_size,
        load=_FINE_TUNE if is_fine_tuned else _START_FROM,
        data=_CONVERSATION_DATA if has_conversations else _DATA,
        tokenizer_type="SFTTokenizer" if has_conversations else "NullTokenizer",
    )
