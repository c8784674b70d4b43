#!/usr/bin/env bash
# Frames/s of training beside the peers, in alternation, three rounds, each peer in its own virtual environment.
#   Doom: `benchmark`, GRU-512, inputs normalised, 32 games, rollout 32, batch 1024, one epoch: ours, Sample Factory.
#   Atari: Breakout, Nature CNN, no recurrence. Ours and Sample Factory: 64 games, rollout 32, batch 1024, one epoch; ours normalises its
#   inputs, as is its default, Sample Factory's example does not. CleanRL at its defaults (8 games, 128 steps, minibatches of 256, four
#   epochs) and with one epoch; Stable-Baselines3's PPO with the same settings as CleanRL.
# All compute in float32; with PRECISION=bfloat16 ours does not. The first 20 s of each run are warm-up.
# Machine: 2 cores without a GPU; takes 31 minutes.
# Expected: Doom 1.7 to 1.9 x and Atari 1.65 to 1.75 x Sample Factory, more of the others.
# Usage: SF_PYTHON=.. CLEANRL_PYTHON=.. CLEANRL=.. SB3_PYTHON=.. benchmark/peers.sh [FRESH FOLDER]
#   SF_PYTHON: see sample_factory.sh
#   CLEANRL: a checkout of github.com/vwxyzjn/cleanrl (fe8d8a03 was measured); CLEANRL_PYTHON:
#     python -m venv .venv-cleanrl && .venv-cleanrl/bin/pip install torch==2.13.0 gym==0.23.1 envpool==0.9.0 'numpy<2' tyro tensorboard 'setuptools<81'
#   SB3_PYTHON: python -m venv .venv-sb3 && .venv-sb3/bin/pip install torch==2.13.0 'stable-baselines3[extra]==2.9.2' ale-py==0.12.1
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/peers}")
for python in SF_PYTHON CLEANRL_PYTHON SB3_PYTHON; do
    declare "$python=$(realpath -s "${!python}")"
done
CLEANRL=$(realpath "$CLEANRL")
export SF_PYTHON
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
ours() {  # FILE NAME flags
    python "$here/../$1.py" --train-dir "$out" --experiment "$2" --device cpu --precision "${PRECISION:-float32}" --normalize-input \
        --num-workers 2 --worker-num-splits 1 --rollout 32 --batch-size 1024 --num-epochs 1 --max-batches-ahead 1 \
        --train-for-seconds 55 --total-timesteps 100000000 "${@:3}"
}
cleanrl() {  # NAME STEPS EPOCHS; a fixed number of steps, because it writes its last events only when it ends by itself
    mkdir "$out/$1"
    (cd "$out/$1" && "$CLEANRL_PYTHON" "$CLEANRL/cleanrl/ppo_atari_envpool.py" --env-id Breakout-v5 --seed "$round" --no-cuda \
        --total-timesteps "$2" --update-epochs "$3" > out.log)
}
sb3() {  # NAME STEPS EPOCHS
    mkdir "$out/$1"
    "$SB3_PYTHON" "$here/stable_baselines3_atari.py" "$out/$1" "$round" "$2" "$3"
}
for round in 1 2 3; do
    ours appo_doom "doom_ours_$round" --env-id benchmark --num-envs-per-worker 16 --rnn-type gru
    "$here/sample_factory.sh" 75 doom_benchmark "$round" "$out/doom_sf_$round"
    ours appo_atari "atari_ours_$round" --env-id Breakout-v5 --num-envs-per-worker 32 --rnn-type none --encoder nature
    "$here/sample_factory.sh" 65 atari_breakout "$round" "$out/atari_sf_$round"
    cleanrl "atari_cleanrl_$round" 16384 4
    cleanrl "atari_cleanrl-1-epoch_$round" 24576 1
    sb3 "atari_sb3_$round" 10240 4
    sb3 "atari_sb3-1-epoch_$round" 20480 1
done
python "$here/collect.py" rates "$here/results/peers${PRECISION:+_$PRECISION}.json" "$out"/{doom,atari}_*_?
