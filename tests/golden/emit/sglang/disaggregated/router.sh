#!/usr/bin/env bash
# meshplan plan 90a453bd1a99
# plan digest: 90a453bd1a9902277cdc201f182d73366df8ab178c3aeaa4a84a38c49c78066e
# parser: sglang-router 0.3.2 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
addresses=(a b c d)
(( ${#addresses[@]} >= 4 )) || { echo "router.sh: 4 addresses are needed" >&2; exit 1; }
exec python3 -m sglang_router.launch_router --host 0.0.0.0 --port 8000 --policy power_of_two --pd-disaggregation --prefill "http://${addresses[0]}:8100" "20390" --prefill "http://${addresses[1]}:8100" "20390" --decode "http://${addresses[2]}:8100" "$@"
