#!/usr/bin/env bash
# The curves of `battle`: five seeds of ours with the default flags and three of Sample Factory 2.1.1, in alternation.
# Machine: 2 cores without a GPU; by estimate 100 minutes. Not run to the end yet.
# Usage: [SF_PYTHON=.venv-sf/bin/python] benchmark/learning_battle.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_battle}")
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
for seed in 1 2 3 4 5; do
    python "$here/../appo_doom.py" --env-id battle --seed "$seed" --total-timesteps 700000 --num-workers 2 --train-dir "$out" \
        --experiment "ours_$seed"
    ((seed > 3)) || SF_PYTHON=${SF_PYTHON:-python} "$here/sample_factory.sh" 1200 doom_battle "$seed" "$out/sf_$seed"
done
python "$here/collect.py" curves "$here/results/learning_battle.csv" "$out"/ours_? "$out"/sf_?
