"""benchmark/seeds.py: settings and seeds, one run after the other or side by side, and what they reached."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from edited import REPORTS, ROOT, edited
from forked import python

sys.path.insert(0, str(ROOT / "benchmark"))
import seeds  # noqa: E402


SMALL = ("--env-id", "basic", "--num-workers", "1", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "32", "--hidden-size",
         "32", "--device", "cpu", "--train-for-seconds", "2")  # fmt: skip


def line(tmp_path, *flags):
    """The command line, and the script that it trains with."""
    script = edited(tmp_path, "appo_edited", REPORTS)
    return [ROOT / "benchmark" / "seeds.py", "--folder", tmp_path / "runs", *flags, "--", sys.executable, script, *SMALL]


def another(command, tmp_path) -> str:
    """What the script answers to the same runs with one flag more."""
    done = python(*command, "--vf-coef", "0.3", folder=tmp_path)
    assert done.returncode == 2
    return done.stdout.partition(" (")[0]


def test_settings_and_seeds(run, tmp_path):
    """Every setting is trained, what failed is said, a run that is cut off goes on, and the same line again makes only what is missing."""
    out, log = tmp_path / "out.csv", tmp_path / "runs" / "default_1" / "log.txt"
    command = line(tmp_path, "--out", out, "--seeds", "1", "--goals", "-1000", "1000", "--settings", "", "no-such-flag=1", "vf-coef=0.25")
    for number, code in ((signal.SIGHUP, 129), (signal.SIGTERM, 143)):
        r = run(command=command)
        r.wait_for(lambda: log.exists() and "frames/s" in log.read_text().rpartition("stopped: ")[2], 60, "a report")
        r.process.send_signal(number)  # ends the run too, which saves
        assert r.wait(30) == code and re.search(r"stopped: .*\n.* play: .*\n.*\n.* continue: .*\n$", log.read_text()) and not out.exists()
    assert another(command, tmp_path) == "error: default_1 already exists, made by another command"

    first = python(*command, folder=tmp_path)
    assert "resuming " in log.read_text() and first.returncode == 1
    assert "failed: no-such-flag_1_1 (exit code 2)" in first.stdout and "Unrecognized" in first.stdout
    curves = seeds.read_curves(out)
    assert set(curves) == {"", "vf-coef=0.25"} and all(set(runs) == {1} for runs in curves.values())
    for runs in curves.values():
        assert (np.diff(runs[1][:, 1]) > 0).all() and -500 < runs[1][:, 2].mean() < 100
    assert len(curves[""][1]) >= 2, "of both sessions"
    assert "| `vf-coef=0.25` | 1 |" in first.stdout and "(1 of 1) | - (0 of 1)" in first.stdout
    before = out.read_text()
    assert '"command": "' in before and '"lag": ' in before and "--vf-coef=0.25" in before and '"cpu"' in before
    command.remove("no-such-flag=1")
    again = python(*command, folder=tmp_path)
    assert again.returncode == 0 and "started" not in again.stdout and out.read_text() == before
    shutil.rmtree(tmp_path / "runs")
    assert another(command, tmp_path) == "error: default_1 already exists, made by another command" and not (tmp_path / "runs").exists()


def test_a_grid_side_by_side(run, tmp_path):
    """Two runs at once, each with cores of its own; Ctrl-C ends both, with checkpoints; and plot.py draws the folder."""
    command = line(tmp_path, "--seeds", "1", "--grid", "rnn-type=gru,none", "--parallel", "2")
    logs = [tmp_path / "runs" / f"rnn-type_{rnn}_1" / "log.txt" for rnn in ("gru", "none")]
    r = run(command=command)
    r.wait_for(lambda: all(log.exists() and "frames/s" in log.read_text() for log in logs), 60, "reports of both")
    r.process.send_signal(signal.SIGINT)
    assert r.wait(30) == 130
    ends = [re.findall("(stopped|done): ", log.read_text()) for log in logs]
    assert ["stopped"] in ends and all(ends), "both have saved; one may have been done before the other began"

    assert python(*command, folder=tmp_path).returncode == 0
    curves = seeds.read_curves(tmp_path / "runs" / "curves.csv")
    assert {setting: set(runs) for setting, runs in curves.items()} == {"rnn-type=gru": {1}, "rnn-type=none": {1}}
    subprocess.run([sys.executable, ROOT / "benchmark" / "plot.py", tmp_path / "runs"], check=True)
    assert (tmp_path / "runs" / "curves.png").stat().st_size > 10_000


def test_combinations():
    found = seeds.combinations(["", "x=0"], ["a=1,2", "sync,no-sync"])
    assert list(found)[:5] == ["a=1 sync", "a=1 no-sync", "a=2 sync", "a=2 no-sync", "x=0 a=1 sync"]
    assert all(name == flags for name, flags in found.items())
    assert seeds.combinations(["", "x=0"], []) == {"": "", "x=0": "x=0"}
    assert seeds.combinations(["ours:", "plain: x=0 y"], []) == {"ours": "", "plain": "x=0 y"}
    named = seeds.combinations(["plain: x=0"], ["env-id=my:A,B"])
    assert named == {"plain env-id=my:A": "x=0 env-id=my:A", "plain env-id=B": "x=0 env-id=B"}
    assert seeds.combinations(["env-id=my:A"], []) == {"env-id=my:A": "env-id=my:A"}


def test_a_peer_in_the_table(tmp_path, monkeypatch):
    """Each seed of ours is followed by the peer's; Sample Factory's is what collect.py reads. The same line again makes nothing."""
    peer, ours = tmp_path / "peer.sh", tmp_path / "ours.sh"
    peer.write_text("""#!/bin/bash
mkdir -p $3/sf
echo '{"env": "doom_basic", "env_frameskip": 4}' > $3/sf/config.json
echo "[2026-11-26 10:00:00,000][1] Begin
[2026-11-26 10:00:10,000][1] Total num frames: 4000
[2026-11-26 10:00:10,000][1] Avg episode reward: [(0, '$2.5')]" > $3/out.txt
echo "sf $1 $2" >> order
""")
    ours.write_text('echo "ours $*" >> order; exit 1\n')
    monkeypatch.chdir(tmp_path)
    options = seeds.Options(seeds=[1, 2], settings=["ours: x=0"], folder=tmp_path / "runs", out=tmp_path / "out.csv")
    options.peers = [f"sf: bash {peer} 'a word' {{seed}} {{folder}}"]
    assert seeds.train(["bash", str(ours)], options, options.out) == 2, "neither of ours has succeeded"
    order = [line.split(" --seed")[0] for line in Path("order").read_text().splitlines()]
    assert order == ["ours --x=0", "sf a word 1", "ours --x=0", "sf a word 2"]
    curves = seeds.read_curves(options.out)
    assert {seed: points.tolist() for seed, points in curves["sf"].items()} == {1: [[10, 1000, 150]], 2: [[10, 1000, 250]]}
    options.settings = [""]  # the default: without a command of ours there is nothing to set
    assert seeds.train([], options, options.out) == 0 and len(Path("order").read_text().splitlines()) == 4


def test_settings_without_a_command_are_refused(tmp_path):
    for flags in (["--settings", "x=0"], ["--grid", "sync,no-sync"]):
        done = python(ROOT / "benchmark" / "seeds.py", "--folder", tmp_path / "runs", "--peers", "x: true", *flags, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "error: no command to run: put it after --\n") and not (tmp_path / "runs").exists()


def test_a_run_without_a_curve_does_not_end_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    peers = ["x: true", "there-is-none: no-such-program", "y: touch y"]
    options = seeds.Options(seeds=[1], settings=[], peers=peers, folder=tmp_path / "runs", out=tmp_path / "out.csv")
    assert seeds.train([], options, options.out) == 3 and Path("y").exists()


def test_cleanrl_and_stable_baselines3_are_peers(tmp_path):
    """Of CleanRL's returns of single episodes the means, of Stable-Baselines3 the means that it logs itself."""
    runs = {name: seeds.Run(name, 1, tmp_path, [name], peer=True) for name in ("cleanrl", "sb3")}
    with SummaryWriter(str(runs["cleanrl"].folder / "runs" / "x")) as writer:
        for i in range(4):
            writer.add_scalar("charts/SPS", 100, 100 * i, walltime=1000 + i)
            writer.add_scalar("charts/episodic_return", 10 * i, 100 * i, walltime=1000 + i)
    with SummaryWriter(str(runs["sb3"].folder)) as writer:
        for i in range(4):
            writer.add_scalar("time/fps", 100, 100 * i, walltime=1000 + i)
            writer.add_scalar("rollout/ep_rew_mean", 10 * i, 100 * i, walltime=1000 + i)
    for run in runs.values():
        run.add_curve(tmp_path / "out.csv", {})
    curves = seeds.read_curves(tmp_path / "out.csv")
    assert curves["cleanrl"][1].tolist() == [[i, 100 * i, 5 * i] for i in range(4)]
    assert curves["sb3"][1].tolist() == [[i, 100 * i, 10 * i] for i in range(4)]


def test_shares_of_a_machine(monkeypatch):
    cores = list(range(7))
    shares = [seeds.part(cores, share, 3) for share in range(3)]
    assert sum(shares, []) == cores and min(map(len, shares)) == 2
    assert [seeds.part(cores[:2], share, 3) for share in range(3)] == [[0], [0], [1]]
    assert [seeds.part(cores[:2], share, 4) for share in range(4)] == [[0], [0], [1], [1]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [seeds.gpus(share, 2)["CUDA_VISIBLE_DEVICES"] for share in range(2)] == ["4", "6"]


def test_through_submitit(tmp_path):
    """On a machine without Slurm submitit starts the same jobs as processes."""
    slurm = ("--slurm", "timeout-min=5", "partition=x")
    command = line(tmp_path, "--seeds", "1", "--settings", "", "no-such-flag=1", "--parallel", "2", *slurm)
    done = python(*command, folder=tmp_path)
    assert done.returncode == 1 and "submitit runs the jobs: local" in done.stdout and "| default | 1 |" in done.stdout
    assert "failed: no-such-flag_1_1 (exit code 2)" in done.stdout and "Unrecognized" in done.stdout
    wrong = python(*line(tmp_path, "--slurm", "no-such-parameter=1"), folder=tmp_path)
    assert wrong.returncode == 2 and "error: --slurm: Unknown argument 'no_such_parameter'" in wrong.stdout


def test_before_a_job_has_used_up_its_time_its_run_is_told_to_end(tmp_path):
    """Slurm sends SIGUSR2 to all processes of a job, and of other signals some Slurms none to the run: it must get SIGTERM alone."""
    for sent in ("[os.kill(pid, signal.SIGUSR2) for pid in (os.getpid(), os.getppid())]", "os.kill(os.getppid(), signal.SIGTERM)"):
        run = f"import os, signal, time; time.sleep(1); {sent}; time.sleep(20)"
        job = f"import sys, seeds; sys.exit(100 - seeds.execute([sys.executable, '-c', {run!r}], {str(tmp_path / 'out')!r}))"
        done = subprocess.run([sys.executable, "-c", job], cwd=ROOT / "benchmark", env=os.environ | {"SLURM_JOB_ID": "1"}, timeout=60)
        assert done.returncode == 100 + signal.SIGTERM


def test_the_table():
    def curve(*points):
        return np.array([(0.0, step, value) for step, value in points])

    text = seeds.table({"": {1: curve((0, 0), (100_000, 10)), 2: curve((0, 0), (50_000, 0), (100_000, 4))},
                        "x": {1: curve((0, 2), (100_000, 2))}, "short": {1: curve((900, 6))}}, [4])  # fmt: skip
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[2][:3] == ["default", "2", "100k (2 of 2)"] and rows[3][:3] == ["`x`", "1", "- (0 of 1)"]
    assert rows[2][3].startswith("3.00 (1.00 to 5.00)"), "means over steps of 5 and of 1"
    assert rows[2][4].startswith("7.00 (4.00 to 10.00)") and rows[3][3] == "2.00"
    assert rows[4][3:] == ["6.00", "6.00"], "one report"
