#!/usr/bin/env bash
# meshplan plan 00b4e44555ea
# plan digest: 00b4e44555ea7589b5be87948ac5e8f19b3b9241e821bfb47f960f2481f15b34
# parser: vllm 0.33.0 (vllm serve's parser and create_engine_config on a CPU that answers for a GPU; no worker starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
