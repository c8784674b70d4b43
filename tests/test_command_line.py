"""The scripts as a user runs them: train, resume; bad input; flags and what becomes of them; the files agree with each other."""

import ast
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tokenize
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import vizdoom
from edited import ROOT, edited, load, replacing
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import appo_atari
import appo_doom
import appo_gym

SMALL = ("--num-workers", "2", "--rollout", "8", "--batch-size", "64", "--hidden-size", "32", "--device", "cpu")
NAMES = ["appo_gym", "appo_mujoco", "appo_doom", "appo_doom_multigpu", "appo_atari", "appo_atari_replay", "appo_dmlab", "appo_pbt_doom"]
BASE = ("appo_gym", "appo_mujoco")  # without operations
METRICS = (ROOT / "benchmark" / "METRICS.md").read_text()
TAGS = set(re.findall(r"^\| `([a-z]+/[A-Za-z_]+)`", METRICS, re.M))
OPERATIONS = {"charts/FPS", "lag/masked"}  # tags that the base has not


@pytest.fixture(autouse=True)
def as_before():
    """Runs in this process set handlers of signals, and extend the path."""
    before, path = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}, [*sys.path]
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.path[:] = path


def scalars(folder: Path) -> dict[str, list]:
    found = {}
    for file in sorted(folder.glob("events*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend(events.Scalars(tag))
    return found


def train_and_resume(run, main, folder: Path, name: str, game: str, *flags: str) -> tuple:
    """A run, and the same one resumed with another learning rate. Returns the edited file, its module, what both runs printed, the scalars of
    the first, and the checkpoints of both."""
    often = replacing("Reporter.SECONDS = 0.05")  # fast machines need not be busy for a second
    script = edited(folder, f"{name}_edited", often, source=ROOT / f"{name}.py")
    r = run(*SMALL, *flags, "--experiment", "e", "--env-id", game, "--total-timesteps", "1500", script=script)
    assert r.wait(90) == 0, r.text()

    def checkpoint() -> dict:
        return torch.load(max((folder / "e").rglob("latest.pth" if name in BASE else "checkpoint_*")), weights_only=True)

    found, before = scalars(folder / "e"), checkpoint()
    for tag, events in found.items():
        assert all(abs(event.value) < 1e9 for event in events), tag
    lags = [event.value for event in found["lag/max"]]
    assert np.median(lags) <= 8, "lag within its bound, but for an actor that the machine has held up"
    assert 1500 <= before["global_step"] < 2000 and found["charts/SPS"][-1].step <= before["global_step"]
    for fps, sps in zip(found.get("charts/FPS", found["charts/SPS"]), found["charts/SPS"], strict=True):
        assert fps.value == pytest.approx((1 if name == "appo_gym" else 4) * sps.value, rel=1e-3)

    appo = load(script)
    code, text = main(appo, "--train-dir", folder, "--experiment", "e", "--total-timesteps", 2000, "--learning-rate", 0.0002)
    assert code == 0 and f"resuming {folder / 'e'} at step {before['global_step']:,}" in text
    after = checkpoint()
    assert after["global_step"] > before["global_step"] and after["version"] > before["version"]
    assert after["optimizer"]["param_groups"][0]["lr"] == 0.0002
    return script, appo, (r.text(), text), found, (before, after)


@pytest.mark.parametrize("name, game, flags", [("appo_gym", "CartPole-v1", ("--num-envs", "8")),
                                               ("appo_doom", "basic", ("--num-envs-per-worker", "4", "--precision", "float32"))])  # fmt: skip
def test_train_and_resume(run, main, tmp_path, name, game, flags):
    folder = tmp_path / "e"
    script, appo, texts, found, checkpoints = train_and_resume(run, main, tmp_path, name, game, *flags)
    steps = [content["global_step"] for content in checkpoints]
    for text, step, place in zip(texts, steps, (f"a new run in {folder}", f"resuming {folder} at step {steps[0]:,}")):
        cores = appo.num_cores()
        assert f"{game}: 2 workers on {cores} cores, 8 environments\n{place}\n" in text, "what was typed the first time still holds"
        ways = rf"play: python evaluate.py {folder}(?: --env-id CartPole-v1)?\ncurves: tensorboard --logdir {folder}\ncontinue: the same command with --experiment e and a larger --total-timesteps"
        assert re.search(rf"^done: {step:,} steps, .*\n{ways}$", text, re.M)
    cfg = json.loads((folder / "cfg.json").read_text())
    assert cfg["file"] == str(script) and (cfg["args"]["batch_size"], cfg["args"]["learning_rate"]) == (64, 0.0002)
    assert set(found) == TAGS - (OPERATIONS if name == "appo_gym" else set()), "the tags are those of the table"
    files = {path.name for path in folder.iterdir() if "events" not in path.name}
    assert files == {"cfg.json", "lock", *({"latest.pth"} if name == "appo_gym" else {"checkpoints", "log.txt"})}
    assert f"override: learning_rate {appo.Args.learning_rate} -> 0.0002\n" in texts[1] and "override" not in texts[0]
    if name != "appo_gym":
        assert "frames/s" in (folder / "log.txt").read_text()
    code, text = main(appo, "--train-dir", tmp_path, "--experiment", "e", "--total-timesteps", 100)
    assert code == 0 and text.endswith("Already complete: raise --total-timesteps to continue.\n") and "workers" not in text


@pytest.mark.parametrize("name, game", [("appo_gym", "Acrobot-v1"), ("appo_doom", "battle"), ("appo_atari", "Breakout-v5"),
                                        ("appo_atari_replay", "Breakout-v5"), ("appo_mujoco", "Ant-v5")])  # fmt: skip
def test_same_seed_same_weights(name, game, main, tmp_path):
    """--num-workers 0 on a CPU: two runs are the same, whatever random numbers were drawn before."""
    appo, ends = importlib.import_module(name), []
    flags = ["--env-id", game, "--num-envs" if name in BASE else "--num-envs-per-worker", 4, "--num-workers", 0, "--rollout", 16,
             "--hidden-size", 64, "--seed", 7, "--device", "cpu", "--total-timesteps", 450]  # fmt: skip
    for i in range(2):
        torch.manual_seed(i), np.random.seed(i)
        more = ["--batch-size", 64]
        code, text = main(appo, "--train-dir", tmp_path, "--experiment", i, *flags, *more)
        assert code == 0, text
        ends.append(torch.load(max((tmp_path / str(i)).rglob("latest.pth" if name in BASE else "checkpoint_*")), weights_only=True))
    a, b = ends
    assert a["version"] == b["version"] >= 6 and a["global_step"] == b["global_step"]
    assert all(torch.equal(a["agent"][key], b["agent"][key]) for key in a["agent"])


BAD = {
    "appo_gym --env-id CartPole-v77": "Environment version `v77` for environment `CartPole` doesn't exist",
    "appo_gym --env-id nowhere:Env-v0": "No module named 'nowhere'",
    "appo_gym --env-id Pendulum-v1": r"unsupported spaces, Dict\(.*for a Box of actions: appo_mujoco.py",
    "appo_gym --num-envs 5 --num-workers 2": "--num-envs 5 cannot be shared out evenly among --num-workers 2",
    "appo_doom --env-id battel": "unknown --env-id battel; there are basic, .*, battle, ",
    "appo_doom --num-envs-per-worker 5 --worker-num-splits 2": "--num-envs-per-worker 5 is not divisible by --worker-num-splits 2",
    "appo_doom --cfg-path nowhere.cfg": "--cfg-path nowhere.cfg: ",
    "appo_atari --max-policy-lag 0": "--max-policy-lag 0 is out of range: at least 1",
    "appo_doom --actor-timeout -1": "--actor-timeout -1.0 is out of range: at least 0",
    "appo_doom --reward-clip 0": "--reward-clip 0.0 is out of range: at least 0.001",
    "appo_atari --sticky-actions 25": "--sticky-actions 25.0 is out of range: 0 to 1",
    "appo_atari_replay --sticky-actions -1": "--sticky-actions -1.0 is out of range: at least 0",
    "appo_doom --num-envs-per-worker 10000000": r"/dev/shm has [\d,]+ MiB free, [\d,]+ are needed: use fewer environments",
} | {f"{name} {flag}": sentence for name in NAMES for flag, sentence in {
    "--device cuda:7": "--device cuda:7: .*CUDA",
    "--device gpu": "--device gpu: Expected one of cpu, cuda",
    "--learning-rate nan": "--learning-rate nan is out of range: at least 0",
}.items()}  # fmt: skip


def refused(call, capsys) -> str:
    """The one sentence that `main` says on stderr, with code 2."""
    capsys.readouterr()
    assert call() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error.removeprefix("error: ")


@pytest.mark.parametrize("command", BAD)
def test_bad_input_gets_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, *flags = command.split()
    device = [] if "--device" in flags else ["--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--total-timesteps", "1", *device, *flags])
    assert re.match(BAD[command], refused(importlib.import_module(name).main, capsys))
    assert not list(tmp_path.iterdir()), "nothing is left of it"


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_too_small(name, tmp_path, monkeypatch, capsys):
    appo = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    whole = {name: 1 for name, kind in appo.Args.__annotations__.items() if kind is int and name not in appo.AT_LEAST}
    for field, least in {**whole, **appo.AT_LEAST, "gamma": 0}.items():
        if least == -np.inf:
            continue
        flag = f"--{field.replace('_', '-')}"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu", flag, str(least - 1), *([] if field == "total_timesteps" else ["--total-timesteps", "1"])])
        assert re.fullmatch(rf"{flag} {least - 1}(\.0)? is out of range: at least {least}\n", refused(appo.main, capsys))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["..", ".", "../x", "e/../..", "/x", "e/../../elsewhere", ""])
def test_an_experiment_stays_below_the_train_dir(name, tmp_path, monkeypatch, capsys):
    """Wherever else it is, something of the user's may lie there."""
    experiment = tmp_path / "train_dir" / "e"
    (experiment / "checkpoints").mkdir(parents=True)
    cfg = json.dumps(dict(file="appo_doom.py", args=asdict(appo_doom.Args())))
    for folder in (experiment, experiment.parent, tmp_path):
        (folder / "cfg.json").write_text(cfg)

    def content() -> dict:
        return {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}

    before = content()
    monkeypatch.chdir(tmp_path)
    short = ["--num-workers", "0", "--num-envs-per-worker", "1", "--total-timesteps", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["appo_doom.py", "--experiment", name, *short])
    assert refused(appo_doom.main, capsys) == f"--experiment {name!r} is not the name of a folder in train_dir\n"
    assert content() == before


@pytest.mark.parametrize("flags, expected", [
    ("--env-id Pog-v5", "unknown --env-id Pog-v5; did you mean Pong-v5"),
    ("--num-workers -1", "--num-workers -1 is out of range: at least 0"),
])  # fmt: skip
def test_bad_input_of_atari(flags, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["appo_atari.py", "--device", "cpu", "--total-timesteps", "1", *flags.split()])
    assert appo_atari.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {expected}") and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """train_dir/e/cfg.json as a run of a file has left it; what `of` and `changes` say is not so. Returns what a resumed run says."""
    monkeypatch.chdir(tmp_path)

    def saved(appo, of: str | None = None, flags=(), **changes):
        folder = tmp_path / "train_dir" / "e"
        folder.mkdir(parents=True, exist_ok=True)
        args = asdict(appo.Args(device="cpu", experiment="e", total_timesteps=1)) | changes
        (folder / "cfg.json").write_text(json.dumps(dict(file=of or appo.__file__, args={k: v for k, v in args.items() if v != "none at all"})))
        monkeypatch.setattr(sys, "argv", ["appo.py", "--experiment", "e", *flags])
        return appo.main

    return saved


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_another_file_or_version_is_refused(name, saved, tmp_path, capsys):
    """At the name of the file; where it lies does not matter."""
    appo, folder = importlib.import_module(name), f"{tmp_path}/train_dir/e"
    assert refused(saved(appo, of="/home/me/appo_other.py"), capsys) == f"{folder} is a run of another file: /home/me/appo_other.py\n"
    for flag, value, problem in (("my_own_flag", 1, "my_own_flag"), ("gamma", "none at all", "gamma"), ("seed", "one", "seed.*int"),
                                 ("seed", None, "seed.*int"), ("rnn_type", "grue", "rnn_type"), ("num_workers", 1.5, "num_workers")):  # fmt: skip
        sentence = refused(saved(appo, of=f"/home/me/{name}.py", **{flag: value}), capsys)
        assert re.match(rf"{folder}/cfg.json is damaged or was written by another version of this file: .*{problem}", sentence)
    assert refused(saved(appo, of=f"/home/me/{name}.py", rollout=0), capsys).startswith("--rollout 0 is out of range"), "it is resumed"


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"file": "appo_gym.py", "args": 3}', '{"args": {}}', "<html>404</html>"])
def test_a_damaged_cfg_json_is_a_sentence(text, saved, tmp_path, capsys):
    resume = saved(appo_gym)
    (tmp_path / "train_dir" / "e" / "cfg.json").write_text(text)
    assert refused(resume, capsys).startswith(f"{tmp_path}/train_dir/e/cfg.json is damaged or was written by another version of this file: ")


@pytest.mark.parametrize("name", NAMES)
def test_another_network_or_environment_needs_another_folder(name, saved, tmp_path, capsys):
    appo = importlib.import_module(name)
    size, rnn, game = appo.Args.hidden_size, appo.Args.rnn_type, appo.Args.env_id
    for flag, before, now in (("hidden-size", size, 2 * size), ("env-id", game, "other"), ("rnn-type", rnn, "none" if rnn == "gru" else "gru")):
        sentence = refused(saved(appo, flags=[f"--{flag}", str(now)]), capsys)
        assert re.fullmatch(rf"{tmp_path}/train_dir/e was made with {flag.replace('-', '.')} {before}, not {now}: .*\n", sentence)


MODULE = """
import gymnasium, pathlib
pathlib.Path({marker!r}).write_text("imported")
gymnasium.register("Own-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=9)
"""


def test_a_runs_folder_names_no_code_to_be_run(saved, tmp_path, monkeypatch, capsys):
    """Neither the file nor the environment's module is imported, unless this is typed."""
    marker = tmp_path / "marker"
    (tmp_path / "own_module.py").write_text(MODULE.format(marker=str(marker)))
    other = tmp_path / "elsewhere" / "appo_gym.py"
    other.parent.mkdir()
    other.write_text(MODULE.format(marker=str(marker)))
    settings = dict(env_id="own_module:Own-v0", num_workers=0, num_envs=2, rollout=4)
    for typed in ([], ["--env-id", "CartPole-v1"]):
        sentence = refused(saved(appo_gym, of=str(other), flags=typed, **settings), capsys)
        assert sentence == "type --env-id own_module:Own-v0 again: it imports a module\n"
    assert not marker.exists() and "own_module" not in sys.modules
    assert saved(appo_gym, of=str(other), flags=["--env-id", "own_module:Own-v0"], **settings)() == 0
    assert marker.exists() and "done: " in capsys.readouterr().out


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, game in zip(NAMES, ("CartPole-v1", "HalfCheetah-v5", "basic", "basic", "Breakout-v5", "Breakout-v5", "rooms_collect_good_objects_train",
                                 "basic"), strict=True):
        appo, folders = importlib.import_module(name), set()
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        monkeypatch.setattr(appo.time, "time", lambda: 1234.5)
        for process in (10, 11):
            monkeypatch.setattr(os, "getpid", lambda: process)
            folders.add(str(appo.parse_args()[1]))
        assert folders == {f"{tmp_path}/train_dir/{game}__{name}__1__1234_{process}" for process in (10, 11)}


def test_the_same_command_resumes(tmp_path, monkeypatch):
    """A scenario file given by a relative path is kept as an absolute one; that is no other environment."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(f"{vizdoom.scenarios_path}/basic.wad", tmp_path)
    Path("own.cfg").write_text("doom_scenario_path = basic.wad\navailable_buttons = { ATTACK }\n")
    monkeypatch.setattr(sys, "argv", ["appo", "--experiment", "e", "--cfg-path", "own.cfg"])
    args, folder = appo_doom.parse_args()
    folder.mkdir(parents=True)
    (folder / "cfg.json").write_text(json.dumps(dict(file=appo_doom.__file__, args=args.typed)))
    assert args.cfg_path == str(tmp_path / "own.cfg") and appo_doom.parse_args() == (args, folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_fills_in_for_itself_what_nobody_typed(name, saved, monkeypatch, capsys):
    """On another machine, or with other environments; nothing is an override, and a number may be typed as 1e6."""
    appo = importlib.import_module(name)
    monkeypatch.setattr(appo, "num_cores", lambda: 4)
    args = appo.Args(device="cpu", experiment="e", **dict(num_envs=12) if name in BASE else {})
    assert args.num_workers == 4 and args.typed["num_workers"] is None and args.typed.get("worker_num_splits") is None
    saved(appo, flags=["--total-timesteps", "1.5e6"], **args.typed)
    monkeypatch.setattr(appo, "num_cores", lambda: 6)
    again, _ = appo.parse_args()
    assert again.num_workers == 6 and again.total_timesteps == 1_500_000
    assert capsys.readouterr().out == f"override: total_timesteps {args.total_timesteps} -> 1500000\n"


def test_workers_that_leave_cores_alone_are_told_of(main, tmp_path, monkeypatch):
    monkeypatch.setattr(appo_gym, "num_cores", lambda: 16)
    flags = ("--train-dir", tmp_path, "--total-timesteps", 1, "--rollout", 2, "--device", "cpu")
    code, text = main(appo_gym, *flags, "--num-envs", 34)
    assert code == 0 and "2 workers on 16 cores, 34 environments\n" in text and "\nfor a worker on each core: --num-envs 32\n" in text
    assert "for a worker" not in main(appo_gym, *flags, "--num-envs", 34, "--num-workers", 2)[1]


@pytest.mark.parametrize("flag", ["--lr", "--learning-rate"])
def test_both_names_of_the_learning_rate(flag, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["appo", flag, "0.5"])
    assert appo_gym.parse_args()[0].learning_rate == 0.5


def test_a_runs_folder_may_be_a_link_and_its_name_has_no_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "train_dir").mkdir()
    (tmp_path / "train_dir" / "e").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(sys, "argv", ["appo", "--experiment", "e"])
    assert appo_doom.parse_args()[1] == tmp_path / "train_dir" / "e"
    monkeypatch.setattr(sys, "argv", ["appo", "--env-id", "ale_py:ALE/Pong-v5"])
    folder = appo_gym.parse_args()[1]
    assert folder.parent == tmp_path / "train_dir" and folder.name.startswith("ale_py-ALE-Pong-v5__")


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_without_its_settings_is_not_resumed(name, tmp_path, monkeypatch, capsys):
    place = tmp_path / "train_dir" / "e" / ("latest.pth" if name in BASE else "checkpoints/checkpoint_000000000100.pth")
    place.parent.mkdir(parents=True)
    place.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["appo", "--experiment", "e", "--device", "cpu"])
    sentence = refused(importlib.import_module(name).main, capsys)
    assert sentence == f"{tmp_path}/train_dir/e has a checkpoint, but no cfg.json: choose another --experiment\n"


CODE = {  # what a file runs that a cfg.json may name
    "appo_doom --cfg-path /own.cfg": "a scenario contains code", "appo_doom_multigpu --cfg-path /own.cfg": "a scenario contains code",
    "appo_pbt_doom --cfg-path /own.cfg": "a scenario contains code", "appo_pbt_doom --env-id own.game": "it is a module",
    "appo_dmlab --env-id folder/own.lua": "it is a script", "appo_mujoco --env-id own_module:Own-v0": "it imports a module",
}  # fmt: skip


@pytest.mark.parametrize("case", CODE)
def test_code_is_typed_again_at_a_resume(case, tmp_path, monkeypatch, capsys):
    name, flag, value = case.split()
    appo = importlib.import_module(name)
    folder = tmp_path / "train_dir" / "e"
    folder.mkdir(parents=True)
    args = asdict(appo.Args(device="cpu")) | {flag[2:].replace("-", "_"): value}
    (folder / "cfg.json").write_text(json.dumps(dict(file=appo.__file__, args=args)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--experiment", "e"])
    assert appo.main() == 2 and capsys.readouterr().err == f"error: type {flag} {value} again: {CODE[case]}\n"
    monkeypatch.setattr(sys, "argv", [name, "--experiment", "e", flag, value])
    assert getattr(appo.parse_args()[0], flag[2:].replace("-", "_")) == value


@pytest.mark.parametrize("name", NAMES)
def test_mistyped_flag(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--num-worker", "2"])
    with pytest.raises(SystemExit) as error:
        importlib.import_module(name).main()
    assert error.value.code == 2 and "--num-workers" in capsys.readouterr().err, "names the nearest"


VARIANTS = sorted(ROOT.glob("appo_*.py"))


def flags_of(path: Path) -> dict[str, list[str]]:
    """Help texts of every field of Args: the comment beside it and the docstring below it, where there are such."""
    args = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Args")
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    comments = {token.start[0]: token.string.removeprefix("#").strip() for token in tokens if token.type == tokenize.COMMENT}
    helps = {}
    for node, after in zip(args.body, args.body[1:]):
        if isinstance(node, ast.AnnAssign):
            helps[node.target.id] = [comments[node.lineno]] if node.lineno in comments else []
            if isinstance(after, ast.Expr):
                helps[node.target.id].append(after.value.value)
    return helps


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_every_flag_is_read_and_explained(path, monkeypatch, capsys):
    helps, reads = flags_of(path), set()
    for attribute in ast.walk(ast.parse(path.read_text())):
        if isinstance(attribute, ast.Attribute) and isinstance(attribute.ctx, ast.Load):
            if ast.unparse(attribute.value) in ("args", "self.args", "learner.args", "self.learner.args"):
                reads.add(attribute.attr)
    assert [name for name in helps if name not in reads] == []
    assert {name: texts for name, texts in helps.items() if len(texts) != 1} == {}, "a comment or a docstring for each field"
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as end:
        importlib.import_module(path.stem).main()
    shown = capsys.readouterr().out
    assert end.value.code == 0
    options = [" ".join(text.replace("│", " ").split()) for text in re.split(r"\n[│ ]+--(?=\w)", shown)]
    for name, (text,) in helps.items():
        (option,) = [option for option in options if re.match(rf"(lr FLOAT, --)?{name.replace('_', '-')}[ ,]", option)]
        assert " ".join(text.split()) in option, f"--help shows the text of {name} beside it"
        if "(default: None)" in option:
            assert re.search("None|Default:|instead", text), f"the text of {name} says what comes without it"


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_sections_stand_in_order(path):
    banners = re.findall(r"^# === (.*) =+$", path.read_text(), re.M)
    assert {len(line) for line in re.findall(r"^# ===.*", path.read_text(), re.M)} == {120}
    ranks = ["Ranks"] if path.stem == "appo_doom_multigpu" else []
    more = ["Population"] if path.stem == "appo_pbt_doom" else []
    order = ["Args", *ranks, "Environment", "Agent", "V-trace and the loss", "Mailbox and rollouts", "Actor", "Inference", "Learner", *more, "Run"]
    assert banners == order
    first, later = re.split("^# A first reading ends here.*", path.read_text(), flags=re.M)
    assert "# === Learner" in first and re.match(r"\s*# === Run =", later)


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_inline_metadata_agrees_with_requirements(path):
    block = re.search(r"^# /// script\n(.*?)^# ///$", path.read_text(), re.M | re.S).group(1)
    inline = set(re.findall(r'"([^"]+==[^"]+)"', block))
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    required = {line for line in lines if line}
    assert inline and inline <= required


def test_import_is_cheap_and_changes_nothing():
    code = f"""
import importlib, os, sys, threading
before = set(os.listdir("."))
for name in {[path.stem for path in VARIANTS]}:
    importlib.import_module(name)
    assert threading.active_count() == 1, name
    assert set(os.listdir(".")) == before and not {{"tensorboard", "imageio"}} & set(sys.modules), name
"""
    subprocess.run([sys.executable, "-B", "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.fixture
def cgroup(monkeypatch):
    """Replaces the files of /sys/fs/cgroup by those given, and the cores of this process by eight."""
    files, real = {}, Path.read_text

    def read_text(path, *arguments):
        if not str(path).startswith("/sys/fs/cgroup/"):
            return real(path, *arguments)
        if path.name not in files:
            raise FileNotFoundError(path)
        return files[path.name]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return files


QUOTAS = {"": 8, "max 100000\n": 8, "350000 100000\n": 3, "50000 100000\n": 1, "800000 100000\n": 8}


@pytest.mark.parametrize("quota", QUOTAS)
@pytest.mark.parametrize("name", ["appo_doom", "appo_atari"])
def test_a_containers_quota_means_fewer_workers(name, cgroup, quota):
    if quota:
        cgroup["cpu.max"] = quota
    appo = importlib.import_module(name)
    args = appo.Args(device="cpu", precision="float32")
    assert args.num_workers == QUOTAS[quota]


def test_defaults_that_depend_on_other_flags(cgroup, monkeypatch):
    """Eight cores: as many workers as share out the environments evenly. With CUDA two a core take turns; in Doom two splits."""
    workers = [appo_gym.Args(device="cpu", num_envs=n).num_workers for n in (32, 9, 7, 1)]
    assert workers == [8, 3, 7, 1]
    assert [appo_gym.Args(device="cuda:1", num_envs=n).num_workers for n in (32, 9)] == [16, 9]
    for capable, precision in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capable)
        args = appo_doom.Args(device="cuda")
        assert (args.num_workers, args.precision, args.worker_num_splits, args.sync) == (8, precision, 2, False)
        assert appo_doom.Args(device="cuda", num_envs_per_worker=1).worker_num_splits == 1
    args = appo_doom.Args(device="cpu", precision="float32")
    assert (args.batch_size, args.precision, args.worker_num_splits, args.sync) == (1024, "float32", 1, False)
    args = appo_doom.Args(device="cpu", num_workers=0)
    assert args.sync and not args.typed["sync"], "otherwise it would be in turn for ever when resumed with other workers"
