#!/usr/bin/env bash
# meshplan plan 3fc59fae2b12
# plan digest: 3fc59fae2b12d0f2f6741e729c50018f309e8f46dc8ba451543b7f096ef80ec5
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
