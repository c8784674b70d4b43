#!/usr/bin/env bash
# A recipe from the wild: the settings of a Sample Factory 2 model of Atari that somebody has published, as far as our flags can say them
# (benchmark/README.md has the table), half an hour of each of three games. Beside them: our defaults, in the curves of half_hour.sh.
# Started again with the same FOLDER it goes on where it was stopped.
# Machine: 2 cores without a GPU; takes 90 minutes, and nothing else should run beside it. With a GPU: drop the limit of time, WORKERS=16 GAMES=2.
# Usage: [WORKERS=2] [GAMES=16] benchmark/recipe_appo_atari.sh [FOLDER]
set -euo pipefail
out=$(realpath -m "${1:-runs/recipe_appo_atari}")
cd "$(dirname "$0")/.."
python benchmark/seeds.py --seeds 1 --folder "$out" --out "$out/recipe_appo_atari.csv" --grid "env-id=Asteroids-v5,Boxing-v5,Freeway-v5" -- \
    python appo_atari.py --num-workers "${WORKERS:-2}" --num-envs-per-worker "${GAMES:-16}" --rollout 128 --batch-size 1024 \
    --num-batches-per-epoch 8 --num-epochs 4 --learning-rate 3.033891184e-4 --anneal-lr --total-timesteps 10000000 \
    --exploration-loss entropy --ent-coef 4.677351413e-4 --vf-coef 0.5 --max-grad-norm 0 --clip-coef 0.1 --ppo-clip-value 1.0 \
    --gamma 0.99 --vtrace-lambda 0.95 --max-policy-lag 1000 --rnn-type none --normalize-input --train-for-seconds 1800
cp "$out/recipe_appo_atari.csv" benchmark/results
