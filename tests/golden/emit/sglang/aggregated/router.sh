#!/usr/bin/env bash
# meshplan plan ff10699c7d89
# plan digest: ff10699c7d89c85749546e55b8568b7f90f82133d8ca8896023b05b0c6d6cabc
# parser: sglang-router 0.3.2 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
: "${MESHPLAN_HOSTS:?set MESHPLAN_HOSTS to the addresses of the 2 hosts, in order}"
read -r -a addresses <<< "$MESHPLAN_HOSTS"
(( ${#addresses[@]} >= 2 )) || { echo "router.sh: 2 addresses are needed" >&2; exit 1; }
exec python3 -m sglang_router.launch_router --host 0.0.0.0 --port 8000 --policy power_of_two --worker-urls "http://${addresses[0]}:8100" "http://${addresses[0]}:8101" "http://${addresses[1]}:8100" "$@"
