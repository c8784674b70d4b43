#!/usr/bin/env bash
# The curves of Pong, one seed, default flags and (shorter) without normalised pixels, beside CleanRL's published one of ppo_atari_envpool.py (results/cleanrl_pong.csv, read off
# the figure in its documentation). A run that was stopped goes on where it was.
# Machine: 2 cores without a GPU; takes 40 minutes. Expected: a mean return of 18 after about 1 million steps.
# Usage: benchmark/learning_pong.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_pong}")
run() {
    python "$here/../appo_atari.py" --env-id Pong-v5 --num-workers 2 --num-envs-per-worker 16 --device cpu --seed 1 --train-dir "$out" \
        --experiment "$@"
}
run ours_1 --total-timesteps 1500000
run plain_1 --total-timesteps 360000 --no-normalize-input
python "$here/collect.py" curves "$here/results/learning_pong.csv" "$out/ours_1" "$out/plain_1"
