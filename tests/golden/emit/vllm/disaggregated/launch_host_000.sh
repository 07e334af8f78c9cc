#!/usr/bin/env bash
# meshplan plan 07866c03f561
# plan digest: 07866c03f561a703b093e3be90fe26d6eeed52e3f71db5640c4c05fc55cd0b62
# parser: vllm 0.33.0 (vllm serve's parser and create_engine_config on a CPU that answers for a GPU; no worker starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
