#!/usr/bin/env bash
# Self-play: two policies learn `duel` from each other; then they play against themselves of an early time, and against the game's bots.
# Machine: 2 cores without a GPU; by estimate 2 hours. Not run yet.
# Usage: benchmark/self_play.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/self_play}")
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
duel() { python "$here/../appo_pbt_doom.py" --train-dir "$out" --experiment duel "$@"; }
duel --env-id duel --num-policies 2 --num-workers 2 --num-envs-per-worker 8 --total-timesteps 100000
cp -r "$out/duel" "$out/early"
duel --total-timesteps 2000000
{
    duel --evaluate --opponents early --eval-episodes 50 --save-video
    duel --evaluate --env-id duel_bots --eval-episodes 100
} | tee "$out/matches.txt"
cp "$out/matches.txt" "$here/results/self_play.txt"
