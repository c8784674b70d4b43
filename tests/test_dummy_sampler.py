"""dummy_sampler.py as a user runs it, shortly: it steps, counts, ends its games, and says what it did."""

import importlib.metadata
import json
import multiprocessing
import signal
import sys

import gymnasium as gym
import numpy as np
import pytest
from conftest import marked
from edited import ROOT

import dummy_sampler

SHORT = ("--num-workers", "2", "--num-envs-per-worker", "2", "--warm-up", "0.2", "--window", "0.5", "--windows", "2")


@pytest.fixture
def sampler(run):
    """The fixture `run` sees that nothing is left behind."""
    return lambda *flags: run(command=[ROOT / "dummy_sampler.py", *flags])


class Countdown(gym.Env):
    """Its episodes take three steps."""

    observation_space, action_space = gym.spaces.Discrete(9), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.left = 3
        return 0, {}

    def step(self, action):
        self.left -= 1
        return 0, 0.0, self.left == 0, False, {}


def test_only_valid_steps_are_counted():
    envs = gym.vector.SyncVectorEnv([Countdown] * 2)  # NEXT_STEP is its default
    envs.reset()
    counted = dummy_sampler.valid_steps(envs, [np.zeros(2, int)])
    assert [next(counted) for _ in range(9)] == [2, 2, 2, 0, 2, 2, 2, 0, 2]


@pytest.mark.parametrize("family, unit", [("doom", 500), ("atari", 200)])
def test_the_ceiling_of(sampler, family, unit, tmp_path):
    r = sampler("--family", family, *SHORT, "--out", "out.json")
    assert r.wait() == 0, r.text()
    content = json.loads((tmp_path / "out.json").read_text())
    (found,) = content["results"]
    assert found["workers"] == 2 and found["envs_per_worker"] == 2 and len(found["windows"]) == 2
    assert found["frames_per_second"] > unit and content["command"].startswith("python dummy_sampler.py --family")
    engine = dict(doom="vizdoom", atari="envpool")[family]
    assert content["machine"][engine] == importlib.metadata.version(engine)
    assert 0 < found["reset_seconds"] < found["start_seconds"]
    assert f"{found['frames_per_second']:,} frames/s" in r.text()


@pytest.mark.parametrize("family, env_id", [("mujoco", "Hopper-v5"), ("pbt_doom", "basic"), ("dmlab", "rooms_watermaze")])
def test_the_ceiling_of_the_other_families(family, env_id, tmp_path, monkeypatch, capfd):
    """In this process. DeepMind Lab has a stand-in."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "stand_in")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dummy_sampler.py", "--family", family, "--env-id", env_id, *SHORT, "--out", "out.json"])
    dummy_sampler.main()
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["workers"] == 2 and len(found["windows"]) == 2 and min(found["windows"]) > 100
    assert not [*tmp_path.rglob("dmlab.tmp")]  # a folder of each engine
    assert f"2 workers x 2 {env_id}: {found['frames_per_second']:,} frames/s" in capfd.readouterr().out and not multiprocessing.active_children()


def test_the_pipeline_alone(sampler, tmp_path):
    r = sampler("--family", "atari", "--null", *SHORT, "--out", "out.json")
    assert r.wait() == 0, r.text()
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["rows_per_second"] > 100 and 2 <= found["rows_per_batch"] <= 4
    assert found["microseconds_per_group"] == pytest.approx(2e6 / found["rows_per_second"], rel=0.05)


def test_a_window_in_which_no_rollout_ends():
    """As where a game makes a few steps per second: what share of the steps is valid is known from before the window."""
    options = dummy_sampler.Options(
        family="atari", null=True, num_workers=1, num_envs_per_worker=2, warm_up=0.01, window=0.05, windows=1, set_workers_cpu_affinity=False
    )
    appo, args = dummy_sampler.variant(options)
    args.rollout = 2000
    found = dummy_sampler.pipeline(options, appo, args, null=True)
    assert found["frames_per_second"] == pytest.approx(args.frameskip * found["rows_per_second"], abs=args.frameskip)


@pytest.mark.parametrize("pinned", [True, False])
def test_the_pipeline_alone_is_pinned_or_not(pinned):
    options = dummy_sampler.Options(family="doom", null=True, set_workers_cpu_affinity=pinned)
    assert dummy_sampler.variant(options)[1].set_workers_cpu_affinity == pinned


def test_processes_end_with_the_main_one(sampler):
    r = sampler("--family", "atari", *SHORT, "--window", "60")
    r.wait_for(lambda: len(marked(r.mark)) == 5, 60, "the workers, beside fork server and resource tracker")
    r.process.kill()


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 130), (signal.SIGHUP, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_ended_while_its_engines_start(sampler, number, code):
    """They leave nothing in /dev/shm, as the fixture sees."""
    r = sampler(*SHORT)
    r.wait_for(lambda: r.engines(), 60, "the first engine")
    r.process.send_signal(number)
    assert r.wait() == code and "Traceback" not in r.text(), r.text()


def test_ctrl_c_in_a_terminal(run, tmp_path):
    """Its processes are in the background of the terminal, which stops none of them."""
    r = run(command=[ROOT / "dummy_sampler.py", "--family", "pbt_doom", *SHORT, "--num-workers", "1", "--windows", "500"], terminal=(30, 100))
    r.wait_for(lambda: "1/500 " in r.text(), 60, "the first window")
    r.type("\x03")
    assert r.wait() == 130 and "Traceback" not in r.text(), r.text()


def test_its_command_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "dummy_sampler.py"), "--out", "my results/$x.json"])
    assert dummy_sampler.command() == "python dummy_sampler.py --out 'my results/$x.json'"


@pytest.mark.parametrize("flags, expected", [
    ("--env-id Pog-v5", "error: unknown --env-id Pog-v5; did you mean Pong-v5"),
    ("--num-workers 0", "error: --num-workers 0 is out of range: at least 1"),
    ("--windows 0", "error: --windows 0 is out of range: at least 1"),
    ("--null --sweep", "error: --null measures 2 to 72 workers; it cannot be combined with --sweep"),
    ("--out nowhere/out.json", "error: no such folder: nowhere"),
])  # fmt: skip
def test_bad_input_gets_one_line(flags, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dummy_sampler.py", "--family", "atari", *SHORT, *flags.split()])
    with pytest.raises(SystemExit) as error:
        dummy_sampler.main()
    assert error.value.code.startswith(expected) and "\n" not in error.value.code
