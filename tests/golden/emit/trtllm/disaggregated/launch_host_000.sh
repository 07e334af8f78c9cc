#!/usr/bin/env bash
# meshplan plan 5f9c03ab97b6
# plan digest: 5f9c03ab97b6842098f7af4eebd8caa7c3566397865afba1d1b8e362d8088858
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
