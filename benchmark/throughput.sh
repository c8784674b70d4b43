#!/usr/bin/env bash
# Frames/s of training against the number of environments, for each family, and beside each the ceiling: the same environments with
# random actions and no learner (dummy_sampler.py). In alternation, two rounds. Doom: `benchmark`, GRU-512; Atari: Breakout, Nature CNN.
# Inputs normalised, rollout 32, batch 1024 (BATCH= for what the files choose by themselves), one epoch. The first 20 s of each training are warm-up.
# Figure 3 and table 1 of the Sample Factory paper are the models; its figures are in results/paper_throughput.csv.
# Machine: any, a worker for each core; on 2 cores without a GPU it takes 20 minutes, and training reaches 13 to 40 % of the ceiling:
# the network takes the rest.
# Usage: [WORKERS=16] [GAMES="8 16 32 64"] [BATCH=4096] [DEVICE=cpu] [PRECISION=float32] [OUT=FILE.json] \
#     benchmark/throughput.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/throughput}")
result=$(realpath "${OUT:-$here/results/throughput.json}")   # its folder must exist
workers=${WORKERS:-$(env -u OMP_NUM_THREADS nproc)}
batch=${BATCH-1024}
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
runs=()
for round in 1 2; do
    for games in ${GAMES:-4 8 16 32}; do
        for family in doom atari; do
            [ $family = doom ] && env_id=benchmark || env_id=Breakout-v5
            python "$here/../dummy_sampler.py" --family $family --env-id $env_id --num-workers "$workers" --num-envs-per-worker "$games" \
                --warm-up 3 --window 4 --windows 3 --out "$out/${family}_${games}_$round.json"
            python "$here/../appo_$family.py" --env-id $env_id --num-workers "$workers" --num-envs-per-worker "$games" --rollout 32 \
                --num-epochs 1 ${batch:+--batch-size "$batch"} --device "${DEVICE:-auto}" --precision "${PRECISION:-auto}" --normalize-input \
                --train-for-seconds 45 --total-timesteps 1000000000 --train-dir "$out" \
                --experiment "${family}_${games}_$round"
            runs+=("$out/${family}_${games}_$round")
        done
    done
done
python "$here/collect.py" throughput "$result" "${runs[@]}"
