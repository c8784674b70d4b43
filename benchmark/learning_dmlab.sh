#!/usr/bin/env bash
# The curve of DeepMind Lab's rooms_collect_good_objects_train, one seed, default flags but for the smaller network, with which two cores see
# three times the frames; and the same with --sync. Started again with the same FOLDER it goes on where it was stopped.
# Machine: 2 cores without a GPU, with deepmind_lab where python finds it; takes 3 hours. Expected: a return of 5 after 300,000 steps.
# Usage: benchmark/learning_dmlab.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_dmlab}")
run() {  # NAME STEPS FLAGS
    python "$here/../appo_dmlab.py" --env-id rooms_collect_good_objects_train --encoder convnet --num-workers 2 --batch-size 1024 \
        --total-timesteps "$2" --train-dir "$out" --experiment "$1" "${@:3}"
}
run ours_1 1000000
run sync_1 500000 --sync
python "$here/collect.py" curves "$here/results/learning_dmlab.csv" "$out/ours_1" "$out/sync_1"
