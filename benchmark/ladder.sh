#!/usr/bin/env bash
# The alternated table of ladder.md: one flag changed a row, three rounds, frames/s while learning `benchmark`.
# Machine: 2 cores without a GPU; takes 14 minutes. Expected: 32 games a worker faster, two splits and 8 games slower, the others ties.
# Usage: benchmark/ladder.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/ladder}")
run() {
    python "$here/../appo_doom.py" --env-id benchmark --num-workers 2 --rollout 32 --batch-size 1024 --device cpu --train-for-seconds 38 \
        --total-timesteps 100000000 --train-dir "$out" --experiment "$@" --restart-behavior overwrite
}
for round in 1 2 3; do
    run "default_$round"
    run "splits2_$round" --worker-num-splits 2
    run "games8_$round" --num-envs-per-worker 8
    run "games32_$round" --num-envs-per-worker 32
    run "ahead0_$round" --max-batches-ahead 0
    run "threads2_$round" --learner-threads 2
done
python "$here/collect.py" rates "$here/results/ladder.json" "$out"/*_?
