#!/usr/bin/env bash
# The curves of `battle`: three seeds of ours with the default flags and three of Sample Factory 2.1.1 in alternation; then one of
# Sample Factory with our learning rate, and two more of ours. Nothing else should run beside it.
# Machine: 2 cores without a GPU; three hours in float32. Not run to the end yet: no seed 3 of Sample Factory, nothing after it.
# Usage: [SF_PYTHON=.venv-sf/bin/python] benchmark/learning_battle.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_battle}")
export SF_PYTHON=${SF_PYTHON:-python}
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
ours() {
    python "$here/../appo_doom.py" --env-id battle --seed "$1" --total-timesteps 650000 --num-workers 2 --train-dir "$out" \
        --experiment "ours_$1"
}
for seed in 1 2 3; do
    ours "$seed"
    "$here/sample_factory.sh" 1790 doom_battle "$seed" "$out/sf_$seed"
done
"$here/sample_factory.sh" 1790 doom_battle 1 "$out/sf-4e-4_1" --learning_rate=4e-4
ours 4
ours 5
python "$here/collect.py" curves "$here/results/learning_battle.csv" "$out"/ours_? "$out"/sf*_?
