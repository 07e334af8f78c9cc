#!/usr/bin/env bash
# meshplan plan 6c74439397fc
# plan digest: 6c74439397fcdf7ff1db9e418c9e3319e842a8b748b825bd72810458b0055423
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
