#!/usr/bin/env bash
# Does it help to learn from old rollouts again, does it matter from which, and what does it cost?
#   learning: twelve minutes of each of three games with appo_atari.py, the same with two epochs (as many optimiser steps a frame as with half
#       of each batch replayed), uniform, attentive, and elite with strategies 1 and 3; results/replay.csv
#   defaults: what the coefficients of the loss of replayed samples do in Breakout; results/seeds_replay.csv
#   speed: frames/s of Breakout in alternation, three rounds, and what replay adds to each thread's work; results/replay_{speed,parts}.json
# Learning and defaults, started again with the same FOLDER, go on where they were stopped; of a run that was stopped and resumed only the first
# twelve minutes count. Speed wants a fresh FOLDER.
# Machine: 2 cores without a GPU; takes 3.7 hours a seed, 1.1 hours a seed, 17 minutes. Nothing else should run beside it.
# Usage: [SEEDS="1 2 3"] benchmark/replay.sh learning|defaults|speed [FOLDER]
set -euo pipefail
what=${1:?learning, defaults or speed}
out=$(realpath -m "${2:-runs/replay_$what}")
cd "$(dirname "$0")/.."
train() {  # CSV flags of seeds.py
    local csv=$1
    shift
    # shellcheck disable=SC2086  # the seeds are words
    python benchmark/seeds.py --seeds ${SEEDS:-1 2 3} --folder "$out" --out "$out/$csv" "$@" -- \
        python appo_atari_replay.py --train-for-seconds 720 --total-timesteps 5000000
    cp "$out/$csv" benchmark/results
}
run() {  # NAME flags. The beginning of a run of the default length, where most candidates are drawn
    python appo_atari_replay.py --env-id Breakout-v5 --train-for-seconds 45 --train-dir "$out" --experiment "$@"
}
case $what in
learning)
    train replay.csv --grid "env-id=Pong-v5,Breakout-v5,Seaquest-v5" --settings "replay-share=0" "replay-share=0 num-epochs=2" "replay=uniform" \
        "replay=attentive" "replay=elite elite-strategy=1" "replay=elite elite-strategy=3" ;;
defaults)
    train seeds_replay.csv --settings "" "value-cloning-coef=0.005" "policy-cloning-coef=0" "policy-cloning-coef=0 value-cloning-coef=0.005" \
        "replay-kl-mask=0.3 value-cloning-coef=0.005" ;;
speed)
    mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
    for round in 1 2 3; do
        run "none_$round" --replay-share 0
        run "two-epochs_$round" --replay-share 0 --num-epochs 2
        run "uniform_$round"
        run "attentive_$round" --replay attentive
        run "elite_$round" --replay elite
        run "elite-kl_$round" --replay elite --replay-distance kl
    done
    python benchmark/collect.py rates benchmark/results/replay_speed.json "$out"/*_?
    python benchmark/replay_parts.py --out benchmark/results/replay_parts.json ;;
*) echo "error: learning, defaults or speed, not $what" >&2; exit 2 ;;
esac
