#!/usr/bin/env bash
# meshplan plan af2c100a3dd4
# plan digest: af2c100a3dd42ea3085a73b3e072cc0b1a43fb8590ac234e7b579ed7ca0c05b8
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
