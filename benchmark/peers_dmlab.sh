#!/usr/bin/env bash
# Frames/s of training on DeepMind Lab beside Sample Factory, in alternation, three rounds: dmlab_benchmark (rooms_collect_good_objects_train),
# IMPALA's ResNet and LSTM-256, instructions read, inputs normalised, 32 games, rollout 32, batch 1024, one epoch.
# The first 20 s of learning of each run are warm-up. Machine: 2 cores without a GPU; takes 18 minutes.
# Usage: SF_PYTHON=.. benchmark/peers_dmlab.sh [FRESH FOLDER]     SF_PYTHON: see sample_factory.sh
#   deepmind_lab must be where both pythons find it, by PYTHONPATH for example.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/peers_dmlab}")
export LP_NUM_THREADS=0   # of Mesa's renderer, which for Sample Factory too is faster without threads
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
for round in 1 2 3; do
    python "$here/../appo_dmlab.py" --train-dir "$out" --experiment "dmlab_ours_$round" --env-id dmlab_benchmark --device cpu \
        --precision float32 --num-workers 2 --num-envs-per-worker 16 --worker-num-splits 1 --rollout 32 --batch-size 1024 \
        --train-for-seconds 150 --total-timesteps 100000000
    "$here/sample_factory.sh" 200 dmlab_benchmark "$round" "$out/dmlab_sf_$round"
done
python "$here/collect.py" rates "$here/results/peers_dmlab.json" "$out"/dmlab_*_?
