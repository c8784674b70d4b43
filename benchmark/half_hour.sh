#!/usr/bin/env bash
# What every Doom id and eleven Atari games reach in half an hour each, default flags, one seed; and what random actions reach there. Started
# again with the same FOLDER it goes on where it was stopped; of a run that was stopped and resumed only the first half hour counts.
# Machine: 2 cores without a GPU; takes 10.5 hours, and nothing else should run beside it.
# Usage: benchmark/half_hour.sh [FOLDER]
set -uo pipefail
out=$(realpath -m "${1:-runs/half_hour}")
cd "$(dirname "$0")/.."
failed=0
games() {  # FAMILY ENVIRONMENTS
    python benchmark/seeds.py --seeds 1 --folder "$out" --out "$out/half_hour_$1.csv" --grid "env-id=$2" -- \
        python "appo_$1.py" --train-for-seconds 1800 --total-timesteps 1000000000
    local code=$?
    [ $code -gt 1 ] && exit $code   # it was stopped
    [ $code = 0 ] || failed=1   # a game failed; the others go on
}
games doom deadly_corridor,battle2,defend_the_line,health_gathering_supreme,my_way_home,battle,defend_the_center,health_gathering,basic,benchmark
games atari Breakout-v5,Pong-v5,SpaceInvaders-v5,Qbert-v5,Seaquest-v5,MsPacman-v5,Enduro-v5,Boxing-v5,Freeway-v5,MontezumaRevenge-v5,Asteroids-v5
python benchmark/random_policy.py "$out/random.csv" "$out"/half_hour_*.csv && cp "$out/random.csv" "$out"/half_hour_*.csv benchmark/results
exit $failed
