#!/usr/bin/env bash
# meshplan plan 5f9c03ab97b6
# plan digest: 5f9c03ab97b6842098f7af4eebd8caa7c3566397865afba1d1b8e362d8088858
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
addresses=(a b c d)
(( ${#addresses[@]} >= 4 )) || { echo "router.sh: 4 addresses are needed" >&2; exit 1; }
folder=$(mktemp -d)
router_file="$folder/disaggregated.yaml"
cat > "$router_file" << MESHPLAN_END
hostname: 0.0.0.0
port: 8000
backend: pytorch
context_servers:
  num_instances: 2
  router:
    type: load_balancing
    args: {use_tokens: true}
  urls:
    - "${addresses[0]}:8100"
    - "${addresses[1]}:8100"
generation_servers:
  num_instances: 1
  router:
    type: load_balancing
    args: {use_tokens: true}
  urls:
    - "${addresses[2]}:8100"
MESHPLAN_END
exec trtllm-serve disaggregated -c "$router_file" "$@"
