#!/usr/bin/env bash
# meshplan plan 45007260eedb
# plan digest: 45007260eedb0df63eef28fbde3324a519dc25e160dcdd2b2a034c3e6eb4a5fa
# parser: megatron-core 0.19.2 (parse_args, validate_args, core_transformer_config_from_args; initialize_model_parallel on fake processes)
# usage: launch.sh NODE_RANK [more flags of the program]
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
fail() {
  printf 'launch.sh: %s\n' "$1" >&2
  exit 1
}

if [[ -f $here/SHA256SUMS && ${MESHPLAN_SKIP_CHECKS:-0} != 1 ]]; then
  changed=$(cd -- "$here" && sha256sum --check --quiet SHA256SUMS 2>&1) || fail \
    "files differ from what meshplan wrote: $changed; emit them again, or set MESHPLAN_SKIP_CHECKS=1"
fi

[[ ${1:-} =~ ^[0-9]+$ ]] || fail "usage: launch.sh NODE_RANK [more flags]; node ranks are in hosts.txt"
node_rank=$1
shift
devices=""
while read -r row_rank row_host row_devices; do
  if [[ $row_rank == "$node_rank" ]]; then
    hostname=$row_host
    devices=$row_devices
  fi
done < "$here/hosts.txt"
[[ -n $devices ]] || fail "no node rank $node_rank in hosts.txt"
IFS=, read -r -a device_list <<< "$devices"

# --- where, and with which variables ------------------------------------------------------------------------------
export MASTER_ADDR=${MASTER_ADDR:-node-0}
export MASTER_PORT=${MASTER_PORT:-29500}
export CUDA_VISIBLE_DEVICES=$devices  # local rank i runs on the i-th of these
export CUDA_DEVICE_MAX_CONNECTIONS=1

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

# --- checks before the start (MESHPLAN_SKIP_CHECKS=1 skips them) --------------------------------------------------
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
check_master() {
  [[ $node_rank != 0 ]] || return 0
  local answer
  # The port opens when node rank 0 starts: a refused connection still proves that the host answers.
  answer=$(timeout 10 bash -c 'exec 3<> "/dev/tcp/$1/$2"' _ "$MASTER_ADDR" "$MASTER_PORT" 2>&1) && return 0
  [[ $answer == *refused* ]] || fail "cannot reach MASTER_ADDR=$MASTER_ADDR port $MASTER_PORT: ${answer:-no answer}"
}
if [[ ${MESHPLAN_SKIP_CHECKS:-0} != 1 ]]; then
  command -v "${TORCHRUN:-torchrun}" > /dev/null || fail "torchrun is not on the PATH (or set TORCHRUN)"
  check_gpus
  check_master
fi

num_hosts=8
world_size=64
exec "${TORCHRUN:-torchrun}" \
  --nnodes "$num_hosts" \
  --node-rank "$node_rank" \
  --nproc-per-node "${#device_list[@]}" \
  --rdzv-backend static \
  --master-addr "$MASTER_ADDR" \
  --master-port "$MASTER_PORT" \
  --max-restarts 0 \
  "${program[@]}" "$@"
