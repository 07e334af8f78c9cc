#!/usr/bin/env bash
# meshplan plan 272c3984a361
# plan digest: 272c3984a361c3fc40dcdb280ea1ddc1926425eb67ece2c1c6d32bd30dfc3a23
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
