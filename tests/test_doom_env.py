"""The environments, on the installed engine, against Sample Factory's tables."""

import shutil

import gymnasium as gym
import numpy as np
import pytest
import vizdoom

import appo_doom
from appo_doom import SCENARIOS, Args, DoomEnv, UserError, make_envs, spaces_of

# Sample Factory's action heads; see its doom_utils.py
HEADS = dict(basic=(4,), my_way_home=(3, 3), deadly_corridor=(3, 3, 3, 2), defend_the_center=(3, 2), defend_the_line=(3, 2),
             health_gathering=(5,), health_gathering_supreme=(5,), battle=(3, 3, 2, 2, 11), battle2=(3, 3, 2, 2, 11), benchmark=(9,))  # fmt: skip


@pytest.mark.parametrize("env_id", SCENARIOS)
def test_every_environment_plays(env_id):
    env = DoomEnv(env_id, 4)
    heads = env.action_space.nvec if isinstance(env.action_space, gym.spaces.MultiDiscrete) else [env.action_space.n]
    assert tuple(heads) == HEADS[env_id]
    env.action_space.seed(0)
    observation, _ = env.reset(seed=1)
    images = []
    for _ in range(30):
        assert env.observation_space.contains(observation)
        images.append(observation["obs"] if isinstance(observation, dict) else observation)
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert np.isfinite(reward) and np.isfinite(info["raw_reward"])
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    assert len({image.tobytes() for image in images}) > 5, "the picture moves"
    assert all(image.std() > 1 for image in images)


def test_heads_press_the_right_buttons():
    env = DoomEnv("battle", 4)
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
    env = DoomEnv("basic", 4)
    image, _ = env.reset(seed=0)
    screen = env.render()
    rows, columns = np.arange(72) * 120 // 72, np.arange(128) * 160 // 128
    np.testing.assert_array_equal(image, screen[rows][:, columns])
    env.close()


def test_time_limit_truncates_with_the_true_last_observation():
    env = DoomEnv("basic", 4)
    env.reset(seed=3)
    for step in range(1, 1000):
        image, reward, terminated, truncated, info = env.step(0)
        assert reward == pytest.approx(0.01 * info["raw_reward"])
        if terminated or truncated:
            break
    assert (step, terminated, truncated) == (75, False, True), "300 tics"
    assert info["raw_reward"] == -4 and image.std() > 1
    second, _ = env.reset()
    assert second.std() > 1
    env.close()


def test_death_terminates_with_a_black_observation():
    env = DoomEnv("defend_the_center", 4)
    env.reset(seed=3)
    terminated = truncated = False
    while not (terminated or truncated):
        image, _, terminated, truncated, info = env.step(np.array([0, 0]))
    env.close()
    assert terminated and not truncated and not image.any() and info["raw_reward"] == -1, "the death penalty"


def test_same_seed_same_game():
    def play():
        env = DoomEnv("battle", 4)
        rng = np.random.default_rng(0)
        images = [env.reset(seed=5)[0]["obs"]]
        for _ in range(40):
            observation, *_ = env.step(np.array([rng.integers(n) for n in HEADS["battle"]]))
            images.append(observation["obs"])
        env.close()
        return np.stack(images)

    np.testing.assert_array_equal(play(), play())


def test_measurements_and_shaping():
    env = DoomEnv("battle", 4)
    env.reset(seed=0)
    observation, *_ = env.step(np.array([0, 0, 0, 0, 5]))  # the weapon is drawn on the first tic
    m = observation["measurements"]
    assert m.shape == (23,) and m[0] == 2, "a pistol"
    assert m[2] == pytest.approx(100 / 30) and m[4] == 0 and m[6] == pytest.approx(0.2) and 0 < m[1] <= 5
    env.weapons.extend([2] * 5)
    state = lambda weapon, ammo, health, kills: np.array([weapon, ammo, health, kills], float)  # noqa: E731
    held = 0.0002  # pistol
    assert env.bonus(state(2, 9, 50, 0), state(2, 9, 70, 0)) == pytest.approx(20 * 0.005 + held)
    assert env.bonus(state(2, 9, 70, 0), state(2, 9, 40, 0)) == pytest.approx(-30 * 0.003 + held)
    assert env.bonus(state(2, 9, 70, 0), state(2, 0, 70, 0)) == 0, "no ammunition, no bonus"
    assert env.bonus(state(2, 9, 70, 0), state(4, 9, 70, 0)) == 0, "a weapon just drawn"
    env.weapons.extend([4] * 5)
    assert env.bonus(state(4, 9, 70, 0), state(4, 9, 70, 0)) == pytest.approx(5 * held), (
        "of the weapon held, not always of the best"
    )
    env.close()
    gathering = DoomEnv("health_gathering", 4)
    assert (
        gathering.bonus(state(0, 0, 50, 0), state(0, 0, 60, 0)) == 1
        and gathering.bonus(state(0, 0, 50, 0), state(0, 0, 40, 0)) == 0
    )
    gathering.close()


def test_kills_are_counted_in_battle():
    """Random play kills something within a few episodes: the raw reward says so, and so does the measurement."""
    env = DoomEnv("battle", 4)
    rng, kills, reported = np.random.default_rng(0), 0.0, 0.0
    for episode in range(8):
        env.reset(seed=episode)
        kills, terminated, truncated = 0.0, False, False
        while not (terminated or truncated):
            observation, _, terminated, truncated, info = env.step(np.array([rng.integers(n) for n in HEADS["battle"]]))
            kills += info["raw_reward"]
            if not terminated:
                reported = float(observation["measurements"][4]) * 10
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
        observation, reward, terminated, truncated, _ = envs.step(np.zeros(2, int))
    assert truncated.all() and observation.std() > 1
    observation, reward, terminated, truncated, info = envs.step(np.ones(2, int))
    assert not truncated.any() and not terminated.any() and not reward.any() and not np.any(info.get("raw_reward", 0))
    envs.close()


class Noise(gym.Env):
    """Random pictures, rewards and ends, which depend on the seed and on the actions."""

    observation_space = gym.spaces.Box(0, 255, (4, 5, 3), np.uint8)
    action_space = gym.spaces.MultiDiscrete([3, 2])
    closed = False

    def observation(self):
        return self.np_random.integers(256, size=(4, 5, 3), dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation(), {}

    def step(self, action):
        assert action.shape == (2,)
        self.np_random.random(action.sum())
        reward, terminated, truncated = self.np_random.normal(), *(self.np_random.random(2) < 0.1)
        info = {"raw_reward": 10 * reward, "game_over": bool(terminated and self.np_random.random() < 0.5)}
        return self.observation(), reward, terminated, truncated, info

    def render(self):
        return self.observation()

    def close(self):
        self.closed = True


class DictNoise(Noise):
    observation_space = gym.spaces.Dict(obs=Noise.observation_space, vector=gym.spaces.Box(-1, 1, (2,), np.float32))

    def observation(self):
        return dict(obs=super().observation(), vector=self.np_random.random(2, np.float32))

    def step(self, action):
        return *super().step(action)[:4], {}


@pytest.mark.parametrize("Env", [Noise, DictNoise])
def test_vector_environment_does_what_gymnasiums_does(Env):
    ours = appo_doom.SerialEnvs([Env() for _ in range(3)])
    theirs = gym.vector.SyncVectorEnv([Env] * 3, copy=False, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
    for name in ("single_observation_space", "single_action_space", "observation_space", "action_space", "num_envs"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]

    def parts(observation):
        return list(observation.values()) if isinstance(observation, dict) else [observation]

    ends = np.zeros(3, int)
    theirs.action_space.seed(0)
    for seed in (5, 6):  # the second reset comes in the middle of episodes
        for mine, other in zip(parts(ours.reset(seed=seed)[0]), parts(theirs.reset(seed=seed)[0])):
            np.testing.assert_array_equal(mine, other)
        for _ in range(100):
            action = theirs.action_space.sample()
            mine, other = ours.step(action), theirs.step(action)
            for a, b in zip((*parts(mine[0]), *mine[1:4]), (*parts(other[0]), *other[1:4])):
                np.testing.assert_array_equal(a, b)
            raw_reward = other[4].get("raw_reward", np.zeros(3)) if Env is Noise else other[1]  # as `play` would read it
            np.testing.assert_array_equal(mine[4]["raw_reward"], raw_reward)
            np.testing.assert_array_equal(mine[4]["game_over"], other[4].get("game_over", np.zeros(3)) if Env is Noise else other[2] | other[3])
            ends += mine[2] | mine[3]
    assert ends.min() > 10
    np.testing.assert_equal(ours.render(), list(theirs.render()))
    ours.close()
    ours.close()
    assert all(env.closed for env in ours.envs)


def test_unknown_environment_names_the_nearest():
    with pytest.raises(UserError, match="battle"):
        DoomEnv("battel", 4)


def test_missing_scenario_file_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(vizdoom, "scenarios_path", str(tmp_path))
    monkeypatch.setattr(appo_doom.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        DoomEnv("battle", 4)


def test_own_scenario(tmp_path):
    cfg = tmp_path / "own.cfg"
    shutil.copy(f"{vizdoom.scenarios_path}/basic.wad", tmp_path)  # paths in a cfg are relative to it
    cfg.write_text(
        "doom_scenario_path = basic.wad\ndoom_map = map01\nliving_reward = -1\nepisode_timeout = 80\n"
        "available_buttons = { MOVE_LEFT MOVE_RIGHT ATTACK TURN_LEFT_RIGHT_DELTA }\nmode = PLAYER\n"
    )
    env = DoomEnv("basic", 4, str(cfg))
    assert tuple(env.action_space.nvec) == (4, 11)
    env.reset(seed=0)
    for step in range(1, 100):
        _, reward, terminated, truncated, _ = env.step(np.array([0, 5]))
        if terminated or truncated:
            break
    env.close()
    assert truncated and step == 20 and reward == -4
    with pytest.raises(UserError, match="nowhere.cfg"):
        DoomEnv("basic", 4, str(tmp_path / "nowhere.cfg"))


@pytest.mark.parametrize("space, ok", [
    (gym.spaces.Box(0, 255, (72, 128, 3), np.uint8), True),
    (gym.spaces.Box(0, 1, (72, 128, 3), np.float32), False),
    (gym.spaces.Box(-1, 1, (4,), np.float32), False),
    (gym.spaces.Dict(a=gym.spaces.Box(0, 255, (72, 128, 3), np.uint8), b=gym.spaces.Box(-1, 1, (4,), np.float32)), True),
    (gym.spaces.Dict(a=gym.spaces.Box(0, 255, (72, 128, 3), np.uint8), b=gym.spaces.Discrete(3)), False),
    (gym.spaces.Dict(a=gym.spaces.Box(0, 255, (72, 128, 3), np.uint8), b=gym.spaces.Box(-1, 1, (5, 5), np.float32)), False),
    (gym.spaces.Dict({name: gym.spaces.Box(0, 255, (72, 128, 3), np.uint8) for name in "ab"}), False),
])  # fmt: skip
def test_unsupported_spaces_are_refused_by_name(space, ok):
    class Env(gym.Env):
        observation_space, action_space = space, gym.spaces.Discrete(2)

    envs = gym.vector.SyncVectorEnv([Env], autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
    if ok:
        assert spaces_of(envs).image == (72, 128, 3)
    else:
        with pytest.raises(UserError, match="unsupported spaces"):
            spaces_of(envs)
    for action, heads in (
        (gym.spaces.MultiDiscrete([5]), (5,)),
        (gym.spaces.Discrete(2, start=1), None),
        (gym.spaces.Box(-1, 1, (2,)), None),
    ):
        Env.action_space = action
        envs = gym.vector.SyncVectorEnv([Env], autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
        if ok and heads:
            assert spaces_of(envs).heads == heads
        else:
            with pytest.raises(UserError, match="unsupported spaces"):
                spaces_of(envs)
