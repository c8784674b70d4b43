"""evaluate.py: finds the file that trained a run, plays it fairly, records it, shows it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import imageio.v2 as imageio
import numpy as np
import pygame
import pytest
import torch
import vizdoom
from conftest import marked
from edited import COUNTING, ROOT, edited, load, replacing, with_envs
from forked import python
from test_command_line import MODULE

import appo_gym
import evaluate

# Pictures whose colours say which episode and which step it is
DRAWN = f"""{COUNTING}
    metadata = dict(render_fps=50)

    def render(self):
        return np.full((60, 80, 3), (200, 60 * self.episode % 256, 20 * self.count), np.uint8)
"""
# The likeliest action of the two checkpoints; the raw reward of a step with it, which the base does not know of
LATEST, BEST = (2, 3), (0, 1)
RAW = {action: 2 * (0.1 * action[0] + action[1]) for action in (LATEST, BEST)}
SHOWN = dict(SDL_VIDEODRIVER="dummy")  # a window that nobody sees


def length(me: int, episode: int) -> int:
    """Of COUNTING's episodes; environment i is number seed + i."""
    return 1 + (me * 7 + episode * 13) % 9


def untrained(folder: Path, script: Path, **flags) -> Path:
    """A run of `script` as training leaves it behind, at step 5, and 3 for the best. Returns its folder."""
    module = evaluate.load(script)
    args = module.Args(device="cpu", hidden_size=16, **flags)
    if hasattr(args, "precision"):
        args.precision = "float32"
    torch.manual_seed(0)
    agent = module.Agent(module.spaces_of(args), args)
    policy = agent.policy
    places = {"latest.pth": (5, LATEST)}
    if hasattr(args, "keep_checkpoints"):
        places = {"checkpoints/checkpoint_1.pth": (5, LATEST), "checkpoints/best.pth": (3, BEST)}
    for place, (step, likeliest) in places.items():
        torch.nn.init.zeros_(policy.weight)
        torch.nn.init.zeros_(policy.bias)
        for head, action in zip(policy.bias.data.split(agent.heads), likeliest):
            head[action % len(head)] = 0.5
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        content = dict(agent=agent.state_dict(), global_step=step)
        torch.save(dict(policies=[content] * args.num_policies) if hasattr(args, "num_policies") else content, folder / place)
    (folder / "cfg.json").write_text(json.dumps(dict(args=asdict(args), file=str(script))))
    return folder


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A run of a copy of appo_doom.py that lies where the user is."""
    monkeypatch.chdir(tmp_path)
    return untrained(tmp_path / "e", with_envs(tmp_path, "appo_drawn", DRAWN))


@pytest.fixture(params=["appo_gym", "appo_atari"])
def drawn_of(request, tmp_path, monkeypatch):
    """The same of the base and of Atari, which goes by raw rewards: the run, and how often its returns have the reward."""
    monkeypatch.chdir(tmp_path)
    script = with_envs(tmp_path, f"{request.param}_drawn", DRAWN, source=ROOT / f"{request.param}.py")
    return untrained(tmp_path / "e", script), 0.5 if request.param == "appo_gym" else 1


@pytest.fixture
def play(monkeypatch, capsys):
    """evaluate.py in this process. Returns the exit code, and what it printed."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)

    def start(*flags, by: Path | None = None, **env) -> tuple[int, str]:
        """by: the file that is said to play, first of all; that is no part of what is returned. Default: any."""
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, flags)])
        torch.manual_seed(0)  # as in a process of its own
        capsys.readouterr()
        code = evaluate.main()
        text = "".join(capsys.readouterr())
        assert code in (0, 130) or code == 2 and re.search(r"^error: .*\n\Z", text, re.M), text
        said = re.match(r"by (/.*)\n", text)
        assert said or code == 2, "it says what it plays by"
        assert by is None or said[1] == str(by)
        return code, text[said.end() :] if said else text

    return start


def test_a_run_of_a_renamed_copy(run, tmp_path):
    """It is played by the file that trained it, with what that imports from its folder."""
    (tmp_path / "own_rewards.py").write_text("FACTOR = 1000.0\n")
    envs = "from own_rewards import FACTOR\n" + COUNTING.replace("2 * reward", "FACTOR + 0 * reward")
    script = with_envs(tmp_path, "my_research", envs)
    r = run("--experiment", "e", "--device", "cpu", "--num-workers", "1", "--num-envs-per-worker", "2", "--rollout", "8",
            "--batch-size", "16", "--hidden-size", "16", "--total-timesteps", "50", script=script)  # fmt: skip
    assert r.wait(60) == 0, r.text()
    done = python(ROOT / "evaluate.py", "e", "--episodes", "16", "--seed", "1", folder=tmp_path)
    mean = 1000 * np.mean([length(me, 0) for me in range(1, 17)])
    assert re.fullmatch(rf"by {script}\n16 episodes, sampled actions, step [\d,]+:\nreturn {mean:.2f} \+- .*\n", done.stdout), done


# Nothing can be done in it but to walk, which costs 1 a tic; an episode has 80
WALK = """
doom_scenario_path = basic.wad
living_reward = -1
episode_timeout = 80
available_buttons = { MOVE_LEFT MOVE_RIGHT }
mode = PLAYER
"""


def test_a_scenario_of_ones_own_is_trained_on_and_played(main, play, tmp_path, monkeypatch):
    """A relative --cfg-path, as typed where the scenario is; it is played from elsewhere."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    appo = load(Path(shutil.copy(ROOT / "appo_doom.py", elsewhere / "appo_scenario.py")))
    shutil.copy(f"{vizdoom.scenarios_path}/basic.wad", here)
    (here / "own.cfg").write_text(WALK)
    monkeypatch.chdir(here)
    code, text = main(appo, "--train-dir", tmp_path, "--experiment", "e", "--cfg-path", "own.cfg", "--num-workers", 0, "--rollout", 8,
                      "--num-envs-per-worker", 2, "--hidden-size", 16, "--device", "cpu", "--total-timesteps", 40)  # fmt: skip
    assert code == 0, text
    monkeypatch.chdir(elsewhere)
    assert f"play: python evaluate.py {tmp_path}/e --cfg-path {here}/own.cfg\n" in text
    assert play(tmp_path / "e") == (2, f"error: type --cfg-path {here}/own.cfg again (load_agent: cfg_path), because it names code to run\n")
    code, text = play(tmp_path / "e", "--episodes", 2, "--cfg-path", here / "own.cfg")
    assert code == 0 and re.search(r"2 episodes, sampled actions, step \d+:\nreturn -80.00 \+- 0.00 ", text), text


def test_which_file_plays(play, tmp_path, monkeypatch):
    """That of the name in cfg.json, beside evaluate.py or where the user is, or the one that is typed. Not where cfg.json says."""
    script = with_envs(tmp_path, "appo_moved", COUNTING)
    folder = untrained(tmp_path / "e", script)
    beside, here, typed = (tmp_path / name for name in ("beside", "here", "typed"))
    for place in (beside, here, typed):
        place.mkdir()
        shutil.copy(script, place)
    monkeypatch.setattr(evaluate, "__file__", str(beside / "evaluate.py"))
    monkeypatch.chdir(here)
    script.write_text("raise SystemExit('it was imported')")
    for path, flags in ((typed, ("--file", "../typed/appo_moved.py")), (beside, ()), (here, ())):
        code, text = play(folder, "--episodes", 1, *flags, by=path / script.name)
        assert code == 0 and text.startswith("1 episodes, ")
        (path / script.name).unlink()
    answer = ", which trained the run, was not found: give its path with --file"
    (folder / script.name).write_text("raise SystemExit('it was imported')")
    monkeypatch.chdir(folder)  # a run's folder is data, even where the user is
    assert play(folder) == (2, f"error: appo_moved.py{answer}\n")
    monkeypatch.chdir(here)
    assert play(folder) == (2, f"error: appo_moved.py{answer}\n")
    assert play(folder, "--file", "nowhere.py") == (2, f"error: nowhere.py{answer}\n")


def test_a_run_of_a_gpu_where_there_is_none(play, tmp_path):
    folder = untrained(tmp_path / "e", ROOT / "appo_gym.py")
    cfg = folder / "cfg.json"
    cfg.write_text(cfg.read_text().replace('"cpu"', '"cuda"'))
    assert play(folder) == (2, "error: --device cuda: PyTorch sees no GPU; use --device cpu\n")


@pytest.fixture
def own_env(tmp_path, monkeypatch):
    """A run of appo_gym.py on an environment that a module registers. Its cfg.json names a file that would do harm. Returns the folder, and what
    is there when the module, or this file, was imported."""
    monkeypatch.chdir(tmp_path)
    folder, marker, other = tmp_path / "e", tmp_path / "marker", tmp_path / "elsewhere" / "appo_gym.py"
    (tmp_path / "own_module.py").write_text(MODULE.format(marker=str(marker)))
    other.parent.mkdir()
    other.write_text(MODULE.format(marker=str(marker)))
    args = appo_gym.Args(device="cpu", env_id="CartPole-v1", num_envs=4)
    agent = appo_gym.Agent(appo_gym.spaces_of(args), args)
    folder.mkdir()
    torch.save(dict(agent=agent.state_dict(), global_step=7), folder / "latest.pth")
    args.env_id = "own_module:Own-v0"
    (folder / "cfg.json").write_text(json.dumps(dict(args=asdict(args), file=str(other))))
    yield folder, marker
    sys.modules.pop("own_module", None)


def test_a_runs_folder_names_no_code_to_be_run(play, own_env, tmp_path, monkeypatch):
    folder, marker = own_env
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    sentence = "type --env-id own_module:Own-v0 again (load_agent: env_id), because it names code to run"
    assert play(folder, "--episodes", 2, by=ROOT / "appo_gym.py") == (2, f"error: {sentence}\n")
    with pytest.raises(evaluate.UserError) as error:
        evaluate.load_agent(folder)
    assert str(error.value) == sentence
    assert not marker.exists() and "own_module" not in sys.modules
    code, text = play(folder, "--episodes", 2, "--env-id", "own_module:Own-v0", by=ROOT / "appo_gym.py")
    assert code == 0 and text.startswith("2 episodes, sampled actions, step 7:\nreturn 9.00 +- 0.00") and marker.exists()


def test_an_environment_that_is_registered_where_the_user_is(own_env, tmp_path):
    """As in training: a module in the working directory is found."""
    done = python(ROOT / "evaluate.py", "e", "--episodes", "2", "--env-id", "own_module:Own-v0", folder=tmp_path)
    assert "2 episodes, sampled actions, step 7:\nreturn 9.00 +- 0.00" in done.stdout, done.stdout


def test_load_agent_makes_environments_of_this_process(own_env, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module, agent, args, step = evaluate.load_agent(own_env[0], env_id="own_module:Own-v0", num_envs=3)
    assert module.__file__ == str(ROOT / "appo_gym.py") and (args.num_envs, args.num_workers, args.device, step) == (3, 0, "cpu", 7)
    assert isinstance(agent, module.Agent) and module.make_envs(args, args.num_envs).num_envs == 3


def test_load_agent_of_both_cores(drawn_of):
    folder, _ = drawn_of
    module, agent, args, step = evaluate.load_agent(str(folder))
    policy = agent.policy
    assert step == 5 and [int(head.argmax()) for head in policy.bias.split(agent.heads)] == list(LATEST)


def test_load_agent_of_a_kind_and_a_file(drawn, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    script = (tmp_path / "appo_drawn.py").rename(tmp_path / "elsewhere" / "appo_drawn.py")
    module, agent, args, step = evaluate.load_agent(drawn, kind="best", file=script, num_envs_per_worker=2)
    assert module.__file__ == str(script) and (step, args.num_envs_per_worker, args.worker_num_splits) == (3, 2, 1)
    assert [int(head.argmax()) for head in agent.policy.bias.split(agent.heads)] == list(BEST)


@pytest.mark.parametrize("flags, action, step", [(("--likeliest",), LATEST, 5), (("--likeliest", "--best"), BEST, 3)])
def test_every_environment_plays_as_often(play, drawn, flags, action, step):
    """Those that end first are not all that counts; of 20 episodes in 16 environments the last ones are left out."""
    returns = [RAW[action] * length(me, episode) for me in range(1, 17) for episode in range(2)][:20]
    expected = f"return {np.mean(returns):.2f} +- {np.std(returns):.2f} (standard deviation), from "
    expected += f"{min(returns):.2f} to {max(returns):.2f}\n"
    assert play(drawn, "--episodes", 20, *flags) == (0, f"20 episodes, likeliest actions, step {step}:\n{expected}")


def test_runs_of_other_files_are_played_and_drawn(play, drawn_of):
    folder, factor = drawn_of
    returns = [factor * RAW[LATEST] * length(me, episode) for me in range(1, 17) for episode in range(2)][:20]
    code, text = play(folder, "--episodes", 20, "--likeliest", "--save-video")
    expected = f"20 episodes, likeliest actions, step 5:\nreturn {np.mean(returns):.2f} +- {np.std(returns):.2f} (standard deviation), from "
    assert code == 0 and expected in text and f"wrote {folder}/video.mp4 (" in text
    frame = imageio.get_reader(folder / "video.mp4").get_data(0)
    assert frame.shape == (240, 320, 3) and abs(frame[..., 0].mean() - 200) < 10


def test_a_real_environment_is_drawn(play, main, tmp_path):
    """Gymnasium's draw only what was made to be drawn."""
    flags = ("--num-workers", 0, "--num-envs", 2, "--rollout", 4, "--device", "cpu", "--total-timesteps", 8)
    code, text = main(appo_gym, "--train-dir", tmp_path, "--experiment", "e", *flags)
    assert code == 0, text
    code, text = play(tmp_path / "e", "--episodes", 2, "--save-video", by=ROOT / "appo_gym.py")
    assert code == 0 and "2 episodes, sampled actions, step 8:\nreturn " in text
    assert imageio.get_reader(tmp_path / "e" / "video.mp4").get_data(0).std() > 1, "there is something to see"


def test_sampled_actions_and_overrides(play, drawn):
    _, one = play(drawn, "--episodes", 3)
    _, same = play(drawn, "--episodes", 3, "--device", "cpu", "--no-likeliest")
    code, other = play(drawn, "--episodes", 3, "--gamma", "0.5", "--seed", "2")
    _, likeliest = play(drawn, "--episodes", 3, "--likeliest")
    assert code == 0 and one == same != other and one.split(":\n")[1] != likeliest.split(":\n")[1]
    assert re.fullmatch(r"3 episodes, sampled actions, step 5:\nreturn .*\n", one)
    assert re.fullmatch(r"override: seed 1 -> 2\noverride: gamma 0.99 -> 0.5\n3 episodes, .*\nreturn .*\n", other)


def test_a_run_of_another_version_of_the_file(play, drawn):
    cfg = json.loads((drawn / "cfg.json").read_text())
    del cfg["args"]["gamma"]
    (drawn / "cfg.json").write_text(json.dumps(cfg))
    code, text = play(drawn)
    assert (code, text) == (2, f"error: {drawn} is of another version of {Path(cfg['file']).name}; flags that differ: gamma\n")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
DAMAGED = dict(empty=b"", cut=None, lfs=LFS, page=b"<!DOCTYPE html>\n<html>\n<body>Not Found</body>\n</html>\n")
FOREIGN = [[], 5, {}, dict(agent={}), dict(agent={}, global_step="five"), dict(policies=[]), dict(model=torch.zeros(3))]


@pytest.mark.parametrize("content", [*DAMAGED, *range(len(FOREIGN))])
def test_a_checkpoint_that_is_none(play, drawn_of, content):
    """One sentence, with the file's name; of several the latest that can be read is played."""
    folder, _ = drawn_of
    for path in [*folder.rglob("*.pth")]:
        data = path.read_bytes()
        if content in DAMAGED:
            path.write_bytes(data[: len(data) // 2] if content == "cut" else DAMAGED[content])
        else:
            torch.save(FOREIGN[content], path)
        flags = ["--best"] if path.name == "best.pth" else []
        sentence = f"{path} is damaged, or no checkpoint of a run"
        assert play(folder, *flags) == (2, f"error: {sentence}\n")
        if path.name == "checkpoint_1.pth":
            (folder / "checkpoints" / "checkpoint_0.pth").write_bytes(data)
            code, text = play(folder, "--episodes", 1)
            assert code == 0 and text.startswith(f"warning: {sentence}; playing {folder}/checkpoints/checkpoint_0.pth\n1 episodes,")


@pytest.mark.parametrize("agent", [[], {}, dict(weight=5)])
def test_a_checkpoint_of_another_network(play, drawn_of, agent):
    folder, _ = drawn_of
    for path in folder.rglob("*.pth"):
        torch.save(dict(agent=agent, global_step=1), path)
        code, text = play(folder, *(["--best"] if path.name == "best.pth" else []))
        assert code == 2 and text.startswith(f"error: the network in {path} does not fit ") and text.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[]", "5", '"args"', "{}", '{"file": "appo_gym.py"}', '{"args": {}}', '{"file": 5, "args": {}}', "\xff",
                                  '{"file": "appo_gym.py", "args": []}', '{"file": "appo_gym.py", "args": null}', "[" * 100_000])  # fmt: skip
def test_settings_that_are_none(play, tmp_path, text):
    folder = untrained(tmp_path / "e", ROOT / "appo_gym.py")
    (folder / "cfg.json").write_bytes(text.encode("latin-1"))
    code, answer = play(folder)
    assert code == 2 and answer.startswith(f"error: {folder}/cfg.json is damaged or is not a run's cfg.json (")
    assert answer.count("\n") == 1


@pytest.mark.parametrize("script, name, value", [
    ("appo_gym", "num_envs", "many"), ("appo_gym", "gamma", None), ("appo_gym", "gamma", "0.9"), ("appo_gym", "env_id", 5), ("appo_gym", "seed", 1.5),
    ("appo_gym", "sync", "no"), ("appo_gym", "seed", []), ("appo_gym", "device", {}), ("appo_doom", "rnn_type", "lsmt"), ("appo_doom", "rnn_type", 5),
    ("appo_doom", "precision", "float64"), ("appo_doom", "cfg_path", 7),
])  # fmt: skip
def test_a_setting_of_a_wrong_type(play, tmp_path, script, name, value):
    folder = untrained(tmp_path / "e", ROOT / f"{script}.py")
    cfg = json.loads((folder / "cfg.json").read_text())
    cfg["args"][name] = value
    (folder / "cfg.json").write_text(json.dumps(cfg))
    code, answer = play(folder)
    assert code == 2 and re.match(f"error: {folder}/cfg.json is damaged: value of key '{name}' of dict .*\n$", answer), answer


@pytest.mark.parametrize("seed", [2**31, 2**64, -(2**64)])
def test_any_seed(play, drawn, seed):
    code, text = play(drawn, "--episodes", 2, "--seed", seed)
    assert code == 0 and "2 episodes, " in text


def test_one_thread(play, drawn):
    """Two wait for each other where a training has the cores."""
    torch.set_num_threads(2)
    assert play(drawn, "--episodes", 1)[0] == 0 and torch.get_num_threads() == 1


@pytest.mark.parametrize("flags, answer", [
    (("--episodes", 0), "--episodes 0 is out of range"),
    (("--policies", 1), "--opponents and --policies are for runs of appo_pbt_doom.py"),
    (("--hidden-size", 32), "the network in .* does not fit basic, these flags or this file"),
    (("--watch",), r"--watch needs a display \(DISPLAY and WAYLAND_DISPLAY are not set\); --save-video works without one"),
])  # fmt: skip
def test_bad_input_gets_one_line(play, drawn, flags, answer):
    code, text = play(drawn, *flags)
    assert code == 2 and re.search(f"^error: {answer}", text, re.M) and "episodes," not in text


def test_no_run_no_such_checkpoint_no_such_flag(play, drawn, capsys):
    assert play(drawn / "nothing") == (2, f"error: there is no run in {drawn}/nothing: it has no cfg.json\n")
    (drawn / "checkpoints" / "best.pth").unlink()
    assert play(drawn, "--best") == (2, f"error: {drawn} has no best checkpoint (some files keep the latest alone)\n")
    with pytest.raises(SystemExit):
        play(drawn, "--likelies")
    assert "Unrecognized options: --likelies" in "".join(capsys.readouterr())


def test_the_video_goes_on_with_the_next_episode(play, drawn):
    code, text = play(drawn, "--episodes", 48, "--save-video")
    video = imageio.get_reader(drawn / "video.mp4")
    frames = [frame for frame in video]  # its own length is not known
    assert code == 0 and text.startswith(f"wrote {drawn}/video.mp4 ({len(frames)} frames)\n48 episodes, ")
    assert video.get_meta_data()["fps"] == 50 and {frame.shape for frame in frames} == {(240, 320, 3)}, "four times as large"
    colours, first = np.array([frame.mean((0, 1)) for frame in frames]), length(1, 0)
    assert np.abs(colours[:, 0] - 200).max() < 10 and np.abs(colours[:first, 2] - 20 * np.arange(first)).max() < 10
    episodes, lengths = np.round(colours[:, 1] / 60).astype(int).tolist(), [length(1, episode) for episode in range(48)]
    # Not of the last step of an episode that has terminated (every other one), which the next episode follows
    begin = [0] * first + [1] * (lengths[1] + 1) + [2] * lengths[2]
    assert episodes[: len(begin)] == begin
    assert sum(lengths) <= len(frames) <= sum(lengths) + 48 < 60 * 50, "48 episodes, as the minute is not over, though others have ended, too"


def test_the_video_is_a_minute_at_most(play, drawn, monkeypatch):
    monkeypatch.setattr(evaluate.Drawing, "VIDEO_SECONDS", 0.1)
    assert "video.mp4 (5 frames)" in play(drawn, "--episodes", 32, "--save-video")[1]


@pytest.mark.parametrize("render, answer", [
    ("", "NotImplementedError"),
    ("    def render(self):\n        return None\n", "returns no picture"),
])  # fmt: skip
@pytest.mark.parametrize("flag", ["--save-video", "--watch"])
def test_what_cannot_draw_itself_is_not_played(play, tmp_path, monkeypatch, flag, render, answer):
    envs = (COUNTING + "\n" + render).replace("        self.count += 1\n", "        raise RuntimeError\n")
    monkeypatch.chdir(tmp_path)
    folder = untrained(tmp_path / "e", with_envs(tmp_path, "appo_not_drawn", envs))
    code, text = play(folder, flag, **SHOWN)
    assert code == 2 and text.startswith("error: basic cannot be rendered: ") and answer in text and text.count("\n") == 1
    assert not (folder / "video.mp4").exists()


class Window:
    """What was seen in it, one a step, and after how many steps it gets an event."""

    def __init__(self):
        self.titles, self.pictures, self.speeds, self.event = [], [], [], None

    def flip(self) -> None:
        self.titles.append(pygame.display.get_caption()[0])
        self.pictures.append(pygame.surfarray.array3d(pygame.display.get_surface()).swapaxes(0, 1))
        if self.event and len(self.titles) == self.event[0]:
            pygame.event.post(pygame.event.Event(*self.event[1:]))

    def tick(self, fps: float) -> None:
        self.speeds.append(fps)


@pytest.fixture
def window(monkeypatch):
    seen = Window()
    monkeypatch.setattr(pygame.display, "flip", seen.flip)
    monkeypatch.setattr(pygame.time, "Clock", lambda: seen)
    return seen


def test_a_window_shows_one_environment_at_its_own_speed(play, drawn, window):
    code, text = play(drawn, "--watch", "--episodes", 3, "--likeliest", **SHOWN)
    first, *others = lengths = [length(1, episode) for episode in range(3)]
    assert code == 0 and f"3 episodes, likeliest actions, step 5:\nreturn {RAW[LATEST] * np.mean(lengths):.2f}" in text
    assert len(window.titles) == sum(lengths) + 3, "each has a picture before its first step"
    ends = np.cumsum(np.add(lengths, 1)) - 1
    assert [window.titles[end] for end in ends] == [f"basic: return {n * RAW[LATEST]:.2f}" for n in lengths], "and one at its end"
    assert (window.pictures[ends[0]] == window.pictures[ends[0] - 1]).all(), "the last one again, where it has terminated"
    assert window.speeds == [50] * len(window.titles)
    assert window.titles[:first] == [f"basic: return {i * RAW[LATEST]:.2f}" for i in range(first)]
    assert all((picture == [200, 0, 20 * i]).all() for i, picture in enumerate(window.pictures[:first]))
    assert {picture.shape for picture in window.pictures} == {(720, 960, 3)}, "80x60, twelve times as large"
    assert not pygame.display.get_init(), "it is closed"


KEYS = [(pygame.KEYDOWN, dict(key=key)) for key in (pygame.K_q, pygame.K_ESCAPE)]


@pytest.mark.parametrize("event", [(pygame.QUIT,), *KEYS])
def test_a_window_is_closed(play, drawn, window, event):
    steps = length(1, 0) + 2
    window.event = (steps, *event)
    code, text = play(drawn, "--watch", "--save-video", "--likeliest", **SHOWN)
    assert code == 0 and len(window.titles) == steps and f"({steps - 1} frames)" in text
    assert f"1 episodes, likeliest actions, step 5:\nreturn {RAW[LATEST] * length(1, 0):.2f}" in text, "what was played until then"


def test_a_screen_that_is_not_there(drawn):
    """DISPLAY is set, as after the end of an ssh session: SDL would show nothing, and say nothing."""
    others = {name: value for name, value in os.environ.items() if name not in ("WAYLAND_DISPLAY", "SDL_VIDEODRIVER")}
    command = [sys.executable, str(ROOT / "evaluate.py"), "e", "--watch"]
    done = subprocess.run(command, env=others | dict(DISPLAY=":99"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "error: --watch cannot open a window: " in done.stderr and "episodes," not in done.stdout


def test_an_evaluation_that_is_ended(run, tmp_path):
    """In whatever way: the fixture looks for engines and shared memory that are left."""
    folder = untrained(tmp_path / "e", ROOT / "appo_doom.py")
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)):
        r = run("--episodes", "4000", "--save-video", launcher=(str(ROOT / "evaluate.py"),), script=folder)
        r.wait_for(lambda: len(r.engines()) == 16 and (folder / "video.mp4").exists(), 60, "the games")
        r.process.send_signal(number)
        assert r.wait(60) == code and "Traceback" not in r.text()
        assert ("stopped" in r.text()) == (code == 130)
        (folder / "video.mp4").unlink()


def test_an_evaluation_that_is_ended_while_its_matches_start(run, tmp_path):
    """It does not crash, as it would if games were freed whose engines are starting."""
    folder = untrained(tmp_path / "e", ROOT / "appo_pbt_doom.py", env_id="duel")
    r = run("--policies", "0", launcher=(str(ROOT / "evaluate.py"),), script=folder)
    r.wait_for(lambda: len(r.engines()) > 4, 60, "the engines of the third match")
    time.sleep(0.8)
    r.process.send_signal(signal.SIGTERM)
    assert r.wait() == 130 and "Traceback" not in r.text(), r.text()


def test_ctrl_c_in_a_terminal(run, tmp_path):
    """The video has a bar of its own, which goes on when all episodes have been played. What was played is told."""
    folder = untrained(tmp_path / "e", ROOT / "appo_doom.py")
    r = run(command=[ROOT / "evaluate.py", folder, "--episodes", "500", "--save-video"], terminal=(30, 100))
    r.wait_for(lambda: re.search(r"video: +\d+%.* (\d\d)/525 .*frames/s", r.text()), 60, "the bar of the video")
    r.type("\x03")
    assert r.wait() == 130 and "stopped" in r.text() and "Traceback" not in r.text(), r.text()
    assert re.search(rf"wrote \S*{folder.name}/video.mp4 \(\d\d+ frames\)", r.text())


def test_in_the_background_of_a_terminal(run, tmp_path):
    """The kernel would stop it when the engine of a match touches the terminal."""
    untrained(tmp_path / "e", ROOT / "appo_pbt_doom.py", env_id="duel")
    at_prompt = "set -m; {} {}/evaluate.py e --policies 0 --episodes 2 & wait $!; jobs".format(sys.executable, ROOT)
    r = run(command=["-c", f"import os; os.execlp('bash', 'bash', '-c', {at_prompt!r})"], terminal=(30, 100))
    r.wait_for(lambda: "/2 [" in r.text() or "Stopped" in r.text(), 60, "the first step")
    assert "Stopped" not in r.text()
    for pid in marked(r.mark):  # its job is a group of its own
        with contextlib.suppress(ProcessLookupError):  # it ended with the one before
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ended_by_a_signal_it_leaves_no_folders(run, tmp_path, number):
    """Of DeepMind Lab's engines: the stand-in makes the same."""
    place = tmp_path / "tmp"
    place.mkdir()
    folder = untrained(tmp_path / "e", ROOT / "appo_dmlab.py")
    environment = dict(PYTHONPATH=f"{ROOT}/tests/stand_in:{os.environ['PYTHONPATH']}", TMPDIR=str(place))
    r = run("--episodes", "100000", script=folder, launcher=("-W", "ignore", ROOT / "evaluate.py"), env=environment)
    r.wait_for(lambda: [*tmp_path.rglob("dmlab.tmp")], 60, "the folder of an engine")
    r.process.send_signal(number)
    assert r.wait() == 130, r.text()
    assert not [*place.iterdir()] and {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"tmp", "e"}


PLAIN = '    def render(self):\n        return {}\n'


@pytest.mark.parametrize("edit, answer", [
    (("", "np.zeros((6, 8), np.uint8)"), None),  # grey
    (("", "np.zeros((6, 8 + self.count), np.uint8)"), "basic renders frames of different sizes, (6, 8) and (6, 9)"),
    (("    metadata = dict(render_fps='fast')\n", "np.zeros((6, 8, 3), np.uint8)"), "basic has render_fps 'fast', which is not a number"),
])  # fmt: skip
def test_odd_pictures(play, tmp_path, monkeypatch, edit, answer):
    monkeypatch.chdir(tmp_path)
    envs = COUNTING.replace("class Env(gym.Env):\n", f"class Env(gym.Env):\n{edit[0]}") + "\n" + PLAIN.format(edit[1])
    folder = untrained(tmp_path / "e", with_envs(tmp_path, "appo_odd_pictures", envs))
    code, text = play(folder, "--save-video", "--episodes", 4)
    assert text.splitlines()[-1] == f"error: {answer}" if answer else code == 0 and imageio.get_reader(folder / "video.mp4").get_data(0).any() == 0


def test_an_environment_that_takes_no_render_mode(play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strict = ("def make_envs(args, num_envs, **options):", "def make_envs(args, num_envs):\n    \"\"\"Without options.\"\"\"")
    path = with_envs(tmp_path, "appo_no_mode", COUNTING)
    text = path.read_text()
    path.write_text(strict[1].join(text.rsplit(strict[0], 1)))
    folder = untrained(tmp_path / "e", path)
    assert play(folder, "--save-video") == (2, "error: basic cannot be rendered: it takes no render_mode\n")
    assert play(folder, "--episodes", 4)[0] == 0


def test_episodes_that_never_end(play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "MOST_STEPS", 50)
    endless = COUNTING.replace("end, kind = self.count == self.length, self.episode % 2", "end, kind = self.me % 2 == 1 and self.count == self.length, 0")
    folder = untrained(tmp_path / "e", with_envs(tmp_path, "appo_endless", endless))
    code, text = play(folder, "--episodes", 100)
    assert code == 0 and "an episode of basic did not end within 50 steps; it and all later ones are left out\n" in text
    assert 0 < int(re.search(r"^(\d+) episodes, ", text, re.M)[1]) < 100


def test_ctrl_c_shows_what_was_played(play, drawn, monkeypatch):
    counts, usual = iter(range(1000)), evaluate.Games.step

    def step(self, action):
        if next(counts) == 30:
            raise KeyboardInterrupt
        usual(self, action)

    monkeypatch.setattr(evaluate.Games, "step", step)
    code, text = play(drawn, "--episodes", 4000)
    assert code == 130 and re.search(r"^\d\d+ episodes, sampled actions, step 5:\nreturn .*\nstopped\n$", text, re.M), text


def test_ctrl_c_of_episodes_that_never_end_says_what_was_played(play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    endless = COUNTING.replace("end, kind = self.count == self.length, self.episode % 2", "end, kind = False, 0")
    folder = untrained(tmp_path / "e", with_envs(tmp_path, "appo_no_end", endless))
    counts, usual = iter(range(1000)), evaluate.Games.step

    def step(self, action):
        if next(counts) == 30:
            raise KeyboardInterrupt
        usual(self, action)

    monkeypatch.setattr(evaluate.Games, "step", step)
    code, text = play(folder, "--likeliest")
    sentence = f"no episode has ended in 30 steps; the return of the first one so far: {30 * RAW[LATEST]:.2f}"
    assert (code, text) == (130, f"{sentence}\nstopped\n")


# A match in which 1 and 2 points are made in each step, until someone types Ctrl-C
ENDLESS = """
class Env:
    possible_agents, metadata = ["one", "two"], {}

    def observation_space(self, agent):
        return gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.count, self.agents = 0, self.possible_agents
        return self.of_both(np.zeros((36, 36, 3), np.uint8)), self.of_both({})

    def of_both(self, value):
        return dict.fromkeys(self.agents, value)

    def step(self, actions):
        self.count += 1
        if self.count == 31:
            raise KeyboardInterrupt
        picture = np.zeros((36, 36, 3), np.uint8)
        return self.of_both(picture), dict(one=1.0, two=2.0), self.of_both(False), self.of_both(False), self.of_both({})

    def close(self):
        pass


def make_game(args, **options):
    return Env()
"""


def test_ctrl_c_of_matches_that_never_end_says_what_was_played(play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = untrained(tmp_path / "e", edited(tmp_path, "appo_no_match_ends", replacing(ENDLESS), source=ROOT / "appo_pbt_doom.py"))
    code, text = play(folder, "--env-id", "a.game", "--policies", 0)
    assert code == 130 and text.endswith("no episode has ended in 30 steps; the return of the first one so far: 30.00\nstopped\n"), text


def test_a_run_in_train_dir_is_named(play, drawn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_dir" / "e").mkdir(parents=True)
    (tmp_path / "train_dir" / "e" / "cfg.json").touch()
    assert play(Path("no") / "e") == (2, "error: there is no run in no/e: it has no cfg.json; did you mean train_dir/e?\n")
