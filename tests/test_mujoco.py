"""appo_mujoco.py: real tasks of EnvPool, Gaussian policies, the loss, values in units of their own."""

import copy
import importlib.util
import itertools
import json
import math
import re

import envpool
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from edited import REPORTS, ROOT, edited, load, replacing
from test_command_line import TAGS, scalars
from test_first_core import at, direct_vtrace, learner_of, make_agent, make_batch, observations
from torch.distributions import Independent, Normal, kl_divergence

import appo_mujoco as appo
import evaluate
from appo_mujoco import Args, UserError

SCRIPT, SEED = ROOT / "appo_mujoco.py", 11
SMALL = ("--num-workers", "2", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "16", "--device", "cpu")


# --- the tasks


@pytest.mark.parametrize("task, falls, more", [("HalfCheetah-v5", False, {}), ("Hopper-v5", True, dict(frame_skip=2)), ("FingerSpin-v1", False, {}),
                                               ("HumanoidStandup-v4", False, dict(post_constraint=True))])  # fmt: skip
def test_the_mailbox_is_what_the_task_says(task, falls, more):
    """Against a second pool with the same seed and actions, read by hand, beyond its time limit of 1,000 steps."""
    n = 3
    args = appo.resolve(Args(env_id=task, frameskip=more.get("frame_skip"), num_envs_per_worker=n, num_workers=0, num_batches_per_epoch=1,
                             device="cpu", reward_scale=0.1, reward_clip=0.3))  # fmt: skip
    m, rng = appo.Mailbox(appo.spaces_of(args), n).arrays(), np.random.default_rng(0)
    worker = appo.WorkerEnvs(args, 0, m, SEED)
    pool = envpool.make(task, env_type="gymnasium", num_envs=n, num_threads=1, seed=SEED, **more)
    (obs, _), before = pool.reset(), np.zeros(n, bool)
    worker.reset(0)
    length, score, trained, ended, cut, outside = np.zeros(n), np.zeros(n), np.zeros(n), 0, 0, 0
    assert m.first.all()
    for _ in range(1100):
        parts = obs if isinstance(obs, dict) else dict(obs=obs)
        assert set(m.obs) == set(parts)
        for name, part in parts.items():  # flat, though that of FingerSpin's `touch` and the like may be anything
            np.testing.assert_array_equal(m.obs[name], np.reshape(part, (n, -1)).astype(np.float32))
        m.action[:] = sampled = rng.normal(0, 1.5, m.action.shape).astype(np.float32)  # the box of Humanoid's is +-0.4, of the others +-1
        action = np.clip(sampled, pool.action_space.low, pool.action_space.high)
        outside += (action != sampled).sum()
        worker.step(0)
        np.testing.assert_array_equal(m.action, sampled, "an actor only reads them")
        obs, reward, terminated, truncated, _ = pool.step(action)
        np.testing.assert_array_equal(m.first, before, "the step after an end, and no other, is the first of an episode")
        np.testing.assert_array_equal(m.terminated, terminated)
        clipped = np.clip(0.1 * reward, -0.3, 0.3)
        np.testing.assert_allclose(m.reward[~before], clipped[~before], rtol=1e-5)
        length, score, trained = length + ~before, score + reward * ~before, trained + clipped * ~before
        over = terminated | truncated
        np.testing.assert_array_equal(m.episode[:, 2], np.where(over, length, 0))
        np.testing.assert_allclose(m.episode[over, :2], np.column_stack([score, trained])[over], rtol=1e-4)
        assert (length[truncated] == 1000).all()
        ended, cut = ended + terminated.sum(), cut + truncated.sum()
        length[over] = score[over] = trained[over] = 0
        before = over
    assert outside > 100, "what is sampled may lie outside the box"
    assert "Humanoid" not in task or m.obs["obs"][:, -78:].any(), "contact forces, as Gymnasium has them"
    assert (ended > n) == falls and (cut == n) == (not falls)
    worker.close()
    pool.close()


def test_a_time_limit_bootstraps_from_the_true_last_observation():
    """A real episode's end through inference, rollouts and learner into V-trace."""
    args = appo.resolve(
        Args(num_envs_per_worker=2, num_workers=0, num_batches_per_epoch=1, rollout=1010, device="cpu", gamma=0.9, vtrace_lambda=1.0)
    )
    device, spaces = torch.device("cpu"), appo.spaces_of(args)
    torch.manual_seed(0)
    agent = appo.Agent(spaces, args)
    inference = appo.Inference(args, spaces, agent, device)
    learner = appo.Learner(args, agent, inference, device)
    envs = appo.WorkerEnvs(args, 0, inference.arrays, SEED)
    envs.reset(0)
    while inference.full.empty():
        inference.serve([0])
        if envs.ended[0].all():  # the observation that has just been served is the last one of both episodes
            last = inference.arrays.obs["obs"].copy()
        envs.step(0)
    slots, _ = inference.full.get()
    batch = learner.gather(slots, learner.version)
    assert not batch.terminated.any() and batch.first.nonzero()[:, 0].tolist() == [0, 0, 1001, 1001]
    np.testing.assert_array_equal(batch.obs["obs"][1000], last)
    torch.testing.assert_close(appo.evaluate_actions(batch.gaussians, batch.actions)[0], batch.logprobs)
    assert (batch.actions.abs() > 1).any(), "they are kept as they were sampled"
    assert torch.equal(batch.mask, ~batch.first[1:]) and batch.mask.sum() == 2 * 1009
    ratios, values = torch.ones(1010, 2), torch.randn(1011, 2)
    vs, advantages = appo.vtrace(ratios, values, batch.rewards, 0.9 * ~batch.terminated, ~batch.first[1:], 1.0, 1.0, 1.0)
    torch.testing.assert_close(vs[999], batch.rewards[999] + 0.9 * values[1000])
    torch.testing.assert_close(vs[998], batch.rewards[998] + 0.9 * vs[999])
    envs.close()


def test_tasks():
    """All of Gymnasium's and dm_control's, and nothing else; a wrong name is answered with the nearest."""
    assert len(appo.TASKS) == 84 and {"Ant-v3", "Ant-v4", "Ant-v5", "HumanoidStandup-v5", "CheetahRun-v1", "DogRun-v1"} <= appo.TASKS
    for typed in ("halfcheetah", "HALFCHEETAH-V5", "HalfCheeta-v5"):
        with pytest.raises(UserError, match=rf"--env-id {typed}: .*; EnvPool has .*HalfCheetah-v5"):
            appo.make_envs(Args(env_id=typed), 1).close()
    for other, answer in {"Pong-v5": "Pong-v5 is a game of Atari: appo_atari.py trains on it",
                          "FetchReach-v4": "--env-id FetchReach-v4: Environment `FetchReach` doesn't exist.*; EnvPool has Reacher",
                          "no_module:Robot-v0": "No module named 'no_module'", "CartPole-v1": "unsupported spaces"}.items():  # fmt: skip
        with pytest.raises(UserError, match=answer):
            appo.spaces_of(Args(env_id=other))
    with pytest.raises(UserError, match="--frameskip is for EnvPool's tasks, and Pendulum-v1 is none"):
        appo.spaces_of(Args(env_id="Pendulum-v1", frameskip=2))
    assert appo.resolve(Args(env_id="Pendulum-v1", device="cpu")).frameskip == 1
    assert [appo.resolve(Args(env_id=task, device="cpu")).frameskip for task in ("HalfCheetah-v5", "Hopper-v4", "DogRun-v1")] == [5, 4, 3]


ROBOT = """
import gymnasium as gym
import numpy as np


class Robot(gym.Env):
    observation_space = gym.spaces.Dict(
        {name: gym.spaces.Box(-np.inf, np.inf, (n,), np.float64) for name, n in dict(observation=3, achieved_goal=1, desired_goal=1).items()})
    action_space = gym.spaces.Box(-2, 2, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = self.np_random.uniform(-1, 1, 1)
        return self.look(), {}

    def look(self):
        return dict(observation=np.zeros(3), achieved_goal=np.zeros(1), desired_goal=self.goal)

    def step(self, action):
        assert action in self.action_space
        return self.look(), -float(abs(action[0] - self.goal[0])), False, False, {}


gym.register("Robot-v0", Robot, max_episode_steps=5)
"""


def test_a_robot_of_ones_own_needs_no_edit(run, tmp_path):
    """In Gymnasium, which is said; nor does EnvPool have to be there."""
    (tmp_path / "my_module.py").write_text(ROBOT)
    (tmp_path / "envpool.py").write_text("raise ImportError")
    script = edited(tmp_path, "appo_mujoco", REPORTS, source=SCRIPT)
    r = run("--env-id", "my_module:Robot-v0", "--num-workers", "2", "--num-envs-per-worker", "16", "--device", "cpu", "--total-timesteps",
            "150000", script=script)  # fmt: skip
    assert r.wait(120) == 0 and "16 environments, Gymnasium's, in 1 splits" in r.text()
    returns = [float(value) for value in re.findall(r"return (-?[\d.]+), ", r.text())]
    assert min(returns) < -2 and returns[-1] > -1.5 and "WARN" not in r.text(), r.text()


@pytest.mark.parametrize("observation, action, refused_by", [
    (gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-2, 2, (2,)), ""),
    (gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (3,), np.float64), b=gym.spaces.Box(-1, 1, (1,))), gym.spaces.Box(-2, 2, (2,)), ""),
    (gym.spaces.Box(0, 255, (3,), np.uint8), gym.spaces.Box(-2, 2, (2,)), "unsupported spaces"),
    (gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2), "unsupported spaces"),
    (gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-2, 2, (2, 2)), "unsupported spaces"),
    (gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(0, 9, (2,), np.int64), "unsupported spaces"),
    (gym.spaces.Box(-1, 1, (3, 3), np.float32), gym.spaces.Box(-2, 2, (2,)), "this network sees vectors"),
])  # fmt: skip
def test_spaces_of_a_task_of_ones_own(observation, action, refused_by, monkeypatch):
    """They go through pipeline and network, or one of them refuses."""

    class Env(gym.Env):
        observation_space, action_space = observation, action

    def made(mode=gym.vector.AutoresetMode.NEXT_STEP):
        monkeypatch.setattr(appo, "make_envs", lambda args, num_envs: gym.vector.SyncVectorEnv([Env] * num_envs, autoreset_mode=mode))
        spaces = appo.spaces_of(Args())
        obs = appo.room_for(spaces, 2, 3)
        return appo.Agent(spaces, Args())(obs, torch.zeros(2, 3, dtype=bool), torch.zeros(3, 0))[0].shape

    if refused_by:
        with pytest.raises(UserError, match=refused_by):
            made()
        return
    assert made() == (2, 3, 4)
    with pytest.raises(UserError, match="NEXT_STEP"):
        made(gym.vector.AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("task", sorted(appo.TASKS))
def test_every_task_has_a_network(task):
    """As the spaces say it: the observation is as long, and the action as many numbers."""
    args = appo.resolve(Args(env_id=task, num_envs_per_worker=2, num_workers=0, num_batches_per_epoch=1, device="cpu"))
    m, spaces = appo.Mailbox(appo.spaces_of(args), 2), appo.spaces_of(args)
    envs = appo.WorkerEnvs(args, 0, m.arrays(), SEED)
    envs.reset(0)
    agent, state = appo.Agent(spaces, args), torch.zeros(2, 0)
    for _ in range(3):
        gaussians, values, _ = agent({name: part[None] for name, part in m.obs.items()}, m.first[None], state)
        assert gaussians.isfinite().all() and values.isfinite().all()
        m.action[:] = appo.sample_actions(gaussians[0].detach())[0]
        envs.step(0)
    envs.close()


def test_batches_that_one_game_cannot_fill():
    """Four batches of a rollout of every row: one sentence says that one row is too few."""
    for batch_size in (None, 32):
        with pytest.raises(UserError, match="needs one rollout of every row: 4 batches of 32"):
            appo.resolve(Args(num_workers=0, num_envs_per_worker=1, device="cpu", batch_size=batch_size))


# --- the policy


def random_policies(rng, *shape: int, numbers: int = 4):
    """[*shape, 2 * numbers], and the same as a distribution in float64."""
    gaussians = torch.from_numpy(rng.normal(0, 1, (*shape, 2 * numbers)))
    mean, log_std = gaussians.chunk(2, -1)
    return gaussians, Independent(Normal(mean, log_std.exp()), 1)


def test_gaussians_against_torch_distributions():
    rng = np.random.default_rng(0)
    for numbers in (1, 3, 17):
        (p, one), (q, two) = random_policies(rng, 50, 6, numbers=numbers), random_policies(rng, 50, 6, numbers=numbers)
        actions = torch.from_numpy(rng.normal(0, 2, (50, 6, numbers)))
        logprob, entropy = appo.evaluate_actions(p, actions)
        torch.testing.assert_close(logprob, one.log_prob(actions))
        torch.testing.assert_close(entropy, one.entropy())
        torch.testing.assert_close(appo.kl_divergence(p, q), kl_divergence(one, two))
        assert not appo.kl_divergence(p, p).any()


def test_sampling_follows_the_policy():
    torch.manual_seed(0)
    gaussians = torch.tensor([[1.0, -2.0, 0.0, math.log(0.5), 0.0, math.log(3.0)]]).repeat(100_000, 1)
    actions, logprob = appo.sample_actions(gaussians)
    torch.testing.assert_close(actions.mean(0), torch.tensor([1.0, -2.0, 0.0]), atol=0.03, rtol=0)
    torch.testing.assert_close(actions.T.cov(), torch.diag(torch.tensor([0.25, 1.0, 9.0])), atol=0.1, rtol=0)
    torch.testing.assert_close(logprob, appo.evaluate_actions(gaussians, actions)[0])
    likeliest, density = appo.sample_actions(gaussians[:1], deterministic=True)
    assert likeliest.tolist() == [[1.0, -2.0, 0.0]] and density.item() == pytest.approx(-1.5 * math.log(2 * math.pi) - math.log(1.5))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("rnn", ["none", "gru", "lstm"])
def test_network(adaptive, rnn):
    args = Args(adaptive_stddev=adaptive, initial_stddev=0.5, rnn_type=rnn)
    spaces = appo.spaces_of(appo.resolve(args))
    agent, first = appo.Agent(spaces, args), torch.zeros(3, 2, dtype=torch.bool)
    obs, state = observations(spaces, 3, 2), torch.zeros(2, agent.state_size)
    gaussians, values, after = agent(obs, first, state)
    assert gaussians.shape == (3, 2, 12) and values.shape == (3, 2) and after.shape == state.shape
    mean, log_std = gaussians.chunk(2, -1)
    assert mean.abs().max() < 0.1, "the first actions are close to 0"
    torch.testing.assert_close(log_std.exp(), torch.full((3, 2, 6), 0.5), atol=0.05 if adaptive else 1e-6, rtol=0)
    if rnn == "none":  # CleanRL's ppo_continuous_action has as many
        assert sum(weight.numel() for weight in agent.parameters()) == 11_085 + (384 if adaptive else 0)
    (gaussians.sum() + values.sum()).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in agent.parameters())


def test_log_ratio_at_lag_zero():
    """Acting network and learning network of one version: their numerical difference must not look like off-policy data."""
    _, agent = make_agent(appo, rnn_type="gru")
    T, B, acted = 8, 16, []
    obs, first, state = observations(agent.spaces, T, B), torch.rand(T, B) < 0.1, torch.zeros(B, agent.state_size)
    agent.update_normalizers(obs, torch.ones(T, B, dtype=torch.bool))
    with torch.no_grad():
        for t in range(T):
            step = [agent(at(obs, (slice(t, t + 1), half)), first[t : t + 1, half], state[half]) for half in (slice(0, 5), slice(5, B))]
            acted.append(torch.cat([gaussians[0] for gaussians, _, _ in step]))
            state = torch.cat([after for _, _, after in step])
        actions, mu = appo.sample_actions(torch.cat(acted))
        gaussians = agent(obs, first, torch.zeros(B, agent.state_size))[0]
        assert (appo.evaluate_actions(gaussians.flatten(0, 1), actions)[0] - mu).std() < 1e-4


# --- the loss


def test_loss_against_numpy():
    args, agent = make_agent(appo, ent_coef=0.1, kl_loss_coef=0.3, vtrace_rho=1.4, vtrace_c=0.7, vtrace_lambda=0.8, clip_coef=0.3, vf_coef=0.7,
                             gamma=0.9, ppo_clip_value=0.2)  # fmt: skip
    agent.critic.std.fill_(3.0)
    agent.critic.mean.fill_(-2.0)
    batch = make_batch(appo, agent)
    batch.logprobs[0] -= 6  # beyond the band of the ratio
    batch.logprobs[1] += 6
    generator = torch.Generator().manual_seed(2)
    batch = batch._replace(mask=batch.mask & (torch.rand(batch.mask.shape, generator=generator) < 0.7))  # the others are too old
    loss, target, metrics = appo.appo_loss(args, agent, batch)
    with torch.no_grad():
        gaussians, values, _ = agent(batch.obs, batch.first, batch.rnn_state, batch.restarts)
    pi, mu = (Independent(Normal(x[..., :2], x[..., 2:].exp()), 1) for x in (gaussians[:-1].double(), batch.gaussians.double()))
    ratio = (pi.log_prob(batch.actions) - batch.logprobs).exp().clamp(0.05, 20)
    vs, advantage = direct_vtrace(ratio, values.double(), batch.rewards.double(), args.gamma * (~batch.terminated).double(),
                                  ~batch.first[1:], 1.4, 0.7, 0.8)  # fmt: skip
    torch.testing.assert_close(target.double(), vs[:-1], rtol=1e-4, atol=1e-4)
    m = batch.mask.numpy()
    ratio, vs, advantage = ratio.numpy()[m], vs[:-1].numpy()[m], advantage.numpy()[m]
    advantage = (advantage - advantage.mean()) / advantage.std()
    policy = -np.minimum(ratio * advantage, np.clip(ratio, 1 / 1.3, 1.3) * advantage).mean()
    new, old = values[:-1].double().numpy()[m], batch.values.numpy()[m]
    value = np.maximum((new - vs) ** 2, (old + np.clip(new - old, -0.6, 0.6) - vs) ** 2).mean() / 9
    kl = kl_divergence(pi, mu).numpy()[m].mean()
    assert loss.item() == pytest.approx(policy + 0.7 * value - 0.1 * pi.entropy().numpy()[m].mean() + 0.3 * kl, rel=1e-4)
    assert metrics["losses/kl"].item() == pytest.approx(kl, rel=1e-4)
    assert metrics["losses/explained_variance"].item() == pytest.approx(1 - ((vs - new) ** 2).mean() / vs.var(), rel=1e-4)


def test_the_kl_penalty_keeps_the_policy_near_the_one_that_acted():
    """Without advantages it alone moves the policy, and towards mu."""
    distances = []
    for coefficient in (0.0, 1.0):
        args, agent = make_agent(appo, kl_loss_coef=coefficient, vf_coef=0.0, learning_rate=0.01, normalize_returns=False)
        learner, batch = learner_of(appo, args, agent), make_batch(appo, agent)
        batch.gaussians[:] = torch.tensor([1.0, -1.0, 0.5, -0.5])
        batch = batch._replace(rewards=torch.zeros_like(batch.rewards), mask=batch.mask & False)
        batch.mask[0, 0] = True  # the advantage of a single sample, less its mean, is 0
        for _ in range(50):
            learner.update(batch, last_epoch=False)
        with torch.no_grad():
            gaussians = agent(batch.obs, batch.first, batch.rnn_state, batch.restarts)[0][:-1]
        distances.append(appo.kl_divergence(gaussians, batch.gaussians)[0, 0].item())
    assert distances[1] < 0.2 * distances[0]


# --- values in units of their own


def test_popart_normalises_the_targets_and_keeps_every_value():
    torch.manual_seed(0)
    critic, x, seen = appo.PopArt(appo.init_layer(torch.nn.Linear(16, 1))), torch.randn(50, 16), []
    values = critic(x)
    for _ in range(20):
        targets, mask = 300 * torch.randn(200) + 50, torch.rand(200) < 0.5
        critic.update(torch.where(mask, targets, 1e6), mask)
        torch.testing.assert_close(critic(x), values, rtol=1e-5, atol=1e-4)
        seen.append(targets[mask])
        before = copy.deepcopy(critic.state_dict())
        critic.update(targets, mask & False)
        assert all(torch.equal(x, before[name]) for name, x in critic.state_dict().items()), "without a sample nothing changes"
    targets = torch.cat(seen)
    total = critic.START + len(targets)  # it starts as if it had seen some with mean 0 and deviation 1
    mean = targets.sum() / total
    assert critic.mean.item() == pytest.approx(mean.item(), rel=1e-4)
    assert critic.std.item() == pytest.approx(((targets.square().sum() + critic.START) / total - mean.square()).sqrt().item(), rel=1e-4)


def test_popart_forgets_what_is_long_ago():
    critic, mask = appo.PopArt(torch.nn.Linear(4, 1)), torch.ones(1000, dtype=torch.bool)
    critic.MEMORY = 10_000  # samples
    for mean in (0.0, 100.0):
        for _ in range(200):
            critic.update(torch.randn(1000) + mean, mask)
    assert critic.mean.item() == pytest.approx(100, abs=0.1) and critic.std.item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("normalize, epochs", [(True, 1), (True, 3), (False, 3)])
def test_popart_gets_the_targets_of_usable_samples_once(normalize, epochs):
    args, agent = make_agent(appo, gamma=0.0, learning_rate=0.0, normalize_returns=normalize, num_epochs=epochs, num_batches_per_epoch=2)
    learner = learner_of(appo, args, agent)
    learner.version, r = 1000, learner.inference.rollouts
    r.versions[:] = np.where(np.arange(12) == 3, 1, 1000)  # those of slot 3 are too old
    with torch.no_grad():  # gamma 0 and on-policy: the targets are the rewards
        gaussians = agent(r.obs, torch.from_numpy(r.first), r.rnn_state)[0][:-1]
        r.logprobs[:] = appo.evaluate_actions(gaussians, r.actions)[0]
    learner.iterate(np.arange(12))
    usable = ~r.first[1:] & (np.arange(12) != 3)
    seen = r.rewards[usable if normalize else usable & False]
    assert agent.critic.count.item() == agent.critic.START + len(seen)
    assert agent.critic.mean.item() == pytest.approx(seen.sum().item() / (agent.critic.START + len(seen)), rel=1e-3)


def test_the_size_of_the_rewards_does_not_matter():
    """With rewards, values and clip a hundred times as large the gradient is the same, when PopArt knows it."""
    gradients = []
    for size in (1.0, 100.0):
        args, agent = make_agent(appo)
        batch = make_batch(appo, agent)
        agent.critic.std.fill_(size)
        batch = batch._replace(rewards=size * batch.rewards, values=size * batch.values)
        appo.appo_loss(args, agent, batch)[0].backward()
        gradients.append([weight.grad for weight in agent.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


# --- as a user runs it


def test_train_resume_evaluate(run, main, tmp_path, monkeypatch, capsys):
    script = edited(tmp_path, "appo_mujoco_edited", replacing("Reporter.SECONDS = 0.05"), source=SCRIPT)
    r = run(*SMALL, "--experiment", "e", "--env-id", "Hopper-v5", "--total-timesteps", "1500", "--rnn-type", "lstm", "--adaptive-stddev",
            script=script)  # fmt: skip
    assert r.wait(90) == 0
    assert "64 samples an iteration, 16 (2 rollouts of 8 steps) an optimiser step" in r.text() and "= 6,000 frames" in r.text()
    found = scalars(tmp_path / "e")
    assert set(found) == TAGS | {"losses/kl"}, "the tags are those of the table"
    rates = [event.value for event in found["charts/learning_rate"]]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.9 * Args.learning_rate
    assert all(event.value == pytest.approx(4 * sps.value) for event, sps in zip(found["charts/FPS"], found["charts/SPS"], strict=True))
    code, text = main(load(script), "--train-dir", tmp_path, "--experiment", "e", "--total-timesteps", 2000)
    assert code == 0 and "override: total_timesteps 1500 -> 2000" in text and "resuming" in text
    agent, args, _ = appo.load_agent(tmp_path / "e", device="cpu")
    assert agent.critic.count > agent.critic.START + 1500 and agent.critic.std != 1.0, "PopArt goes on where it was"
    envs = appo.make_envs(args, 1)  # a trained policy in code of one's own, as in README.md
    obs = {name: torch.from_numpy(part)[None] for name, part in appo.by_name(envs.reset(seed=1)[0]).items()}
    assert agent(obs, torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, agent.state_size))[0].shape == (1, 1, 6)
    envs.close()

    def evaluated(*flags: str):
        file = json.loads((tmp_path / "e" / "cfg.json").read_text())["file"]
        monkeypatch.setattr("sys.argv", ["evaluate.py", str(tmp_path / "e"), "--file", file, *flags])
        return evaluate.main(), "".join(capsys.readouterr())

    results = [evaluated("--episodes", "3", *likeliest) for likeliest in (["--likeliest"], [], ["--likeliest"])]
    assert results[0] == results[2] and results[0][1].split("step")[1] != results[1][1].split("step")[1]
    assert results[0][0] == 0 and re.search(r"3 episodes, likeliest actions, step [\d,]+: return [\d.]+ \+- [\d.]+", results[0][1])
    code, text = evaluated("--episodes", "1", "--save-video")
    if not importlib.util.find_spec("mujoco"):
        assert code == 2 and re.search("error: Gymnasium cannot draw Hopper-v5 .*pip install mujoco", text)
    else:
        assert code == 0 and "1 episodes, sampled actions, step" in text
        video = imageio.get_reader(tmp_path / "e" / "video.mp4")
        frames = list(itertools.islice(video, 1000))  # its own length is not known
        assert video.get_meta_data()["fps"] == 125 and frames[0].shape == (480, 480, 3) and (frames[0] != frames[-1]).any()
