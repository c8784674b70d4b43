"""The scripts as a user runs them: train, resume; bad input; flags and what becomes of them; the files agree with each other."""

import ast
import contextlib
import errno
import gc
import importlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tokenize
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import torch
import vizdoom
from edited import ROOT, edited, load, replacing
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import appo_atari
import appo_doom

SMALL = ("--num-workers", "2", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "64", "--hidden-size", "32",
         "--device", "cpu", "--precision", "float32")  # fmt: skip
METRICS = (ROOT / "benchmark" / "METRICS.md").read_text()
TAGS = set(re.findall(r"^\| `([a-z]+/[A-Za-z_]+)`", METRICS, re.M))


def scalars(folder: Path) -> dict[str, list]:
    found = {}
    for file in sorted(folder.glob("events*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend(events.Scalars(tag))
    return found


@pytest.mark.parametrize(
    "name, game, other, learning_rate",
    [("appo_doom", "basic", "battle", "0.0004"), ("appo_atari", "Breakout-v5", "Pong-v5", "0.00025")],
)
def test_train_and_resume(run, main, tmp_path, name, game, other, learning_rate):
    often = replacing("Reporter.SECONDS = 0.05")  # fast machines need not be busy for a second
    script = edited(tmp_path, f"{name}_edited", often, source=ROOT / f"{name}.py")
    r = run(*SMALL, "--experiment", "e", "--env-id", game, "--total-timesteps", "1500", script=script)
    assert r.wait(90) == 0
    for expected in (
        "parameters on cpu",
        "encoder in float32",
        "64 samples an iteration, 64 (8 rollouts of 8 steps) an optimiser step",
        "expected lag up to",
        "MiB of shared memory",
        "frames",
    ):
        assert expected in r.text()
    cfg = json.loads((tmp_path / "e" / "cfg.json").read_text())
    assert (
        cfg["args"]["batch_size"] == 64
        and cfg["resolved"]["precision"] == "float32"
        and cfg["packages"]["torch"] == torch.__version__
        and "vizdoom" in cfg["packages"]
    )
    found = scalars(tmp_path / "e")
    assert set(found) == TAGS, "the tags are those of the table"
    for tag, events in found.items():
        assert all(abs(event.value) < 1e9 for event in events), tag
    lags = [event.value for event in found["lag/max"]]
    assert np.median(lags) <= 8, "lag within its bound, but for an actor that the machine has held up"
    for fps, sps in zip(found["charts/FPS"], found["charts/SPS"], strict=True):
        assert fps.value == pytest.approx(4 * sps.value, rel=1e-3)
    if name == "appo_doom":  # which divides the rewards of `basic` by 100
        for trained, raw in zip(found["charts/episodic_return_trained"], found["charts/episodic_return"], strict=True):
            assert trained.value == pytest.approx(0.01 * raw.value, rel=1e-3)
    assert "frames/s" in (tmp_path / "e" / "log.txt").read_text()
    first = sorted((tmp_path / "e" / "checkpoints").glob("checkpoint_*"))[-1]
    before = torch.load(first, weights_only=True)
    assert found["charts/SPS"][-1].step <= before["global_step"]

    appo, flags = load(script), ("--train-dir", tmp_path, "--experiment", "e")
    code, text = main(appo, *flags, "--total-timesteps", 2000, "--learning-rate", 0.0002)
    assert code == 0 and f"resuming {tmp_path / 'e'} at step {before['global_step']:,}" in text
    assert f"override: learning_rate {learning_rate} -> 0.0002" in text
    assert "2 workers x 4 environments" in text, "what was typed the first time still holds"
    after = torch.load(sorted((tmp_path / "e" / "checkpoints").glob("checkpoint_*"))[-1], weights_only=True)
    assert after["global_step"] > before["global_step"] and after["version"] > before["version"]
    assert after["optimizer"]["param_groups"][0]["lr"] == 0.0002
    assert len(after["episodes"]) >= len(before["episodes"]) > 0, "means go on where they were"

    code, text = main(importlib.import_module(name), *flags, "--env-id", other)
    assert code == 2 and f"override: file {name}_edited.py -> {name}.py" in text
    assert re.search(rf"error: .*e holds another environment, of {name}_edited.py: env_id {game} -> {other}; rename --experiment", text)
    code, text = main(appo, *flags, "--total-timesteps", 100)
    assert code == 0 and "steps already; raise --total-timesteps" in text and "workers x" not in text


@pytest.mark.parametrize("name, game", [("appo_gym", "Acrobot-v1"), ("appo_doom", "battle"), ("appo_atari", "Breakout-v5"),
                                        ("appo_atari_replay", "Breakout-v5"), ("appo_mujoco", "Ant-v5")])  # fmt: skip
def test_same_seed_same_weights(name, game, tmp_path):
    """--num-workers 0 on a CPU: two runs are the same, whatever random numbers were drawn before."""
    appo, ends = importlib.import_module(name), []
    for i in range(2):
        gc.collect()  # the log of a run before it in this process
        random.seed(i), np.random.seed(i), torch.manual_seed(i)
        args = appo.Args(env_id=game, num_workers=0, num_envs_per_worker=4, hidden_size=64, seed=7, device="cpu", rollout=16,
                         total_timesteps=450, learner_threads=1, inference_threads=1)  # fmt: skip
        assert appo.train(args, tmp_path / str(i)) == 0
        ends.append(torch.load(max((tmp_path / str(i) / "checkpoints").glob("checkpoint_*")), weights_only=True))
    a, b = ends
    assert a["version"] == b["version"] >= 6 and a["global_step"] == b["global_step"]
    assert all(torch.equal(a["agent"][key], b["agent"][key]) for key in a["agent"])


BAD = {
    "--env-id battel": r"unknown --env-id battel; did you mean battle",
    "--num-envs-per-worker 5 --worker-num-splits 2": r"--num-envs-per-worker 5 is not divisible by --worker-num-splits 2",
    "--batch-size 1000": r"--batch-size 1000 is not a multiple of --rollout 32",
    "--device cuda:7": r"--device cuda:7: .*CUDA",
    "--device gpu": r"--device gpu: Expected one of cpu, cuda",
    "--gamma 1.5": r"--gamma 1.5 is out of range",
    "--rollout 0": r"--rollout 0 is out of range",
    "--learning-rate -1": r"--learning-rate -1.0 is out of range",
    "--cfg-path nowhere.cfg": r"--cfg-path nowhere.cfg",
    "--sync --num-workers 2 --batch-size 1056": r"--sync .*needs one rollout of every row: 1 batches of 1056 samples are not 32 rows x 32 steps",
    "--sync --num-workers 2 --num-batches-per-epoch 5": r"--sync .*: 5 batches of 192 samples .*if --num-batches-per-epoch divides the rows",
    "--num-workers 0 --num-batches-per-epoch 17": r"--sync \(which --num-workers 0 implies\) .*: 17 batches of 32 samples are not 16 rows x 32 steps",
    "--batch-size 100000000": r"[\d,]+ slots of rollouts need [\d,]+ MiB of [\d,]+ that are free",
    "--num-envs-per-worker 10000000": r"/dev/shm has [\d,]+ MiB free, [\d,]+ MiB are needed",
    "--vtrace-rho 100": r"--vtrace-rho 100.0 is out of range: 0 to 20",
    "--actor-timeout inf": r"--actor-timeout inf is out of range: 0 to 1000000",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_gets_one_line(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["appo_doom.py", "--device", "cpu", "--total-timesteps", "1", *flags.split()])
    assert appo_doom.main() == 2
    error = capsys.readouterr().err
    assert re.match(f"error: {BAD[flags]}", error) and error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is left of it"


@pytest.mark.parametrize("name", ["..", ".", "../x", "e/../..", "/x", "e/../../elsewhere"])
def test_an_experiment_stays_below_the_train_dir(name, tmp_path, monkeypatch, capsys):
    """Wherever else it is, something of the user's may lie there."""
    experiment = tmp_path / "train_dir" / "e"
    (experiment / "checkpoints").mkdir(parents=True)
    cfg = json.dumps({"args": asdict(appo_doom.Args())})
    for folder in (experiment, experiment.parent, tmp_path):
        (folder / "cfg.json").write_text(cfg)

    def content() -> dict:
        return {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}

    before = content()
    monkeypatch.chdir(tmp_path)
    short = ["--num-workers", "0", "--num-envs-per-worker", "1", "--total-timesteps", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["appo_doom.py", "--experiment", name, *short])
    assert appo_doom.main() == 2
    assert capsys.readouterr().err == f"error: --experiment {name} is not a folder below train_dir\n"
    assert content() == before


@pytest.mark.parametrize("flags, expected", [
    ("--env-id Pog-v5", "unknown --env-id Pog-v5; did you mean Pong-v5"),
    ("--env-id HalfCheetah-v5", "HalfCheetah-v5 is no Atari game: appo_mujoco.py trains on it"),
    ("--noop-max 0", "--noop-max 0 is out of range: 1 to inf"),
    ("--sticky-actions 2", "--sticky-actions 2.0 is out of range: 0 to 1"),
])  # fmt: skip
def test_bad_input_of_atari(flags, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["appo_atari.py", "--device", "cpu", "--total-timesteps", "1", *flags.split()])
    assert appo_atari.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {expected}") and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_an_experiment_of_another_file_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "train_dir" / "e").mkdir(parents=True)
    cfg = dict(file="/home/me/appo_atari.py", args=asdict(appo_atari.Args()))
    (tmp_path / "train_dir" / "e" / "cfg.json").write_text(json.dumps(cfg))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["appo_doom.py", "--experiment", "e", "--device", "cpu"])
    assert appo_doom.main() == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("override: file appo_atari.py -> appo_doom.py\n")
    assert re.match("error: .*e holds another environment, of appo_atari.py: cfg_path none -> None; rename --experiment\n", printed.err)


def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["appo_doom.py"])
    monkeypatch.setattr(appo_doom.time, "time", lambda: 1234.5)
    folders = set()
    for process in (10, 11):
        monkeypatch.setattr(os, "getpid", lambda: process)
        folders.add(str(appo_doom.parse_args()[1]))
    assert folders == {f"train_dir/basic__appo_doom__1__1234_{process}" for process in (10, 11)}


@dataclass
class OwnArgs(appo_doom.Args):
    my_number: int = 0
    my_coefficient: float = -1.0
    ent_coef: float = 0  # an int


def test_ranges_belong_to_names():
    """A flag of one's own may be anything, and an int may be the default of a float."""
    args = appo_doom.resolve(OwnArgs(device="cpu", reward_scale=-1.0))
    assert (args.my_number, args.my_coefficient, args.ent_coef, args.reward_scale) == (0, -1.0, 0, -1.0)
    for low, names in appo_doom.AT_LEAST.items():
        for name in names:
            with pytest.raises(appo_doom.UserError, match=f"--{name.replace('_', '-')} {low - 1} is out of range: {low} to"):
                appo_doom.resolve(OwnArgs(device="cpu", **{name: low - 1}))
    for name, high in appo_doom.AT_MOST.items():
        with pytest.raises(appo_doom.UserError, match=f"--{name.replace('_', '-')} {high + 1} is out of range: .* to {high}"):
            appo_doom.resolve(OwnArgs(device="cpu", **{name: high + 1}))


@pytest.mark.parametrize("name", [path.stem for path in sorted(ROOT.glob("appo_*.py"))])
def test_every_number_has_a_range(name):
    """But for a factor of either sign."""
    appo = importlib.import_module(name)
    kinds = {field.name: str(field.type).split(", _ArgConfig")[0] for field in fields(appo.Args)}  # of Auto, what it stands for
    numbers = {name for name, kind in kinds.items() if re.search(r"\b(int|float)\b", kind)}
    named = [name for names in appo.AT_LEAST.values() for name in names]
    assert len(named) == len(set(named)) and set(named) | set(appo.AT_MOST) <= numbers
    assert numbers - set(named) <= {"reward_scale"}


def test_the_same_command_resumes(tmp_path, monkeypatch):
    """A scenario file given by a relative path is kept as an absolute one; that is no other environment."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(f"{vizdoom.scenarios_path}/basic.wad", tmp_path)
    Path("own.cfg").write_text("doom_scenario_path = basic.wad\navailable_buttons = { ATTACK }\n")
    monkeypatch.setattr(sys, "argv", ["appo", "--experiment", "e", "--cfg-path", "own.cfg"])
    args, folder = appo_doom.parse_args()
    folder.mkdir(parents=True)
    (folder / "cfg.json").write_text(json.dumps({"args": asdict(args)}))
    assert appo_doom.parse_args()[0] == args


def test_a_running_experiment_is_not_overwritten(tmp_path, monkeypatch):
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "cfg.json").write_text("{}")
    running = appo_doom.open_log(tmp_path / "e")
    with pytest.raises(appo_doom.UserError, match="another run is using"):
        appo_doom.train(appo_doom.Args(num_workers=0, num_envs_per_worker=1, total_timesteps=1, device="cpu"), tmp_path / "e")
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["e", "cfg.json", "log.txt"]
    assert (tmp_path / "e" / "cfg.json").read_text() == "{}" and not (tmp_path / "e" / "log.txt").read_text()
    running.close()
    appo_doom.open_log(tmp_path / "e").close()


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, capsys):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    file = appo_doom.open_log(tmp_path / "e")
    file.write("goes on\n")
    assert (tmp_path / "e" / "log.txt").read_text() == "goes on\n"
    assert re.match(r"warning: .*e is on a file system without locks", capsys.readouterr().out)


def test_mistyped_flag(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["appo_doom.py", "--num-worker", "2"])
    with pytest.raises(SystemExit) as error:
        appo_doom.main()
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
            if ast.unparse(attribute.value) in ("args", "self.args", "learner.args"):
                reads.add(attribute.attr)
    assert [name for name in helps if name not in reads] == []
    assert {name: texts for name, texts in helps.items() if len(texts) != 1} == {}, "a comment or a docstring for each field"
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as end:
        importlib.import_module(path.stem).main()
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "(default: None)" not in shown
    options = [" ".join(text.replace("│", " ").split()) for text in re.split(r"\n[│ ]+--(?=\w)", shown)]
    for name, (text,) in helps.items():
        (option,) = [option for option in options if re.match(rf"{name.replace('_', '-')}[ ,]", option)]
        assert " ".join(text.split()) in option, f"--help shows the text of {name} beside it"


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_sections_stand_in_order(path):
    banners = re.findall(r"^# === (.*) =+$", path.read_text(), re.M)
    assert {len(line) for line in re.findall(r"^# ===.*", path.read_text(), re.M)} == {120}
    more = ["Population"] if path.stem == "appo_pbt_doom" else []
    ranks = ["Ranks"] if path.stem == "appo_doom_multigpu" else []
    assert banners == ["Args", "Environment", "Mailbox and rollouts", "Agent", "V-trace and the loss", "Actor", "Inference", "Learner", *ranks,
                       "Actors and signals", "Checkpoints", *more, "Main"]  # fmt: skip
    first, later = re.split("^# A first reading ends here.*", path.read_text(), flags=re.M)
    assert "# === Learner" in first and "# === Actors" in later


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


@pytest.mark.parametrize("files, workers, pinned", [
    ({}, 8, True),
    ({"cpu.max": "max 100000\n"}, 8, True),
    ({"cpu.max": "350000 100000\n"}, 3, False),
    ({"cpu.max": "50000 100000\n"}, 1, False),
    ({"cpu.max": "800000 100000\n"}, 8, True),
])  # fmt: skip
def test_a_containers_quota_means_fewer_workers_and_no_pinning(cgroup, files, workers, pinned):
    """Beside a quota other containers see, and pin to, the same cores."""
    cgroup.update(files)
    args = appo_doom.resolve(appo_doom.Args(device="cpu", precision="float32"))
    assert (args.num_workers, args.set_workers_cpu_affinity) == (workers, pinned)
    assert args.learner_threads + args.inference_threads <= max(2, workers)


def test_any_number_of_games_will_do_with_cuda(monkeypatch):
    """Two splits are for an even number; and whatever a run was made with can be evaluated."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **more: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for games in range(1, 10):
        args = appo_doom.resolve(appo_doom.Args(num_workers=3, num_envs_per_worker=games))
        assert (args.device, args.precision, args.worker_num_splits) == ("cuda", "bfloat16", 1 if games % 2 else 2)
        debug = appo_doom.resolve(appo_doom.Args(num_workers=0, num_envs_per_worker=games, worker_num_splits=2))
        assert (debug.worker_num_splits, debug.sync, debug.batch_size) == (1, True, games * 32)


def test_defaults_of_the_other_games():
    sizes = [appo_atari.resolve(appo_atari.Args(device="cpu", num_workers=n)).batch_size for n in (1, 2, 20)]
    assert sizes == [256, 256, 2048]


def test_defaults_are_resolved_without_surprise():
    args = appo_doom.resolve(appo_doom.Args(device="cpu", num_workers=2))
    assert (args.batch_size, args.worker_num_splits, args.sync) == (1024, 1, False)
    assert appo_doom.resolve(appo_doom.Args(device="cpu", num_workers=20)).batch_size == 4096
    assert appo_doom.resolve(appo_doom.Args(device="cpu", num_workers=72)).batch_size == 8192
    sizes = [appo_doom.resolve(appo_doom.Args(device="cpu", num_workers=20, num_batches_per_epoch=n)).batch_size for n in (2, 4, 8)]
    assert sizes == [2048, 1024, 1024], "an iteration is as large as with one batch, down to the smallest batch"
    assert appo_doom.resolve(appo_doom.Args(device="cpu", num_workers=2, num_batches_per_epoch=4, sync=True)).batch_size == 256
    debug = appo_doom.resolve(appo_doom.Args(device="cpu", num_workers=0, num_envs_per_worker=4))
    assert debug.sync and debug.batch_size == 4 * 32
    assert not [
        field.name
        for field in fields(args)
        if field.name in ("num_workers", "batch_size", "worker_num_splits") and getattr(args, field.name) is None
    ]
