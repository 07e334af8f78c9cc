#!/usr/bin/env bash
# meshplan plan 768bb4f408ed
# plan digest: 768bb4f408eda0963e89f2b1fd64408fbd364cb991dd688f4b16f8057f024913
# parser: megatron-core 0.19.2 (parse_args, validate_args, core_transformer_config_from_args; initialize_model_parallel on fake processes)
# Runs in every task of srun: task r is rank r.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
fail() {
  printf 'rank_task.sh: %s\n' "$1" >&2
  exit 1
}
: "${SLURM_PROCID:?start this with srun, see job.sbatch}" "${MASTER_ADDR:?}" "${MASTER_PORT:?}"
devices=""
while read -r row_rank _ row_local_rank row_devices; do
  if [[ $row_rank == "$SLURM_PROCID" ]]; then
    local_rank=$row_local_rank
    devices=$row_devices
  fi
done < "$here/ranks.txt"
[[ -n $devices ]] || fail "no rank $SLURM_PROCID in ranks.txt"
IFS=, read -r -a host_devices <<< "$devices"
device_list=("${host_devices[local_rank]}")
hostname=$(hostname)
export CUDA_VISIBLE_DEVICES=$devices  # local rank i runs on the i-th of these
export RANK=$SLURM_PROCID LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=${#host_devices[@]} WORLD_SIZE=4
# no variable needs a value

# --- Megatron-LM --------------------------------------------------------------------------------------------------
: "${MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM (core_v0.19.2)}"
[[ -f $MEGATRON_LM/pretrain_gpt.py ]] || fail "MEGATRON_LM=$MEGATRON_LM has no pretrain_gpt.py"
program=("$MEGATRON_LM/pretrain_gpt.py")
while read -r -a words; do
  [[ ${words[0]:-} == --* ]] || continue
  program+=("${words[@]}")
done < "$here/megatron_args.txt"

# Not decided by the plan: environment variables, see README.md.
program+=(
  --train-iters "${TRAIN_ITERS:-100}"
  --lr "${LR:-1.0e-4}"
  --min-lr "${MIN_LR:-1.0e-5}"
  --lr-decay-style "${LR_DECAY_STYLE:-cosine}"
  --lr-warmup-iters "${LR_WARMUP_ITERS:-0}"
  --weight-decay "${WEIGHT_DECAY:-0.1}"
  --clip-grad "${CLIP_GRAD:-1.0}"
  --seed "${SEED:-1234}"
  --log-interval "${LOG_INTERVAL:-1}"
  --eval-iters "${EVAL_ITERS:-0}"
)
if [[ -n ${DATA_PATH:-} ]]; then
  read -r -a data_paths <<< "$DATA_PATH"
  program+=(--data-path "${data_paths[@]}" --split "${DATA_SPLIT:-99,1,0}")
else
  program+=(--mock-data)
fi
tokenizer_type=${TOKENIZER_TYPE:-NullTokenizer}
program+=(--tokenizer-type "$tokenizer_type")
if [[ $tokenizer_type == NullTokenizer ]]; then
  program+=(--vocab-size 128256)
else
  program+=(--tokenizer-model "${TOKENIZER_MODEL:?set TOKENIZER_MODEL for TOKENIZER_TYPE=$tokenizer_type}")
fi
if [[ -n ${SAVE_DIR:-} ]]; then
  program+=(--save "$SAVE_DIR" --save-interval "${SAVE_INTERVAL:-1000}")
fi
if [[ -n ${LOAD_DIR:-} ]]; then
  program+=(--load "$LOAD_DIR")
fi

check_gpus() {
  command -v nvidia-smi > /dev/null || fail "nvidia-smi is not on the PATH"
  local listing device line name memory_mib
  listing=$(env -u CUDA_VISIBLE_DEVICES nvidia-smi --query-gpu=index,name,memory.total --format=csv,noheader,nounits)
  for device in "${device_list[@]}"; do
    line=$(grep -E "^$device, " <<< "$listing") || fail "$hostname has no GPU $device; it has: $listing"
    IFS=, read -r _ name memory_mib <<< "${line//, /,}"
    [[ " $name " == *[!A-Za-z0-9]H100[!A-Za-z0-9]* ]] ||
      fail "GPU $device is $name, the plan is for "H100
    (( memory_mib >= 78469 )) || fail "GPU $device has $memory_mib MiB, the plan counts on 78469 MiB"
  done
  return 0
}
[[ ${MESHPLAN_SKIP_CHECKS:-0} == 1 ]] || check_gpus
exec "${PYTHON:-python}" "${program[@]}" "$@"
