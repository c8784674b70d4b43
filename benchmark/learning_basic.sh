#!/usr/bin/env bash
# The curves of `basic`: three seeds of ours with the default flags and of Sample Factory 2.1.1, in alternation.
# Machine: 2 cores without a GPU; takes about 25 minutes. Expected: a mean raw return of 75 in every run of ours within 100,000 steps.
# Usage: [SF_PYTHON=.venv-sf/bin/python] benchmark/learning_basic.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_basic}")
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
for seed in 1 2 3; do
    python "$here/../appo_doom.py" --env-id basic --seed "$seed" --total-timesteps 160000 --num-workers 2 --device cpu --train-dir "$out" \
        --experiment "ours_$seed"
    SF_PYTHON=${SF_PYTHON:-python} "$here/sample_factory.sh" 330 doom_basic "$seed" "$out/sf_$seed"
done
python "$here/collect.py" curves "$here/results/learning_basic.csv" "$out"/ours_? "$out"/sf_?
