"""appo_mujoco.py: real tasks of EnvPool, Gaussian policies, the loss, values in units of their own."""

import importlib.util
import itertools
import json
import math
import os
import re
from types import SimpleNamespace

import envpool
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from edited import REPORTS, ROOT, edited, load, replacing
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from test_algorithm import at, direct_vtrace, make_agent, make_batch, observations
from test_command_line import OPERATIONS, TAGS, scalars
from torch.distributions import Independent, Normal

import appo_mujoco as appo
import evaluate
from appo_mujoco import Args, UserError

SCRIPT, SEED = ROOT / "appo_mujoco.py", 11
SMALL = ("--num-workers", "2", "--num-envs", "8", "--rollout", "8", "--batch-size", "16", "--device", "cpu")


# --- the tasks


@pytest.mark.parametrize("task, falls, more", [("HalfCheetah-v5", False, {}), ("Hopper-v5", True, {}), ("FingerSpin-v1", False, {}),
                                               ("HumanoidStandup-v4", False, dict(post_constraint=True))])  # fmt: skip
def test_the_mailbox_is_what_the_task_says(task, falls, more):
    """Against a second pool with the same seed and actions, read by hand, beyond its time limit of 1,000 steps."""
    n = 3
    args = Args(env_id=task, num_envs=n, num_workers=0, device="cpu")
    m, rng = appo.Mailbox(appo.spaces_of(args), n).share(), np.random.default_rng(0)
    worker = appo.WorkerEnvs(args, 0, m, SEED)
    pool = envpool.make(task, env_type="gymnasium", num_envs=n, num_threads=1, seed=SEED, **more)
    (obs, _), before = pool.reset(), np.zeros(n, bool)
    worker.reset()
    length, score, ended, cut, outside = np.zeros(n), np.zeros(n), 0, 0, 0
    assert m.first.all()
    for _ in range(1100):
        parts = {f"obs/{name}": part for name, part in obs.items()} if isinstance(obs, dict) else dict(obs=obs)
        assert set(m.obs) == set(parts)
        for name, part in parts.items():  # flat, though that of FingerSpin's `touch` and the like may be anything
            np.testing.assert_array_equal(m.obs[name], np.reshape(part, (n, -1)).astype(np.float32))
        m.action[:] = sampled = rng.normal(0, 1.5, m.action.shape).astype(np.float32)  # the box of Humanoid's is +-0.4, of the others +-1
        action = np.clip(sampled, -1, 1) * pool.action_space.high
        outside += (abs(sampled) > 1).sum()
        worker.step()
        np.testing.assert_array_equal(m.action, sampled, "an actor only reads them")
        obs, reward, terminated, truncated, _ = pool.step(action)
        np.testing.assert_array_equal(m.first, before, "the step after an end, and no other, is the first of an episode")
        np.testing.assert_array_equal(m.terminated, terminated)
        np.testing.assert_allclose(m.reward[~before], reward[~before], rtol=1e-5)
        length, score = length + ~before, score + reward * ~before
        over = terminated | truncated
        np.testing.assert_array_equal(m.episode[:, 1], np.where(over, length, 0))
        np.testing.assert_allclose(m.episode[over, 0], score[over], rtol=1e-4)
        assert (length[truncated] == 1000).all()
        ended, cut = ended + terminated.sum(), cut + truncated.sum()
        length[over] = score[over] = 0
        before = over
    assert outside > 100, "what is sampled may lie outside the box"
    assert "Humanoid" not in task or m.obs["obs"][:, -78:].any(), "contact forces, as Gymnasium has them"
    assert (ended > n) == falls and (cut == n) == (not falls)
    worker.envs.close()
    pool.close()


def test_a_time_limit_bootstraps_from_the_true_last_observation():
    """A real episode's end through inference, rollouts and learner into V-trace."""
    args = Args(num_envs=2, num_workers=0, rollout=1010, device="cpu", gamma=0.9, vtrace_lambda=1.0)
    spaces = appo.spaces_of(args)
    torch.manual_seed(0)
    agent = appo.Agent(spaces, args)
    inference = appo.Inference(args, spaces, agent, torch.device("cpu"))
    learner = appo.Learner(args, inference)
    inference.pipes = [SimpleNamespace(send=lambda message: None)]  # no actor reads
    envs = appo.WorkerEnvs(args, 0, inference.mailbox, SEED)
    envs.reset()
    with torch.inference_mode():
        while inference.full.empty():
            inference.requests = [0]
            inference.serve()
            if envs.done.all():  # the observation that has just been served is the last one of both episodes
                last = inference.mailbox.obs["obs"].copy()
            envs.step()
    block = inference.full.get()
    batch = learner.gather(np.r_[block])
    assert not batch.terminated.any() and batch.first.nonzero()[:, 0].tolist() == [0, 0, 1001, 1001]
    np.testing.assert_array_equal(batch.obs["obs"][1000], last)
    gaussians = agent(batch.obs, batch.first, batch.rnn_state[0])[0].detach()
    torch.testing.assert_close(appo.log_prob(gaussians[:-1], batch.actions), batch.logprobs)
    assert (batch.actions.abs() > 1).any(), "they are kept as they were sampled"
    valid = (~batch.first[1:]).float()
    assert valid.sum() == 2 * 1009
    ratios, values = torch.ones(1010, 2), torch.randn(1011, 2)
    vs, advantages = appo.vtrace(ratios, values, batch.rewards, 0.9 * ~batch.terminated, valid, 1.0, 1.0, 1.0)
    torch.testing.assert_close(vs[999], batch.rewards[999] + 0.9 * values[1000])
    torch.testing.assert_close(vs[998], batch.rewards[998] + 0.9 * vs[999])
    envs.envs.close()


def test_tasks():
    """All of Gymnasium's and dm_control's, and nothing else; a wrong name is answered with what Gymnasium says."""
    assert len(appo.TASKS) == 84 and {"Ant-v3", "Ant-v4", "Ant-v5", "HumanoidStandup-v5", "CheetahRun-v1", "DogRun-v1"} <= appo.TASKS
    for other, answer in {"HalfCheeta-v5": "Did you mean: `HalfCheetah`", "Pong-v5": "Environment `Pong` doesn't exist",
                          "no_module:Robot-v0": "No module named 'no_module'", "CartPole-v1": "unsupported spaces.*for choices: appo_gym.py",
                          }.items():  # fmt: skip
        with pytest.raises((UserError, gym.error.Error, ModuleNotFoundError), match=answer):
            appo.spaces_of(Args(env_id=other))


def test_a_wrapper_of_gymnasium_takes_envpools_tasks():
    envs = gym.wrappers.vector.TransformObservation(appo.make_envs(Args(env_id="Hopper-v5"), 2), lambda obs: dict(obs=obs["obs"] + 1))
    before, after = appo.make_envs(Args(env_id="Hopper-v5"), 2).reset(seed=3)[0]["obs"], envs.reset(seed=3)[0]["obs"]
    np.testing.assert_array_equal(before + 1, after)


def test_a_task_that_cannot_be_drawn_is_a_sentence():
    with pytest.raises(UserError, match="--env-id CheetahRun-v1: EnvPool cannot render it, and Gymnasium does not have it"):
        appo.make_envs(Args(env_id="CheetahRun-v1"), 1, render_mode="rgb_array")


NUMBERS = [  # of an action: its bounds, and what arrives of -3, -1, 0, 1 and 3 as they are drawn
    (-2000, 2000, [-2000, -2000, 0, 2000, 2000]),
    (200, 1000, [200, 200, 600, 1000, 1000]),
    (-0.01, 0.01, [-0.01, -0.01, 0, 0.01, 0.01]),
    (0.1, 0.7, [0.1, 0.1, 0.4, 0.7, 0.7]),
    (5, 5, [5] * 5),
    (-1e9, 3e9, [-1e9, -1e9, 1e9, 3e9, 3e9]),
    (0, np.inf, [0, 0, 0, 1, 3]),
    (-np.inf, 2, [-3, -1, 0, 1, 2]),
    (-np.inf, np.inf, [-3, -1, 0, 1, 3]),
    (-1e10, 1e10, [-3, -1, 0, 1, 3]),  # LqrLqr21-v1 of EnvPool, which has no limit
    (-3e38, 3e38, [-3, -1, 0, 1, 3]),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.filterwarnings("error")
def test_the_policys_unit_is_half_of_each_numbers_range(dtype, monkeypatch):
    low, high, expected = (np.array(column, dtype).T for column in zip(*NUMBERS))
    got = []

    class Env(gym.Env):
        observation_space, action_space = Box(-1, 1, (3,)), Box(low, high, dtype=dtype)

        def reset(self, *, seed=None, options=None):
            return np.zeros(3, np.float32), {}

        def step(self, action):
            got.append(action)
            return np.zeros(3, np.float32), 0.0, False, False, {}

    monkeypatch.setitem(gym.registry, "Own-v0", gym.envs.registration.EnvSpec("Own-v0", Env, disable_env_checker=True))
    args = Args(env_id="Own-v0", num_workers=0, num_envs=5, device="cpu")
    m = appo.Mailbox(appo.spaces_of(args), 5).share()
    worker = appo.WorkerEnvs(args, 0, m, SEED)
    worker.reset()
    m.action[:] = drawn = np.array([-3, -1, 0, 1, 3], np.float32)[:, None]
    worker.step()
    np.testing.assert_array_equal(m.action, np.broadcast_to(drawn, m.action.shape), "they are kept as they were drawn")
    assert all(action.dtype == dtype for action in got)
    np.testing.assert_array_equal(np.stack(got)[[0, 1, 3, 4]], expected[[0, 1, 3, 4]], "the bounds themselves, to the last bit")
    np.testing.assert_allclose(np.stack(got)[2], expected[2], rtol=1e-6)


@pytest.mark.parametrize("task", ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5"])
def test_bounds_of_one_leave_actions_as_they_are(task):
    """To the last bit, however small."""
    space, rng = appo.make_envs(Args(env_id=task), 1).single_action_space, np.random.default_rng(0)
    actions = (rng.normal(0, 1, (1000, *space.shape)) * 10.0 ** rng.integers(-30, 2, (1000, *space.shape))).astype(np.float32)
    assert appo.to_bounds(actions, space).tobytes() == np.clip(actions, space.low, space.high).tobytes()


ROBOT = """
import gymnasium as gym
import numpy as np


class Robot(gym.Env):
    observation_space = gym.spaces.Dict(
        {name: gym.spaces.Box(-np.inf, np.inf, (n,), np.float64) for name, n in dict(observation=3, achieved_goal=1, desired_goal=1).items()})
    action_space = gym.spaces.Box(200, 1000, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = self.np_random.uniform(-1, 1, 1)
        return self.look(), {}

    def look(self):
        return dict(observation=np.zeros(3), achieved_goal=np.zeros(1), desired_goal=self.goal.copy())

    def step(self, action):
        assert action in self.action_space
        return self.look(), -float(abs((action[0] - 600) / 400 - self.goal[0])), False, False, {}


gym.register("Robot-v0", Robot, max_episode_steps=5)
"""


def test_a_robot_of_ones_own_needs_no_edit(run, tmp_path):
    """Nor does EnvPool have to be there. As they are drawn, all actions would be clipped to one bound."""
    (tmp_path / "my_module.py").write_text(ROBOT)
    (tmp_path / "envpool.py").write_text("raise ImportError")
    script = edited(tmp_path, "appo_mujoco", REPORTS, source=SCRIPT)
    r = run("--env-id", "my_module:Robot-v0", "--num-workers", "2", "--num-envs", "32", "--device", "cpu", "--total-timesteps", "150000",
            script=script)  # fmt: skip
    assert r.wait(120) == 0, r.text()
    returns = [float(value) for value in re.findall(r"return (-?[\d.]+), ", r.text())]
    assert min(returns) < -2 and returns[-1] > -1.5 and "WARN" not in r.text(), r.text()


@pytest.mark.parametrize("observation, action, names, refused_by", [
    (Box(-1, 1, (3,), np.float32), Box(-2, 2, (2,)), ["obs"], ""),
    (Dict(a=Box(-1, 1, (3,), np.float64), b=Box(-1, 1, (1,))), Box(-2, 2, (2,)), ["obs/a", "obs/b"], ""),
    (Box(0, 255, (3,), np.uint8), Box(-2, 2, (2,)), ["obs"], ""),
    (Tuple((Discrete(3), Box(-1, 1, (2, 2)))), Box(-2, 2, (2, 3), np.float16), ["obs/0", "obs/1"], ""),
    (Dict(a=Box(-1, 1, (3,)), said=Text(4)), Box(np.array([-1, 0]), np.array([5, 9.0]), dtype=np.float64), ["obs/a"], ""),
    (Box(-1, 1, (3,), np.float32), Discrete(2), [], "unsupported spaces.*for choices: appo_gym.py"),
    (Box(-1, 1, (3,), np.float32), Box(0, 9, (2,), np.int64), [], "unsupported spaces"),
    (Box(0, 255, (8, 8), np.uint8), Box(-2, 2, (2,)), ["obs"], ""),
    (Box(-np.inf, np.inf, (4, 348)), Box(-2, 2, (2,)), ["obs"], ""),
    (Box(0, 255, (64, 64, 3), np.uint8), Box(-2, 2, (2,)), [], "obs is an image, Box.*: this network sees vectors"),
    (Box(0, 1, (96, 96, 3), np.float32), Box(-2, 2, (2,)), [], "obs is an image, Box.*: this network sees vectors"),
])  # fmt: skip
@pytest.mark.filterwarnings("error", "ignore:.*is left out")
def test_spaces_of_a_task_of_ones_own(observation, action, names, refused_by, monkeypatch):
    """They go through the pipeline and the network; what the environment gets is in its box, and of its type."""

    class Env(gym.Env):
        observation_space, action_space = observation, action
        got = []

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            self.got.append(action)
            return self.observation_space.sample(), np.array([1.0]), False, False, {"raw_reward": None}

    monkeypatch.setitem(gym.registry, "Own-v0", gym.envs.registration.EnvSpec("Own-v0", Env, disable_env_checker=True))
    args = Args(env_id="Own-v0", num_workers=0, num_envs=2, device="cpu")
    if refused_by:
        with pytest.raises(UserError, match=refused_by):
            appo.spaces_of(args)
        return
    spaces = appo.spaces_of(args)
    assert list(spaces.obs) == names and spaces.action_size == action.low.size
    inference = appo.Inference(args, spaces, appo.Agent(spaces, args), torch.device("cpu"))
    inference.pipes = [SimpleNamespace(send=lambda message: None)]  # no actor reads
    envs = appo.WorkerEnvs(args, 0, inference.mailbox, SEED)
    envs.reset()
    with torch.inference_mode():
        for _ in range(30):
            inference.requests = [0]
            inference.serve()
            inference.mailbox.action[:] *= 10
            envs.step()
    assert len(Env.got) == 60 and all(given in action and given.dtype == action.dtype for given in Env.got)
    ends = np.unique(np.stack(Env.got))
    assert {action.low.min(), action.high.max()} <= set(ends.tolist())
    monkeypatch.setattr(appo, "make_envs", lambda args, n: gym.vector.SyncVectorEnv([Env] * n, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP))
    with pytest.raises(UserError, match="NEXT_STEP"):
        appo.spaces_of(args)


@pytest.mark.parametrize("task", sorted(appo.TASKS))
def test_every_task_has_a_network(task):
    """As the spaces say it: the observation is as long, and the action as many numbers."""
    args = Args(env_id=task, num_envs=2, num_workers=0, device="cpu")
    spaces = appo.spaces_of(args)
    m = appo.Mailbox(spaces, 2)
    envs = appo.WorkerEnvs(args, 0, m.share(), SEED)
    envs.reset()
    agent, state = appo.Agent(spaces, args), torch.zeros(2, 0)
    for _ in range(3):
        gaussians, values, _ = agent({name: part[None] for name, part in m.obs.items()}, m.first[None], state)
        assert gaussians.isfinite().all() and values.isfinite().all()
        m.action[:] = appo.sample_actions(gaussians[0].detach())
        envs.step()
    envs.envs.close()


# --- the policy


def random_policies(rng, *shape: int, numbers: int = 4):
    """[*shape, 2 * numbers], and the same as a distribution in float64."""
    gaussians = torch.from_numpy(rng.normal(0, 1, (*shape, 2 * numbers)))
    mean, log_std = gaussians.chunk(2, -1)
    return gaussians, Independent(Normal(mean, log_std.exp()), 1)


def test_gaussians_against_torch_distributions():
    rng = np.random.default_rng(0)
    for numbers in (1, 3, 17):
        gaussians, distribution = random_policies(rng, 50, 6, numbers=numbers)
        actions = torch.from_numpy(rng.normal(0, 2, (50, 6, numbers)))
        torch.testing.assert_close(appo.log_prob(gaussians, actions), distribution.log_prob(actions))
        torch.testing.assert_close(appo.entropy_of(gaussians), distribution.entropy())


def test_sampling_follows_the_policy():
    torch.manual_seed(0)
    gaussians = torch.tensor([[1.0, -2.0, 0.0, math.log(0.5), 0.0, math.log(3.0)]]).repeat(100_000, 1)
    actions = appo.sample_actions(gaussians)
    torch.testing.assert_close(actions.mean(0), torch.tensor([1.0, -2.0, 0.0]), atol=0.03, rtol=0)
    torch.testing.assert_close(actions.T.cov(), torch.diag(torch.tensor([0.25, 1.0, 9.0])), atol=0.1, rtol=0)


@pytest.mark.parametrize("rnn", ["none", "gru"])
def test_network(rnn):
    args = Args(initial_stddev=0.5, rnn_type=rnn, device="cpu")
    spaces = appo.spaces_of(args)
    agent, first = appo.Agent(spaces, args), torch.zeros(3, 2, dtype=torch.bool)
    obs, state = observations(spaces, 3, 2), torch.zeros(2, agent.state_size)
    gaussians, values, after = agent(obs, first, state)
    assert gaussians.shape == (3, 2, 12) and values.shape == (3, 2) and after.shape == state.shape
    mean, log_std = gaussians.chunk(2, -1)
    assert mean.abs().max() < 0.1, "the first actions are close to 0"
    torch.testing.assert_close(log_std.exp(), torch.full((3, 2, 6), 0.5))
    if rnn == "none":  # CleanRL's ppo_continuous_action has as many
        assert sum(weight.numel() for weight in agent.parameters()) == 11_085
    (gaussians.sum() + values.sum()).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in agent.parameters())


def test_log_ratio_at_lag_zero():
    """Acting step by step and learning at once: their numerical difference must not look like off-policy data."""
    _, agent = make_agent(appo, rnn_type="gru")
    T, B, acted = 8, 16, []
    obs, first, state = observations(agent.spaces, T, B), torch.rand(T, B) < 0.1, torch.zeros(B, agent.state_size)
    for name, x in obs.items():
        agent.normalizers[name].update(x, torch.ones(T, B, dtype=torch.bool))
    with torch.no_grad():
        for t in range(T):
            step = [agent(at(obs, (slice(t, t + 1), half)), first[t : t + 1, half], state[half]) for half in (slice(0, 5), slice(5, B))]
            acted.append(torch.cat([gaussians[0] for gaussians, _, _ in step]))
            state = torch.cat([after for _, _, after in step])
        mu = torch.stack(acted)
        actions = appo.sample_actions(mu)
        gaussians = agent(obs, first, torch.zeros(B, agent.state_size))[0]
        assert (appo.log_prob(gaussians, actions) - appo.log_prob(mu, actions)).std() < 1e-4


# --- the loss


def test_loss_against_numpy():
    args, agent = make_agent(appo, ent_coef=0.1, vtrace_rho=1.4, vtrace_c=0.7, vtrace_lambda=0.8, clip_coef=0.3, vf_coef=0.7, gamma=0.9)
    agent.critic.std.fill_(3.0)
    agent.critic.mean.fill_(-2.0)
    batch = make_batch(appo, agent)
    batch.logprobs[0] -= 6  # beyond the band of the ratio
    batch.logprobs[1] += 6
    loss, target, metrics = appo.appo_loss(args, agent, batch)
    with torch.no_grad():
        gaussians, values, _ = agent(batch.obs, batch.first, batch.rnn_state[0])
    mean, log_std = gaussians[:-1].double().chunk(2, -1)
    pi = Independent(Normal(mean, log_std.exp()), 1)
    ratio = (pi.log_prob(batch.actions) - batch.logprobs).exp().clamp(0.05, 20)
    vs, advantage = direct_vtrace(ratio, values.double(), batch.rewards.double(), args.gamma * (~batch.terminated).double(),
                                  ~batch.first[1:], 1.4, 0.7, 0.8)  # fmt: skip
    torch.testing.assert_close(target.double(), vs[:-1], rtol=1e-4, atol=1e-4)
    m = ~batch.first[1:].numpy()
    ratio, vs, advantage = ratio.numpy()[m], vs[:-1].numpy()[m], advantage.numpy()[m]
    advantage = (advantage - advantage.mean()) / advantage.std()
    policy = -np.minimum(ratio * advantage, np.clip(ratio, 1 / 1.3, 1.3) * advantage).mean()
    new, old = values[:-1].double().numpy()[m], batch.values.numpy()[m]
    clipped = old + np.clip(new - old, -3 * args.ppo_clip_value, 3 * args.ppo_clip_value)
    value = np.maximum((new - vs) ** 2, (clipped - vs) ** 2).mean() / 9
    assert loss.item() == pytest.approx(policy + 0.7 * value - 0.1 * pi.entropy().numpy()[m].mean(), rel=1e-4)
    assert metrics["losses/explained_variance"].item() == pytest.approx(1 - ((vs - new) ** 2).mean() / vs.var(), rel=1e-4)


def test_the_size_of_the_rewards_does_not_matter():
    """With rewards a hundred times as large the gradient is the same, when PopArt knows it."""
    gradients = []
    for size in (1.0, 100.0):
        args, agent = make_agent(appo)
        batch = make_batch(appo, agent)
        agent.critic.std.fill_(size)
        batch = SimpleNamespace(**vars(batch) | dict(rewards=size * batch.rewards, values=size * batch.values))
        appo.appo_loss(args, agent, batch)[0].backward()
        gradients.append([weight.grad for weight in agent.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


# --- as a user runs it


@pytest.mark.parametrize("fewer", [0, 1])
def test_a_worker_for_each_core_stays_on_its_own(fewer, run):
    """Fewer workers stay free: other runs may share the machine."""
    cores = len(os.sched_getaffinity(0))
    workers = max(1, cores - fewer)
    r = run(*SMALL, "--env-id", "Hopper-v5", "--num-workers", workers, "--num-envs", 2 * workers, "--total-timesteps", 10**6, script=SCRIPT)
    r.wait_for(lambda: len(r.actors()) == workers and "step" in r.text(), what="the actors")
    expected = cores if workers < cores else 1
    assert [len(os.sched_getaffinity(actor)) for actor in r.actors()] == [expected] * workers
    if expected == 1:
        assert set.union(*(os.sched_getaffinity(actor) for actor in r.actors())) == os.sched_getaffinity(0)


@pytest.mark.parametrize("task, flags, expected", [
    ("Hopper-v5", (), 1.0), ("Ant-v5", (), 0.5), ("HalfCheetah-v5", (), 0.5), ("Hopper-v5", ("--initial-stddev", 0.6), 0.6),
])  # fmt: skip
def test_noise_starts_larger_where_agents_fall_soon(task, flags, expected, main, tmp_path):
    """Few of Ant's first steps end an episode, none of HalfCheetah's. A typed value stays, and a resumed run does not begin again."""
    typed = ("--train-dir", tmp_path, "--experiment", "e", "--num-workers", 0, "--num-envs", 16, "--learning-rate", 1e-4)
    for steps in (600, 1200):
        code, text = main(appo, *typed, "--env-id", task, *flags, "--total-timesteps", steps)
        assert code == 0, text
        stddev = appo.read_checkpoint(tmp_path / "e")["agent"]["log_std"].exp()
        torch.testing.assert_close(stddev, torch.full_like(stddev, expected), rtol=0.02, atol=0)


def test_train_resume_evaluate(run, main, tmp_path, monkeypatch, capsys):
    script = edited(tmp_path, "appo_mujoco_edited", replacing("Reporter.SECONDS = 0.05"), source=SCRIPT)
    r = run(*SMALL, "--experiment", "e", "--env-id", "Hopper-v5", "--total-timesteps", "1500", "--rnn-type", "gru", script=script)
    assert r.wait(90) == 0, r.text()
    found = scalars(tmp_path / "e")
    assert set(found) == TAGS - OPERATIONS, "the tags are those of the table"
    rates = [event.value for event in found["charts/learning_rate"]]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.9 * Args.learning_rate
    code, text = main(load(script), "--train-dir", tmp_path, "--experiment", "e", "--total-timesteps", 2000)
    assert code == 0 and f"resuming {tmp_path / 'e'} at step" in text
    module, agent, args, _ = evaluate.load_agent(tmp_path / "e", file=script, num_envs=1)
    assert agent.critic.count > 1000 + 1500 and agent.critic.std != 1.0, "PopArt goes on where it was"
    envs = module.make_envs(args, 1)  # a trained policy in code of one's own, as in README.md
    obs = {name: torch.from_numpy(part)[None] for name, part in envs.reset(seed=1)[0].items()}
    logits, _, _ = agent(obs, torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, agent.state_size))
    assert logits.shape == (1, 1, 6)
    assert module.to_bounds(module.sample_actions(logits[0]).detach().numpy(), envs.single_action_space) in envs.action_space
    envs.close()

    def evaluated(*flags: str):
        file = json.loads((tmp_path / "e" / "cfg.json").read_text())["file"]
        monkeypatch.setattr("sys.argv", ["evaluate.py", str(tmp_path / "e"), "--file", file, *flags])
        return evaluate.main(), "".join(capsys.readouterr())

    capsys.readouterr()
    results = [evaluated("--episodes", "3", *likeliest) for likeliest in (["--likeliest"], [], ["--likeliest"])]
    assert results[0] == results[2] and results[0][1].split("step")[1] != results[1][1].split("step")[1]
    assert results[0][0] == 0 and re.search(r"3 episodes, likeliest actions, step [\d,]+:\nreturn [\d.]+ \+- [\d.]+", results[0][1])
    code, text = evaluated("--episodes", "1", "--save-video")
    if not importlib.util.find_spec("mujoco"):
        assert code == 2 and re.search("error: --env-id Hopper-v5: EnvPool cannot render it, and Gymnasium says: MuJoCo is not installed", text), text
    else:
        assert code == 0 and "1 episodes, sampled actions, step" in text
        video = imageio.get_reader(tmp_path / "e" / "video.mp4")
        frames = list(itertools.islice(video, 1000))  # its own length is not known
        assert video.get_meta_data()["fps"] == 125 and frames[0].shape == (480, 480, 3) and (frames[0] != frames[-1]).any()
