#!/usr/bin/env bash
# meshplan plan ff10699c7d89
# plan digest: ff10699c7d89c85749546e55b8568b7f90f82133d8ca8896023b05b0c6d6cabc
# parser: sglang 0.5.23 (prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 1 "$@"
