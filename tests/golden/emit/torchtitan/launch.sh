#!/usr/bin/env bash
# meshplan plan 94643d4a2f60
# plan digest: 94643d4a2f607a359a9b003e41faef8fb2079061ec9dc4077472ffe14c790825
# parser: torchtitan 0.3.0 (ConfigManager.parse_args, ParallelDims, the model's update_from_config; nothing is built)
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
# no variable needs a value

# --- TorchTitan ---------------------------------------------------------------------------------------------------
program=(-m torchtitan.train)
while read -r -a words; do
  [[ ${#words[@]} != 0 && ${words[0]} != "#" ]] || continue
  if [[ ${words[0]} != --* ]]; then
    # The sub-command ends the flags: what the user adds comes before it.
    program+=(--training.steps "${TRAIN_STEPS:-100}")
    [[ -z ${HF_ASSETS_PATH:-} ]] || program+=(--hf-assets-path "$HF_ASSETS_PATH")
    program+=("$@")
    set --
  fi
  program+=("${words[@]}")
done < "$here/torchtitan_args.txt"

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
