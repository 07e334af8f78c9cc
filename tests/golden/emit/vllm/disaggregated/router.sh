#!/usr/bin/env bash
# meshplan plan 07866c03f561
# plan digest: 07866c03f561a703b093e3be90fe26d6eeed52e3f71db5640c4c05fc55cd0b62
# parser: vllm-router 0.1.17 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
addresses=(a b c d)
(( ${#addresses[@]} >= 4 )) || { echo "router.sh: 4 addresses are needed" >&2; exit 1; }
exec vllm-router --host 0.0.0.0 --port 8000 --policy power_of_two --vllm-pd-disaggregation --kv-connector nixl --prefill "http://${addresses[0]}:8100" --prefill "http://${addresses[1]}:8100" --decode "http://${addresses[2]}:8100" "$@"
