#!/usr/bin/env bash
# meshplan plan 99b4210905b2
# plan digest: 99b4210905b2a198b6bfbd16803c72db3a8379d50f767629223bf029ffaa929d
# parser: sglang 0.5.23 (prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 1 "$@"
