#!/usr/bin/env bash
# meshplan plan feb537c104b4
# plan digest: feb537c104b4db6ab8a5564faf38978f05072eb2f3d8c832674af864c1209af9
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
