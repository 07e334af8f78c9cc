#!/usr/bin/env bash
# meshplan plan 9d40126b067e
# plan digest: 9d40126b067e85affbec654e40f00f900650a0f7a10e4ab4439ee5ccb29a017c
# parser: sglang-router 0.3.2 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
addresses=(a b c d)
(( ${#addresses[@]} >= 4 )) || { echo "router.sh: 4 addresses are needed" >&2; exit 1; }
exec python3 -m sglang_router.launch_router --host 0.0.0.0 --port 8000 --policy power_of_two --pd-disaggregation --prefill "http://${addresses[0]}:8100" "20390" --prefill "http://${addresses[1]}:8100" "20390" --decode "http://${addresses[2]}:8100" "$@"
