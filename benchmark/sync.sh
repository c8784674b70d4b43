#!/usr/bin/env bash
# `basic` with --sync, three seeds, to lay beside the asynchronous curves of learning_basic.sh.
# Machine: 2 cores without a GPU; takes about 7 minutes. Expected: a return of 75 within 120,000 steps, later than without --sync.
# Usage: benchmark/sync.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/sync}")
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
for seed in 1 2 3; do
    python "$here/../appo_doom.py" --env-id basic --seed "$seed" --total-timesteps 160000 --num-workers 2 --batch-size 1024 --sync --device cpu \
        --train-dir "$out" --experiment "sync_$seed"
done
python "$here/collect.py" curves "$here/results/sync.csv" "$out"/sync_?
