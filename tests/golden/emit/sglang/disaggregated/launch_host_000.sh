#!/usr/bin/env bash
# meshplan plan 9d40126b067e
# plan digest: 9d40126b067e85affbec654e40f00f900650a0f7a10e4ab4439ee5ccb29a017c
# parser: sglang 0.5.23 (prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
