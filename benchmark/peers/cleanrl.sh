#!/usr/bin/env bash
# One of CleanRL's scripts, for a number of steps: it writes its last events only when it ends by itself.
# Usage: CLEANRL=.. CLEANRL_PYTHON=.. cleanrl.sh SCRIPT.py ENV_ID STEPS SEED FRESH_FOLDER [further flags of its own]
# CLEANRL: a checkout of github.com/vwxyzjn/cleanrl (fe8d8a03 was measured). CLEANRL_PYTHON, for Atari:
#   python -m venv .venv-cleanrl && .venv-cleanrl/bin/pip install torch==2.13.0 gym==0.23.1 envpool==0.9.0 \
#       'numpy<2' tyro tensorboard 'setuptools<81'
# and for MuJoCo:
#   python -m venv .venv-cleanrl-mujoco && .venv-cleanrl-mujoco/bin/pip install torch==2.13.0 gymnasium==0.29.1 mujoco==2.3.3 imageio \
#       'numpy<2' tyro tensorboard 'setuptools<81'
set -euo pipefail
if [[ ${1:-} == -* || $# -lt 5 ]]; then
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \?//' >&2
    exit 2
fi
script=$(realpath "$CLEANRL")/cleanrl/$1 python=$(realpath -s "$CLEANRL_PYTHON")   # -s: a virtual environment's python is a link
mkdir -p "$5"
cd "$5"   # it writes to runs/ where it is started
"$python" "$script" --env-id "$2" --total-timesteps "$3" --seed "$4" --no-cuda "${@:6}" > out.log
