#!/bin/sh
# Two ranks with one worker each beside one process with two workers, the same number of samples in an update: frames/s, three rounds in
# alternation. Writes results/ranks.json, in which "ours" is the two ranks.
set -eu
cd "$(dirname "$0")/.."
runs=$(mktemp -d)
flags="--train-for-seconds 60 --total-timesteps 1000000000 --num-envs-per-worker 16 --train-dir $runs"
for round in 1 2 3; do
    for family in doom atari; do
        [ $family = doom ] && env=benchmark || env=Breakout-v5
        python appo_$family.py --env-id $env $flags --num-workers 2 --batch-size 1024 --experiment ${family}_one_$round
        torchrun --standalone --nproc-per-node 2 appo_$family.py --env-id $env $flags --num-workers 1 --batch-size 512 \
            --experiment ${family}_ours_$round
    done
done
python benchmark/collect.py rates benchmark/results/ranks.json "$runs"/*
