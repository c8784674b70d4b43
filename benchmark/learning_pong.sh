#!/usr/bin/env bash
# The curves of Pong, one seed, default flags and (shorter) without normalised pixels, beside CleanRL's published one of
# ppo_atari_envpool.py (results/cleanrl_pong.csv, read off the figure in its documentation). Started again with the same FOLDER it
# goes on where it was stopped.
# Machine: 2 cores without a GPU; takes 50 minutes. Expected: a mean return of 18 after 1 to 2 million steps.
# Usage: benchmark/learning_pong.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_pong}")
run() {  # NAME flags
    python "$here/../appo_atari.py" --env-id Pong-v5 --num-workers 2 --num-envs-per-worker 16 --device cpu --seed 1 \
        --train-dir "$out" --experiment "$@"
}
run ours_1 --total-timesteps 2000000
run plain_1 --total-timesteps 360000 --no-normalize-input
python "$here/collect.py" curves "$here/results/learning_pong.csv" "$out/ours_1" "$out/plain_1"
