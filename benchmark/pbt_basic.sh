#!/usr/bin/env bash
# A population of four on `basic`, of which three start with a learning rate that learns nothing: what population-based training makes of
# it, and the history of its settings. At each exchange the worst becomes a copy of the best.
# Machine: 2 cores without a GPU; 24 minutes, with other work beside a third of it.
# Usage: benchmark/pbt_basic.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/pbt_basic}")
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
python "$here/../appo_pbt_doom.py" --env-id basic --num-policies 4 --num-workers 2 --with-pbt --pbt-replace-fraction 0.25 \
    --pbt-start-mutation 40000 --pbt-period-env-steps 15000 --total-timesteps 150000 \
    --policy-settings '{"1": {"learning_rate": 1e-7}, "2": {"learning_rate": 0.01}, "3": {"learning_rate": 0.03}}' \
    --train-dir "$out" --experiment population
python "$here/collect.py" population "$here/results/pbt_basic.csv" "$out/population"
