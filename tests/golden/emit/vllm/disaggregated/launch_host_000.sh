#!/usr/bin/env bash
# meshplan plan 4af308e221b8
# plan digest: 4af308e221b8302214b3a7c9f6a044f0f275f58f1c7444d51a17f86b1be73aa1
# parser: vllm 0.33.0 (vllm serve's parser and create_engine_config on a CPU that answers for a GPU; no worker starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
