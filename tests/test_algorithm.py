"""V-trace, the loss and the network against slow, direct evaluations. Runs for every file that holds a copy."""

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical

VARIANTS = sorted(path.stem for path in Path(__file__).parent.parent.glob("appo_*.py"))
# The policy of the others is discrete; what a Gaussian one is tested for is in test_mujoco.py
DISCRETE = pytest.mark.parametrize("appo", [name for name in VARIANTS if name != "appo_mujoco"], indirect=True)
WITH_VECTOR = pytest.mark.parametrize("appo", [name for name in VARIANTS if name not in ("appo_dmlab", "appo_atari", "appo_atari_replay")], indirect=True)


@pytest.fixture(params=VARIANTS)
def appo(request):
    return importlib.import_module(request.param)


def random_case(rng, T, B):
    first = rng.random((T + 1, B)) < 0.2
    return dict(
        ratios=torch.from_numpy(np.exp(rng.normal(0, 1, (T, B)))),
        values=torch.from_numpy(rng.normal(0, 1, (T + 1, B))),
        rewards=torch.from_numpy(rng.normal(0, 1, (T, B))),
        discounts=torch.from_numpy(0.97 * (rng.random((T, B)) > 0.2)),
        valid=torch.from_numpy(~first[1:]).double(),
    )


def direct_vtrace(ratios, values, rewards, discounts, valid, rho_bar, c_bar, lam):
    """Equation 1 of the IMPALA paper, term by term: vs[s] = V[s] + sum over t of (product of discounts and c) * delta[t]."""
    T, B = rewards.shape
    vs = values.clone()
    for b in range(B):
        for s in range(T):
            for t in range(s, T):
                weight = 1.0
                for i in range(s, t):
                    weight *= float(discounts[i, b]) * lam * min(c_bar, float(ratios[i, b])) * float(valid[i, b])
                rho = min(rho_bar, float(ratios[t, b])) * float(valid[t, b])
                delta = rho * (rewards[t, b] + discounts[t, b] * values[t + 1, b] - values[t, b])
                vs[s, b] += weight * delta
    advantages = torch.empty_like(rewards)
    for t in range(T):
        advantages[t] = rewards[t] + discounts[t] * (lam * vs[t + 1] + (1 - lam) * values[t + 1]) - values[t]
    return vs, advantages


@pytest.mark.parametrize("seed", range(8))
def test_vtrace_is_the_papers_sum(appo, seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng, T=int(rng.integers(1, 12)), B=int(rng.integers(1, 5)))
    settings = dict(rho_bar=float(rng.uniform(0.5, 2)), c_bar=float(rng.uniform(0.3, 1.5)), lam=float(rng.uniform(0.5, 1)))
    for got, expected in zip(appo.vtrace(**case, **settings), direct_vtrace(**case, **settings)):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_rho_and_c_are_clipped_apart(appo):
    rng = np.random.default_rng(0)
    case = random_case(rng, 6, 3)
    vs = [appo.vtrace(**case, rho_bar=rho, c_bar=c, lam=1.0)[0] for rho, c in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0))]
    assert not torch.allclose(vs[0], vs[1]) and not torch.allclose(vs[0], vs[2]) and not torch.allclose(vs[1], vs[2])


def test_on_policy_vtrace_is_the_n_step_return(appo):
    T, gamma = 9, 0.9
    rewards, values = torch.randn(T, 2, dtype=torch.float64), torch.randn(T + 1, 2, dtype=torch.float64)
    ones = torch.ones(T, 2, dtype=torch.float64)
    vs, advantages = appo.vtrace(ones, values, rewards, gamma * ones, ones, 1.0, 1.0, 1.0)
    expected = values[T]
    for t in reversed(range(T)):
        expected = rewards[t] + gamma * expected
        torch.testing.assert_close(vs[t], expected)
        torch.testing.assert_close(advantages[t], expected - values[t])


@pytest.mark.parametrize("lam", [0.0, 0.8, 0.95, 1.0])
def test_on_policy_advantage_is_gae(appo, lam):
    rng = np.random.default_rng(3)
    T, B = 20, 4
    case = random_case(rng, T, B) | dict(ratios=torch.ones(T, B, dtype=torch.float64), valid=torch.ones(T, B, dtype=torch.float64))
    _, advantages = appo.vtrace(**case, rho_bar=1.0, c_bar=1.0, lam=lam)
    gae = torch.zeros(B, dtype=torch.float64)
    for t in reversed(range(T)):
        delta = case["rewards"][t] + case["discounts"][t] * case["values"][t + 1] - case["values"][t]
        gae = delta + case["discounts"][t] * lam * gae
        torch.testing.assert_close(advantages[t], gae)


def test_episodes_do_not_leak_into_each_other(appo):
    """Changing everything after an episode's end changes nothing before it: termination, and truncation with its ignored step."""
    rng = np.random.default_rng(5)
    T = 12
    case = random_case(rng, T, 2)
    case["discounts"][:], case["valid"][:] = 0.97, 1
    case["discounts"][5, 0] = 0.0  # row 0: action 5 terminates; obs[6] is the last one, action 6 is ignored, obs[7] is first
    case["valid"][6, :] = 0  # row 1: the same with a time limit
    changed = {name: tensor.clone() for name, tensor in case.items()}
    changed["rewards"][6:] += 100.0
    changed["values"][7:] -= 50.0
    before, after = (appo.vtrace(**x, rho_bar=1.0, c_bar=1.0, lam=0.95) for x in (case, changed))
    torch.testing.assert_close(before[0][:6], after[0][:6])
    torch.testing.assert_close(before[1][:6], after[1][:6])
    assert before[0][6, 1] == case["values"][6, 1], "the true last observation is worth its own value"
    more = case | dict(values=case["values"].clone())
    more["values"][6, :] += 1.0  # the value of the last observation matters after a truncation, and only there
    difference = appo.vtrace(**more, rho_bar=1.0, c_bar=1.0, lam=0.95)[1][5] - before[1][5]
    torch.testing.assert_close(difference, torch.tensor([0.0, 0.97], dtype=torch.float64))


def make_spaces(appo, heads, vector=3):
    """An image and numbers beside it; for a network that sees vectors alone, and whose actions are two numbers, more numbers."""
    box = gym.spaces.Box
    if hasattr(appo, "LabEnv"):  # beside the image an instruction and the task
        return appo.Spaces(dict(appo.LabEnv(appo.Args(device="cpu"), 0).observation_space), heads)
    if hasattr(appo, "MujocoEnvs"):
        return appo.Spaces({name: box(-np.inf, np.inf, (size,)) for name, size in (("obs", 5), ("vector", vector))}, 2)
    return appo.Spaces(dict(obs=box(0, 255, (72, 128, 3), np.uint8), vector=box(-np.inf, np.inf, (vector,), np.float32)), heads)


def make_agent(appo, heads=(3, 4), **settings):
    own = dict(precision="float32") if hasattr(appo.Args, "max_policy_lag") else {}
    if hasattr(appo.Args, "replay_share"):
        own |= dict(replay_share=0.0)  # what is learned from is given back at once
    args = appo.Args(**dict(hidden_size=32, rnn_type="gru", num_epochs=1, device="cpu") | own | settings)
    torch.manual_seed(0)
    agent = appo.Agent(make_spaces(appo, heads), args)
    agent.spaces = make_spaces(appo, heads)
    return args, agent


def observations(spaces, *shape: int, generator=None) -> dict[str, torch.Tensor]:
    """Random ones, by name [*shape, ...]."""
    result = {}
    for name, space in spaces.obs.items():
        if space.dtype.kind == "f":
            result[name] = torch.randn(*shape, *space.shape, generator=generator)
        else:
            dtype = getattr(torch, space.dtype.name)
            result[name] = torch.randint(int(space.high.max()) + 1, (*shape, *space.shape), generator=generator, dtype=dtype)
    return result


def make_batch(appo, agent, T=6, B=4, seed=1) -> SimpleNamespace:
    """Random rollouts. `lags` of a sixth of the samples are 1000: too old, where that is asked."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(T + 1, B, generator=generator) < 0.25
    logits = torch.randn(T, B, sum(getattr(agent, "heads", ())), generator=generator)
    if hasattr(agent, "heads"):
        actions = torch.stack([torch.randint(n, (T, B), generator=generator) for n in agent.heads], -1)
    else:
        actions = torch.randn(T, B, 2, generator=generator)
    lags = torch.where(torch.rand(T, B, generator=generator) < 1 / 6, 1000, 0)
    return SimpleNamespace(
        obs=observations(agent.spaces, T + 1, B, generator=generator), first=first,
        rnn_state=torch.randn(1, B, agent.state_size, generator=generator), actions=actions,
        logprobs=torch.randn(T, B, generator=generator) - 2, values=torch.randn(T, B, generator=generator),
        rewards=torch.randn(T, B, generator=generator), terminated=torch.rand(T, B, generator=generator) < 0.1,
        versions=torch.zeros(T, B, dtype=torch.int64), lags=lags,
        logits=logits, times_replayed=torch.zeros(1, B, dtype=torch.int64), inactive=torch.rand(T + 1, B, generator=generator) < 0.1,
    )  # fmt: skip


def used_of(appo, batch) -> torch.Tensor:
    """What the losses average over."""
    active = ~batch.inactive[:-1] if hasattr(appo, "PolicyInference") else True
    return ~batch.first[1:] & (batch.lags < 100 if hasattr(appo.Args, "max_policy_lag") else True) & active


def loss_of(appo, args, agent, batch):
    """Loss and metrics."""
    loss, *_, metrics = appo.appo_loss(args, agent, batch)
    return loss, metrics


class Pipe:
    """The learner's end of its pipe: what it has given back."""

    def __init__(self):
        self.sent = []

    def send(self, blocks):
        self.sent.append(blocks)


def acting_with(appo, args, agent):
    """What acts with a copy of the network, or with the network."""
    if hasattr(appo, "PolicyInference"):
        args.num_policies = 1
        return appo.Inference(args, agent.spaces, [agent]).policies[0]
    return appo.Inference(args, agent.spaces, agent, torch.device("cpu"))


def learner_of(appo, args, agent, slots=12, T=6):
    """A learner alone, and rollouts in its memory: those of `make_batch`, all by the newest version. Blocks are of three slots."""
    if hasattr(args, "num_envs"):
        args.num_envs, args.num_workers = slots, slots // 3
    else:
        args.num_envs_per_worker, args.num_workers, args.worker_num_splits = 3, slots // 3, 1
    args.rollout = T
    inference = acting_with(appo, args, agent)
    inference.rollouts = appo.Rollouts(agent.spaces, T, slots, agent.state_size, torch.device("cpu"))
    inference.learner_pipe = Pipe()
    batch = make_batch(appo, agent, T, slots)
    for name, field in vars(inference.rollouts).items():
        for key, part in field.items() if name == "obs" else [(None, field)]:
            value = batch.obs[key] if name == "obs" else getattr(batch, name)
            part[:] = value if torch.is_tensor(part) else value.numpy()
    if hasattr(appo, "PolicyInference"):
        learner = appo.Learner(args, 0, agent, inference)
        learner.args, learner.inference = args, inference
    else:
        learner = appo.Learner(args, inference) if hasattr(args, "num_envs") else appo.Learner(args, agent, inference)
    inference.version = 1  # not the first batch, which in Doom only initialises the inputs' statistics
    inference.rollouts.versions[:] = 1
    return learner


def all_valid(rollouts) -> None:
    for name in {"first", "inactive"} & vars(rollouts).keys():
        getattr(rollouts, name)[:] = False


def blocks_of(slots: int) -> list[slice]:
    return [slice(i, i + 3) for i in range(0, slots, 3)]


@DISCRETE
def test_loss_against_numpy(appo):
    args, agent = make_agent(appo, ent_coef=0.1, vtrace_rho=1.4, vtrace_c=0.7, vtrace_lambda=0.8, clip_coef=0.3, vf_coef=0.7, gamma=0.9)
    batch = make_batch(appo, agent)
    batch.logprobs[0] -= 6  # beyond the band of the ratio
    batch.logprobs[1] += 6
    loss, metrics = loss_of(appo, args, agent, batch)
    with torch.no_grad():
        logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state[0])
    logprob = entropy = skl = 0
    for h, head in enumerate(logits[:-1].double().split(agent.heads, -1)):
        p = torch.softmax(head, -1)
        u = torch.full_like(p, 1 / p.shape[-1])
        logprob = logprob + p.log().gather(-1, batch.actions[..., h : h + 1]).squeeze(-1)
        entropy = entropy - (p * p.log()).sum(-1)
        skl = skl + 0.5 * ((p * (p / u).log()).sum(-1) + (u * (u / p).log()).sum(-1))
    ratio = (logprob - batch.logprobs).exp().clamp(0.05, 20)
    if hasattr(appo, "PolicyInference"):
        ratio[batch.inactive[:-1]] = 1  # what an agent chose that could not act
    vs, advantage = direct_vtrace(ratio, values.double(), batch.rewards.double(), args.gamma * (~batch.terminated).double(),
                                  ~batch.first[1:], 1.4, 0.7, 0.8)  # fmt: skip
    m = used_of(appo, batch).numpy()
    log_ratio = (logprob - batch.logprobs).numpy()[m]
    ratio, vs, advantage = ratio.numpy()[m], vs[:-1].numpy()[m], advantage.numpy()[m]
    advantage = (advantage - advantage.mean()) / advantage.std()
    policy = -np.minimum(ratio * advantage, np.clip(ratio, 1 / 1.3, 1.3) * advantage).mean()
    new, old = values[:-1].double().numpy()[m], batch.values.numpy()[m]
    # Where it is in units of the targets' deviation, that is a prior still: 1
    clipped = old + np.clip(new - old, -args.ppo_clip_value, args.ppo_clip_value)
    value = np.maximum((new - vs) ** 2, (clipped - vs) ** 2).mean()
    explore = (skl if hasattr(appo, "symmetric_kl") else -entropy).numpy()[m].mean()
    assert loss.item() == pytest.approx(policy + 0.7 * value + 0.1 * explore, rel=1e-4)
    assert metrics["losses/entropy"].item() == pytest.approx(entropy.numpy()[m].mean(), rel=1e-4)
    assert metrics["losses/explained_variance"].item() == pytest.approx(1 - ((vs - new) ** 2).mean() / vs.var(), rel=1e-4)
    assert metrics["losses/approx_kl"].item() == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-4)
    assert metrics["losses/clipfrac"].item() == pytest.approx(((ratio < 1 / 1.3) | (ratio > 1.3)).mean(), rel=1e-4)


def test_samples_that_take_no_part(appo):
    """What stands in invalid samples changes neither loss nor gradient; in Doom, nor what stands in those that are too old, where they
    are not part of a trace."""
    args, agent = make_agent(appo, vtrace_lambda=0.0)  # a trace goes through samples that are too old
    batch = make_batch(appo, agent)
    invalid = ~used_of(appo, batch)
    assert invalid.any() and (batch.lags > 0).any()
    changed = SimpleNamespace(**vars(batch) | dict(
        rewards=torch.where(invalid, 77.0, batch.rewards), logprobs=torch.where(invalid, -9.0, batch.logprobs),
        values=torch.where(invalid, 33.0, batch.values), terminated=batch.terminated ^ invalid,
        actions=torch.where(invalid.unsqueeze(-1), 0, batch.actions),
    ))  # fmt: skip
    gradients = []
    for b in (batch, changed):
        agent.zero_grad()
        loss, _ = loss_of(appo, args, agent, b)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in agent.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_few_usable_samples(appo):
    """One, or none: finite, and without any the gradient is 0."""
    args, agent = make_agent(appo)
    batch = make_batch(appo, agent)
    for usable in (1, 0):
        batch.first[1:] = True
        batch.first[3, :usable] = False
        batch.lags[:] = 0
        agent.zero_grad()
        loss, metrics = loss_of(appo, args, agent, batch)
        loss.backward()
        norm = sum(p.grad.square().sum() for p in agent.parameters())
        assert torch.isfinite(loss + norm) and bool(norm) == bool(usable) and all(torch.isfinite(x) for x in metrics.values())


def test_a_far_off_policy_sample_has_a_finite_gradient(appo):
    """exp(100) is infinite in float32; the ratio's clamp must stand before the exponential."""
    args, agent = make_agent(appo)
    batch = make_batch(appo, agent)
    batch.logprobs[0, 0] = -100.0
    loss, _ = loss_of(appo, args, agent, batch)
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(p.grad).all() for p in agent.parameters())


def at(obs: dict, index) -> dict:
    return {name: x[index] for name, x in obs.items()}


def cores_of(appo) -> list[str]:
    return ["gru", "none", *(["lstm"] if hasattr(appo.Args, "max_policy_lag") else [])]


def test_a_rollout_at_once_equals_single_steps(appo):
    """The learner's forward over T steps equals acting step by step, and a reset forgets all that was before it."""
    for rnn in cores_of(appo):
        _, agent = make_agent(appo, rnn_type=rnn)
        b = make_batch(appo, agent, T=10)
        b.rnn_state = b.rnn_state[0]
        with torch.no_grad():
            logits, values, last = agent(b.obs, b.first, b.rnn_state)
            state = b.rnn_state
            for t in range(11):
                one, value, state = agent(at(b.obs, slice(t, t + 1)), b.first[t : t + 1], state)
                torch.testing.assert_close(one[0], logits[t], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(value[0], values[t], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)
            again = agent(b.obs, b.first, b.rnn_state + 1.0)[0]
        for row in range(b.first.shape[1]):
            start = int(b.first[:, row].float().argmax()) if b.first[:, row].any() else 11
            torch.testing.assert_close(again[start:, row], logits[start:, row])
            if rnn != "none" and start > 0:
                assert not torch.allclose(again[:start, row], logits[:start, row])


def test_a_reset_forgets_a_state_that_is_not_finite(appo):
    """Zeroed, not multiplied by zero: a row that once went wrong is well again in its next episode."""
    for rnn in set(cores_of(appo)) - {"none"}:
        _, agent = make_agent(appo, rnn_type=rnn)
        b = make_batch(appo, agent, T=3, B=2)
        first = torch.tensor([[True, False], [False, False], [False, True], [False, False]])
        logits, values, state = agent(b.obs, first, torch.full_like(b.rnn_state[0], torch.nan))
        expected = torch.tensor([[True, False], [True, False], [True, True], [True, True]])
        assert torch.equal(values.isfinite(), expected) and torch.equal(logits.isfinite().all(-1), expected) and state.isfinite().all()


def test_an_epoch_deals_out_every_rollout_once(appo):
    """Four epochs of three batches, each of slots of its own, whose content it has. They are given back once, after the last step."""
    args, agent = make_agent(appo, num_epochs=4)
    learner, batches, gather = learner_of(appo, args, agent), [], appo.Learner.gather
    args.batch_size = 4 * 6
    learner.gather = lambda slots: batches.append((slots, gather(learner, slots))) or batches[-1][1]
    learner.update = lambda batch, last_epoch: given.append((last_epoch, len(learner.inference.learner_pipe.sent))) or {"x": torch.tensor(1.0)}
    given, blocks = [], blocks_of(12)[::-1]
    metrics = learner.iterate(blocks)
    orders = [np.concatenate([slots for slots, _ in batches[i : i + 3]]).tolist() for i in range(0, 12, 3)]
    assert len(batches) == 12 and {len(slots) for slots, _ in batches} == {4}
    assert [sorted(order) for order in orders] == [list(range(12))] * 4 and len(set(map(tuple, orders))) == 4
    assert given == [(i >= 9, 0) for i in range(12)]
    rollouts = learner.inference.rollouts
    active = ~rollouts.inactive[:-1] if hasattr(appo, "PolicyInference") else True
    if not hasattr(appo, "PolicyInference"):  # where several share the blocks, it is not the learner that gives them back
        assert learner.inference.learner_pipe.sent == [blocks]
    assert metrics["x"] == 1 and learner.global_step == (~rollouts.first[1:] & active).sum()
    for slots, batch in batches:
        for name, field in vars(learner.inference.rollouts).items():
            for key, part in field.items() if name == "obs" else [(None, field)]:
                copied = batch.obs[key] if name == "obs" else getattr(batch, name)
                assert torch.equal(copied, torch.as_tensor(part)[:, slots]), name


def test_a_batch_is_about_as_large_as_asked(appo):
    args, agent = make_agent(appo)
    for size, expected in ((1, 12), (12, 6), (24, 3), (40, 2), (1000, 1)):
        learner, batches = learner_of(appo, args, agent), []
        args.batch_size = size
        learner.update = lambda batch, last_epoch: batches.append(batch) or dict(loss=torch.zeros(()))
        learner.iterate(blocks_of(12))
        assert len(batches) == expected


@WITH_VECTOR
def test_every_step_is_a_version(appo):
    args, agent = make_agent(appo, num_epochs=2)
    learner = learner_of(appo, args, agent)
    args.batch_size = 24
    before = copy.deepcopy(agent.state_dict())
    metrics = learner.iterate(blocks_of(12))
    assert learner.inference.version == 1 + 6 and metrics["lag/mean"] == metrics["lag/max"] == 0 and metrics["losses/grad_norm"] > 0
    assert all(np.isfinite(float(value)) for value in metrics.values())
    changed = {name for name, x in agent.state_dict().items() if not torch.equal(x, before[name])}
    assert changed >= {name for name, _ in agent.named_parameters()} and "normalizers.vector.mean" in changed
    steps = (~learner.inference.rollouts.first[1:]).sum()
    assert 0 < agent.normalizers["vector"].count < 0.5 * steps, "a quarter, or a third where T is 6, in the last epoch alone"


def test_the_learning_rate_falls_to_0(appo):
    args, agent = make_agent(appo, learning_rate=0.5, anneal_lr=True, total_timesteps=120)
    learner, rates = learner_of(appo, args, agent, slots=6, T=5), []
    all_valid(learner.inference.rollouts)
    for _ in range(4):
        rates.append((learner.global_step, learner.iterate(blocks_of(6))["charts/learning_rate"]))
    assert rates == [(0, 0.5), (30, 0.375), (60, 0.25), (90, 0.125)]
    args.anneal_lr = False
    assert learner.iterate(blocks_of(6))["charts/learning_rate"] == 0.5


def test_normalizer_merges_to_the_statistics_of_all_samples(appo):
    rng = np.random.default_rng(0)
    norm = appo.Normalizer((5,), 255.0)
    chunks = [rng.integers(0, 256, (n, 5)).astype(np.uint8) for n in (7, 1, 30)]
    valid = [np.ones(7, bool), np.ones(1, bool), rng.random(30) < 0.5]
    for chunk, mask in zip(chunks, valid):
        norm.update(torch.from_numpy(chunk), torch.from_numpy(mask))
    norm.update(torch.from_numpy(chunks[0]), torch.zeros(7, dtype=torch.bool))  # nothing valid: nothing changes
    data = np.concatenate([chunk[mask] for chunk, mask in zip(chunks, valid)]) / 255
    np.testing.assert_allclose(norm.mean, data.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.var, data.var(0), rtol=1e-4)
    expected = np.clip((chunks[2] / 255 - data.mean(0)) / np.sqrt(data.var(0) + 1e-5), -5, 5)
    np.testing.assert_allclose(norm(torch.from_numpy(chunks[2])), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("numbers", [[float("nan")], [float("inf")], [1e30], [1e19, -1e19]])
def test_an_observation_that_is_not_finite_changes_no_statistics(appo, numbers):
    """Nor one whose square is not; nor squares, of several, whose sum is not. Infinities are clipped, so no loss would show them."""
    norm = appo.Normalizer((2,), 1.0)
    x, valid = torch.randn(20, 2), torch.ones(20, dtype=torch.bool)
    norm.update(x, valid)
    before = copy.deepcopy(norm.state_dict())
    x[4:, 1] = torch.tensor(numbers * 16)[:16]
    with pytest.raises(FloatingPointError, match="an observation.* is not finite, or its square is not"):
        norm.update(x, valid)
    assert all(torch.equal(one, two) for one, two in zip(before.values(), norm.state_dict().values()))
    valid[4:] = False
    norm.update(x, valid)  # what is not valid does not matter
    assert norm.count == 24 and norm(x[:4]).isfinite().all()


@WITH_VECTOR
def test_what_is_not_finite_ends_learning(appo):
    """A NaN anywhere, or an infinity where statistics see it; weights and statistics are still good, and the version is the last good one."""
    always = (slice(None), 2)  # statistics see every fourth step
    for name, where, number in (("vector", (1, 2), np.nan), ("vector", always, np.inf), ("vector", always, 1e30), ("rewards", (1, 2), np.nan)):
        args, agent = make_agent(appo)
        learner = learner_of(appo, args, agent)
        rollouts = learner.inference.rollouts
        all_valid(rollouts)
        learner.iterate(blocks_of(12))
        before = copy.deepcopy(agent.state_dict())
        (rollouts.obs["vector"] if name == "vector" else rollouts.rewards)[where] = number
        with pytest.raises(FloatingPointError, match="not finite"):
            learner.iterate(blocks_of(12))
        kept = {key: x for key, x in agent.state_dict().items() if not key.startswith("normalizers.obs")}  # which may have been first
        assert all(torch.equal(x, before[key]) for key, x in kept.items()) and learner.inference.version == 2


@WITH_VECTOR
@pytest.mark.parametrize("phase", range(4))
def test_statistics_are_of_valid_samples(appo, phase, monkeypatch):
    """Of every fourth step of every rollout, from one on that is drawn: an environment with a period of four steps shows all of them."""
    args, agent = make_agent(appo, learning_rate=0.0)
    learner = learner_of(appo, args, agent, T=32, slots=6)
    rollouts, time = learner.inference.rollouts, torch.arange(33.0)
    rollouts.obs["vector"][:] = (100 * torch.arange(6.0)[:, None] + time[:, None, None]).expand(33, 6, 3)
    all_valid(rollouts)
    rollouts.first[1:9, 2] = True
    monkeypatch.setattr(torch, "randint", lambda high, size: torch.tensor(range(high)[phase]))
    learner.iterate(blocks_of(6))
    seen = [100 * slot + t for slot in range(6) for t in range(phase, 32, 4) if not (slot == 2 and t < 8)]
    norm = agent.normalizers["vector"]
    assert norm.count == len(seen) and norm.mean[0].item() == pytest.approx(np.mean(seen)) and norm.var[0].item() == pytest.approx(np.var(seen))


@DISCRETE
def test_drawing_follows_the_policy(appo):
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.0]]).repeat(40_000, 1)
    choices = appo.log_distributions(logits, (3, 2))
    for choice, actions in zip(choices, appo.sample_actions(choices).unbind(-1)):
        torch.testing.assert_close(torch.bincount(actions) / len(logits), choice[0].exp(), atol=0.01, rtol=0)


@DISCRETE
def test_actions_that_are_masked_out(appo):
    """A logit of -inf: never drawn, and entropy, divergence and gradients are those of the other actions alone."""
    full, heads = torch.randn(50, 7, requires_grad=True), (4, 3)
    masked = torch.where(torch.tensor([True, False, True, True, False, True, True]), full, -torch.inf)
    kept = full.detach()[:, [0, 2, 3, 5, 6]].requires_grad_()
    choices, others = appo.log_distributions(masked, heads), appo.log_distributions(kept, (3, 2))
    actions = appo.sample_actions(choices)
    assert not any((appo.sample_actions(choices) == torch.tensor([1, 0])).any() for _ in range(100))
    renamed = torch.stack([actions[:, 0].clamp(min=1) - 1, actions[:, 1] - 1], -1)
    torchs = [Categorical(logits=part) for part in kept.split((3, 2), -1)]
    torch.testing.assert_close(appo.log_prob(others, renamed), sum(map(Categorical.log_prob, torchs, renamed.unbind(-1))))
    torch.testing.assert_close(sum(map(appo.entropy_of, others)), sum(choice.entropy() for choice in torchs))
    sums = []
    for found, chosen in ((choices, actions), (others, renamed)):
        values = [appo.log_prob(found, chosen), *map(appo.entropy_of, found)]
        if hasattr(appo, "symmetric_kl"):
            values += map(appo.symmetric_kl, found)
        sums.append(values)
    for one, two in zip(*sums):
        torch.testing.assert_close(one, two)
    for values in sums:
        sum(map(torch.sum, values)).backward()
    torch.testing.assert_close(full.grad[:, [0, 2, 3, 5, 6]], kept.grad)
    assert not full.grad[:, [1, 4]].any()


def precisions_of(appo) -> list:
    return [("float32", 1e-4), *([("bfloat16", 0.02)] if hasattr(appo.Args, "precision") else [])]


@DISCRETE
def test_log_ratio_at_lag_zero(appo):
    """Acting network and learning network of one version: their numerical difference must not look like off-policy data. With a policy
    far from a uniform one, as after training."""
    for rnn_type in cores_of(appo):
        for precision, bound in precisions_of(appo):
            slow = rnn_type == "lstm" or getattr(appo.Args, "encoder", "") == "impala"  # there is no such LSTM; a ResNet takes half a minute
            if precision == "bfloat16" and slow and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                continue  # the default of such a CPU is float32
            own = dict(precision=precision) if hasattr(appo.Args, "precision") else {}
            args, agent = make_agent(appo, (3, 3, 2, 2, 11), rnn_type=rnn_type, **own)
            T, B = 8, 16
            obs, first, state, acted = observations(agent.spaces, T, B), torch.rand(T, B) < 0.1, torch.zeros(B, agent.state_size), []
            for name, normalizer in agent.normalizers.items():
                normalizer.update(obs[name], torch.ones(T, B, dtype=torch.bool))
            with torch.no_grad():
                agent.policy.weight.mul_(2 / agent(obs, first, state)[0].std((0, 1)).mean())
            args.num_workers = 1
            policy = acting_with(appo, args, agent).agent
            held = {name.split(".")[0] for name, x in policy.named_parameters() if x.dtype == torch.bfloat16}
            assert held == (({"images", "core"} if rnn_type != "none" else {"images"}) if precision == "bfloat16" else set())
            with torch.no_grad():
                for t in range(T):
                    step, new = [], []
                    for half in (slice(0, 5), slice(5, B)):  # acting happens in other batch sizes than learning
                        logits, _, after = policy(at(obs, (slice(t, t + 1), half)), first[t : t + 1, half], state[half])
                        step.append(logits[0])
                        new.append(after)
                    state = torch.cat(new)
                    acted.append(torch.cat(step))
                mu = appo.log_distributions(torch.stack(acted), agent.heads)
                pi = appo.log_distributions(agent(obs, first, torch.zeros(B, agent.state_size))[0], agent.heads)
            actions = appo.sample_actions(mu)
            assert sum(map(appo.entropy_of, mu)).mean() < 0.8 * np.log([3, 3, 2, 2, 11]).sum()
            log_ratio = appo.log_prob(pi, actions) - appo.log_prob(mu, actions)
            assert log_ratio.std() < bound, (rnn_type, precision)


def test_every_buffer_reaches_the_acting_copy():
    """Of Doom: one that is not saved, too. What acts is the learner's own memory in the base, never in Doom."""
    for name in VARIANTS:
        appo = importlib.import_module(name)
        args, agent = make_agent(appo)
        agent.register_buffer("own", torch.zeros(3), persistent=False)
        args.num_workers = 1
        inference = acting_with(appo, args, agent)
        if not hasattr(inference, "publish"):
            assert inference.agent is agent
            continue
        learned, acting = ([*one.parameters(), *one.buffers()] for one in (agent, inference.agent))
        for version in range(1, 4):
            before = [x.clone() for x in acting]
            with torch.no_grad():
                for x in learned:
                    x.add_(1)
            assert all(torch.equal(one, two) for one, two in zip(before, acting))
            inference.publish(version)
            assert inference.version == version and inference.agent.own.tolist() == [version] * 3
            assert all(torch.equal(one, two) for one, two in zip(acting, learned, strict=True))


@pytest.mark.parametrize("name", ["appo_gym", "appo_mujoco"])
def test_popart_keeps_every_value(name):
    """When the targets' mean and deviation move, the layer is rescaled; the deviation is that of the targets, in the end."""
    appo = importlib.import_module(name)
    torch.manual_seed(0)
    critic, x = appo.PopArt(torch.nn.Linear(8, 1)), torch.randn(50, 8)
    before = critic(x)
    valid = torch.ones(32, 64, dtype=torch.bool)
    for _ in range(200):
        critic.update(300 + 40 * torch.randn(32, 64), valid)
        torch.testing.assert_close(critic(x), before, rtol=1e-3, atol=1e-3)
    assert critic.mean.item() == pytest.approx(300, rel=0.02) and critic.std.item() == pytest.approx(40, rel=0.05)
