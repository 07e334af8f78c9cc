#!/usr/bin/env bash
# meshplan plan 90a453bd1a99
# plan digest: 90a453bd1a9902277cdc201f182d73366df8ab178c3aeaa4a84a38c49c78066e
# parser: sglang 0.5.23 (prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
