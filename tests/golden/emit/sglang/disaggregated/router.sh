#!/usr/bin/env bash
# meshplan plan 99b4210905b2
# plan digest: 99b4210905b2a198b6bfbd16803c72db3a8379d50f767629223bf029ffaa929d
# parser: sglang-router 0.3.2 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
addresses=(a b c d)
(( ${#addresses[@]} >= 4 )) || { echo "router.sh: 4 addresses are needed" >&2; exit 1; }
exec python3 -m sglang_router.launch_router --host 0.0.0.0 --port 8000 --policy power_of_two --pd-disaggregation --prefill "http://${addresses[0]}:8100" "20390" --prefill "http://${addresses[1]}:8100" "20390" --decode "http://${addresses[2]}:8100" "$@"
