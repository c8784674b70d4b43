#!/usr/bin/env bash
# Frames/s of training on `benchmark`, ours and Sample Factory 2.1.1, in alternation, three times each; 2 workers x 16 games,
# rollout 32, batch 1024, GRU-512, inputs normalised, one epoch. 90 s a run, the first 20 s of each are warm-up.
# Machine: 2 cores without a GPU; takes 10 minutes. Expected: a ratio of 1.8 to 1.9 in float32.
# Usage: [SF_PYTHON=.venv-sf/bin/python] benchmark/throughput.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/throughput}")
for round in 1 2 3; do
    python "$here/../appo_doom.py" --env-id benchmark --num-workers 2 --num-envs-per-worker 16 --rollout 32 --batch-size 1024 --device cpu \
        --train-for-seconds 85 --total-timesteps 100000000 --train-dir "$out" --experiment "ours_$round" --restart-behavior overwrite
    SF_PYTHON=${SF_PYTHON:-python} "$here/sample_factory.sh" 90 doom_benchmark "$round" "$out/sf_$round"
done
python "$here/collect.py" rates "$here/results/throughput.json" "$out"/ours_? "$out"/sf_?
