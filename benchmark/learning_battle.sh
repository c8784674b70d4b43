#!/usr/bin/env bash
# The curves of `battle`: three seeds of ours with the default flags and three of Sample Factory 2.1.1 in alternation; then two more of
# ours, and one of Sample Factory with our learning rate. Nothing else should run beside it.
# Machine: 2 cores without a GPU; three and a half hours in float32.
# Usage: [SF_PYTHON=.venv-sf/bin/python] benchmark/learning_battle.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_battle}")
export SF_PYTHON=${SF_PYTHON:-python}
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
ours() {
    python "$here/../appo_doom.py" --env-id battle --seed "$1" --total-timesteps 650000 --num-workers 2 --device cpu --train-dir "$out" \
        --experiment "ours_$1"
}
for seed in 1 2 3; do
    ours "$seed"
    "$here/sample_factory.sh" 1790 doom_battle "$seed" "$out/sf_$seed"
done
ours 4
ours 5
"$here/sample_factory.sh" 1790 doom_battle 1 "$out/sf-4e-4_1" --learning_rate=4e-4
python "$here/collect.py" curves "$here/results/learning_battle.csv" "$out"/ours_? "$out"/sf*_?
