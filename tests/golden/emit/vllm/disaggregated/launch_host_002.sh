#!/usr/bin/env bash
# meshplan plan f1afd795c578
# plan digest: f1afd795c578828411b66b9513c80e6be22a649d8da2865537c2e8d3f275ccb6
# parser: vllm 0.33.0 (vllm serve's parser and create_engine_config on a CPU that answers for a GPU; no worker starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 2 "$@"
