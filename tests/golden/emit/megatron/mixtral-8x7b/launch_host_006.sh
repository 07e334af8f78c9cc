#!/usr/bin/env bash
# meshplan plan 69e2f5a39a1b
# plan digest: 69e2f5a39a1b1539ea3acc14faeb36f4817d6f630dfdc06fe27547dd08f67767
# parser: megatron-core 0.19.2 (parse_args, validate_args, core_transformer_config_from_args; initialize_model_parallel on fake processes)
# Run this on host 6 (node-6): ranks 48 to 55.
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 6 "$@"
