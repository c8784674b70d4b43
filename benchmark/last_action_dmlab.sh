#!/usr/bin/env bash
# The last action and the last reward as inputs of the core: a level of DeepMind Lab with and without them, one seed each, the smaller network.
# Started again with the same FOLDER it goes on where it was stopped.
# Machine: 2 cores without a GPU, with deepmind_lab where python finds it; takes 30 minutes.
# Usage: benchmark/last_action_dmlab.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/last_action_dmlab}")
run() {  # NAME FLAGS
    python "$here/../appo_dmlab.py" --env-id rooms_collect_good_objects_train --encoder convnet --num-workers 2 --batch-size 1024 \
        --total-timesteps 500000 --train-dir "$out" --experiment "$@"
}
run ours_1 --no-last-action-reward
run last-action_1 --last-action-reward
python "$here/collect.py" curves "$here/results/last_action_dmlab.csv" "$out/ours_1" "$out/last-action_1"
