#!/usr/bin/env bash
# meshplan plan 7805c5b5ca7e
# plan digest: 7805c5b5ca7e9b7ba17b8a5d169d7728b22c81ebfd029319e53ba9c40f0d4a2c
# parser: vllm 0.33.0 (vllm serve's parser and create_engine_config on a CPU that answers for a GPU; no worker starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 1 "$@"
