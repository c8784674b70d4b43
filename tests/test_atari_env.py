"""appo_atari.py on real EnvPool: what ends an episode and what a game, what is masked, what is counted."""

from types import SimpleNamespace

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch

import appo_atari as appo
from appo_atari import Args, UserError

N, SEED = 4, 11


def played(games):
    """Generator: stops after the reset and after every step, for the caller to read the mailbox and fill in the actions."""
    games.reset()
    while True:
        yield
        games.step()


@pytest.mark.parametrize(
    "game, episodic_life, n, steps", [("Breakout-v5", True, 4, 450), ("Breakout-v5", False, 4, 450), ("RoadRunner-v5", True, 8, 600)]
)
def test_lives_and_games(game, episodic_life, n, steps):
    """The mailbox against a second pool with the same seed and actions, read by hand."""
    args = Args(env_id=game, episodic_life=episodic_life, num_envs_per_worker=n, num_workers=0, device="cpu", reward_clip=3.0)
    m, rng = appo.Mailbox(appo.spaces_of(args), n).share(), np.random.default_rng(0)
    worker = appo.WorkerEnvs(args, 0, m, SEED)
    pool = envpool.make(game, env_type="gymnasium", num_envs=n, seed=SEED, episodic_life=episodic_life, use_fire_reset=True)
    obs, info = pool.reset()
    before, score, length, lives, firsts, games, silent = np.zeros(n, bool), np.zeros(n), np.zeros(n), info["lives"].copy(), 0, 0, 0
    over, reward, terminated, truncated = before, None, None, None  # of the step before
    for t, _ in zip(range(steps), played(worker)):
        np.testing.assert_array_equal(m.obs["obs"], obs.transpose(0, 2, 3, 1))
        if t == 0:
            assert m.first.all() and not m.terminated.any() and not m.episode.any()
        else:
            np.testing.assert_array_equal(m.first, before, "the step after an end, and no other, is the first of an episode")
            assert not (m.first & (m.terminated | (m.reward != 0))).any(), "the ignored step brings nothing"
            np.testing.assert_array_equal(m.terminated, terminated)
            np.testing.assert_array_equal(m.reward, np.clip(reward, -3, 3))
            score, length = score + reward, length + ~before
            unreported = before & ~over & (info["lives"] > lives)  # EnvPool began a new game in the no-ops after a lost life
            over = terminated & (info["lives"] == 0) | unreported  # `AtariEnvs` goes by info["terminated"]
            np.testing.assert_array_equal(m.episode[:, 1] > 0, over, "statistics are of games, not of lives")
            np.testing.assert_allclose(m.episode[over, 0], score[over])
            np.testing.assert_array_equal(m.episode[over, 1], length[over])
            if episodic_life:
                lost = (info["lives"] < lives) | (info["terminated"] > 0)
                assert (lost == terminated)[~before].all(), "a lost life ends an episode"
            else:
                np.testing.assert_array_equal(terminated, over)
            firsts, games, silent = firsts + before.sum(), games + over.sum(), silent + unreported.sum()
            score[over] = length[over] = 0
            lives, before = info["lives"].copy(), terminated | truncated
        action = rng.integers(0, worker.envs.single_action_space.nvec[0], n)
        m.action[:, 0] = action
        obs, reward, terminated, truncated, info = pool.step(action)
    assert games >= n and (firsts > 2 * games if episodic_life else firsts <= games)
    assert (silent > 0) == (game == "RoadRunner-v5")


def test_the_time_limit_of_a_game():
    """It ends the game without `terminated`, though lives were lost before, and the next game counts from nothing."""
    args = Args(num_envs_per_worker=N, num_workers=0, device="cpu")
    m = appo.Mailbox(appo.spaces_of(args), N).share()
    games = appo.WorkerEnvs(args, 0, m, SEED)
    envs = games.envs
    assert envs.options["max_episode_steps"] == 27_000 and appo.AtariEnvs(Args(frameskip=5), 1).options["max_episode_steps"] == 21_600
    envs.options["max_episode_steps"] = 60
    rng, lengths, lost = np.random.default_rng(0), [], 0
    cut = np.zeros(N, bool)
    for _ in zip(range(300), played(games)):
        assert m.first[cut].all() and not m.terminated[cut].any()
        over = m.episode[:, 1] > 0
        cut, lost = over & ~m.terminated, lost + int((m.terminated & ~over).sum())
        lengths += m.episode[cut, 1].tolist()
        m.action[:, 0] = rng.integers(0, 4, N)
    assert lost > N and len(lengths) > N and set(lengths) == {60}


def test_the_ignored_step_is_in_no_loss():
    """Real games through inference and rollouts into the learner's batch: its mask leaves out what only resets."""
    args = Args(num_envs_per_worker=N, num_workers=0, rollout=100, hidden_size=32, device="cpu", precision="float32")
    spaces = appo.spaces_of(args)
    agent = appo.Agent(spaces, args)
    inference = appo.Inference(args, spaces, agent, torch.device("cpu"))
    learner = appo.Learner(args, agent, inference)
    inference.pipes = [SimpleNamespace(send=lambda group: None)]  # no actor reads
    for _ in played(appo.WorkerEnvs(args, 0, inference.mailbox, SEED)):
        inference.requests = [0]
        inference.serve()
        if not inference.full.empty():
            break
    batch = learner.gather(np.r_[inference.full.get()])
    first = batch.first[1:]
    assert first.sum() > 3
    assert (batch.rewards[first] == 0).all() and not batch.terminated[first].any()
    assert batch.terminated[:-1][first[1:]].all(), "each follows the end of a life"
    learner.iterate([slice(0, N)])
    assert learner.global_step == (~first).sum()


def config(**flags) -> dict:
    envs = appo.make_envs(Args(device="cpu", **flags), 2)
    envs.reset(seed=7)
    found = dict(envs.pool.config)
    envs.close()
    return found


def test_flags_reach_the_games():
    found = config(frameskip=3, episodic_life=False, noop_max=5, fire_reset=False, sticky_actions=0.5, full_action_space=True)
    expected = dict(num_envs=2, num_threads=1, seed=7, frame_skip=3, episodic_life=False, noop_max=5, use_fire_reset=False,
                    repeat_action_probability=0.5, full_action_space=True, max_episode_steps=36_000, reward_clip=False, stack_num=4,
                    img_height=84, img_width=84, gray_scale=True)  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    found = config()
    expected = dict(
        frame_skip=4, episodic_life=True, noop_max=30, use_fire_reset=True, repeat_action_probability=0.0, full_action_space=False
    )
    assert {name: found[name] for name in expected} == expected
    assert appo.spaces_of(Args(full_action_space=True)).heads == (18,) and appo.spaces_of(Args()).heads == (4,)


def test_an_unknown_game_names_the_nearest():
    for typed, near in (("breakout", "Breakout-v5"), ("Brekout-v5", "Breakout-v5"), ("Pog-v5", "Pong-v5")):
        with pytest.raises(UserError, match=f"did you mean .*{near}"):
            appo.make_envs(Args(env_id=typed), 1)
    games = {name for name, (module, *_) in envpool.registration.registry.specs.items() if module == "envpool.atari" and name.endswith("-v5")}
    assert len(games) == 104


@pytest.mark.parametrize("encoder", ["nature", "impala"])
@pytest.mark.parametrize("rnn", ["none", "gru"])
def test_networks(encoder, rnn):
    args = Args(encoder=encoder, rnn_type=rnn)
    agent = appo.Agent(appo.Spaces(dict(obs=gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)), (6,)), args)
    obs, first = torch.randint(256, (3, 2, 84, 84, 4), dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.bool)
    logits, values, state = agent(dict(obs=obs), first, torch.zeros(2, agent.state_size))
    assert logits.shape == (3, 2, 6) and values.shape == (3, 2) and state.shape == (2, agent.state_size)
    assert logits.abs().max() < 0.2, "the first policy is close to uniform"
    if rnn == "none":
        assert sum(weight.numel() for weight in agent.parameters()) == dict(nature=1_687_719, impala=2_084_311)[encoder]
    logits.sum().backward()
    assert all(weight.grad is not None for name, weight in agent.named_parameters() if "critic" not in name)
