#!/usr/bin/env bash
# meshplan plan 9d40126b067e
# plan digest: 9d40126b067e85affbec654e40f00f900650a0f7a10e4ab4439ee5ccb29a017c
# parser: sglang 0.5.23 (prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts)
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
(( host < 4 )) || fail "the plan has 4 host(s), numbered from 0"
addresses=(a b c d)
(( ${#addresses[@]} >= 4 )) || fail "4 host addresses are needed, there are ${#addresses[@]}"
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
prefill_command() {
  read_flags prefill_args.txt
  command=(python3 -m sglang.launch_server --model-path publisher/deepseek-v3 "${flags[@]}")
  command+=(--host 0.0.0.0 --port "$port" --disaggregation-bootstrap-port "$((internal_port + 390))")
}
decode_command() {
  read_flags decode_args.txt
  command=(python3 -m sglang.launch_server --model-path publisher/deepseek-v3 "${flags[@]}")
  if (( node_rank == 0 )); then
    command+=(--host 0.0.0.0 --port "$port" --nnodes 2 --node-rank "$node_rank" --dist-init-addr "$head:$internal_port")
  else
    command+=(--host 0.0.0.0 --port "$port" --nnodes 2 --node-rank "$node_rank" --dist-init-addr "$head:$internal_port")
  fi
}

# --- checks before the start (MESHPLAN_SKIP_CHECKS=1 skips them) --------------------------------------------------
check_gpus() {
  case $1 in
  prefill)
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
  decode)
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
  command -v python3 > /dev/null || fail "python3 is not on the PATH"
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
