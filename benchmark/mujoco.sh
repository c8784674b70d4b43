#!/usr/bin/env bash
# Continuous actions: speed beside the peers, what is learned beside CleanRL, and what lag does with and without the KL penalty.
#   speed: steps/s of HalfCheetah and Ant in alternation, three rounds: ours, the bare loop (dummy_sampler.py), Sample Factory's MuJoCo recipe
#       with two workers, CleanRL's ppo_continuous_action.py, Stable-Baselines3's PPO with eight environments; results/peers_mujoco.json
#   learning: three million steps of five tasks, and runs of one million, whose learning rate falls to 0 sooner; results/mujoco.csv
#   cleanrl: a million steps of HalfCheetah with CleanRL; results/cleanrl_mujoco.csv
#   settings: the runs of a million steps by which the defaults were chosen, two hours for the one seed that is its default; results/seeds_mujoco.csv
#       (the one kept there has more seeds of some settings, and not every task of others)
#   lag: half a million steps of HalfCheetah with --sync, and with one and four iterations ahead, with and without the KL penalty; with eight
#       epochs, so that the learner is the slower side and what is ahead of it waits; results/mujoco_lag.csv
# Learning, settings and lag, started again with the same FOLDER, go on where they were stopped. The others want a fresh FOLDER.
# All sides have the tasks' version 4, which is the one with published numbers.
# Machine: 2 cores without a GPU. Nothing else should run beside it.
# Usage: [SEEDS="1 2 3"] [SF_PYTHON=.. CLEANRL_PYTHON=.. CLEANRL=.. SB3_PYTHON=..] benchmark/mujoco.sh speed|learning|settings|cleanrl|lag [FOLDER]
#   CLEANRL: a checkout of github.com/vwxyzjn/cleanrl (fe8d8a03 was measured); CLEANRL_PYTHON:
#     python -m venv .venv-cleanrl-mujoco && .venv-cleanrl-mujoco/bin/pip install torch==2.13.0 gymnasium==0.29.1 mujoco==2.3.3 imageio 'numpy<2' tyro tensorboard 'setuptools<81'
#   SF_PYTHON: python -m venv .venv-sf-mujoco && .venv-sf-mujoco/bin/pip install torch==2.13.0 sample-factory==2.1.1 gymnasium==0.29.1 mujoco==2.3.3 imageio 'numpy<2'
#   SB3_PYTHON: python -m venv .venv-sb3-mujoco && .venv-sb3-mujoco/bin/pip install torch==2.13.0 'stable-baselines3==2.9.2' tensorboard mujoco imageio
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
what=${1:?speed, learning, settings, cleanrl or lag}
out=$(realpath -m "${2:-runs/mujoco_$what}")
for python in SF_PYTHON CLEANRL_PYTHON SB3_PYTHON; do
    [ -z "${!python:-}" ] || declare "$python=$(realpath -s "${!python}")"
done
[ -z "${CLEANRL:-}" ] || CLEANRL=$(realpath "$CLEANRL")
cd "$here/.."
train() {  # CSV "flags" flags of seeds.py
    # shellcheck disable=SC2086  # the seeds are words, and so are the flags
    python benchmark/seeds.py --seeds ${SEEDS:-1 2 3} --folder "$out" --out "$out/$1" "${@:3}" -- python appo_mujoco.py $2
    cp "$out/$1" benchmark/results
}
ours() {  # NAME flags
    python appo_mujoco.py --train-dir "$out" --experiment "$@"
}
cleanrl() {  # NAME TASK SEED STEPS; a fixed number of steps, because it writes its last events only when it ends by itself
    mkdir "$out/$1"
    (cd "$out/$1" && "$CLEANRL_PYTHON" "$CLEANRL/cleanrl/ppo_continuous_action.py" --env-id "$2" --seed "$3" --no-cuda \
        --total-timesteps "$4" > out.log)
}
case $what in
speed)
    mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
    for round in 1 2 3; do
        for task in HalfCheetah Ant; do
            name=${task,,}
            ours "${name}_ours_$round" --env-id $task-v4 --train-for-seconds 45 --total-timesteps 100000000
            mkdir "$out/${name}_bare_$round"
            python dummy_sampler.py --family mujoco --env-id $task-v4 --warm-up 3 --window 4 --windows 3 --out "$out/${name}_bare_$round/rate.json"
            SF_PYTHON=$SF_PYTHON benchmark/sample_factory.sh 65 mujoco_$name "$round" "$out/${name}_sf_$round"
            cleanrl "${name}_cleanrl_$round" $task-v4 "$round" 81920
            mkdir "$out/${name}_sb3_$round"
            "$SB3_PYTHON" benchmark/stable_baselines3_mujoco.py "$out/${name}_sb3_$round" $task-v4 "$round" 131072
        done
    done
    python benchmark/collect.py steps benchmark/results/peers_mujoco.json "$out"/*_{ours,bare,sf,cleanrl,sb3}_? ;;
learning)
    train mujoco.csv "" --grid "env-id=HalfCheetah-v4,Hopper-v4,Walker2d-v4,Ant-v4,HumanoidStandup-v4" --settings "" "total-timesteps=1000000" ;;
settings)
    rows=()  # of these: games of a worker, rollout, batch, epochs, learning rate, and what else
    while read -r games rollout batch epochs rate more; do
        rows+=("num-envs-per-worker=$games rollout=$rollout batch-size=$batch num-epochs=$epochs learning-rate=$rate${more:+ $more}")
    done <<ROWS
16 64 256 2 3e-4
16 64 256 2 1e-3
16 64 256 5 3e-4
16 64 256 5 1e-3
32 64 256 2 1e-3
32 32 256 2 1e-3
16 64 256 2 3e-3
32 32 256 2 3e-3
16 64 256 2 3e-3 initial-stddev=0.5
16 64 256 2 3e-3 no-normalize-returns
32 32 256 4 3e-3
16 64 256 2 3e-3 kl-loss-coef=1
16 64 512 4 3e-3
64 32 1024 4 3e-3
32 32 512 4 3e-3
64 32 512 4 3e-3 num-batches-per-epoch=8
64 16 512 4 3e-3
32 32 512 4 2e-3
32 32 512 4 3e-3 max-grad-norm=3.5
32 32 512 4 1e-3
32 32 512 4 1.5e-3
32 32 512 4 3e-3 kl-loss-coef=1
32 32 512 4 2e-3 kl-loss-coef=1
32 32 512 4 2e-3 max-batches-ahead=0
32 32 512 4 2e-3 sync
32 32 512 8 2e-3 max-batches-ahead=0
32 32 512 8 1e-3 max-batches-ahead=0
32 32 512 4 2e-3 vtrace-lambda=1
32 32 512 4 2e-3 vtrace-lambda=0.98
32 32 512 4 2e-3 adaptive-stddev
32 32 512 4 2e-3 initial-stddev=0.5
32 32 512 4 2e-3 kl-loss-coef=0
ROWS
    SEEDS=${SEEDS:-1} train seeds_mujoco.csv "--total-timesteps 1000000" --grid "env-id=HalfCheetah-v5,Hopper-v5,Walker2d-v5" --settings "${rows[@]}" ;;
lag)
    train mujoco_lag.csv "--env-id HalfCheetah-v4 --total-timesteps 500000 --num-epochs 8 --max-policy-lag 1000" --grid "kl-loss-coef=0.1,0" \
        --settings sync max-batches-ahead=1 max-batches-ahead=4 ;;
cleanrl)
    mkdir -p "${out%/*}" && mkdir "$out"
    cleanrl "cleanrl_1" HalfCheetah-v4 1 1000000
    python benchmark/collect.py curves benchmark/results/cleanrl_mujoco.csv "$out"/cleanrl_1 ;;
*) echo "error: speed, learning, settings, cleanrl or lag, not $what" >&2; exit 2 ;;
esac
