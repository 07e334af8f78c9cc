#!/usr/bin/env bash
# meshplan plan 9944222a13fb
# plan digest: 9944222a13fb2e7de2c59e25da7641939285abddfb00693c3885c540f536a370
# parser: vllm-router 0.1.17 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
addresses=(a b c d)
(( ${#addresses[@]} >= 4 )) || { echo "router.sh: 4 addresses are needed" >&2; exit 1; }
exec vllm-router --host 0.0.0.0 --port 8000 --policy power_of_two --vllm-pd-disaggregation --kv-connector nixl --prefill "http://${addresses[0]}:8100" --prefill "http://${addresses[1]}:8100" --decode "http://${addresses[2]}:8100" "$@"
