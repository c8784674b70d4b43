"""evaluate.py: finds the file that trained a run, plays it fairly, records it, shows it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pygame
import pytest
import torch
import vizdoom
from edited import COUNTING, ROOT, load, with_envs
from forked import python

import evaluate

# Pictures whose colours say which episode and which step it is
DRAWN = f"""{COUNTING}
    metadata = dict(render_fps=50)

    def render(self):
        return np.full((60, 80, 3), (200, 60 * self.episode % 256, 20 * self.count), np.uint8)
"""
# The likeliest action of the two checkpoints, and the raw reward of a step with it
LATEST, BEST = (2, 3), (0, 1)
REWARD = {action: 2 * (0.1 * action[0] + action[1]) for action in (LATEST, BEST)}
SHOWN = dict(SDL_VIDEODRIVER="dummy")  # a window that nobody sees


def length(me: int, episode: int) -> int:
    """Of COUNTING's episodes; environment i is number seed + i."""
    return 1 + (me * 7 + episode * 13) % 9


def untrained(folder: Path, script: Path) -> Path:
    """A run of `script` as training leaves it behind, at step 5, and 3 for the best. Returns its folder."""
    module = evaluate.load(script)
    args = module.Args(device="cpu", precision="float32", hidden_size=16)
    torch.manual_seed(0)
    agent = module.Agent(module.spaces_of(args), args)
    (folder / "checkpoints").mkdir(parents=True)
    for name, step, likeliest in (("checkpoint_1", 5, LATEST), ("best", 3, BEST)):
        torch.nn.init.zeros_(agent.actor.weight)
        torch.nn.init.zeros_(agent.actor.bias)
        for head, action in zip(agent.actor.bias.data.split(agent.heads), likeliest):
            head[action % len(head)] = 0.5
        torch.save(dict(agent=agent.state_dict(), global_step=step), folder / "checkpoints" / f"{name}.pth")
    (folder / "cfg.json").write_text(json.dumps(dict(args=asdict(args), file=str(script))))
    return folder


@pytest.fixture
def drawn(tmp_path):
    return untrained(tmp_path / "e", with_envs(tmp_path, "appo_drawn", DRAWN))


@pytest.fixture
def play(monkeypatch, capsys):
    """evaluate.py in this process. Returns the exit code, and what it printed."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)

    def start(*flags, **env) -> tuple[int, str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, flags)])
        code = evaluate.main()
        text = "".join(capsys.readouterr())
        assert code == 0 or code == 2 and re.search(r"^error: .*\n\Z", text, re.M), text
        return code, text

    return start


def test_a_run_of_a_renamed_copy(run, tmp_path):
    """It is played by the file that trained it, with what that imports from its folder, from wherever the user is."""
    (tmp_path / "own_rewards.py").write_text("FACTOR = 1000.0\n")
    envs = "from own_rewards import FACTOR\n" + COUNTING.replace("2 * reward", "FACTOR + 0 * reward")
    script = with_envs(tmp_path, "my_research", envs)
    r = run("--experiment", "e", "--device", "cpu", "--num-workers", "1", "--num-envs-per-worker", "2", "--rollout", "8",
            "--batch-size", "16", "--hidden-size", "16", "--total-timesteps", "50", script=script)  # fmt: skip
    assert r.wait(60) == 0, r.text()
    (tmp_path / "elsewhere").mkdir()
    done = python(ROOT / "evaluate.py", tmp_path / "e", "--episodes", "16", "--seed", "1", folder=tmp_path / "elsewhere")
    mean = 1000 * np.mean([length(me, 0) for me in range(1, 17)])
    assert re.fullmatch(rf"16 episodes, sampled actions, step [\d,]+: return {mean:.2f} \+- .*\n", done.stdout), done


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
    appo = load(Path(shutil.copy(ROOT / "appo_doom.py", tmp_path / "appo_scenario.py")))
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    shutil.copy(f"{vizdoom.scenarios_path}/basic.wad", here)
    (here / "own.cfg").write_text(WALK)
    monkeypatch.chdir(here)
    code, text = main(appo, "--train-dir", tmp_path, "--experiment", "e", "--cfg-path", "own.cfg", "--num-workers", 0, "--rollout", 8,
                      "--num-envs-per-worker", 2, "--hidden-size", 16, "--device", "cpu", "--total-timesteps", 40)  # fmt: skip
    assert code == 0, text
    monkeypatch.chdir(elsewhere)
    code, text = play(tmp_path / "e", "--episodes", 2)
    assert code == 0 and re.search(r"2 episodes, sampled actions, step \d+: return -80.00 \+- 0.00 ", text), text


def test_a_file_that_was_moved(play, tmp_path, monkeypatch):
    script = with_envs(tmp_path, "appo_moved", COUNTING)
    folder, here, elsewhere = untrained(tmp_path / "e", script), tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    script.rename(here / script.name)
    code, text = play(folder)
    answer = "is not there, which trained the run; say where it is now with --file PATH"
    assert (code, text) == (2, f"error: {script} {answer}\n")
    monkeypatch.chdir(here)
    code, text = play(folder, "--episodes", 1)
    assert code == 0 and text.startswith(f"{script} is gone; using {script.name}\n1 episodes, "), "where the user is"
    monkeypatch.setattr(evaluate, "__file__", str(here / "evaluate.py"))
    monkeypatch.chdir(elsewhere)
    code, text = play(folder, "--episodes", 1)
    assert code == 0 and text.startswith(f"{script} is gone; using {here / script.name}\n1 episodes, "), "beside evaluate.py"
    (here / script.name).rename(elsewhere / "appo_renamed.py")
    code, text = play(folder, "--episodes", 1, "--file", "appo_renamed.py")
    assert code == 0 and text.startswith("1 episodes, ")
    assert play(folder, "--file", "nowhere.py") == (2, f"error: nowhere.py {answer}\n")
    cfg = json.loads((folder / "cfg.json").read_text())
    del cfg["file"]
    (folder / "cfg.json").write_text(json.dumps(cfg))
    assert play(folder) == (2, f"error: {folder}/cfg.json does not say which file trained the run; say it with --file PATH\n")


@pytest.mark.parametrize("flags, action, step", [(("--likeliest",), LATEST, 5), (("--likeliest", "--best"), BEST, 3)])
def test_every_environment_plays_as_often(play, drawn, flags, action, step):
    """Those that end first are not all that counts; of 20 episodes in 16 environments the last ones are left out."""
    returns = [REWARD[action] * length(me, episode) for me in range(1, 17) for episode in range(2)][:20]
    expected = f"return {np.mean(returns):.2f} +- {np.std(returns):.2f} (standard deviation), from "
    expected += f"{min(returns):.2f} to {max(returns):.2f}\n"
    assert play(drawn, "--episodes", 20, *flags) == (0, f"20 episodes, likeliest actions, step {step}: {expected}")


def test_sampled_actions_and_overrides(play, drawn):
    _, one = play(drawn, "--episodes", 3)
    _, same = play(drawn, "--episodes", 3, "--device", "cpu", "--no-likeliest")
    code, other = play(drawn, "--episodes", 3, "--gamma", "0.5", "--seed", "2")
    _, likeliest = play(drawn, "--episodes", 3, "--likeliest")
    assert code == 0 and one == same != other and one.split(": ")[1] != likeliest.split(": ")[1]
    assert re.fullmatch(r"3 episodes, sampled actions, step 5: return .*\n", one)
    assert re.fullmatch(r"override: seed 1 -> 2\noverride: gamma 0.99 -> 0.5\n3 episodes, .*\n", other)


@pytest.mark.parametrize("flags, answer", [
    (("--episodes", 0), "--episodes 0 is out of range"),
    (("--policies", 1), "--opponents and --policies are for runs of appo_pbt_doom.py"),
    (("--hidden-size", 32), "the network in .* does not fit basic, these flags or this file"),
    (("--gamma", 7), "--gamma 7.0 is out of range"),
    (("--watch",), r"--watch needs a screen, and there is none \(no DISPLAY, no WAYLAND_DISPLAY\); --save-video needs none"),
])  # fmt: skip
def test_bad_input_gets_one_line(play, drawn, flags, answer):
    code, text = play(drawn, *flags)
    assert code == 2 and re.search(f"^error: {answer}", text, re.M) and "episodes," not in text


def test_no_run_no_such_checkpoint_no_such_flag(play, drawn, capsys):
    assert play(drawn / "nothing") == (2, f"error: there is no run in {drawn}/nothing: it has no cfg.json\n")
    (drawn / "checkpoints" / "best.pth").unlink()
    assert play(drawn, "--best") == (2, f"error: no best checkpoint in {drawn}/checkpoints\n")
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
    episodes = np.round(colours[:, 1] / 60).astype(int).tolist()
    assert len(frames) > first and set(episodes) >= {0, 1, 2} and episodes == sorted(episodes)
    # Not of the last step of an episode that has terminated (every other one), which the next episode follows
    assert [episodes.count(episode) for episode in (0, 1, 2)] == [first, length(1, 1) + 1, length(1, 2)]


def test_the_video_is_a_minute_at_most(play, drawn, monkeypatch):
    monkeypatch.setattr(evaluate.Drawing, "VIDEO_SECONDS", 0.1)
    assert "video.mp4 (5 frames)" in play(drawn, "--episodes", 32, "--save-video")[1]


@pytest.mark.parametrize("render, answer", [
    ("", "NotImplementedError"),
    ("    def render(self):\n        return None\n", "returns no picture"),
])  # fmt: skip
@pytest.mark.parametrize("flag", ["--save-video", "--watch"])
def test_what_cannot_draw_itself_is_not_played(play, tmp_path, flag, render, answer):
    envs = (COUNTING + "\n" + render).replace("        self.count += 1\n", "        raise RuntimeError\n")
    folder = untrained(tmp_path / "e", with_envs(tmp_path, "appo_not_drawn", envs))
    code, text = play(folder, flag, **SHOWN)
    assert code == 2 and text.startswith("error: basic cannot draw itself: ") and answer in text and text.count("\n") == 1
    assert not (folder / "video.mp4").exists()


def test_environments_of_their_own_to_be_drawn(play, tmp_path):
    """As MuJoCo has them: only where there is something to see."""
    main = 'if __name__ == "__main__":\n'
    instead = "    Env.render = lambda self: np.full((300, 400, 3), self.count, np.uint8)\n    return make_envs(args, num_envs)\n"
    script = with_envs(tmp_path, "appo_drawn_instead", COUNTING, (main, f"def drawn_envs(args, num_envs):\n{instead}\n\n{main}"))
    folder = untrained(tmp_path / "e", script)
    assert play(folder, "--episodes", 2)[1].startswith("2 episodes, ")
    code, text = play(folder, "--episodes", 2, "--save-video")
    assert code == 0 and text.startswith("basic is played in the environments of `drawn_envs`")
    assert imageio.get_reader(folder / "video.mp4").get_data(0).shape == (300, 400, 3), "large enough"


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
    assert code == 0 and f"3 episodes, likeliest actions, step 5: return {REWARD[LATEST] * np.mean(lengths):.2f}" in text
    assert len(window.titles) == sum(lengths) + 1, "an episode that is truncated has a picture at its end"
    assert window.speeds == [50] * len(window.titles)
    assert window.titles[:first] == [f"basic: return {i * REWARD[LATEST]:.2f}" for i in range(first)]
    assert all((picture == [200, 0, 20 * i]).all() for i, picture in enumerate(window.pictures[:first]))
    assert {picture.shape for picture in window.pictures} == {(720, 960, 3)}, "80x60, twelve times as large"
    assert not pygame.display.get_init(), "it is closed"


KEYS = [(pygame.KEYDOWN, dict(key=key)) for key in (pygame.K_q, pygame.K_ESCAPE)]


@pytest.mark.parametrize("event", [(pygame.QUIT,), *KEYS])
def test_a_window_is_closed(play, drawn, window, event):
    steps = length(1, 0) + 2
    window.event = (steps, *event)
    code, text = play(drawn, "--watch", "--save-video", "--likeliest", **SHOWN)
    assert code == 0 and len(window.titles) == steps and f"({steps} frames)" in text
    assert f"1 episodes, likeliest actions, step 5: return {REWARD[LATEST] * length(1, 0):.2f}" in text, "what was played until then"


def test_a_screen_that_is_not_there(drawn):
    """DISPLAY is set, as after the end of an ssh session: SDL would show nothing, and say nothing."""
    others = {name: value for name, value in os.environ.items() if name not in ("WAYLAND_DISPLAY", "SDL_VIDEODRIVER")}
    command = [sys.executable, str(ROOT / "evaluate.py"), str(drawn), "--watch"]
    done = subprocess.run(command, env=others | dict(DISPLAY=":99"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "error: --watch cannot open a window: " in done.stderr and "episodes," not in done.stdout


def test_an_evaluation_that_is_ended(run, tmp_path):
    """In whatever way: the fixture looks for engines and shared memory that are left."""
    folder = untrained(tmp_path / "e", shutil.copy(ROOT / "appo_doom.py", tmp_path / "appo_ended.py"))
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        r = run("--episodes", "4000", "--save-video", launcher=(str(ROOT / "evaluate.py"),), script=folder)
        r.wait_for(lambda: len(r.engines()) == 16 and (folder / "video.mp4").exists(), 60, "the games")
        r.process.send_signal(number)
        assert r.wait(60) == code and "Traceback" not in r.text()
        assert ("stopped" in r.text()) == (code == 130)
        (folder / "video.mp4").unlink()
