#!/usr/bin/env bash
# Learning: one command for each figure and table, whose curves it writes to benchmark/results, or to RESULTS. Started again with the same
# FOLDER it goes on where it was stopped; of a run that was stopped and resumed only the first minutes count where minutes are compared.
# Times are those of 2 cores without a GPU, for the seeds that were published; nothing else should run beside it.
# Usage: [SEEDS="1 2 3"] [RESULTS=FOLDER] [DRY_RUN=1] benchmark/learning.sh NAME [FOLDER [FLAGS]]
#   FLAGS are added to every training of ours, for example: --device cuda --num-workers 16
#   DRY_RUN=1 prints the commands, and runs nothing.
# NAME is one of:
set -euo pipefail
. "$(dirname "$0")/common.sh" "$@"
one=${SEEDS:-1} three=${SEEDS:-1 2 3} failed=0
# shellcheck disable=SC2086  # seeds are words

train() {  # "SEEDS" CSV flags of seeds.py, then -- and a command. A run that fails is named, and the others go on
    local code=0
    run python benchmark/seeds.py --folder "$out" --out "$out/$2" --seeds $1 "${@:3}" "${flags[@]}" || code=$?
    [ $code -le 1 ] || exit $code   # it was stopped, or refused
    [ $code = 0 ] || failed=1
    return $code
}
table() {  # as train, and the CSV file is a result if no run has failed
    ! train "$@" || run cp "$out/$2" "$results"
}
collect() {  # curves|TAG CSV: a result of all runs in FOLDER
    run python benchmark/collect.py "$1" "$results/$2" "$out"/*_[0-9]*
}
peer() {  # NAME SECONDS ENV flags: Sample Factory, for seeds.py
    echo "$1: benchmark/peers/sample_factory.sh $2 $3 {seed} {folder}${4:+ ${*:4}}"
}
play() {  # FOLDER FILE: adds the run's name and the return of its likeliest actions
    echo "$(basename "$1"): $(python evaluate.py "$1" --likeliest --episodes 20 | tail -n 1)" >> "$2"
}
tree() {  # PID: it and all processes below
    local child
    echo "$1"
    for child in $(pgrep -P "$1"); do tree "$child"; done
}
rss() {  # PIDS: MiB of all
    ps -o rss= -p "$(echo "$@" | tr ' ' ,)" | awk '{sum += $1} END {print int(sum / 1024)}'
}
soak() {  # PID CSV: memory, files and processes of the training that PID starts, once a minute
    local main minute pids
    until main=$(pgrep -f "python appo_doom.py .*$out" | head -1); do
        sleep 1
        kill -0 "$1" 2> /dev/null || return 0   # it was finished already
    done
    echo "minutes,main_rss_mib,tree_rss_mib,main_descriptors,processes,shm_kib" > "$2"
    for ((minute = 1; ; minute++)); do
        for _ in $(seq 60); do sleep 1; kill -0 "$main" 2> /dev/null || return 0; done
        pids=$(tree "$main")
        echo "$minute,$(rss "$main"),$(rss $pids),$(ls "/proc/$main/fd" | wc -l),$(wc -w <<< "$pids"),$(du -sk /dev/shm | cut -f1)" >> "$2"
    done
}

# ---- names

# The goal is a mean return of 75. Needs SF_PYTHON. Expected: ours within 100,000 steps.
basic() {  # ViZDoom's basic, three seeds of ours and of Sample Factory: 25 minutes
    table "$three" learning_basic.csv --goals 75 --settings ours: --peers "$(peer sf 330 doom_basic)" -- python appo_doom.py \
        --env-id basic --total-timesteps 160000
}
basic_seeds() {  # basic, five seeds of the default: 12 minutes
    table "${SEEDS:-1 2 3 4 5}" basic_seeds.csv --goals 75 --settings ours: -- python appo_doom.py --env-id basic --total-timesteps 160000
}

# To lay beside `basic`. Expected: 75 within 120,000 steps, later than without --sync.
sync() {  # basic with --sync, three seeds: 7 minutes
    table "$three" sync.csv --goals 75 --settings "sync: sync" -- python appo_doom.py --env-id basic \
        --total-timesteps 160000
}

# Three seeds of each in alternation, then two more of ours, and one of Sample Factory with our learning rate. Needs SF_PYTHON. In float32.
battle() {  # battle beside Sample Factory: 3.5 hours
    local ours=(--settings ours: -- python appo_doom.py --env-id battle --total-timesteps 650000)
    table "$three" learning_battle.csv --goals 10 --peers "$(peer sf 1790 doom_battle)" "${ours[@]}"
    table "${SEEDS:-4 5}" learning_battle.csv --goals 10 "${ours[@]}"
    table "$one" learning_battle.csv --goals 10 --peers "$(peer sf-4e-4 1790 doom_battle --learning_rate=4e-4)" "${ours[@]}"
}

# In bfloat16 where the CPU has it. Expected: nine of ten reach 10 kills.
battle_seeds() {  # battle, ten seeds of the default: 80 minutes
    table "${SEEDS:-1 2 3 4 5 6 7 8 9 10}" battle_seeds.csv --goals 5 10 --settings ours: -- python appo_doom.py --env-id battle \
        --total-timesteps 600000
}

# The published run is seed 1 of `battle`, resumed. Expected: 30 kills, or 23, after 12 million frames.
battle_long() {  # battle for 17.4 million frames: 2.2 hours
    table "$one" learning_battle_long.csv --goals 20 28 30 --settings ours: -- python appo_doom.py --env-id battle --total-timesteps 4350000
}

# With the learning rate of an early default; and the soak: memory of the main process, and of it and all its descendants (shared pages are
# counted in each), file descriptors and /dev/shm, once a minute. Expected: a return of 10 after 1.2 million steps.
defend() {  # defend_the_center, 2 million steps at 1e-4, and memory over time: 50 minutes
    { table "$one" learning_defend.csv --settings ours: -- python appo_doom.py --env-id defend_the_center --learning-rate 1e-4 \
        --total-timesteps 2000000; exit $failed; } &
    [ -n "${DRY_RUN:-}" ] || soak $! "$out/soak.csv"
    wait $!
    run cp "$out/soak.csv" "$results"
}

# Beside CleanRL's published curve of ppo_atari_envpool.py (results/cleanrl_pong.csv, read off the figure in its documentation).
# Expected: a mean return of 18 after 1 to 2 million steps.
pong() {  # Pong, default flags, five seeds: 90 minutes in bfloat16
    table "${SEEDS:-1 2 3 4 5}" learning_pong.csv --goals 18 --settings ours: -- python appo_atari.py --env-id Pong-v5 --total-timesteps 2000000
}

# Beside CleanRL's, too. Expected: a mean return of 200 after about 3 million steps, 340 at the end.
breakout() {  # Breakout, 6 million steps: 2 hours
    table "$one" learning_breakout.csv --goals 200 --settings ours: -- python appo_atari.py --env-id Breakout-v5 --total-timesteps 6000000
}

# The agents of `battle_long` and of 1.8 million steps of Breakout.
picture() {  # the moving picture of the README: 3 hours
    train "$one" curves.csv --settings "battle: env-id=battle" -- python appo_doom.py --total-timesteps 4350000
    train "$one" curves.csv --settings "breakout: env-id=Breakout-v5" -- python appo_atari.py --total-timesteps 1800000
    run python evaluate.py "$out/battle_1" --save-video
    run python evaluate.py "$out/breakout_1" --save-video
    run python benchmark/animation.py "$results/agents.gif" "$out/battle_1/video.mp4" "$out/breakout_1/video.mp4" --start 0 20
    run python benchmark/collect.py curves "$results/agents.csv" "$out/breakout_1"
}

# DeepMind Lab: with the smaller network, with which two cores see three times the frames. deepmind_lab must be where python finds it.
dmlab_level=(python appo_dmlab.py --env-id rooms_collect_good_objects_train --encoder convnet --batch-size 1024)

# Expected: a return of 5 after 300,000 steps.
dmlab() {  # rooms_collect_good_objects_train, and with --sync: 3 hours
    table "$one" learning_dmlab.csv --goals 5 --settings "ours: total-timesteps=1000000" "sync: total-timesteps=500000 sync" -- \
        "${dmlab_level[@]}"
}

# In one of the tasks objects that are rarely found are worth +1 and -1, in the other ones are frequent and tens are to be had.
# (The published table is older, and has the same without PopArt.)
dmlab_popart() {  # two tasks at once: 40 minutes
    local task tasks=(rooms_collect_good_objects_train rooms_exploit_deferred_effects_train)
    train "$one" curves.csv --settings ours: -- python appo_dmlab.py --env-id "${tasks[0]},${tasks[1]}" \
        --encoder convnet --batch-size 1024 --total-timesteps 500000
    for task in "${tasks[@]}"; do collect "tasks/$task/episodic_return" "popart_$task.csv"; done
}

# One setting changed at a time. Expected: the learning rate matters most; at 4e-4, the default, no other setting leads.
settings_battle() {  # battle, 700 thousand steps with other learning rates, clips, lambda, epochs, horizon, batch: 8 minutes a run
    table "$three" seeds_battle.csv --goals 5 10 --settings "" learning-rate=1e-4 learning-rate=2e-4 ppo-clip-value=1.0 \
        ppo-clip-value=1000 vtrace-lambda=1 num-epochs=2 gamma=0.995 batch-size=512 "learning-rate=1e-4 ppo-clip-value=1.0" \
        -- python appo_doom.py --env-id battle --total-timesteps 700000
}
settings_lag() {  # battle, 650 thousand steps with a batch ahead and with none: 1.7 hours
    table "$three" seeds_lag.csv --goals 5 10 --settings "" max-batches-ahead=0 -- python appo_doom.py --env-id battle \
        --total-timesteps 650000
}
settings_precision() {  # battle, 700 thousand steps in bfloat16 and in float32: 46 minutes
    table "$three" seeds_precision.csv --goals 5 10 15 --grid precision=bfloat16,float32 -- python appo_doom.py --env-id battle \
        --total-timesteps 700000
}
settings_basic() {  # basic with three learning rates: 15 minutes
    table "$three" seeds_basic.csv --goals 50 75 --settings "" learning-rate=1e-4 learning-rate=2e-4 -- python appo_doom.py --env-id basic \
        --total-timesteps 160000
}
settings_health() {  # health_gathering with two learning rates: 17 minutes
    table "$three" seeds_health_gathering.csv --goals 10 20 --settings "" learning-rate=1e-4 -- python appo_doom.py \
        --env-id health_gathering --total-timesteps 300000
}
settings_defend() {  # defend_the_center with three learning rates: 45 minutes
    table "$three" seeds_defend_the_center.csv --goals 5 10 15 --settings "" learning-rate=2e-4 learning-rate=1e-4 \
        -- python appo_doom.py --env-id defend_the_center --total-timesteps 500000
}
settings_way_home() {  # my_way_home with two learning rates: 6 minutes
    table "$one" seeds_my_way_home.csv --settings "" learning-rate=1e-4 -- python appo_doom.py --env-id my_way_home --total-timesteps 400000
}

# Why --sync is slower: without PPO's clip asynchronous training suffers as well, and a second epoch, in which the clip acts, mends --sync.
settings_sync() {  # basic with --sync, without the clip, and with a second epoch: 26 minutes
    table "$three" seeds_sync.csv --goals 0 50 75 --settings "" sync clip-coef=10 "sync num-epochs=2" \
        -- python appo_doom.py --env-id basic --total-timesteps 90000
}

# The core in bfloat16 beside a float32 core, which needs the file of commit 45d6a36. On a CPU with AVX512-BF16. Expected: no difference.
core_bfloat16() {  # battle and basic (LSTM) with the core in bfloat16 and in float32: 50 minutes
    local seed core file before="$out/float32"
    run mkdir -p "$before"
    run git archive -o "$out/before.tar" 45d6a36 appo_doom.py
    run tar -xf "$out/before.tar" -C "$before"
    for seed in $three; do
        for core in bfloat16 float32; do
            [ $core = float32 ] && file=$before/appo_doom.py || file=appo_doom.py
            table "$seed" core_bfloat16.csv --settings "${core}_core_battle: env-id=battle total-timesteps=600000" \
                "${core}_lstm_basic: env-id=basic rnn-type=lstm total-timesteps=110000" -- python "$file"
        done
    done
}

# Two ranks beside one process with the same games and the same samples in an update; and one, two and four small ranks, whose samples add
# up.
ranks() {  # basic with ranks under torchrun, three seeds: 26 minutes
    local seed ranks command same small="num-workers=1 num-envs-per-worker=8 batch-size=256" folder=$out
    for seed in $three; do
        for ranks in 1 2 4; do
            command=(torchrun --standalone --nproc-per-node $ranks appo_doom_multigpu.py)
            case $ranks in
            1) command=(python appo_doom.py) same="num-workers=2 batch-size=1024" ;;
            2) same="num-workers=1 batch-size=512" ;;
            4) same=$small ;;
            esac
            out="$folder/$ranks" table "$seed" seeds_ranks_$ranks.csv --goals 75 --settings "$same" "$small" -- "${command[@]}" \
                --env-id basic --total-timesteps 100000 --device cpu
        done
    done
}

# Of four policies three start with a learning rate that learns nothing. At each exchange the worst becomes a copy of the best.
pbt_basic() {  # a population on basic, and the history of its settings: 21 minutes
    run python appo_pbt_doom.py --env-id basic --num-policies 4 --with-pbt --pbt-replace-fraction 0.25 --pbt-start-mutation 40000 \
        --pbt-period-env-steps 15000 --total-timesteps 150000 \
        --policy-settings '{"1": {"learning_rate": 1e-7}, "2": {"learning_rate": 0.01}, "3": {"learning_rate": 0.03}}' \
        --train-dir "$out" --experiment population "${flags[@]}"
    run python benchmark/collect.py population "$results/pbt_basic.csv" "$out/population"
}

# And what random actions reach there.
half_hour() {  # every Doom id and eleven Atari games, half an hour each: 10.5 hours
    local games=deadly_corridor,battle2,defend_the_line,health_gathering_supreme,my_way_home,battle,defend_the_center,health_gathering,basic
    local limit=(--train-for-seconds 1800 --total-timesteps 1000000000)
    table "$one" half_hour_doom.csv --grid "env-id=$games,benchmark" -- python appo_doom.py "${limit[@]}"
    games=Breakout-v5,Pong-v5,SpaceInvaders-v5,Qbert-v5,Seaquest-v5,MsPacman-v5,Enduro-v5,Boxing-v5,Freeway-v5,MontezumaRevenge-v5
    table "$one" half_hour_atari.csv --grid "env-id=$games,Asteroids-v5" -- python appo_atari.py "${limit[@]}"
    run python benchmark/random_policy.py "$results/random.csv" "$out"/half_hour_{doom,atari}.csv
}

# A recipe from the wild: the settings of a Sample Factory 2 model of Atari that somebody has published, as far as our flags can say them
# (benchmark/HISTORY.md has the table). With a GPU: FLAGS --train-for-seconds 1000000 --num-workers 16 --num-envs-per-worker 2.
recipe() {  # half an hour of each of three games with settings published for Sample Factory: 90 minutes
    table "$one" recipe_appo_atari.csv --grid env-id=Asteroids-v5,Boxing-v5,Freeway-v5 -- python appo_atari.py \
        --rollout 128 --batch-size 1024 --num-batches-per-epoch 8 --num-epochs 4 --learning-rate 3.033891184e-4 --anneal-lr \
        --total-timesteps 10000000 --ent-coef 4.677351413e-4 --vf-coef 0.5 --max-grad-norm 0 --clip-coef 0.1 \
        --ppo-clip-value 1.0 --gamma 0.99 --vtrace-lambda 0.95 --max-policy-lag 1000 --rnn-type none \
        --train-for-seconds 1800
}

# Twelve minutes of each of three games without replay (appo_atari_replay.py with --replay-share 0), the same with two epochs (as many
# optimiser steps a frame as with half of each batch replayed), uniform, attentive, and elite with strategies 1 and 3.
replay() {  # Pong, Breakout and Seaquest with each way of replaying and with none: 3.7 hours a seed
    table "$three" replay.csv --grid env-id=Pong-v5,Breakout-v5,Seaquest-v5 --settings replay-share=0 "replay-share=0 num-epochs=2" \
        replay=uniform replay=attentive "replay=elite elite-strategy=1" "replay=elite elite-strategy=3" \
        -- python appo_atari_replay.py --train-for-seconds 720 --total-timesteps 5000000
}
replay_settings() {  # the coefficient of the loss of replayed samples, on Breakout: half an hour a seed (the table's others are older)
    table "$one" seeds_replay.csv --goals 15 25 --settings "" policy-cloning-coef=0 \
        -- python appo_atari_replay.py --train-for-seconds 720 --total-timesteps 5000000
}

# Steps and seconds to the goal: where Gymnasium says that an environment is solved. Needs SB3_PYTHON, and box2d and minigrid here and
# there.
gym() {  # five environments beside Stable-Baselines3, five seeds: 29 minutes
    run python benchmark/peers/gym_goals.py --sb3-python "${SB3_PYTHON:-python}" --rounds "$(wc -w <<< "${SEEDS:-1 2 3 4 5}")" \
        --out "$results/gym_learning.csv" -- "${flags[@]}"
}

# The returns that are published for tuned settings are deterministic, so the last policies are also played without noise.
mujoco() {  # eight MuJoCo tasks, five seeds of a million steps (Pendulum: 100 thousand): about 90 minutes, two runs at a time
    local folder seeds="${SEEDS:-11 12 13 14 15}" csv=mujoco_seeds.csv
    local tasks=HalfCheetah-v5,Walker2d-v5,Hopper-v5,Ant-v5,HumanoidStandup-v5,Swimmer-v5,Pusher-v5
    ! train "$seeds" $csv --parallel 2 --grid env-id=Pendulum-v1 --settings "" -- python appo_mujoco.py --total-timesteps 100000
    table "$seeds" $csv --parallel 2 --grid env-id=$tasks --settings "" -- python appo_mujoco.py --total-timesteps 1000000
    for folder in "$out"/env-id_*_[0-9]*/; do
        run play "$folder" "$out/mujoco_played.txt"
    done
    run cp "$out/mujoco_played.txt" "$results"
}

mujoco_long() {  # three million steps of Ant, five seeds: 55 minutes
    local folder
    table "${SEEDS:-11 12 13 14 15}" mujoco_long.csv --parallel 2 --grid env-id=Ant-v4 --settings "" -- python appo_mujoco.py --total-timesteps 3000000
    for folder in "$out"/env-id_*_[0-9]*/; do
        run play "$folder" "$out/mujoco_long_played.txt"
    done
    run cp "$out/mujoco_long_played.txt" "$results"
}

# The zoo's settings are for version 3. Needs SB3_PYTHON, installed for MuJoCo.
mujoco_zoo() {  # three MuJoCo tasks with the tuned settings of Stable-Baselines3's zoo, two seeds of a million steps: 2.5 hours
    local task command="${SB3_PYTHON:-python} benchmark/peers/stable_baselines3_ppo.py" peers=()
    export OMP_NUM_THREADS=1   # two runs at a time
    for task in Walker2d-v5 HalfCheetah-v5 Hopper-v5; do
        peers+=("$task: $command $task {seed} --folder {folder} --play 20")
    done
    flags=()   # they are for runs of ours
    table "${SEEDS:-1 2}" mujoco_zoo.csv --parallel 2 --peers "${peers[@]}"
    [ -n "${DRY_RUN:-}" ] || (cd "$out" && grep played ./*-v5_*.txt) > "$out/mujoco_zoo_played.txt"
    run cp "$out/mujoco_zoo_played.txt" "$results"
}

# Needs CLEANRL and CLEANRL_PYTHON, installed for MuJoCo.
mujoco_cleanrl() {  # a million steps of HalfCheetah with CleanRL: 16 minutes
    run benchmark/peers/cleanrl.sh ppo_continuous_action.py HalfCheetah-v4 1000000 1 "$out/cleanrl_1"
    collect curves cleanrl_mujoco.csv
}

run mkdir -p "$out" "$results"
"$name"
exit $failed
