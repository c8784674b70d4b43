#!/usr/bin/env bash
# What PopArt (values in units of their own, for each task) gains on two tasks of DeepMind Lab at once: in one of them objects that are
# rarely found are worth +1 and -1, in the other ones are frequent and tens are to be had. One seed, default flags but for the smaller
# network. Started again with the same FOLDER it goes on where it was stopped.
# Machine: 2 cores without a GPU, with deepmind_lab where python finds it; takes 75 minutes. Expected: see benchmark/README.md.
# Usage: benchmark/popart_dmlab.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/popart_dmlab}")
tasks=(rooms_collect_good_objects_train rooms_exploit_deferred_effects_train)
run() {  # NAME FLAGS
    python "$here/../appo_dmlab.py" --env-id "${tasks[0]},${tasks[1]}" --encoder convnet --num-workers 2 --batch-size 1024 \
        --total-timesteps 500000 --train-dir "$out" --experiment "$@"
}
run ours_1
run no-popart_1 --no-normalize-returns
for task in "${tasks[@]}"; do
    python "$here/collect.py" "tasks/$task/episodic_return" "$here/results/popart_$task.csv" "$out/ours_1" "$out/no-popart_1"
done
