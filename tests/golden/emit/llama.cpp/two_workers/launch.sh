#!/usr/bin/env bash
# meshplan plan feb537c104b4
# plan digest: feb537c104b4db6ab8a5564faf38978f05072eb2f3d8c832674af864c1209af9
# usage: launch.sh HOST [more flags of every server]; HOST is a host number of workers.txt
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

[[ ${1:-} =~ ^[0-9]+$ ]] || fail "usage: launch.sh HOST [more flags]; host numbers are in workers.txt"
host=$1
shift
(( host < 1 )) || fail "the plan has 1 host(s), numbered from 0"
addresses=(a b)
(( ${#addresses[@]} >= 1 )) || fail "1 host addresses are needed, there are ${#addresses[@]}"
own=${addresses[host]}
hostname=$own

read_flags() {
  flags=()
  local line
  while IFS= read -r line; do
    [[ -n $line && $line != "#"* ]] || continue
    flags+=("${line%% *}")
    [[ $line != *" "* ]] || flags+=("${line#* }")
  done < "$here/$1"
}

# --- the command of each role -------------------------------------------------------------------------------------
mixed_command() {
  read_flags mixed_args.txt
  command=(llama-server --hf-repo unsloth/DeepSeek-V3-GGUF:Q4_K_M "${flags[@]}")
  command+=(--host 0.0.0.0 --port "$port")
}

# --- checks before the start (MESHPLAN_SKIP_CHECKS=1 skips them) --------------------------------------------------
check_gpus() {
  case $1 in
  mixed)
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
  ;;
  esac
  return 0
}
if [[ ${MESHPLAN_SKIP_CHECKS:-0} != 1 ]]; then
  command -v llama-server > /dev/null || fail "llama-server is not on the PATH"
fi

# --- start --------------------------------------------------------------------------------------------------------
logs=${MESHPLAN_LOGS:-$here/logs}
mkdir -p "$logs"
pids=()
waits=()
stop() {
  (( ${#pids[@]} == 0 )) || kill "${pids[@]}" 2> /dev/null || true
}
trap stop EXIT
trap 'exit 143' TERM INT
while read -r worker role row_host node_rank head_host port internal_port devices <&3; do
  [[ $worker != "#"* && $row_host == "$host" ]] || continue
  head=${addresses[head_host]}
  mpi_hosts=$(awk -v worker="$worker" -v list="${addresses[*]}" \
    'BEGIN { split(list, address, " ") }
     $1 == worker { n = split($8, _, ","); printf "%s%s:%d", separator, address[$3 + 1], n; separator = "," }' \
    "$here/workers.txt")
  IFS=, read -r -a device_list <<< "$devices"
  [[ ${MESHPLAN_SKIP_CHECKS:-0} == 1 ]] || check_gpus "$role"
  export CUDA_VISIBLE_DEVICES=$devices
  "${role}_command"
  (( ${#command[@]} > 0 )) || continue
  log="$logs/worker_${worker}_node_${node_rank}.log"
  "${command[@]}" "$@" > "$log" 2>&1 3<&- &
  pids+=($!)
  (( node_rank > 0 )) || waits+=("$! $port $log")
done 3< "$here/workers.txt"

# --- wait until the servers answer --------------------------------------------------------------------------------
deadline=$(( SECONDS + ${MESHPLAN_READY_TIMEOUT_S:-3600} ))
for wait_for in ${waits[@]+"${waits[@]}"}; do
  read -r pid port log <<< "$wait_for"
  until curl --silent --fail --max-time 5 --output /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 "$pid" 2> /dev/null || fail "the server of port $port ended; its log: $log"
    (( SECONDS < deadline )) || fail "the server of port $port does not answer; its log: $log"
    sleep 2
  done
  echo "port $port answers"
done
echo "all workers of host $host are ready"
(( ${#pids[@]} > 0 )) || exit 0
wait -n "${pids[@]}" || true  # servers do not end by themselves
fail "a worker ended; logs are in $logs"
