#!/usr/bin/env bash
# Frames/s of training on Breakout beside PufferLib 3.0.0's trainer, in alternation, three rounds: 32 games, Nature CNN, rollout 32, batch
# 1024, one epoch, float32 (pufferlib_atari.py says what differs). PufferLib with its worker processes, and as it was
# fastest among async, serial and native with one and two threads (2,610, 825, 3,013, 3,853, 3,127, 4,184 frames/s in one short run each).
# The first 20 s of each run are warm-up. Machine: 2 cores without a GPU; takes 9 minutes.
# Usage: PUFFERLIB_PYTHON=.. benchmark/peers_pufferlib.sh [FRESH FOLDER]
# PUFFERLIB_PYTHON: a virtual environment with the trainer, without PufferLib's own games (whose build downloads a graphics library):
#   python -m venv .venv-puffer; PATH=$PWD/.venv-puffer/bin:/usr/bin:/bin   # a CUDA compiler on the PATH would be used
#   pip install torch==2.13.0 'numpy<2' 'Cython>=3' setuptools wheel pybind11
#   pip download --no-deps --no-build-isolation --no-binary pufferlib --no-clean pufferlib==3.0.0   # fails, but leaves the source unpacked
#     in pip's temporary folder; in its setup.py `c_extension_paths = []` must stand beside `c_extensions = []`; then, in that folder:
#   NO_OCEAN=1 pip install --no-build-isolation --no-deps .
#   pip install torch==2.13.0 'numpy<2' 'gym<=0.23' 'gymnasium<=0.29.1' 'pettingzoo<=1.24.1' 'shimmy[gym-v21]' psutil pynvml rich \
#     rich_argparse imageio pyro-ppl heavyball envpool==1.2.5
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/peers_pufferlib}")
python=$(realpath -s "$PUFFERLIB_PYTHON")
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
pufferlib() {  # NAME MODE THREADS
    mkdir "$out/$1"
    "$python" -W ignore "$here/pufferlib_atari.py" "$out/$1" 60 "$2" "$3" > "$out/$1.txt" 2>&1
}
for round in 1 2 3; do
    python "$here/../appo_atari.py" --env-id Breakout-v5 --num-workers 2 --num-envs-per-worker 16 --rollout 32 --batch-size 1024 --num-epochs 1 \
        --device cpu --precision float32 --train-for-seconds 55 --total-timesteps 100000000 --train-dir "$out" --experiment "atari_ours_$round"
    pufferlib "atari_puffer-async_$round" async 1
    pufferlib "atari_puffer-native_$round" native 2
done
python "$here/collect.py" rates "$here/results/peers_pufferlib.json" "$out"/atari_*_?
