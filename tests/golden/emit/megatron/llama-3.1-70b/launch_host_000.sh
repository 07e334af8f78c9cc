#!/usr/bin/env bash
# meshplan plan 45007260eedb
# plan digest: 45007260eedb0df63eef28fbde3324a519dc25e160dcdd2b2a034c3e6eb4a5fa
# parser: megatron-core 0.19.2 (parse_args, validate_args, core_transformer_config_from_args; initialize_model_parallel on fake processes)
# Run this on host 0 (node-0): ranks 0 to 7.
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
