#!/usr/bin/env bash
# Sample Factory 2.1.1 with the settings of our benchmarks, for a number of seconds (its own --train_for_seconds does not stop it).
# Usage: sample_factory.sh SECONDS ENV SEED FOLDER [further flags of its own]
# Needs its own virtual environment, whose python is in $SF_PYTHON:
#   python -m venv .venv-sf && .venv-sf/bin/pip install torch==2.13.0 sample-factory==2.1.1 vizdoom
set -euo pipefail
seconds=$1 env=$2 seed=$3 folder=$4
shift 4
mkdir -p "$folder"
cd "$folder"   # its engines write _vizdoom.ini where they are started
# A process session of its own, so that all of it can be ended: when its main process dies its workers and engines go on.
setsid "${SF_PYTHON:-python}" -m sf_examples.vizdoom.train_vizdoom --env="$env" --seed="$seed" --algo=APPO --device=cpu \
    --env_frameskip=4 --use_rnn=True --num_workers=2 --num_envs_per_worker=16 --worker_num_splits=2 --num_epochs=1 --rollout=32 \
    --recurrence=32 --batch_size=1024 --wide_aspect_ratio=False --train_dir="$folder" --experiment=sf "$@" > "$folder/out.txt" 2>&1 &
session=$!
disown
files=()
stop() {
    pids=$(pgrep -s "$session" || true)
    for pid in $pids; do
        while read -r file; do files+=("$file"); done < <(grep -o '/dev/shm/[^ ]*' "/proc/$pid/maps" 2> /dev/null | sort -u)
    done
    for pid in $pids; do kill -KILL "$pid" 2> /dev/null || true; done
    for file in "${files[@]}"; do rm -f "$file"; done
}
trap stop EXIT
for _ in $(seq "$seconds"); do
    sleep 1
    kill -0 "$session" 2> /dev/null || { echo "sample-factory ended by itself, see $folder/out.txt" >&2; exit 1; }
done
