#!/usr/bin/env bash
# meshplan plan aaf713820f2e
# plan digest: aaf713820f2e676bcaa09d4b3f8fec552e2732adb9105d21e568ba3a19db1008
# parser: sglang 0.5.23 (prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts)
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 1 "$@"
