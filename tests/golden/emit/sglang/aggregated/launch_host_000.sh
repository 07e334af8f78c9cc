#!/usr/bin/env bash
# meshplan plan b661a4e3b164
# plan digest: b661a4e3b164f09c95c38df8fe6047bd56a6e9c633c75f9cd1c8216d0de83c9d
# parser: sglang 0.5.23 (prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
