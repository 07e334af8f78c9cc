#!/usr/bin/env bash
# meshplan plan 7b6c4df4e1d7
# plan digest: 7b6c4df4e1d773eaa3ac26b5430f771bdcbf34fbfed0f384da50c5084381e07d
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
