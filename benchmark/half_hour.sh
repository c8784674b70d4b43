#!/bin/sh
# What every Doom id and ten Atari games reach in half an hour each, default flags, one seed. The same line goes on where it was stopped;
# of a run that was stopped and resumed only the first half hour counts.
# Writes results/half_hour_doom.csv and results/half_hour_atari.csv.
set -eu
cd "$(dirname "$0")/.."
flags="--train-for-seconds 1800 --total-timesteps 1000000000"
python benchmark/seeds.py --seeds 1 --folder runs/half_hour --out benchmark/results/half_hour_doom.csv --grid \
    env-id=deadly_corridor,battle2,defend_the_line,health_gathering_supreme,my_way_home,battle,defend_the_center,health_gathering,basic,benchmark \
    -- python appo_doom.py $flags
python benchmark/seeds.py --seeds 1 --folder runs/half_hour --out benchmark/results/half_hour_atari.csv --grid \
    env-id=Breakout-v5,Pong-v5,SpaceInvaders-v5,Qbert-v5,Seaquest-v5,MsPacman-v5,Enduro-v5,Boxing-v5,Freeway-v5,MontezumaRevenge-v5 \
    -- python appo_atari.py $flags
