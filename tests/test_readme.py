"""What README.md and benchmark/README.md show works as shown."""

import ast
import re
import subprocess
import sys
import textwrap
from dataclasses import fields

import imageio.v2 as imageio
import numpy as np
import pytest
from torch.distributed.run import get_args_parser
from PIL import Image

import appo_atari
import appo_atari_replay
import appo_dmlab
import appo_doom
import appo_gym
import appo_mujoco
import appo_pbt_doom
import dummy_sampler
import evaluate
from edited import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import animation  # noqa: E402
import plot  # noqa: E402
import seeds  # noqa: E402

README, MEASUREMENTS = (ROOT / "README.md").read_text(), (ROOT / "benchmark" / "README.md").read_text()
TEXTS = {"README.md": README, "benchmark/README.md": MEASUREMENTS}
FLAGS = {"help", "logdir", "no-deps", "shm-size", "add", "update"} | {
    prefix + field.name.replace("_", "-")
    for options in (appo_gym.Args, appo_doom.Args, appo_atari.Args, appo_atari_replay.Args, appo_dmlab.Args, appo_mujoco.Args,
                    appo_pbt_doom.Args, dummy_sampler.Options, animation.Options, seeds.Options, evaluate.Options)
    for field in fields(options)
    for prefix in (("", "no-") if field.type is bool else ("",))
}
FLAGS |= {flag.removeprefix("--") for action in get_args_parser()._actions for flag in action.option_strings}  # torchrun's


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.M | re.S)


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", text))


def test_it_can_be_read_in_one_go():
    assert len(README.splitlines()) <= 155
    for name, text in TEXTS.items():
        assert [line for line in text.splitlines() if len(line) > 140] == [], name
        assert not re.search(r"@@[A-Z]|TODO", text), name


def test_the_two_commands():
    commands = ["python appo_doom.py --env-id basic", "python -m pytest"]
    assert blocks("sh")[:2] == [f"pip install -r requirements.txt && {command}\n" for command in commands]


def test_loading_a_policy(run, tmp_path):
    r = run("--experiment", "my_run", "--num-workers", "0", "--num-envs-per-worker", "2", "--hidden-size", "32", "--device", "cpu",
            "--total-timesteps", "130", "--train-dir", str(tmp_path / "train_dir"))  # fmt: skip
    assert r.wait(120) == 0
    (tmp_path / "blobs").mkdir()  # a download is a folder of links
    for i, path in enumerate(sorted(path for path in (tmp_path / "train_dir" / "my_run").rglob("*") if path.is_file())):
        link = tmp_path / "snapshot" / path.relative_to(tmp_path / "train_dir" / "my_run")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.replace(tmp_path / "blobs" / str(i)))
    (code,) = blocks("python")
    code = code.replace('"train_dir/my_run"', '"snapshot"')
    assert len(code.splitlines()) <= 6
    code += """
assert logits.shape == (1, 1, 4) and values.shape == (1, 1) and action.shape == (1, 1) and state.shape == (1, agent.state_size)
assert step >= 130 and args.device == "cpu" and agent.normalizers["obs"].count > 0
envs.close()
"""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)


def test_the_diagram_is_the_docstrings():
    lines = appo_gym.__doc__.splitlines(True)
    begin, end = (next(i for i, line in enumerate(lines) if mark in line) for mark in ("actor process w", " slot:  FREE"))
    assert textwrap.dedent("".join(lines[begin : end + 1])) in blocks("")


def test_what_it_names_is_there():
    names = set()
    for node in ast.parse((ROOT / "appo_gym.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names |= {node.name} | {f"{node.name}.{child.name}" for child in ast.walk(node) if isinstance(child, ast.FunctionDef)}
    named = ["make_envs", "Agent", "Agent.forward", "by_name"]
    assert [name for name in named if name not in names or f"`{name}`" not in README] == []


@pytest.mark.parametrize("name", TEXTS)
def test_files_and_flags_exist(name):
    text, folder = TEXTS[name], (ROOT / name).parent
    files = {ROOT / file for file in re.findall(r"`(?:python )?((?:appo_\w+|dummy_\w+|carry|evaluate|benchmark/\w+)\.\w+|benchmark/)", text)}
    files |= {folder / file for file in re.findall(r"\]\(([\w./]+)[#)]", text)} | {folder / f for f in re.findall(r"`(results/[\w.]+)`", text)}
    assert files and [file for file in files if not file.exists()] == []
    assert flags_in(text) - FLAGS == set()


@pytest.mark.parametrize("script", sorted((ROOT / "benchmark").glob("*.sh")), ids=lambda script: script.name)
def test_benchmark_scripts_use_flags_that_exist(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    commands = script.read_text().replace("\\\n", " ").splitlines()
    ours = [line for line in commands if re.search(r"/\.\./|^ *(ours|run) ", line) and "$here/parts.py" not in line]
    assert set().union(*map(flags_in, ours)) - FLAGS == set()


def test_tables_are_those_of_the_raw_results():
    assert MEASUREMENTS.count("<!-- table: ") == len(plot.TABLES)
    assert plot.with_tables(MEASUREMENTS) == MEASUREMENTS, "python benchmark/plot.py writes them"


def test_animation(tmp_path):
    for name, fps, shape in (("left", 8.75, (480, 640, 3)), ("right", 15, (840, 640, 3))):
        with imageio.get_writer(tmp_path / f"{name}.mp4", fps=fps, macro_block_size=8) as video:
            for i in range(int(3 * fps)):
                video.append_data(np.full(shape, 60 * int(i / fps), np.uint8))
    out = tmp_path / "out.gif"
    animation.main(animation.Options(out, (tmp_path / "left.mp4", tmp_path / "right.mp4"), start=(0.0, 1.0)))
    with Image.open(out) as gif:
        frames = []
        for k in range(gif.n_frames):
            gif.seek(k)
            frames += [np.array(gif.convert("RGB"))] * round(gif.info["duration"] / 100)
    assert frames[0].shape == (240, 320 + animation.GAP + 183, 3) and 19 <= len(frames) <= 20
    for k in (5, 15):  # the middle of a second; the right one began a second later
        assert abs(int(frames[k][120, 100, 0]) - 60 * (k // 10)) < 12 and abs(int(frames[k][120, 400, 0]) - 60 * (k // 10 + 1)) < 12
