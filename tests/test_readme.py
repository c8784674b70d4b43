"""What README.md shows works as shown; links, files and flags in all documents exist."""

import ast
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import fields

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
import tyro
from edited import ROOT, edited, load
from PIL import Image
from torch.distributed.run import get_args_parser

import appo_atari
import appo_atari_replay
import appo_dmlab
import appo_doom
import appo_doom_multigpu
import appo_gym
import appo_mujoco
import appo_pbt_doom
import dummy_sampler
import evaluate

sys.path.insert(0, str(ROOT / "benchmark"))
import animation  # noqa: E402

DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "benchmark").glob("*.md")]}
README = DOCUMENTS["README.md"]
PRESENT = sorted(DOCUMENTS.keys() - {"benchmark/HISTORY.md"})  # it names what is gone
VARIANTS = {module.__name__.removeprefix("appo_"): module for module in (
    appo_gym, appo_doom, appo_doom_multigpu, appo_atari, appo_atari_replay, appo_mujoco, appo_dmlab, appo_pbt_doom)}  # fmt: skip


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.M | re.S)


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", text))


def known_flags() -> set[str]:
    """Of our programs, of torchrun and, by hand, of docker, pip, pytest and tensorboard."""
    options = [dummy_sampler.Options, evaluate.Options, *(module.Args for module in VARIANTS.values())]
    names = {field.name for one in options for field in fields(one)}
    for path in (ROOT / "benchmark").rglob("*.py"):
        names |= set(re.findall(r"^    (\w+): ", path.read_text(), re.M))
    flags = {name.replace("_", "-") for name in names}
    torchrun = {flag.removeprefix("--") for action in get_args_parser()._actions for flag in action.option_strings}
    carry = flags_in((ROOT / "carry.py").read_text())
    return flags | {f"no-{flag}" for flag in flags} | torchrun | carry | {"help", "shm-size", "index-url", "no-deps", "durations", "logdir"}


def test_its_beginning_is_short():
    head = README.split("\n## How to read a file\n")[0]
    assert head != README and len(re.findall(r"\S*\w\S*", head)) <= 900
    for name, text in DOCUMENTS.items():
        assert [line for line in text.splitlines() if len(line) > 140] == [], name


def test_the_two_commands():
    """Each works alone, on a fresh machine; .ci/run takes the second from here."""
    commands = ["python appo_doom.py --env-id basic", "python -m pytest"]
    assert blocks("sh")[:2] == [f"pip install -r requirements.txt && {command}\n" for command in commands]


def test_its_commands_are_accepted():
    lines = [shlex.split(line, comments=True) for line in "".join(blocks("sh")).replace("\\\n", " ").splitlines()]
    commands = [part.split() for words in lines for part in " ".join(words).split(" && ")]
    assert len(commands) > 15
    for program, *words in commands:
        if program == "torchrun":
            options = get_args_parser().parse_args(words)
            program, words = "python", ["appo_doom_multigpu.py", *options.training_script_args]
        if program == "pip":
            assert [word for word in words if "==" in word and word not in (ROOT / "requirements.txt").read_text()] == []
            continue
        assert program == "python"
        file, *flags = words
        if file == "carry.py":
            help_text = subprocess.run([sys.executable, ROOT / file, "--help"], check=True, capture_output=True, text=True).stdout
            assert flags_in(" ".join(flags)) <= flags_in(help_text)
        elif file == "evaluate.py":
            tyro.cli(evaluate.Options, args=flags)
        elif file.startswith("appo_") and flags != ["--help"]:
            tyro.cli(VARIANTS[file[5:-3]].Args, args=flags)
        else:
            assert flags == ["--help"] or words == ["-m", "pytest"], words


def test_its_table_of_features():
    """Every row, against the files."""

    def have(condition) -> set[str]:
        return {name for name, module in VARIANTS.items() if condition(module)}

    def has_flag(flag: str) -> set[str]:
        return have(lambda module: hasattr(module.Args, flag))

    def says(words: str) -> set[str]:
        return {name for name, module in VARIANTS.items() if words in open(module.__file__).read()}

    expected = {
        "an environment of your own": says("gym.make(args.env_id"),
        "recurrent core": has_flag("rnn_type"),
        "an actor that dies": says("starting another"),
        "games in the main process": says("multiprocessing.dummy") | says("threading.Thread\n"),
        "collecting and learning in turn": has_flag("sync"),
        "epochs of minibatches": has_flag("num_epochs") & has_flag("anneal_lr"),
        "PopArt": have(lambda module: hasattr(module, "PopArt")),
        "replay": has_flag("replay"),
        "several policies": has_flag("num_policies"),
        "`torchrun`": says("torch.distributed"),
        "bfloat16": has_flag("precision"),
    }
    table = README.split("| feature | in `appo_*.py` |\n|---|---|\n")[1].split("\n\n")[0]
    rows = {feature: where for feature, where in re.findall(r"^\| (.+) \| (.+) \|$", table, re.M)}
    assert len(rows) == len(expected) == len(table.splitlines())
    for start, files in expected.items():
        (where,) = [where for feature, where in rows.items() if feature.startswith(start)]
        where, _, more = where.partition(";")
        named = set(re.findall(r"`(\w+)`", where))
        assert files == (set(VARIANTS) - named if where.startswith("all") else named), start
        if start == "recurrent core":
            assert set(re.findall(r"`(\w+)`", more)) == have(lambda module: module.Args.rnn_type != "none")


def test_loading_a_policy(tmp_path):
    folder = tmp_path / "train_dir" / "my_run"
    args = appo_doom.Args(num_workers=0, num_envs_per_worker=2, hidden_size=32, device="cpu", total_timesteps=130)
    assert appo_doom.train(args, folder) == 0
    (tmp_path / "blobs").mkdir()  # a download is a folder of links
    for i, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        link = tmp_path / "snapshot" / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.replace(tmp_path / "blobs" / str(i)))
    (code,) = blocks("python")
    code = code.replace('"train_dir/my_run"', '"snapshot"')
    code += """
assert logits.shape == (1, 1, 4) and values.shape == (1, 1) and action.shape == (1, 1) and state.shape == (1, agent.state_size)
assert step >= 130 and args.device == "cpu" and agent.normalizers["obs"].count > 0
envs.close()
"""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)


class Masked(gym.Env):
    observation_space = gym.spaces.Dict(mask=gym.spaces.MultiBinary(3), position=gym.spaces.Box(-1, 1, (2,), np.float32))
    action_space = gym.spaces.Discrete(3)


def test_forbidding_actions(tmp_path):
    """The edit that is shown, in a copy of the file."""
    old, new = ("".join(line[1:] for line in blocks("diff")[0].splitlines(True) if line[0] == sign) for sign in "-+")
    appo = load(edited(tmp_path, "appo_masked", (old, new), source=ROOT / "appo_gym.py"))
    space = appo.NamedArrays(Masked()).observation_space
    args = appo.Args(device="cpu", num_workers=1)
    agent = appo.Agent(appo.Spaces(dict(space.items()), (3,)), args)
    obs = {name: torch.zeros(1, 4, *part.shape) for name, part in space.items()}
    obs["obs/mask"][0] = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 1, 0]])
    logits = agent(obs, torch.ones(1, 4, dtype=torch.bool), torch.zeros(4, agent.state_size))[0]
    assert torch.equal(logits.isfinite(), obs["obs/mask"] == 1)


def test_what_it_names_is_there():
    names = set()
    for node in ast.parse((ROOT / "appo_gym.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names |= {node.name} | {f"{node.name}.{child.name}" for child in ast.walk(node) if isinstance(child, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    named = set(re.findall(r"`((?:Agent|Reporter)(?:\.\w+)?|make_envs|EXTRA_METRICS|EPISODE)`", README))
    assert len(named) == 5 and named <= names


def test_the_diagram_is_the_docstrings():
    lines = appo_gym.__doc__.splitlines(True)
    begin, end = (next(i for i, line in enumerate(lines) if mark in line) for mark in ("actor process w", " block:  FREE"))
    assert textwrap.dedent("".join(lines[begin : end + 1])) in blocks("")


@pytest.mark.parametrize("name", PRESENT)
def test_files_and_flags_exist(name):
    named = re.findall(r"`(?:python |bash )?((?:\w+/)*\w+\.(?:py|sh|md))\b", DOCUMENTS[name])
    folders = ROOT, ROOT / "benchmark", ROOT / "tests"
    ours = re.compile(r"appo_|dummy_|evaluate|carry|benchmark/|tests/|test_")
    assert [file for file in named if ours.match(file) and not any((folder / file).exists() for folder in folders)] == []
    text = DOCUMENTS[name]
    if name == "QUESTIONS.md":
        text = re.sub(r"^\| [^|]* \|", "", text, flags=re.M)  # Sample Factory's own
    assert flags_in(text) - known_flags() == set()


def anchors(text: str) -> set[str]:
    """As GitHub makes them of titles."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_anchors(name):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[name]):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = (ROOT / name).parent / path if path else ROOT / name
            if not target.exists() or anchor and anchor not in anchors(target.read_text()):
                broken.append(link)
    assert broken == []


def test_its_animated_picture(tmp_path):
    """As benchmark/animation.py makes it of two videos."""
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
