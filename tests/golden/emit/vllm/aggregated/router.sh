#!/usr/bin/env bash
# meshplan plan 00b4e44555ea
# plan digest: 00b4e44555ea7589b5be87948ac5e8f19b3b9241e821bfb47f960f2481f15b34
# parser: vllm-router 0.1.17 (its own argument parser; no router starts)
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
: "${MESHPLAN_HOSTS:?set MESHPLAN_HOSTS to the addresses of the 2 hosts, in order}"
read -r -a addresses <<< "$MESHPLAN_HOSTS"
(( ${#addresses[@]} >= 2 )) || { echo "router.sh: 2 addresses are needed" >&2; exit 1; }
exec vllm-router --host 0.0.0.0 --port 8000 --policy power_of_two --worker-urls "http://${addresses[0]}:8100" "http://${addresses[0]}:8101" "http://${addresses[1]}:8100" "$@"
