#!/usr/bin/env bash
# Sample Factory 2.1.1 with the settings of our benchmarks, for a number of seconds (its own --train_for_seconds does not stop it).
# Usage: sample_factory.sh SECONDS ENV SEED FOLDER [further flags of its own]     ENV: doom_benchmark, atari_breakout, ...
# Needs its own virtual environment, whose python is in $SF_PYTHON (envpool 0.9.0 is the newest that works with its gymnasium):
#   python -m venv .venv-sf && .venv-sf/bin/pip install torch==2.13.0 sample-factory==2.1.1 vizdoom envpool==0.9.0 'gym==0.26.2' 'shimmy<1'
# and another for MuJoCo:
#   python -m venv .venv-sf-mujoco && .venv-sf-mujoco/bin/pip install torch==2.13.0 sample-factory==2.1.1 gymnasium==0.29.1 mujoco==2.3.3 \
#       imageio 'numpy<2'
set -euo pipefail
if [[ ${1:-} == -* || $# -lt 4 ]]; then
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \?//' >&2
    exit 2
fi
seconds=$1 env=$2 seed=$3 folder=$(realpath -m "$4")
shift 4
[[ ${SF_PYTHON:-} != */* ]] || SF_PYTHON=$(realpath -s "$SF_PYTHON")   # -s: a virtual environment's python is a link
common=(--env="$env" --seed="$seed" --algo=APPO --device=cpu --env_frameskip=4 --num_workers=2 --rollout=32 --batch_size=1024
        --num_batches_per_epoch=1 --num_epochs=1 --train_dir="$folder" --experiment=sf)
deadline=45   # seconds in which all of its workers are there
case $env in
    doom_*) module=sf_examples.vizdoom.train_vizdoom
            flags=(--use_rnn=True --recurrence=32 --num_envs_per_worker=16 --worker_num_splits=2 --wide_aspect_ratio=False) ;;
    atari_*) module=sf_examples.envpool.atari.train_envpool_atari   # 64 agents: 2 workers with a pool of 32 games each
            flags=(--use_rnn=False --recurrence=1 --env_agents=32 --num_envs_per_worker=1 --worker_num_splits=1 --async_rl=True
                   --serial_mode=False --with_vtrace=False) ;;
    dmlab_*) module=sf_examples.dmlab.train_dmlab   # deepmind_lab must be where its python finds it
             # Without the last flag it plays for most of a minute at random before it begins.
             deadline=90
             flags=(--use_rnn=True --recurrence=32 --num_envs_per_worker=16 --worker_num_splits=2
                    --encoder_conv_architecture=resnet_impala --dmlab_use_level_cache=False --decorrelate_envs_on_one_worker=False) ;;
    mujoco_*) module=sf_examples.mujoco.train_mujoco   # its own recipe, but for the number of workers
              flags=(--env_frameskip=1 --rollout=64 --num_batches_per_epoch=4 --num_epochs=2 --num_envs_per_worker=8
                     --worker_num_splits=2) ;;
esac
start() {
    rm -rf "${folder:?}"   # else it resumes
    mkdir -p "$folder"
    cd "$folder"   # its engines write _vizdoom.ini where they are started
    # A process session of its own, so that all of it can be ended: when its main process dies its workers and engines go on.
    setsid "${SF_PYTHON:-python}" -m "$module" "${common[@]}" "${flags[@]}" "$@" > "$folder/out.txt" 2>&1 &
    session=$!
    disown
}
declare -A files   # its shared memory: engines that are killed, or die by themselves, leave theirs
note_files() {
    local file pid
    for pid in $(pgrep -s "$session"); do
        while read -r file; do files[$file]=1; done < <(grep -o '/dev/shm/[^ ]*' "/proc/$pid/maps" 2> /dev/null | sort -u)
    done
}
stop() {
    note_files
    for pid in $(pgrep -s "$session"); do kill -KILL "$pid" 2> /dev/null || true; done
    for file in "${!files[@]}"; do rm -f "$file"; done
}
trap stop EXIT
for attempt in 1 2 3; do
    start "$@"
    for ((second = 0; second < seconds; second++)); do
        sleep 1
        ((second >= 15)) || note_files   # of the game it starts first, only to look at it; later it would disturb what is measured
        kill -0 "$session" 2> /dev/null || { echo "sample-factory ended by itself, see $folder/out.txt" >&2; exit 1; }
        if ((second == deadline)) && (($(grep -o "Heartbeat connected on RolloutWorker_w." "$folder/out.txt" | sort -u | wc -l) < 2)); then
            echo "a rollout worker of sample-factory is not there, which it would only notice after half an hour: starting it again" >&2
            stop
            continue 2
        fi
    done
    exit 0
done
exit 1
