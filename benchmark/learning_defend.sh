#!/usr/bin/env bash
# The curve of `defend_the_center`, one seed, 2 million steps with a learning rate of 1e-4; and the soak: memory (of the main process, and
# of it and all its descendants, shared pages counted in each), file descriptors and /dev/shm once a minute.
# Machine: 2 cores without a GPU; takes about 50 minutes. Expected: a return of 10 after 1.2 million steps.
# Usage: benchmark/learning_defend.sh [FRESH FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-runs/learning_defend}")
mkdir -p "${out%/*}" && mkdir "$out"   # an error when it exists: an old run would be resumed
soak="$out/soak.csv"
python "$here/../appo_doom.py" --env-id defend_the_center --learning-rate 1e-4 --num-workers 2 --total-timesteps 2000000 \
    --device cpu --train-dir "$out" --experiment ours_1 &
run=$!
tree() { echo "$1"; local child; for child in $(pgrep -P "$1"); do tree "$child"; done; }  # every process below, games included
echo "# commit $(git -C "$here" rev-parse --short HEAD), $(nproc) cores, $(date +%F)" > "$soak"
echo "minutes,main_rss_mib,tree_rss_mib,main_descriptors,processes,shm_kib" >> "$soak"
for ((minute = 1; ; minute++)); do
    for _ in $(seq 60); do sleep 1; kill -0 $run 2> /dev/null || break 2; done
    pids=$(tree $run)
    rss=$(awk '/VmRSS/ {print int($2 / 1024)}' /proc/$run/status) || break   # it has just ended
    all=$(ps -o rss= -p $(echo $pids | tr ' ' ,) | awk '{sum += $1} END {print int(sum / 1024)}')
    echo "$minute,$rss,$all,$(ls /proc/$run/fd | wc -l),$(echo $pids | wc -w),$(du -sk /dev/shm | cut -f1)" >> "$soak"
done
wait $run
cp "$soak" "$here/results/soak.csv"
python "$here/collect.py" curves "$here/results/learning_defend.csv" "$out/ours_1"
