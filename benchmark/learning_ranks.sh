#!/usr/bin/env bash
# Learning `basic` with ranks under torchrun. Two ranks beside one process with the same games and the same samples in an update; and one,
# two and four small ranks, whose samples add up. Three seeds each. Started again with the same FOLDER it goes on where it was stopped.
# Machine: 2 cores; takes 26 minutes. Writes results/seeds_ranks_1.csv, _2.csv and _4.csv.
# Usage: benchmark/learning_ranks.sh [FOLDER]
set -euo pipefail
out=$(realpath -m "${1:-runs/learning_ranks}")
cd "$(dirname "$0")/.."
small="num-workers=1 num-envs-per-worker=8 batch-size=256"
for seed in 1 2 3; do
    for ranks in 1 2 4; do
        run="torchrun --standalone --nproc-per-node $ranks appo_doom_multigpu.py"
        [ $ranks = 1 ] && run="python appo_doom.py" && same="num-workers=2 batch-size=1024"
        [ $ranks = 2 ] && same="num-workers=1 batch-size=512"
        [ $ranks = 4 ] && same=$small
        python benchmark/seeds.py --seeds $seed --folder "$out/$ranks" --out "$out/seeds_ranks_$ranks.csv" --goals 75 \
            --settings "$same" "$small" -- $run --env-id basic --total-timesteps 100000 --device cpu
    done
done
cp "$out"/seeds_ranks_?.csv benchmark/results
