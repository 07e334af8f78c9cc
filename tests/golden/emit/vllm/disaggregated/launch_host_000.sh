#!/usr/bin/env bash
# meshplan plan 9944222a13fb
# plan digest: 9944222a13fb2e7de2c59e25da7641939285abddfb00693c3885c540f536a370
# parser: vllm 0.33.0 (vllm serve's parser and create_engine_config on a CPU that answers for a GPU; no worker starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
