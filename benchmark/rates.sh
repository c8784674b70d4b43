#!/usr/bin/env bash
# Speed of training, beside the peers and between settings: commands in alternation, so that a change of the machine's speed meets all of
# them. Each of three rounds runs every command once; a rate leaves out the first 20 s after a run's first report. Results go to
# benchmark/results, or to RESULTS. Minutes are those of 2 cores without a GPU; nothing else may run beside it. benchmark/peers/ says how each peer is installed.
# Usage: [ROUNDS=3] [RESULTS=FOLDER] [DRY_RUN=1] benchmark/rates.sh NAME [FRESH FOLDER [FLAGS]]
#   FLAGS are added to every training of ours, for example: --device cuda --num-workers 16
#   DRY_RUN=1 prints the commands of one round, and runs nothing.
# NAME is one of:
set -euo pipefail
. "$(dirname "$0")/common.sh" "$@"
rounds=${ROUNDS:-3} folders=() collected=()

new() {  # NAME: folder of a run
    folder="$out/$1_$round"
    folders+=("$folder")
}
ours() {  # NAME SECONDS FILE flags
    new "$1"
    run python "$3" --train-dir "$out" --experiment "$1_$round" --train-for-seconds "$2" --total-timesteps 1000000000 "${@:4}" "${flags[@]}"
}
ours_in_both() {  # the same in float32 and, where the processor has it, in bfloat16
    ours "$@" --precision float32
    grep -q avx512_bf16 /proc/cpuinfo || return 0
    ours "$1-bfloat16" "${@:2}" --precision bfloat16
}
ours_for() {  # NAME STEPS FILE flags: of a file that knows no seconds
    new "$1"
    run python "$3" --train-dir "$out" --experiment "$1_$round" --total-timesteps "$2" "${@:4}" "${flags[@]}"
}
alone() {  # NAME flags: the same environments with random actions
    new "$1"
    run mkdir "$folder"
    run python dummy_sampler.py --warm-up 3 --window 4 --windows 3 --out "$folder/rate.json" "${@:2}"
}
sample_factory() {  # NAME SECONDS ENV
    new "$1"
    run benchmark/peers/sample_factory.sh "$2" "$3" "$round" "$folder"
}
cleanrl() {  # NAME SCRIPT ENV_ID STEPS flags
    new "$1"
    run benchmark/peers/cleanrl.sh "$2" "$3" "$4" "$round" "$folder" "${@:5}"
}
stable_baselines3() {  # NAME ENV_ID flags
    new "$1"
    run "${SB3_PYTHON:-python}" benchmark/peers/stable_baselines3_ppo.py "$2" "$round" --folder "$folder" "${@:3}"
}
pufferlib_trainer() {  # NAME MODE THREADS
    new "$1"
    run mkdir "$folder"
    run "${PUFFERLIB_PYTHON:-python}" -W ignore benchmark/peers/pufferlib_atari.py "$folder" 60 "$2" "$3"
}
compare() {  # NAME SECONDS "name: command"...; compare.py has rounds of its own
    run python benchmark/compare.py --out "$results/$1.json" --rounds "$rounds" --seconds "$2" "${@:3}"
}

# ---- names: each runs one round, and says what collect.py makes of all of them

# `benchmark`, GRU-512, inputs normalised, 32 games, rollout 32, batch 1024, one epoch. Sample Factory computes in float32, has two splits,
# normalises returns and uses GAE. Needs SF_PYTHON. Expected: 1.7 to 1.9 x in float32, 2.2 to 2.9 x in bfloat16.
doom() {  # ViZDoom beside Sample Factory: 7 minutes, 10 with bfloat16
    ours_in_both doom_ours 55 appo_doom.py --env-id benchmark --device cpu --num-workers 2 --num-envs-per-worker 16 \
        --worker-num-splits 1 --rollout 32 --batch-size 1024 --num-epochs 1 --max-batches-ahead 1 --rnn-type gru
    sample_factory doom_sf 75 doom_benchmark
    collected=(rates peers_doom)
}

# Breakout, Nature CNN, no recurrence; the peers in float32. Ours and Sample Factory: 64 games, rollout 32, batch 1024, one epoch; ours
# normalises its inputs, as is its default, Sample Factory's example does not; ours has the newer EnvPool. CleanRL at its defaults (8 games,
# 128 steps, minibatches of 256, four epochs) and with one epoch; Stable-Baselines3's PPO with the same settings as CleanRL. Needs
# SF_PYTHON, CLEANRL, CLEANRL_PYTHON, SB3_PYTHON. Expected: 1.65 to 1.75 x Sample Factory, in bfloat16 2.3 x; more of the others.
atari() {  # Breakout beside Sample Factory, CleanRL and Stable-Baselines3: 24 minutes, 27 with bfloat16
    ours_in_both atari_ours 55 appo_atari.py --env-id Breakout-v5 --device cpu --num-workers 2 --num-envs-per-worker 32 \
        --worker-num-splits 1 --rollout 32 --batch-size 1024 --num-epochs 1 --max-batches-ahead 1 --rnn-type none --encoder nature
    sample_factory atari_sf 65 atari_breakout
    cleanrl atari_cleanrl ppo_atari_envpool.py Breakout-v5 16384
    cleanrl atari_cleanrl-1-epoch ppo_atari_envpool.py Breakout-v5 24576 --update-epochs 1
    stable_baselines3 atari_sb3 BreakoutNoFrameskip-v4 --steps 10240
    stable_baselines3 atari_sb3-1-epoch BreakoutNoFrameskip-v4 --steps 20480 --epochs 1
    collected=(rates peers_atari)
}

peers() {  # doom and atari, the table and the picture of both: 31 minutes, 37 with bfloat16
    doom
    atari
    collected=(rates peers)
}

# rooms_collect_good_objects_train, IMPALA's ResNet and LSTM-256, instructions read, inputs normalised, 32 games, rollout 32, batch 1024,
# one epoch, float32. Needs SF_PYTHON, and deepmind_lab where both pythons find it, by PYTHONPATH for example. Expected: 3.7 x.
dmlab() {  # DeepMind Lab beside Sample Factory: 18 minutes
    export LP_NUM_THREADS=0   # of Mesa's renderer, which for Sample Factory too is faster without threads
    ours dmlab_ours 150 appo_dmlab.py --env-id rooms_collect_good_objects_train --device cpu --precision float32 \
        --num-workers 2 --num-envs-per-worker 16 --worker-num-splits 1 --rollout 32 --batch-size 1024
    sample_factory dmlab_sf 200 dmlab_benchmark
    collected=(rates peers_dmlab)
}

# HalfCheetah and Ant, steps/s: ours, the tasks alone, Sample Factory's MuJoCo recipe with two workers, CleanRL, and Stable-Baselines3 with
# eight environments. All have the tasks' version 4, the one with published numbers. Needs SF_PYTHON, CLEANRL, CLEANRL_PYTHON and
# SB3_PYTHON, installed for MuJoCo. Expected: 2 (Ant) to 3 (HalfCheetah) x Sample Factory.
mujoco() {  # MuJoCo beside Sample Factory, CleanRL and Stable-Baselines3: 35 minutes
    local task family
    for task in HalfCheetah Ant; do
        family=${task,,}
        ours_for "${family}_ours" 500000 appo_mujoco.py --env-id $task-v4
        alone "${family}_bare" --family mujoco --env-id $task-v4 --num-envs-per-worker 32
        sample_factory "${family}_sf" 65 "mujoco_$family"
        cleanrl "${family}_cleanrl" ppo_continuous_action.py $task-v4 81920
        stable_baselines3 "${family}_sb3" $task-v4 --steps 131072
    done
    collected=(steps peers_mujoco)
}

# Needs SB3_PYTHON, and box2d here and there. Expected: 3 x on CartPole, 2 x on LunarLander. Has rounds of its own.
gym() {  # CartPole and LunarLander beside Stable-Baselines3: 5 minutes
    run python benchmark/peers/gym_goals.py --speed --sb3-python "${SB3_PYTHON:-python}" --rounds "$rounds" \
        --envs CartPole-v1 LunarLander-v3 --out "$results/gym_speed.json" -- "${flags[@]}"
}

# Breakout, 32 games, Nature CNN, rollout 32, batch 1024, one epoch, float32. PufferLib with its worker processes, and as it was fastest
# among async, serial and native with one and two threads (2,610, 825, 3,013, 3,853, 3,127, 4,184 frames/s in one short run each). Needs
# PUFFERLIB_PYTHON. Expected: 2.6 to 3.2 and 1.5 to 1.9 x.
pufferlib() {  # Breakout beside PufferLib's trainer: 9 minutes
    ours atari_ours 55 appo_atari.py --env-id Breakout-v5 --device cpu --precision float32 --num-workers 2 --num-envs-per-worker 16 \
        --rollout 32 --batch-size 1024 --num-epochs 1
    pufferlib_trainer atari_puffer-async async 1
    pufferlib_trainer atari_puffer-native native 2
    collected=(rates peers_pufferlib)
}

# `benchmark` (GRU-512) and Breakout (Nature CNN), inputs normalised, rollout 32, batch 1024, one epoch, with more and more games a worker,
# and a worker for each core; beside each the same games with random actions. Expected on 2 cores: training at 13 to 44 % of the games
# alone, as the network takes the rest. WORKERS=16 for fewer workers than cores, GAMES="8 16 32 64", BATCH= for the files' own batch.
throughput() {  # training and the games alone, with 4 to 32 games a worker: 22 minutes
    local games family env_id workers=${WORKERS:-$(env -u OMP_NUM_THREADS nproc)} batch=${BATCH-1024}
    for games in ${GAMES:-4 16 32}; do
        for family in doom atari; do
            [ $family = doom ] && env_id=benchmark || env_id=Breakout-v5
            alone "$family-${games}_bare" --family $family --env-id $env_id --num-workers "$workers" --num-envs-per-worker "$games"
            ours "$family-${games}_ours" 45 appo_$family.py --env-id $env_id --num-workers "$workers" --num-envs-per-worker "$games" \
                --rollout 32 --num-epochs 1 ${batch:+--batch-size "$batch"}
        done
    done
    collected=(rates throughput)
}

# Both have the same number of samples in an update; in ranks.json "ours" is the two ranks. Expected: a tie.
ranks() {  # two ranks under torchrun beside one process with two workers: 15 minutes
    local family env_id file same=(--train-for-seconds 60 --total-timesteps 1000000000 --num-envs-per-worker 16 --device cpu)
    run mkdir -p "$out/files"
    for family in doom atari; do
        [ $family = doom ] && env_id=benchmark || env_id=Breakout-v5
        file="$out/files/appo_$family"
        if [ "$round" = 1 ]; then
            run cp appo_$family.py "$file.py"
            run python carry.py --add appo_doom_multigpu.py "$file.py" || [ $? = 1 ]   # a conflict, in Atari's docstring:
            run sed -i '/^|||||||/,/^>>>>>>>/d; /^<<<<<<< /d' "${file}_multigpu.py"   # its own text stays
        fi
        new ${family}_one
        run python "$file.py" --env-id $env_id "${same[@]}" --num-workers 2 --batch-size 1024 --train-dir "$out" \
            --experiment ${family}_one_$round "${flags[@]}"
        new ${family}_ours
        run torchrun --standalone --nproc-per-node 2 "${file}_multigpu.py" --env-id $env_id "${same[@]}" --num-workers 1 --batch-size 512 \
            --train-dir "$out" --experiment ${family}_ours_$round "${flags[@]}"
    done
    collected=(rates ranks)
}

# `benchmark`; frames/s of all policies together. Expected: one policy is a tie, two make 0.84.
policies() {  # one policy and two of appo_pbt_doom.py beside appo_doom.py: 8 minutes
    local same="--env-id benchmark --num-workers 2 --num-envs-per-worker 16 --device cpu ${flags[*]}"
    compare policies 40 "base: python appo_doom.py $same" "1 of pbt: python appo_pbt_doom.py --num-policies 1 $same" \
        "2 of pbt: python appo_pbt_doom.py --num-policies 2 $same"
}

# Breakout, 45 s, with as many candidates as at the beginning of a run, where most are drawn. The control is the same file with
# --replay-share 0, not appo_atari.py. Expected, of its frames/s: two epochs and uniform 78 to 95 %, the others 55 to 69 %.
replay() {  # each way of replaying beside none: 14 minutes
    ours none 45 appo_atari_replay.py --env-id Breakout-v5 --replay-share 0
    ours two-epochs 45 appo_atari_replay.py --env-id Breakout-v5 --replay-share 0 --num-epochs 2
    ours uniform 45 appo_atari_replay.py --env-id Breakout-v5
    ours attentive 45 appo_atari_replay.py --env-id Breakout-v5 --replay attentive
    ours elite 45 appo_atari_replay.py --env-id Breakout-v5 --replay elite
    collected=(rates replay_speed)
}

# `benchmark` and Breakout, each setting beside the default. Expected: Doom 32 games a worker faster, two splits and 8 games slower, the
# others ties; Atari two splits and 8 games slower, the others ties.
ladder() {  # one flag changed at a time: 37 minutes
    local family env_id same more
    for family in doom atari; do
        [ $family = doom ] && env_id=benchmark || env_id=Breakout-v5
        same="python appo_$family.py --env-id $env_id --num-workers 2 --rollout 32 --batch-size 1024 --device cpu ${flags[*]}" more=()
        [ $family = doom ] || more=("batch256: $same --batch-size 256")
        compare ladder_$family 38 "default: $same" "splits2: $same --worker-num-splits 2" "games8: $same --num-envs-per-worker 8" \
            "games32: $same --num-envs-per-worker 32" "ahead0: $same --max-batches-ahead 0" "${more[@]}"
    done
}

# The most frames/s with 1 to 64 games a worker; and rows/s of actors, mailbox, pipes, inference thread and rollouts when games cost
# nothing, with 2 to 72 workers.
games() {  # the games alone, and the pipeline without games: 7 minutes
    local family env_id
    for family in doom atari; do
        [ $family = doom ] && env_id=benchmark || env_id=Breakout-v5
        run python dummy_sampler.py --family $family --env-id $env_id --sweep --num-workers 2 --warm-up 2 --window 3 --windows 3 \
            --out "$results/ceiling_$family.json"
        run python dummy_sampler.py --family $family --null --num-envs-per-worker 16 --warm-up 2 --window 3 --windows 3 \
            --out "$results/null_$family.json"
    done
}

# A level whose resets cost little. The games of a process share the engine's memory. deepmind_lab must be where python finds it.
dmlab_games() {  # the games of DeepMind Lab alone, and their memory, with 1 to 32 games a worker: 4 minutes
    run python benchmark/parts.py --file dmlab --env-id seekavoid_arena_01 --games 1 4 16 32 --out "$results/games_dmlab.json"
}

run mkdir -p "${out%/*}" "$results"
run mkdir "$out"   # an error when it exists: old runs would be resumed
[ -z "${DRY_RUN:-}" ] || rounds=1
for round in $(seq "$rounds"); do
    "$name"
    [ -n "${collected[*]}" ] || exit 0   # it has made its result, in all rounds, by itself
done
run python benchmark/collect.py "${collected[0]}" "$results/${collected[1]}.json" "${folders[@]}"
