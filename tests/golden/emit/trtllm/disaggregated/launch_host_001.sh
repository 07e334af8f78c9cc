#!/usr/bin/env bash
# meshplan plan 5951824be7ee
# plan digest: 5951824be7ee437f917ce38ad0bfd518d33cd969b17bf3311ccb08007cfea22e
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh" 1 "$@"
