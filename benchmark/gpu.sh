#!/usr/bin/env bash
# All that a machine with a GPU can tell, in one command of at most nine minutes: gpu.json and gpu.md in FOLDER (gpu.py says what).
# Where nothing can be installed from the network, WHEELS names a folder of wheels of what Python lacks there; they are used, not installed.
# Machine: one GPU and its cores. To try it without: benchmark/gpu.sh FOLDER --device cpu --num-workers 2 --num-envs-per-worker 8
# Usage: [WHEELS=FOLDER] benchmark/gpu.sh FRESH_FOLDER [FLAGS OF gpu.py]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir "$1"   # an error when it exists: old runs would be resumed
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    python3 -m pip install -q --no-index --no-deps --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
python3 "$here/gpu.py" "$@"
