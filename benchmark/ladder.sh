#!/usr/bin/env bash
# The alternated tables of ladder.md: one flag changed a row, three rounds, frames/s while learning `benchmark` (doom) or Breakout (atari).
# Machine: 2 cores without a GPU; takes 16 (doom) or 21 minutes (atari). Expected: Doom 32 games a worker faster, two splits and 8 games
# slower, the others ties; Atari two splits, 8 games and two learner threads slower, the others ties.
# Usage: benchmark/ladder.sh doom|atari [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
family=${1:?doom or atari}
out=$(realpath -m "${2:-runs/ladder_$family}")
case $family in doom) env_id=benchmark ;; atari) env_id=Breakout-v5 ;; *) echo "error: doom or atari, not $family" >&2; exit 2 ;; esac
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
run() {  # NAME flags
    python "$here/../appo_$family.py" --env-id $env_id --num-workers 2 --rollout 32 --batch-size 1024 --device cpu --train-for-seconds 38 \
        --total-timesteps 100000000 --train-dir "$out" --experiment "$@"
}
for round in 1 2 3; do
    run "default_$round"
    run "splits2_$round" --worker-num-splits 2
    run "games8_$round" --num-envs-per-worker 8
    run "games32_$round" --num-envs-per-worker 32
    run "ahead0_$round" --max-batches-ahead 0
    run "threads2_$round" --learner-threads 2
    if [ $family = atari ]; then
        run "batch256_$round" --batch-size 256
        run "plain_$round" --no-normalize-input
    fi
done
python "$here/collect.py" rates "$here/results/ladder_$family.json" "$out"/*_?
