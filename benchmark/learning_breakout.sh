#!/usr/bin/env bash
# The curve of Breakout, one seed, default flags, beside CleanRL's published one of ppo_atari_envpool.py (results/cleanrl_breakout.csv, read off
# the figure in its documentation). Started again with the same FOLDER it goes on where it was stopped.
# Machine: 2 cores without a GPU; takes 2 hours. Expected: a mean return of 200 after about 3 million steps, 340 at the end.
# Usage: benchmark/learning_breakout.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_breakout}")
python "$here/../appo_atari.py" --env-id Breakout-v5 --num-workers 2 --num-envs-per-worker 16 --device cpu --seed 1 \
    --total-timesteps 6000000 --train-dir "$out" --experiment ours_1
python "$here/collect.py" curves "$here/results/learning_breakout.csv" "$out/ours_1"
