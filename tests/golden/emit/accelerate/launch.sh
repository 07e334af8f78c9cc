#!/usr/bin/env bash
# meshplan plan f728e176036d
# plan digest: f728e176036d59d005a3bc25515cb4603974fe2f502d9f1d5d058e65e19bcd5e
# parser: accelerate 1.15.0 (launch_command_parser, _validate_launch_command, prepare_multi_gpu_env, ParallelismConfig; no model)
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

# --- your training script -----------------------------------------------------------------------------------------
export MESHPLAN_CONFIG=$here/training_config.json MESHPLAN_RANK_TABLE=$here/rank_table.json
script=train.py
script=${SCRIPT:-$script}
[[ -f $script ]] || fail "no training script $script (in $PWD); set SCRIPT to its path"
# A path that begins with a dash would be taken for a flag.
[[ $script == /* ]] || script=$PWD/$script
program=("$script")

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
  :  # the starter looks for itself
  check_gpus
  check_master
fi

num_hosts=8
world_size=64
exec "${ACCELERATE:-accelerate}" launch \
  --config_file "$here/accelerate_config.yaml" \
  --num_machines "$num_hosts" \
  --num_processes "$world_size" \
  --machine_rank "$node_rank" \
  --main_process_ip "$MASTER_ADDR" \
  --main_process_port "$MASTER_PORT" \
  "${program[@]}" "$@"
