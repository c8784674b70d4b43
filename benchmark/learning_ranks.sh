#!/bin/sh
# Learning `basic` with ranks under torchrun. Two ranks beside one process with the same games and the same samples in an update; and one,
# two and four small ranks, whose samples add up. Three seeds each. Writes results/seeds_ranks_1.csv, _2.csv and _4.csv.
set -eu
cd "$(dirname "$0")/.."
small="num-workers=1 num-envs-per-worker=8 batch-size=256"
for seed in 1 2 3; do
    for ranks in 1 2 4; do
        launcher="torchrun --standalone --nproc-per-node $ranks"
        [ $ranks = 1 ] && launcher=python && same="num-workers=2 batch-size=1024"
        [ $ranks = 2 ] && same="num-workers=1 batch-size=512"
        [ $ranks = 4 ] && same=$small
        python benchmark/seeds.py --seeds $seed --folder runs/ranks_$ranks --out benchmark/results/seeds_ranks_$ranks.csv --goals 75 \
            --settings "$same" "$small" -- $launcher appo_doom.py --env-id basic --total-timesteps 100000
    done
done
