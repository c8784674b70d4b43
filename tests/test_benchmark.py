"""What the scripts of benchmark/ run exists, with the flags that they give it; and each kind of script once, with tiny numbers."""

import ast
import contextlib
import csv
import datetime
import functools
import importlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tyro
from conftest import marked
from edited import ROOT
from forked import MARK, new_mark
from torch.distributed.run import get_args_parser
from torch.utils.tensorboard import SummaryWriter

BENCHMARK = ROOT / "benchmark"
sys.path[:0] = [str(BENCHMARK), str(BENCHMARK / "peers")]
import collect  # noqa: E402
import compare  # noqa: E402
import gym_goals  # noqa: E402
import parts  # noqa: E402
import plot  # noqa: E402
import random_policy  # noqa: E402
import seeds  # noqa: E402

NAMES = {}  # script -> what it can be asked for
for script in ("rates.sh", "learning.sh"):
    usage = subprocess.run([BENCHMARK / script], capture_output=True, text=True).stderr
    NAMES[script] = re.findall(r"^    (\w+) ", usage.partition("NAME is one of:")[2], re.M)
BOTH = [(script, name) for script, names in NAMES.items() for name in names]


# ---- every command


class Wrong(Exception):
    pass


def parsed(options, flags: list[str]):
    try:
        return tyro.cli(options, args=flags, console_outputs=False)
    except SystemExit:
        raise Wrong(f"{options.__module__} does not take {shlex.join(flags)}") from None


@functools.cache
def check(*command: str) -> None:
    """Raises Wrong where a command names a file that is not there, or gives one of ours what it does not take."""
    program, *words = command
    if program == "torchrun":
        found = get_args_parser().parse_args(words)
        program, words = found.training_script, found.training_script_args
    elif program in ("python", sys.executable):
        words = words[2:] if words[0] == "-W" else words
        program, words = words[0], words[1:]
    elif program in ("mkdir", "cp", "sed", "tar", "git", "play"):  # the last is of learning.sh
        return
    file = Path(program)
    if file.stem.startswith("appo_"):  # or a copy of one in another folder, perhaps with what multigpu adds
        file = file if (ROOT / file.name).exists() else file.with_stem(file.stem.removesuffix("_multigpu"))
        file = Path(file.name)
    if not (ROOT / file).is_file():
        raise Wrong(f"there is no {file}")
    if file.stem.startswith("appo_"):
        parsed(importlib.import_module(file.stem).Args, words)
    elif file.name == "evaluate.py":
        module = importlib.import_module("evaluate")
        _, more = tyro.cli(module.Options, args=words, return_unknown_args=True, console_outputs=False)
        parsed(importlib.import_module("appo_pbt_doom").Args, more)
    elif file.name == "seeds.py":
        split = words.index("--") if "--" in words else len(words)
        options = parsed(seeds.Options, words[:split])
        for flags in seeds.combinations(options.settings, options.grid).values():
            check(*words[split + 1 :], *(f"--{flag}" for flag in flags.split())) if words[split + 1 :] else None
        for peer in options.peers:
            check(*shlex.split(peer.split(": ", 1)[1]))
    elif file.name in ("compare.py", "turns.py"):
        for text in parsed(importlib.import_module(file.stem).Options, words).commands:
            check(*shlex.split(text.split(": ", 1)[1]))
    elif file.name == "gym_goals.py":
        split = words.index("--") if "--" in words else len(words)
        parsed(gym_goals.Options, words[:split])
        parsed(importlib.import_module("appo_gym").Args, words[split + 1 :])
    elif file.name == "collect.py":
        if not re.fullmatch(r"curves|rates|steps|population|tasks/\w+/episodic_return", words[0]):
            raise Wrong(f"collect.py does not know {words[0]}")
    elif file.name == "sample_factory.sh":
        seconds, env, *_ = words
        kinds = re.findall(r"^ +(\w+_)\*\)", (ROOT / file).read_text(), re.M)
        if not (seconds.isdigit() and env.startswith(tuple(kinds)) and len(words) >= 4):
            raise Wrong(f"sample_factory.sh does not take {words}")
    elif file.name == "cleanrl.sh":
        if not (words[0].endswith(".py") and words[2].isdigit() and len(words) >= 5):
            raise Wrong(f"cleanrl.sh does not take {words}")
    elif file.name == "stable_baselines3_ppo.py":  # which cannot be imported here
        known = set(re.findall(r"(\w+)=(?:str|int|float)\b", (ROOT / file).read_text()))
        if unknown := {word for word in words if word.startswith("--")} - {f"--{name}" for name in known}:
            raise Wrong(f"stable_baselines3_ppo.py does not take {unknown}")
    elif file.name == "pufferlib_atari.py":
        if not (len(words) == 4 and words[2] in ("async", "serial", "native")):
            raise Wrong(f"pufferlib_atari.py does not take {words}")
    elif file.stem in ("dummy_sampler", "parts", "gpu", "animation", "fill_level_cache"):
        parsed(importlib.import_module(file.stem).Options, words)
    elif unknown := {word for word in words if word.startswith("--")} - {"--add"}:  # arena.py, carry.py, plot.py, random_policy.py
        raise Wrong(f"{file.name} does not take {unknown}")


@functools.cache
def printed(script: str, name: str, *flags: str) -> list[list[str]]:
    """The commands that a script would run for a name, one after the other."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_PYTHON")} | dict(DRY_RUN="1", CLEANRL="cleanrl")
    command = [BENCHMARK / script, name, "/nowhere/out", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [shlex.split(line.removeprefix("+ ")) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("script, name", BOTH)
def test_every_command_of_every_name(script, name):
    commands = printed(script, name)
    for command in commands:
        check(*command)
    assert any("/results/" in word for word in commands[-1]) or commands[-1][-1].endswith("/results"), "it ends with a result"
    assert not Path("/nowhere").exists()


@pytest.mark.parametrize("script", NAMES)
def test_a_wrong_name_is_answered_with_all_names(script):
    functions = set(re.findall(r"^([a-z_0-9]+)\(\) \{", (BENCHMARK / script).read_text().partition("\n# ---- names")[2], re.M))
    assert functions == set(NAMES[script]) and len(functions) > 10
    done = subprocess.run([BENCHMARK / script, "no_such_name"], capture_output=True, text=True)
    assert done.returncode == 2 and all(f"    {name} " in done.stderr for name in functions) and "DRY_RUN" in done.stderr


def test_flags_reach_every_training():
    """And a misspelt one is found, wherever the script puts it."""
    some = [("rates.sh", name) for name in ("doom", "ranks", "policies", "gym")]
    for script, name in some + [("learning.sh", name) for name in ("sync", "pbt_basic")]:
        for command in printed(script, name, "--rollout", "64"):
            check(*command)
        with pytest.raises(Wrong):
            for command in printed(script, name, "--rolout", "64"):
                check(*command)


def test_ranks_are_added_to_copies_that_are_python(tmp_path):
    """A conflict, in Atari's docstring, is resolved."""
    made = [command for command in printed("rates.sh", "ranks") if "/nowhere/out/files" in " ".join(command) and "--env-id" not in command]
    for command in made:
        command = [word.replace("/nowhere/out", str(tmp_path)) for word in command]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0 or "carry.py" in command
    files = [tmp_path / "files" / f"appo_{family}_multigpu.py" for family in ("doom", "atari")]
    assert len(made) > 6 and all("join_ranks" in [node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")] for file in files)


@pytest.mark.parametrize("command", [
    "python appo_doom.py --env-idd basic",
    "python appo_doom.py --encoder nature",  # a flag of another file
    "python appo_doom.py --rnn-type none gru",
    "python appo_doom.py --num-epochs two",
    "python appo_domo.py --env-id basic",
    "torchrun --standalone --nproc-per-node 2 appo_doom_multigpu.py --env-idd basic",
    "python benchmark/seeds.py --seed 1 -- python appo_doom.py",
    "python benchmark/seeds.py --settings num-epoch=2 -- python appo_doom.py",
    "python benchmark/seeds.py --grid rnn-type=gru,lsmt -- python appo_doom.py",
    "python benchmark/seeds.py --settings 'ours: synch' -- python appo_doom.py",
    "python benchmark/seeds.py --peers 'sf: benchmark/peers/sample_factory.sh 10 dom_basic {seed} {folder}' -- python appo_doom.py",
    "python benchmark/compare.py --out x.json 'a: python appo_doom.py' 'b: python appo_doom.py --sink'",
    "python benchmark/parts.py --out x.json --family doom",
    "python dummy_sampler.py --familly doom",
    "python benchmark/collect.py rate x.json folder",
    "python benchmark/peers/stable_baselines3_ppo.py CartPole-v1 1 --step 5",
    "python benchmark/peers/gym_goals.py --out x.json -- --num-worker 2",
    "python evaluate.py folder --opponent other",
])  # fmt: skip
def test_a_misspelt_command_is_found(command):
    with pytest.raises(Wrong):
        check(*shlex.split(command))


def documented(file: Path) -> list[str]:
    """The commands in the docstring of a file, without remarks."""
    lines = (ast.get_docstring(ast.parse(file.read_text())) or "").replace("\\\n", " ")
    lines = re.sub(r"\n +(?=-- python)", " ", lines)
    return [line.strip() for line in lines.splitlines() if re.match(r" +python (?!-m)[^\[]*$", line)]


@pytest.mark.parametrize("file", [*sorted(BENCHMARK.glob("*.py")), *sorted(BENCHMARK.glob("peers/*.py"))], ids=lambda file: file.name)
def test_every_command_in_a_docstring(file):
    for command in documented(file):
        command = re.sub(r"\bN\b|\bSEED\b|\bSECONDS\b|\bTHREADS\b", "1", command.replace(" MODE ", " async ").replace(" FILE ", " x "))
        check(*shlex.split(command, comments=True))


def test_docstrings_have_commands():
    found = {file.name: len(documented(file)) for file in BENCHMARK.glob("*.py")}
    assert found["seeds.py"] >= 4 and found["parts.py"] >= 6 and found["gpu.py"] >= 2


def test_the_commands_of_self_play():
    text = (BENCHMARK / "self_play.sh").read_text().replace("\\\n", " ")
    files = dict(appo="appo_pbt_doom.py", play="evaluate.py")
    found = [(files[name], words) for name, words in re.findall(r"^(?: *OMP_NUM_THREADS=1)? *(appo|play) ([^()>|\n]*)", text, re.M)]
    assert len(found) == 5
    for file, words in found:
        check("python", file, *shlex.split(re.sub(r"\$\{?\w+\}?", "0", words)))
    for line in re.findall(r"^python (.*)", text, re.M):
        check("python", *shlex.split(line.replace("$here", "benchmark")))


@pytest.mark.parametrize("script", sorted(BENCHMARK.rglob("*.sh")), ids=lambda script: script.name)
def test_shell_scripts(script):
    subprocess.run(["bash", "-n", script], check=True)
    if script.name != "common.sh":
        for flag in ("-h", "--help"):
            asked = subprocess.run(["bash", script, flag], capture_output=True, text=True)
            assert asked.returncode == 2 and "Usage: " in asked.stderr and not asked.stdout, asked
    if script.name != "common.sh":  # which others source
        assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text()


# ---- each kind of script once


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A `python` whose trainings and dummy samplers are over at once: their results are those of a run of 40 s, 100 steps/s."""
    run, begin = tmp_path / "made" / "run", 1_000_000_000.0
    run.mkdir(parents=True)
    with SummaryWriter(str(run)) as writer:
        for i in range(1, 9):
            for tag, value in {"charts/SPS": 100, "charts/episodic_return": 10 * i, "lag/mean": 1}.items():
                writer.add_scalar(tag, value, 500 * i, walltime=begin + 5 * i)
    (run / "log.txt").write_text(time.strftime("%Y-%m-%d %H:%M:%S begin\na new run in x\n", time.localtime(begin)))
    (run / "cfg.json").write_text(json.dumps(dict(resolved=dict(device="cpu", precision="float32", batch_size=1024))))
    rate = tmp_path / "made" / "rate.json"
    rate.write_text(json.dumps(dict(frameskip=4, results=[dict(workers=2, frames_per_second=4000)])))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python"
    program.write_text(f"""#!/bin/bash
value() {{ while [ "$1" != "$flag" ]; do shift; done; echo "$2"; }}
case $1 in
appo_*) flag=--train-dir; folder=$(value "$@"); flag=--experiment; cp -r {run} "$folder/$(value "$@")" ;;
dummy_sampler.py) flag=--out; cp {rate} "$(value "$@")" ;;
*) exec {sys.executable} "$@" ;;
esac
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RESULTS", str(tmp_path / "results"))
    return tmp_path


def test_compare_ends_a_run_that_does_not_end_by_itself(pretended, monkeypatch):
    """A file without --train-for-seconds by SIGINT; any other one ends as it will. Rates are those of the third report and later."""
    monkeypatch.setattr(compare, "START_UP", 2)
    ending = dict(by_itself="sys.exit(sys.argv[-2:] != ['--train-for-seconds', '0.5'])",
                  when_told="signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); time.sleep(20)", broken="sys.exit(130)")  # fmt: skip
    for name, end in ending.items():
        remark = "# train_for_seconds" if name == "by_itself" else ""
        begin = f"folder = sys.argv[sys.argv.index('--train-dir') + 1]; shutil.copytree({str(pretended / 'made' / 'run')!r}, folder + '/run')"
        (pretended / f"{name}.py").write_text(f"import shutil, signal, sys, time {remark}\n{begin}\n{end}\n")
    start = time.monotonic()
    for name in ("by_itself", "when_told"):
        assert compare.rate(f"{sys.executable} {pretended / name}.py", 0.5) == 100
    assert time.monotonic() - start < 15
    with pytest.raises(subprocess.CalledProcessError, match="130"):
        compare.rate(f"{sys.executable} {pretended / 'broken.py'}", 5)


def test_turns_tells_the_faster_of_two_runs_and_leaves_none(tmp_path):
    """Each has a child that writes, of one twice as often; one that ends by itself is an error."""
    child = "import os, sys, time\nwhile True:\n os.write(1, b'.')\n time.sleep(float(sys.argv[1]))"
    run = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}, *sys.argv[1:]], stdout=subprocess.DEVNULL)"
    (tmp_path / "run.py").write_text(run)
    mark = new_mark()
    command, out = f"{sys.executable} {tmp_path / 'run.py'}", tmp_path / "turns.json"
    flags = ["--out", out, "--turns", "3", "--seconds", "0.5", "--warm-up", "1"]
    for second, code in (("0.01", 0), ("no-number", 1)):
        commands = [f"slow: {command} 0.02", f"fast: {command} {second}"]
        ended = subprocess.run([sys.executable, BENCHMARK / "turns.py", *flags, *commands], env={**os.environ, MARK: mark}, capture_output=True)
        assert ended.returncode == code, ended.stderr.decode()
        assert not marked(mark)
    assert 1.5 < statistics.median(json.loads(out.read_text())["ratios"]) < 2.2


def test_a_curve_of_the_base_counts_from_the_start_of_its_actors(tmp_path):
    """It has no log; and its args are as they are used, without a precision."""
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("args", "{}", walltime=1000)
        for i in range(1, 4):
            writer.add_scalar("charts/SPS", 100, 500 * i, walltime=1000 + 5 * i)
            writer.add_scalar("charts/episodic_return", i, 500 * i, walltime=1000 + 5 * i)
    (tmp_path / "cfg.json").write_text(json.dumps(dict(file="appo_gym.py", args=dict(device="cpu", batch_size=256))))
    assert collect.read(tmp_path) == [(5, 500, 1), (10, 1000, 2), (15, 1500, 3)]
    assert collect.used_args(tmp_path) == dict(device="cpu", batch_size=256, precision="float32")


def test_a_session_that_reported_nothing_takes_no_time(tmp_path):
    """Ctrl-C before the first report, and the same command a day later."""
    log = "{0}-01 10:00:00 basic: 2 workers\na new run in /x\n{0}-02 10:00:00 basic: 2 workers\n{0}-02 10:00:00 a new run in /x\n"
    (tmp_path / "log.txt").write_text(log.format("2026-11"))
    start = datetime.datetime(2026, 11, 2, 10).timestamp()
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("charts/SPS", 100, 500, walltime=start + 7)
    assert [(seconds, step) for seconds, step, _ in collect.read_events(tmp_path, "charts/SPS")] == [(7, 500)]


def test_a_population_that_was_stopped_at_its_start_has_a_history(tmp_path):
    games = "2026-11-01 10:00:00 basic: 2 policies, 2 workers of 4 games\na new run in /x\n"
    report = "2026-11-01 10:01:00 step 100: return 1.00, 50 frames/s\n"
    (tmp_path / "log.txt").write_text(2 * games + report + games.replace("a new run in /x", "resuming /x at step 100"))
    with SummaryWriter(str(tmp_path / "policy_00")) as writer:
        writer.add_scalar("pbt/learning_rate", 0.5, 4)
    assert collect.read_population(tmp_path) == [dict(step=4, policy=0, weights_of=0, objective="", learning_rate=0.5)]


def test_a_run_that_is_too_short_for_a_rate_is_left_out(tmp_path, monkeypatch, capsys):
    for name, seconds in (("short", 20), ("long", 60)):
        with SummaryWriter(str(tmp_path / f"x_{name}_1")) as writer:
            for i in range(0, seconds, 5):
                writer.add_scalar("time/fps", 100, 500 * i, walltime=1000 + i)
    monkeypatch.setattr(sys, "argv", ["collect.py", "steps", str(tmp_path / "out.json"), *map(str, tmp_path.glob("x_*"))])
    collect.main()
    assert json.loads((tmp_path / "out.json").read_text())["medians"] == {"x_long": 500}
    assert "skipped: " in (error := capsys.readouterr().err) and "x_short_1 is too short for a rate" in error


@pytest.mark.parametrize("script", ["compare.py", "turns.py"])
def test_two_commands_have_names_of_their_own(script, tmp_path):
    for commands in (["python x.py", "b: python y.py"], ["a: python x.py", "a: python y.py"]):
        done = subprocess.run([sys.executable, BENCHMARK / script, "--out", tmp_path / "out", *commands], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr == 'error: each command must be "NAME: COMMAND", with a name of its own\n'


def test_a_population_has_no_single_curve(tmp_path):
    for policy in range(2):
        with SummaryWriter(str(tmp_path / f"policy_{policy:02}")) as writer:
            writer.add_scalar("charts/SPS", 100, 500, walltime=1000)
    with pytest.raises(ValueError, match="several policies"):
        collect.read_events(tmp_path, "charts/SPS")


def test_rates(pretended, monkeypatch):
    monkeypatch.setenv("ROUNDS", "2")
    monkeypatch.setenv("GAMES", "4")
    monkeypatch.setenv("SF_PYTHON", sys.executable)
    command = [BENCHMARK / "rates.sh", "throughput", pretended / "out", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    order = re.findall(r"--experiment (\S+)", done.stdout)
    assert order == ["doom-4_ours_1", "atari-4_ours_1", "doom-4_ours_2", "atari-4_ours_2"] and done.stdout.count("--seed 7") == 4
    found = json.loads((pretended / "results" / "throughput.json").read_text())
    assert found["medians"] == {"doom-4_bare": 4000, "doom-4_ours": 400, "atari-4_bare": 4000, "atari-4_ours": 400}
    assert found["ratios"]["atari-4_bare"] == 0.1 and found["runs"]["doom-4_ours_2"]["precision"] == "float32"
    assert found["peers"]["SF_PYTHON"]["numpy"] == np.__version__
    assert subprocess.run(command, capture_output=True).returncode == 1, "the folder is there"


def test_learning(pretended, monkeypatch):
    monkeypatch.setenv("SEEDS", "1 2")
    command = [BENCHMARK / "learning.sh", "pong", pretended / "out", "--num-workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| ours | 2 | 1k (2 of 2) |" in done.stdout.replace("`", "")
    curves = seeds.read_curves(pretended / "results" / "learning_pong.csv")
    assert {setting: set(runs) for setting, runs in curves.items()} == dict(ours={1, 2})
    np.testing.assert_array_equal(curves["ours"][2][:2], [[5, 500, 10], [10, 1000, 20]])


def test_one_part_of_each_file(tmp_path, monkeypatch, capsys):
    """In the forms that the results have."""

    def measured(file: str, *flags: str) -> dict:
        out = tmp_path / f"{file}.json"
        monkeypatch.setattr(
            sys, "argv", ["parts.py", "--file", file, "--out", str(out), "--rounds", "2", "--seconds", "0.4", "--repeats", "1", *flags]
        )
        parts.main()
        return json.loads(out.read_text())

    found = measured("doom", "--num-envs-per-worker", "2", "--num-workers", "1")
    assert all(len(rates) == 1 and 100 < rates[0] < 1e6 for rates in found["frames_per_second"].values())
    assert found["shares"]["dummy"] == [round(found["frames_per_second"]["dummy"][0] / found["frames_per_second"]["bare"][0], 3)]
    times = found["milliseconds_per_sample"]
    batches = [f"inference, batch {n}" for n in (8, 16, 32, 64)] + [
        f"{part}, batch 1024" for part in ("gather", "learn", "vtrace", "learning")
    ]
    assert sorted(times) == sorted(batches) and all(0 < value < 100 for value in times.values())
    assert found["estimate_frames_per_second"] > 0 < found["simulation_milliseconds"]
    in_a_run = parts.in_a_run  # each takes some seconds: one is enough
    monkeypatch.setattr(parts, "in_a_run", lambda *a: in_a_run(*a) if "CartPole" in a[2] and not a[3] else dict(act=1.0, iteration=1.0))
    for file, env_id in (("mujoco", "HalfCheetah-v5"), ("gym", "CartPole-v1")):
        (found,) = measured(file, "--env-id", env_id, "--num-envs-per-worker", "8", "--seconds", "0.5")["envs"].values()
        assert len(found) == 12 and {"worker", "act, 8 rows", "act, 16 rows", "act, in a run, side by side"} <= set(found)
        assert all(0 < value < 1e5 for value in found.values())
    found = measured("replay")
    times = found["milliseconds"]
    assert len(times) == 9 and min(times.values()) > 0 and (found["fresh"], found["replayed"]) == (16, 16)
    assert {"choose", "distances 96", "learn with what is replayed", "act, logits and features stored"} <= set(times)
    (found,) = measured("doom", "--games", "2", "--num-workers", "1", "--seconds", "0.2")["results"]
    assert found["envs_per_worker"] == 2 and found["frames_per_second"] > 100 and found["resident_mib_of_a_worker"] > 50


def test_gym_goals(tmp_path, monkeypatch):
    """Ours until a report shows the goal, beside a peer that says it needed 5 s; and the speed of both."""
    peer = tmp_path / "python"
    answer = '{"steps": 7, "seconds": 5, "reached": true, "steps_per_second": 1.4}'
    peer.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho '{answer}'\n")
    peer.chmod(0o755)
    monkeypatch.setitem(gym_goals.GOALS, "CartPole-v1", 20)
    monkeypatch.setattr(gym_goals, "bare", lambda env_id: 9000.0)
    for out, more, asked in (("out.csv", "", "--goal 20 --steps 0"), ("out.json", "--speed --steps 20000", "--goal inf --steps 20000")):
        typed = f"gym_goals.py --out {tmp_path / out} --rounds 1 --envs CartPole-v1 --sb3-python {peer} {more} -- --num-workers 1"
        monkeypatch.setattr(sys, "argv", typed.split())
        gym_goals.main()
        assert (tmp_path / "asked").read_text().endswith(f"stable_baselines3_ppo.py CartPole-v1 1 {asked}\n")
    curves, rates = plot.read_curves(tmp_path / "out.csv"), plot.rates(tmp_path / "out.json")
    (ours,), (sb3,) = curves["CartPole-v1_ours"]["1"], curves["CartPole-v1_sb3"]["1"]
    assert ours[0] > 1 and ours[1] > 100 and ours[2] == 20
    assert 0 <= sb3[0] < 3 and sb3[1:].tolist() == [7, 20], "by the clock"
    assert rates["CartPole-v1_ours"][0] > 100 and rates["CartPole-v1_sb3"] == [1.4] and rates["CartPole-v1_bare"] == [9000]


def test_random_policy(tmp_path):
    runs, out = tmp_path / "curves.csv", tmp_path / "random.csv"
    runs.write_text('# {"command": "python appo_gym.py"}\nenv-id=CartPole-v1,1,5.0,100,20.0\nenv-id=CartPole-v1,1,6.0,200,21.0\n')
    random_policy.main(out, [runs])
    (row,) = csv.DictReader(line for line in out.read_text().splitlines() if not line.startswith("#"))
    assert row["env_id"] == "CartPole-v1" and row["episodes"] == "112" and 18 < float(row["return"]) < 28


def test_sample_factory_is_ended(tmp_path, monkeypatch):
    """After so many seconds, with all that it has started."""
    program, mark = tmp_path / "python", new_mark()
    program.write_text('#!/bin/sh\necho "$@"\nsleep 60 &\nsleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("SF_PYTHON", str(program))
    monkeypatch.setenv(MARK, mark)
    command = [BENCHMARK / "peers" / "sample_factory.sh", "1", "doom_basic", "7", tmp_path / "run", "--learning_rate=4e-4"]
    start = time.monotonic()
    subprocess.run(command, check=True, timeout=20)
    assert 0.9 < time.monotonic() - start < 10
    time.sleep(0.3)
    assert marked(mark) == set()
    said = (tmp_path / "run" / "out.txt").read_text()
    assert said.startswith("-m sf_examples.vizdoom.train_vizdoom --env=doom_basic --seed=7") and said.endswith("--learning_rate=4e-4\n")
    program.write_text("#!/bin/sh\nexit 1\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "ended by itself" in done.stderr


def test_cleanrl(tmp_path, monkeypatch):
    """It writes where it is started, so that is the run's folder."""
    (tmp_path / "cleanrl" / "cleanrl").mkdir(parents=True)
    (tmp_path / "cleanrl" / "cleanrl" / "ppo.py").write_text("import os, sys\nos.mkdir('runs')\nprint(*sys.argv[1:])\n")
    monkeypatch.setenv("CLEANRL", str(tmp_path / "cleanrl"))
    monkeypatch.setenv("CLEANRL_PYTHON", sys.executable)
    command = [BENCHMARK / "peers" / "cleanrl.sh", "ppo.py", "Breakout-v5", "100", "3", tmp_path / "run", "--update-epochs", "1"]
    subprocess.run(command, check=True)
    said = (tmp_path / "run" / "out.log").read_text()
    assert said == "--env-id Breakout-v5 --total-timesteps 100 --seed 3 --no-cuda --update-epochs 1\n"
    assert (tmp_path / "run" / "runs").is_dir()


def test_cartpole_without_velocities():
    masked = importlib.import_module("masked_cartpole")
    with contextlib.closing(masked.make()) as env:
        first, _ = env.reset(seed=1)
        full = env.unwrapped.state
        assert first.shape == env.observation_space.shape == (2,) and np.allclose(first, [full[0], full[2]])
