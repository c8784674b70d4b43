"""The environments, on the installed engine, against Sample Factory's tables; what a worker makes of them; the files of games."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import vizdoom

import appo_doom
from appo_doom import SCENARIOS, Args, DoomEnv, UserError, make_envs, spaces_of

# Sample Factory's action heads; see its doom_utils.py
HEADS = dict(basic=(4,), my_way_home=(3, 3), deadly_corridor=(3, 3, 3, 2), defend_the_center=(3, 2), defend_the_line=(3, 2),
             health_gathering=(5,), health_gathering_supreme=(5,), battle=(3, 3, 2, 2, 11), battle2=(3, 3, 2, 2, 11), benchmark=(9,))  # fmt: skip


@pytest.mark.parametrize("env_id", SCENARIOS)
def test_every_environment_plays(env_id):
    env = DoomEnv(Args(env_id=env_id))
    assert tuple(env.action_space.nvec) == HEADS[env_id]
    env.action_space.seed(0)
    observation, _ = env.reset(seed=1)
    images = []
    for _ in range(30):
        assert env.observation_space.contains(observation)
        images.append(observation["obs"])
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert np.isfinite(reward) and np.isfinite(info["raw_reward"])
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    assert len({image.tobytes() for image in images}) > 5, "the picture moves"
    assert all(image.std() > 1 for image in images)


def test_heads_press_the_right_buttons():
    env = DoomEnv(Args(env_id="battle"))
    pressed = []

    class Game:
        def __getattr__(self, name):
            return getattr(real, name)

        def make_action(self, buttons, skip):
            pressed.append((buttons, skip))
            return real.make_action(buttons, skip)

    env.reset(seed=0)
    real, env.game = env.game, Game()
    for action in ([0, 0, 0, 0, 5], [1, 2, 1, 0, 0], [2, 1, 0, 1, 10]):
        env.step(np.array(action))
    env.close()
    # forward, back, right, left, attack, speed, turn in degrees
    assert pressed == [([0, 0, 0, 0, 0, 0, 0], 4), ([1, 0, 0, 1, 1, 0, -10], 4), ([0, 1, 1, 0, 0, 1, 10], 4)]


def test_the_image_is_the_nearest_neighbour_of_the_screen():
    env = DoomEnv(Args(env_id="basic"))
    image = env.reset(seed=0)[0]["obs"]
    screen = env.render()
    rows, columns = np.arange(72) * 120 // 72, np.arange(128) * 160 // 128
    np.testing.assert_array_equal(image, screen[rows][:, columns])
    env.close()


def test_time_limit_truncates_with_the_true_last_observation():
    env = DoomEnv(Args(env_id="basic"))
    env.reset(seed=3)
    for step in range(1, 1000):
        observation, reward, terminated, truncated, info = env.step(np.array([0]))
        assert reward == pytest.approx(0.01 * info["raw_reward"])
        if terminated or truncated:
            break
    assert (step, terminated, truncated) == (75, False, True), "300 tics"
    assert info["raw_reward"] == -4 and observation["obs"].std() > 1
    second, _ = env.reset()
    assert second["obs"].std() > 1
    env.close()


def test_death_terminates_with_the_last_observation():
    env = DoomEnv(Args(env_id="defend_the_center"))
    observation, _ = env.reset(seed=3)
    terminated = truncated = False
    while not (terminated or truncated):
        before = observation
        observation, _, terminated, truncated, info = env.step(np.array([0, 0]))
    env.close()
    assert terminated and not truncated and info["raw_reward"] == -1, "the death penalty"
    assert observation is not before and (observation["obs"] == before["obs"]).all() and before["obs"].any()


def test_same_seed_same_game():
    def play():
        env = DoomEnv(Args(env_id="battle"))
        rng = np.random.default_rng(0)
        images = [env.reset(seed=5)[0]["obs"]]
        for _ in range(40):
            observation, *_ = env.step(np.array([rng.integers(n) for n in HEADS["battle"]]))
            images.append(observation["obs"])
        env.close()
        return np.stack(images)

    np.testing.assert_array_equal(play(), play())


def test_measurements_and_shaping():
    env = DoomEnv(Args(env_id="battle"))
    env.reset(seed=0)
    observation, *_ = env.step(np.array([0, 0, 0, 0, 5]))  # the weapon is drawn on the first tic
    m = observation["vector"]
    assert m.shape == (23,) and m[0] == 2, "a pistol"
    assert m[2] == pytest.approx(100 / 30) and m[4] == 0 and m[6] == pytest.approx(0.2) and 0 < m[1] <= 5
    env.weapons.extend([2] * 5)
    state = lambda weapon, ammo, health, kills: np.array([weapon, ammo, health, kills], float)  # noqa: E731
    held = 0.0002  # pistol
    assert env.bonus(state(2, 9, 50, 0), state(2, 9, 70, 0)) == pytest.approx(20 * 0.005 + held)
    assert env.bonus(state(2, 9, 70, 0), state(2, 9, 40, 0)) == pytest.approx(-30 * 0.003 + held)
    assert env.bonus(state(2, 9, 70, 0), state(2, 0, 70, 0)) == 0, "no ammunition, no bonus"
    assert env.bonus(state(2, 9, 70, 0), state(4, 9, 70, 0)) == 0, "a weapon just drawn"
    env.weapons.extend([4] * 2)
    assert env.bonus(state(4, 9, 70, 0), state(4, 9, 70, 0)) == 0, "the fourth step"
    assert env.bonus(state(4, 9, 70, 0), state(4, 9, 70, 0)) == pytest.approx(5 * held), "of the weapon held, not always of the best"
    env.close()
    gathering = DoomEnv(Args(env_id="health_gathering"))
    assert gathering.bonus(state(0, 0, 50, 0), state(0, 0, 60, 0)) == 1 and gathering.bonus(state(0, 0, 50, 0), state(0, 0, 40, 0)) == 0
    gathering.close()


def test_kills_are_counted_in_battle():
    """Random play kills something within a few episodes: the raw reward says so, and so does the measurement."""
    env = DoomEnv(Args(env_id="battle"))
    rng, kills, reported = np.random.default_rng(0), 0.0, 0.0
    for episode in range(8):
        env.reset(seed=episode)
        kills, terminated, truncated = 0.0, False, False
        while not (terminated or truncated):
            observation, _, terminated, truncated, info = env.step(np.array([rng.integers(n) for n in HEADS["battle"]]))
            kills += info["raw_reward"]
            if not terminated:
                reported = float(observation["vector"][4]) * 10
                assert reported == pytest.approx(kills)
        if kills:
            break
    env.close()
    assert kills >= 1


def test_vector_environment_resets_on_the_next_step():
    envs = make_envs(Args(env_id="basic"), 2)
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    envs.reset(seed=0)
    for _ in range(75):
        observation, reward, terminated, truncated, _ = envs.step(np.zeros((2, 1), int))
    assert truncated.all() and observation["obs"].std() > 1
    observation, reward, terminated, truncated, info = envs.step(np.ones((2, 1), int))
    assert not truncated.any() and not terminated.any() and not reward.any() and not np.any(info.get("raw_reward", 0))
    envs.close()


class Noise(gym.Env):
    """Random pictures, numbers, rewards and ends, which depend on the seed and on the actions."""

    observation_space = gym.spaces.Dict(obs=gym.spaces.Box(0, 255, (4, 5, 3), np.uint8), vector=gym.spaces.Box(-1, 1, (2,), np.float32))
    action_space = gym.spaces.MultiDiscrete([3, 2])
    closed = False

    def observation(self):
        return dict(obs=self.np_random.integers(256, size=(4, 5, 3), dtype=np.uint8), vector=self.np_random.random(2, np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation(), {}

    def step(self, action):
        assert action.shape == (2,)
        self.np_random.random(action.sum())
        reward, terminated, truncated = self.np_random.normal(), *(self.np_random.random(2) < 0.1)
        info = {"raw_reward": 10 * reward, "kills": int(action[0]), "said": "nothing"}
        return self.observation(), reward, terminated, truncated, info

    def close(self):
        self.closed = True


class Silent(Noise):
    """Its rewards are raw ones."""

    def step(self, action):
        return *super().step(action)[:4], {}


@pytest.mark.parametrize("Env", [Noise, Silent])
def test_a_worker_does_what_its_environments_do(Env, monkeypatch):
    """`WorkerEnvs` and the mailbox against environments stepped by hand, which are reset on the step after an episode's end. With
    a metric of one's own, which not every environment has."""
    monkeypatch.setattr(appo_doom, "EXTRA_METRICS", ("kills",))
    monkeypatch.setattr(appo_doom, "EPISODE", (*appo_doom.EPISODE, "kills"))
    made = []

    def make(args, num_envs):
        made.append(gym.vector.SyncVectorEnv([Env] * num_envs, copy=False, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP))
        return made[-1]

    monkeypatch.setattr(appo_doom, "make_envs", make)
    args = Args(num_workers=2, num_envs_per_worker=6, worker_num_splits=2)
    spaces = appo_doom.spaces_of(args)
    mailbox = appo_doom.Mailbox(spaces, 12)
    m, rng = mailbox.share(), np.random.default_rng(0)
    splits = [appo_doom.WorkerEnvs(args, group, m, 5 + 3 * (group - 2)) for group in (2, 3)]  # of worker 1
    envs = [Env() for _ in range(6)]
    for split in splits:
        split.reset()
    assert m.first.tolist() == [False] * 6 + [True] * 6 and not m.episode.any()
    seen = [env.reset(seed=5 + i)[0] for i, env in enumerate(envs)]
    ended, sums, finished = [False] * 6, np.zeros((6, 3)), 0

    def check(i, observation):
        for name, part in observation.items():
            np.testing.assert_array_equal(m.obs[name][6 + i], part)

    for i in range(6):
        check(i, seen[i])
    for _ in range(200):
        m.action[:] = rng.integers((3, 2), size=(12, 2))
        for split in rng.permutation(2):
            splits[split].step()
        for i, env in enumerate(envs):
            row = 6 + i
            assert m.first[row] == ended[i]
            if ended[i]:
                check(i, env.reset()[0])
                assert (m.reward[row], m.terminated[row], m.episode[row].tolist()) == (0, False, [0, 0, 0])
                ended[i] = False
                continue
            observation, reward, terminated, truncated, info = env.step(m.action[row])
            check(i, observation)
            assert m.reward[row] == pytest.approx(reward) and m.terminated[row] == terminated
            sums[i] += info.get("raw_reward", reward), 1, info.get("kills", 0)
            ended[i] = terminated or truncated
            np.testing.assert_allclose(m.episode[row], sums[i] * ended[i], rtol=1e-4, atol=1e-4)
            finished += ended[i]
            sums[i] *= not ended[i]
    assert finished > 50 and not m.obs["obs"][:6].any() and not m.first[:6].any(), "the other worker's rows are not touched"
    for split in splits:
        split.envs.close()
    assert all(env.unwrapped.closed for envs in made[1:] for env in envs.envs)


@pytest.mark.parametrize("scale, clip, expected", [(1.0, 10.0, 0.0), (-100.0, 3.0, 3.0), (-100.0, 10.0, 4.0)])
def test_rewards_are_scaled_then_clipped(scale, clip, expected):
    """On top of the scenario's own scale, 0.01. Walking costs 1 a tic: -4 a step."""
    env = DoomEnv(Args(env_id="basic", reward_scale=scale, reward_clip=clip))
    env.reset(seed=0)
    _, reward, _, _, info = env.step(np.array([0]))
    env.close()
    assert info["raw_reward"] == -4 and reward == pytest.approx(expected or -0.04)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused(number, monkeypatch):
    """In one of two environments. Clipping would make an infinite one a good one."""
    rewards = [1.0, number]

    class Env(Noise):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, rewards.pop(0), *rest

    make = lambda args, n: gym.vector.SyncVectorEnv([Env] * n, copy=False, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)  # noqa: E731
    monkeypatch.setattr(appo_doom, "make_envs", make)
    args = Args(num_workers=1, num_envs_per_worker=2, worker_num_splits=1)
    mailbox = appo_doom.Mailbox(appo_doom.spaces_of(args), 2)
    envs = appo_doom.WorkerEnvs(args, 0, mailbox.share(), 5)
    envs.reset()
    with pytest.raises(ValueError, match=rf"a reward is not finite: \[ *1\. +{number}\]"):
        envs.step()
    assert not mailbox.reward.any()


def test_own_scenario(tmp_path):
    cfg = tmp_path / "own.cfg"
    shutil.copy(f"{vizdoom.scenarios_path}/basic.wad", tmp_path)  # paths in a cfg are relative to it
    cfg.write_text(
        "doom_scenario_path = basic.wad\ndoom_map = map01\nliving_reward = -1\nepisode_timeout = 80\n"
        "available_buttons = { MOVE_LEFT MOVE_RIGHT ATTACK TURN_LEFT_RIGHT_DELTA }\nmode = PLAYER\n"
    )
    env = DoomEnv(Args(cfg_path=str(cfg)))
    assert tuple(env.action_space.nvec) == (4, 11)
    env.reset(seed=0)
    for step in range(1, 100):
        _, reward, terminated, truncated, _ = env.step(np.array([0, 5]))
        if terminated or truncated:
            break
    env.close()
    assert truncated and step == 20 and reward == -4
    with pytest.raises(UserError, match="nowhere.cfg"):
        DoomEnv(Args(cfg_path=str(tmp_path / "nowhere.cfg")))


@pytest.mark.parametrize("old, new, warning", [
    ("doom_scenario_path", "\ufeffdoom_scenario_path", "line #1"), ("living_reward", "livingg_reward", "line #3"), ("ATTACK", "ATACK", "lines 6-6"),
])  # fmt: skip
def test_a_line_of_a_scenario_that_vizdoom_ignores(tmp_path, capfd, old, new, warning):
    """It goes on without it, on another map or without a reward."""
    lines = "doom_scenario_path = basic.wad\ndoom_map = map01\nliving_reward = -1\nepisode_timeout = 80\nmode = PLAYER\n"
    cfg = tmp_path / "own.cfg"
    cfg.write_text((lines + "available_buttons = { MOVE_LEFT ATTACK }\n").replace(old, new))
    with pytest.raises(UserError, match="own.cfg: ViZDoom ignored a line; see its warning above"):
        DoomEnv(Args(cfg_path=str(cfg)))
    assert warning in capfd.readouterr().err


def test_variables_of_a_scenario_that_nobody_observes(tmp_path):
    cfg = tmp_path / "own.cfg"
    cfg.write_text("doom_scenario_path = basic.wad\r\navailable_buttons = { ATTACK }\r\navailable_game_variables = { HEALTH AMMO2 }\r\n")
    with pytest.warns(UserWarning, match="own.cfg: these variables are not observed: HEALTH, AMMO2"):
        DoomEnv(Args(cfg_path=str(cfg)))


IMAGE = gym.spaces.Box(0, 255, (72, 128, 3), np.uint8)
VECTOR = gym.spaces.Box(-1, 1, (4,), np.float32)


@pytest.mark.parametrize("obs, action, mode, refused_by", [
    (gym.spaces.Dict(obs=IMAGE), gym.spaces.MultiDiscrete([2]), "NEXT_STEP", ""),
    (gym.spaces.Dict(a=VECTOR, map=IMAGE, b=VECTOR), gym.spaces.MultiDiscrete([2, 3]), "NEXT_STEP", ""),
    (gym.spaces.Dict(obs=IMAGE), gym.spaces.MultiDiscrete([2]), "SAME_STEP", "AutoresetMode.NEXT_STEP, not"),
    (IMAGE, gym.spaces.MultiDiscrete([2]), "NEXT_STEP", "unsupported spaces"),
    (gym.spaces.Dict(obs=IMAGE), gym.spaces.Discrete(2), "NEXT_STEP", "unsupported spaces"),
])  # fmt: skip
def test_unsupported_spaces_are_refused(obs, action, mode, refused_by, monkeypatch):
    class Env(gym.Env):
        observation_space, action_space = obs, action

    mode = gym.vector.AutoresetMode[mode]
    monkeypatch.setattr(appo_doom, "make_envs", lambda args, num_envs: gym.vector.SyncVectorEnv([Env] * num_envs, autoreset_mode=mode))
    if refused_by:
        with pytest.raises(UserError, match=refused_by):
            spaces_of(Args())
    else:
        assert spaces_of(Args()) == appo_doom.Spaces(dict(obs), tuple(action.nvec))


def test_the_network_sees_all_images_and_vectors():
    torch.manual_seed(0)
    obs = dict(map=gym.spaces.Box(0, 255, (36, 40, 1), np.uint8), obs=IMAGE, a=VECTOR, b=gym.spaces.Box(-1, 1, (2,), np.float32))
    spaces, first = appo_doom.Spaces(obs, (3,)), torch.zeros(1, 1, dtype=torch.bool)
    agent = appo_doom.Agent(spaces, Args(hidden_size=16, rnn_type="none", precision="float32"))
    blank = appo_doom.zeros_for(spaces, 1, 1)
    logits = agent(blank, first, torch.zeros(1, 0))[0]
    for name, x in blank.items():
        assert not torch.allclose(agent(blank | {name: x + 1}, first, torch.zeros(1, 0))[0], logits, rtol=1e-4), name


CFGS = sorted(Path(vizdoom.scenarios_path).glob("*.cfg"))


@pytest.mark.parametrize("cfg", [path for path in CFGS if path.stem not in ("cig", "multi", "multi_duel", "doom", "doom2")], ids=lambda path: path.stem)
def test_every_scenario_of_the_package_by_its_cfg(cfg):
    """But those for several players, which test_faults.py tries, and two whose games the package has not."""
    env = DoomEnv(Args(cfg_path=str(cfg)))
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(3):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation) and np.isfinite(reward)
        if terminated or truncated:
            env.reset()
    env.close()


def test_what_an_engine_finds_when_it_starts(tmp_path, monkeypatch):
    """Itself in the temporary folder, whatever its name; there its own folder, though eight start at once; Ctrl-C turned off."""
    engine, empty = tmp_path / "vizdoom", tmp_path / "it's empty"
    engine.write_text('#!/bin/sh\necho "$PWD" _viz* "$2"\ngrep SigIgn /proc/$$/status\n')
    engine.chmod(0o755)
    monkeypatch.setattr(vizdoom, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(tempfile, "tempdir", str(empty))
    script = appo_doom.launcher.__wrapped__()
    for process in [subprocess.Popen([script, "-1", "two words"], stdout=subprocess.PIPE, text=True) for _ in range(8)]:
        where, ignored = process.communicate()[0].splitlines()
        assert where == f"{empty} _vizdoom two words"
        assert int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1


def test_setpriv_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="setpriv"):
        appo_doom.launcher.__wrapped__()


def test_an_engine_whose_starter_is_dead_does_not_start(tmp_path, monkeypatch):
    """It may die between the fork and the kernel's being told: nobody else would end the engine."""
    engine, script = tmp_path / "vizdoom", tmp_path / "script"
    engine.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    engine.chmod(0o755)
    monkeypatch.setattr(vizdoom, "__file__", str(tmp_path / "__init__.py"))
    script.write_text(Path(appo_doom.launcher.__wrapped__()).read_text())
    script.chmod(0o755)
    subprocess.run(["sh", "-c", f"{script}; true"])  # its parent is this shell
    assert not (tmp_path / "started").exists()
    subprocess.run([script], check=True)
    assert (tmp_path / "started").exists()


def test_the_shared_memory_of_a_started_engine_has_no_name():
    """Its own alone: those of other programs stay."""
    other = Path(f"/dev/shm/ViZDoomSM_test_{os.getpid()}")
    other.write_bytes(bytes(4096))
    try:
        env = DoomEnv(Args(env_id="basic"))
        env.reset(seed=0)
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/ViZDoom" in line]
        assert lines and all(line.endswith("(deleted)") for line in lines) and other.exists()
        env.close()
    finally:
        other.unlink()
