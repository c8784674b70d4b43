#!/usr/bin/env bash
# Two ranks with one worker each beside one process with two workers, the same number of samples in an update: frames/s, three rounds in
# alternation. Machine: 2 cores; takes 15 minutes, and nothing else may run. Writes results/ranks.json, in which "ours" is the two ranks.
# Usage: benchmark/ranks.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/ranks}")
mkdir -p "${out%/*}" && mkdir "$out" "$out.files"   # an error when it exists: an old run would be resumed
cp "$here"/../appo_{doom,atari}.py "$out.files"
for family in doom atari; do python "$here/../carry.py" --add appo_doom_multigpu.py "$out.files/appo_$family.py"; done
flags="--train-for-seconds 60 --total-timesteps 1000000000 --num-envs-per-worker 16 --device cpu"
for round in 1 2 3; do
    for family in doom atari; do
        [ $family = doom ] && env=benchmark || env=Breakout-v5
        file="$out.files/appo_$family"
        python "$file.py" --env-id $env $flags --num-workers 2 --batch-size 1024 --train-dir "$out" --experiment ${family}_one_$round
        torchrun --standalone --nproc-per-node 2 "${file}_multigpu.py" --env-id $env $flags --num-workers 1 --batch-size 512 \
            --train-dir "$out" --experiment ${family}_ours_$round
    done
done
python "$here/collect.py" rates "$here/results/ranks.json" "$out"/*
