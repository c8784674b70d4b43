#!/usr/bin/env bash
# The parts of the pipeline measured alone, for each family, and what the pipeline carries when environments cost nothing.
# Machine: 2 cores without a GPU; takes 25 minutes. Expected: the dummy sampler at 97 % (Doom) to 99 % of bare loops, random actions at
# 80 %, 10 % either way.
# Usage: benchmark/parts.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# With the engine of DeepMind Lab where python finds it, by PYTHONPATH for example, its part alone takes 6 minutes more.
if python -c "import deepmind_lab" 2> /dev/null; then
    python "$here/parts.py" --family dmlab --out "$here/results/parts_dmlab.json"
fi
for family in doom atari; do
    [ $family = doom ] && env_id=benchmark || env_id=Breakout-v5
    python "$here/parts.py" --family $family --env-id $env_id --num-workers 2 --num-envs-per-worker 16 --seconds 4 --repeats 10 \
        --out "$here/results/parts_$family.json"
    python "$here/../dummy_sampler.py" --family $family --null --num-envs-per-worker 16 --warm-up 2 --window 3 --windows 3 \
        --out "$here/results/null_$family.json"
    python "$here/../dummy_sampler.py" --family $family --env-id $env_id --sweep --num-workers 2 --warm-up 2 --window 3 --windows 3 \
        --out "$here/results/ceiling_$family.json"
done
