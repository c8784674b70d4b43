"""Each program as a user starts it at a prompt: in a pseudo terminal that controls its session, with `stty tostop`.

Actors are background process groups of it. What touches the terminal there (Doom's engines do) is stopped by the kernel, unless the actor
has seen to it: without a terminal nothing of this can be seen."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from edited import REPORTS, ROOT, edited

STAND_IN = Path(__file__).parent / "stand_in"
COMMON = ["--num-workers", "2", "--rollout", "8", "--batch-size", "64", "--hidden-size", "32", "--device", "cpu", "--experiment", "e"]
GAMES = ["--num-envs-per-worker", "2", "--precision", "float32"]
RUNS = {
    "appo_gym": ["--num-envs", "4"],
    "appo_mujoco": ["--num-envs", "4", "--env-id", "Ant-v5"],
    "appo_doom": GAMES,
    "appo_atari": [*GAMES, "--env-id", "ALE/Pong-v5"],
    "appo_dmlab": [*GAMES, "--env-id", "rooms_watermaze", "--encoder", "convnet"],
    "appo_pbt_doom": [*GAMES, "--env-id", "duel"],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_training_and_ctrl_c(name, run, tmp_path):
    script = edited(tmp_path, f"{name}_edited", REPORTS, source=ROOT / f"{name}.py")
    env = {"PYTHONPATH": f"{STAND_IN}:{os.environ['PYTHONPATH']}"} if name == "appo_dmlab" else {}
    r = run(*COMMON, *RUNS[name], script=script, env=env, terminal=(24, 80))
    r.wait_for(lambda: re.search(r"\d% .*, [1-9][\d,]* (steps|frames)/s", r.text()), 60, "a report of the bar")
    r.type("\x03")
    assert r.wait(30) == 130, r.text()
    assert re.search(r"\nstopped: [1-9][\d,]* steps, .*\nplay: .*\ncurves: .*\ncontinue: .*--experiment e\n\Z", r.text()), r.text()


def test_what_a_terminal_without_a_size_shows(run, tmp_path):
    """A bar would have no place: plain lines."""
    script = edited(tmp_path, "appo_gym_edited", REPORTS, source=ROOT / "appo_gym.py")
    r = run(*COMMON, *RUNS["appo_gym"], script=script, terminal=(0, 80))
    r.wait_for(lambda: re.search(r"^step [\d,]+: .*steps/s", r.text(), re.M), 60, "a line")
    r.type("\x03")
    assert r.wait(30) == 130 and "%|" not in r.text()


@pytest.mark.parametrize("name", ["appo_gym", "appo_doom"])
def test_the_terminal_is_closed(name, run, tmp_path):
    """A lost connection: the kernel sends SIGHUP, a shell once more, and nothing can be printed any longer."""
    script = edited(tmp_path, f"{name}_edited", REPORTS, source=ROOT / f"{name}.py")
    r = run(*COMMON, *RUNS[name], script=script, terminal=(24, 80))
    r.wait_for(lambda: re.search(r"\d% .*, [1-9][\d,]* (steps|frames)/s", r.text()), 60, "a report of the bar")
    assert not list(tmp_path.rglob("*.pth"))
    r.hang_up()
    r.process.send_signal(signal.SIGHUP)
    r.process.wait(30)
    assert len(list(tmp_path.rglob("*.pth"))) == 1


def test_a_stopped_job_goes_on(run, tmp_path):
    """Ctrl-Z, and some seconds later fg: no actor is taken for hung."""
    script = edited(tmp_path, "appo_doom_edited", REPORTS, source=ROOT / "appo_doom.py")
    r = run(*COMMON, *RUNS["appo_doom"], "--actor-timeout", "12", script=script, terminal=(24, 80))

    def reports() -> int:
        return r.text().count("frames/s")

    r.wait_for(reports, 60, "a report of the bar")
    r.process.send_signal(signal.SIGSTOP)  # SIGTSTP does nothing to a session's leader
    time.sleep(14)
    before = reports()
    r.process.send_signal(signal.SIGCONT)
    r.wait_for(lambda: reports() > before + 3, 30, "more reports")
    r.type("\x03")
    assert r.wait(30) == 130 and "no answer" not in r.text()
