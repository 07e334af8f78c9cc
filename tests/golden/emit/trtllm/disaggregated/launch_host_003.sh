#!/usr/bin/env bash
# meshplan plan d6c7ac1ce5c0
# plan digest: d6c7ac1ce5c06dcb2c967a930755b28f31720e24992d130aee404a724f6e6166
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 3 "$@"
