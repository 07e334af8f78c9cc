#!/usr/bin/env bash
# meshplan plan 7805c5b5ca7e
# plan digest: 7805c5b5ca7e9b7ba17b8a5d169d7728b22c81ebfd029319e53ba9c40f0d4a2c
# parser: vllm-router 0.1.17 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
: "${MESHPLAN_HOSTS:?set MESHPLAN_HOSTS to the addresses of the 2 hosts, in order}"
read -r -a addresses <<< "$MESHPLAN_HOSTS"
(( ${#addresses[@]} >= 2 )) || { echo "router.sh: 2 addresses are needed" >&2; exit 1; }
exec vllm-router --host 0.0.0.0 --port 8000 --policy power_of_two --worker-urls "http://${addresses[0]}:8100" "http://${addresses[0]}:8101" "http://${addresses[1]}:8100" "$@"
