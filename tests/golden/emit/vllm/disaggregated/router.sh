#!/usr/bin/env bash
# meshplan plan 4af308e221b8
# plan digest: 4af308e221b8302214b3a7c9f6a044f0f275f58f1c7444d51a17f86b1be73aa1
# parser: vllm-router 0.1.17 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
addresses=(a b c d)
(( ${#addresses[@]} >= 4 )) || { echo "router.sh: 4 addresses are needed" >&2; exit 1; }
exec vllm-router --host 0.0.0.0 --port 8000 --policy power_of_two --vllm-pd-disaggregation --kv-connector nixl --prefill "http://${addresses[0]}:8100" --prefill "http://${addresses[1]}:8100" --decode "http://${addresses[2]}:8100" "$@"
