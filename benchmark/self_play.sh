#!/usr/bin/env bash
# Self-play: two policies learn `duel` from each other in a small arena (benchmark/arena.py); then they play against themselves of an
# early time, and against the game's bots, whom they have never met.
# Machine: 2 cores without a GPU; takes an hour. Expected: they win all games against their early selves, and one of them nearly all
# against the bots.
# Usage: [RESULTS=FOLDER] benchmark/self_play.sh [FRESH FOLDER]
set -euo pipefail
if [[ ${1:-} == -* || $# -gt 1 ]]; then
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \?//' >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/self_play}") results=$(realpath -m "${RESULTS:-$here/results}")
mkdir -p "$results" "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
python "$here/arena.py" "$out/arena.wad"
appo() { python "$here/../appo_pbt_doom.py" --train-dir "$out" "$@"; }
play() { python "$here/../evaluate.py" "$out/$1" "${@:2}"; }
appo --experiment duel --env-id duel --match-wad "$out/arena.wad" --num-policies 2 --num-workers 2 --num-envs-per-worker 8 \
     --total-timesteps 50000
cp -r "$out/duel" "$out/early"
appo --experiment duel --total-timesteps 750000
jobs=()   # two evaluations at a time, each with one core
for policy in 0 1; do
    OMP_NUM_THREADS=1 play duel --opponents "$out/early" --policies $policy --episodes 50 > "$out/early_$policy.txt" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
jobs=()
for experiment in duel early; do
    OMP_NUM_THREADS=1 play $experiment --env-id duel_bots --episodes 50 > "$out/bots_$experiment.txt" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
(cd "$out" && tail -n +1 early_0.txt early_1.txt bots_duel.txt bots_early.txt) | grep -Ev "^(override|by /)" | tee "$results/self_play.txt"
play duel --opponents "$out/early" --policies 0 --episodes 1 --save-video
python "$here/animation.py" "$results/self_play.gif" "$out/duel/video.mp4" --height 120 --megabytes 1.5
