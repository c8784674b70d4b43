"""As test_algorithm.py, for the files that have the first core still."""

import copy
import importlib
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_algorithm import direct_vtrace

VARIANTS = sorted(path.stem for path in Path(__file__).parent.parent.glob("appo_*.py") if "\ndef resolve(" in path.read_text())


@pytest.fixture(params=VARIANTS)
def appo(request):
    return importlib.import_module(request.param)


def make_spaces(appo, heads, args, vector=3):
    """An image and numbers beside it: measurements, or in DeepMind Lab the task and an instruction."""
    if hasattr(appo, "LabEnv"):
        return appo.Spaces(appo.by_name(appo.LabEnv(args, 0).observation_space), heads)
    box = gym.spaces.Box
    return appo.Spaces(dict(obs=box(0, 255, (72, 128, 3), np.uint8), vector=box(-np.inf, np.inf, (vector,), np.float32)), heads)


def make_agent(appo, heads=(3, 4), **settings):
    own = dict(num_epochs=1, num_batches_per_epoch=1, precision="float32")
    args = appo.Args(hidden_size=32, **own | settings)
    torch.manual_seed(0)
    agent = appo.Agent(make_spaces(appo, heads, args), args)
    agent.spaces = make_spaces(appo, heads, args)
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


def make_batch(appo, agent, T=6, B=4, mask=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(T + 1, B, generator=generator) < 0.25
    mask = ~first[1:] if mask is None else mask
    if hasattr(agent, "heads"):
        actions = torch.stack([torch.randint(n, (T, B), generator=generator) for n in agent.heads], -1)
    else:
        actions = torch.randn(T, B, *agent.spaces.action.shape, generator=generator)
    more = {name: torch.zeros(T, B, dtype=torch.bool) for name in ("inactive", "replayed") if name in appo.Batch._fields}
    if "logits" in appo.Batch._fields:
        more["logits"] = torch.randn(T, B, sum(agent.heads), generator=generator)
    if "gaussians" in appo.Batch._fields:
        more["gaussians"] = torch.randn(T, B, 2 * actions.shape[-1], generator=generator)
    return appo.Batch(
        obs=observations(agent.spaces, T + 1, B, generator=generator), first=first,
        rnn_state=torch.randn(B, agent.state_size, generator=generator),
        actions=actions, logprobs=torch.randn(T, B, generator=generator) - 2, values=torch.randn(T, B, generator=generator),
        rewards=torch.randn(T, B, generator=generator), terminated=torch.rand(T, B, generator=generator) < 0.1, mask=mask,
        restarts=[0] + [t for t in range(1, T + 1) if first[t].any()], **more,
    )  # fmt: skip


def learner_of(appo, args, agent, slots=12, T=6):
    """A learner alone, and rollouts in its memory: those of `make_batch`, all by the newest version."""
    rollouts, batch = appo.Rollouts(agent.spaces, T, slots, agent.state_size, torch.device("cpu")), make_batch(appo, agent, T, slots)
    for name, x in batch._asdict().items():
        for field, value in [(rollouts.obs[key], x[key]) for key in x] if name == "obs" else [(getattr(rollouts, name, None), x)]:
            if field is not None:
                field[:] = value if torch.is_tensor(field) else value.numpy()
    inference = SimpleNamespace(
        acting=SimpleNamespace(publish=lambda version: None), release=lambda slots: None, counts=Counter(), rollouts=rollouts
    )
    args.num_workers, args.worker_num_splits, args.batch_size = 1, 1, 256
    learner = appo.Learner(args, agent, inference, torch.device("cpu"))
    if hasattr(learner, "kept"):  # no old rollouts
        learner.kept = np.arange(0)
    return learner


@pytest.mark.parametrize("exploration", ["entropy", "symmetric_kl"])
def test_loss_against_numpy(appo, exploration):
    if hasattr(appo.Args, "exploration_loss"):
        own = dict(exploration_loss=exploration)
    elif exploration == "entropy":  # the only one that appo_gym.py has
        own = {}
    else:
        pytest.skip("it has no flag to choose one")
    args, agent = make_agent(appo, **own, ent_coef=0.1, vtrace_rho=1.4, vtrace_c=0.7, vtrace_lambda=0.8, clip_coef=0.3,
                             vf_coef=0.7, gamma=0.9)  # fmt: skip
    batch = make_batch(appo, agent)
    batch.logprobs[0] -= 6  # beyond the band of the ratio
    batch.logprobs[1] += 6
    generator = torch.Generator().manual_seed(2)
    batch = batch._replace(mask=batch.mask & (torch.rand(batch.mask.shape, generator=generator) < 0.7))  # the others are too old
    loss, *_, metrics = appo.appo_loss(args, agent, batch)
    with torch.no_grad():
        logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state, batch.restarts)
    logprob = entropy = skl = 0
    for h, head in enumerate(logits[:-1].double().split(agent.heads, -1)):
        p = torch.softmax(head, -1)
        u = torch.full_like(p, 1 / p.shape[-1])
        logprob = logprob + p.log().gather(-1, batch.actions[..., h : h + 1]).squeeze(-1)
        entropy = entropy - (p * p.log()).sum(-1)
        skl = skl + 0.5 * ((p * (p / u).log()).sum(-1) + (u * (u / p).log()).sum(-1))
    ratio = (logprob - batch.logprobs).exp().clamp(0.05, 20)
    vs, advantage = direct_vtrace(ratio, values.double(), batch.rewards.double(), args.gamma * (~batch.terminated).double(),
                                  ~batch.first[1:], 1.4, 0.7, 0.8)  # fmt: skip
    m = batch.mask.numpy()
    ratio, vs, advantage = ratio.numpy()[m], vs[:-1].numpy()[m], advantage.numpy()[m]
    advantage = (advantage - advantage.mean()) / advantage.std()
    policy = -np.minimum(ratio * advantage, np.clip(ratio, 1 / 1.3, 1.3) * advantage).mean()
    new, old = values[:-1].double().numpy()[m], batch.values.numpy()[m]
    value = np.maximum((new - vs) ** 2, (old + np.clip(new - old, -args.ppo_clip_value, args.ppo_clip_value) - vs) ** 2).mean()
    explore = -entropy.numpy()[m].mean() if exploration == "entropy" else skl.numpy()[m].mean()
    assert loss.item() == pytest.approx(policy + 0.7 * value + 0.1 * explore, rel=1e-4)
    explained = metrics["losses/explained_variance"].item()
    assert explained == pytest.approx(1 - ((vs - new) ** 2).mean() / vs.var(), rel=1e-4)


def test_one_usable_sample(appo):
    args, agent = make_agent(appo)
    batch = make_batch(appo, agent)
    alone = torch.zeros_like(batch.mask)
    alone.view(-1)[batch.mask.flatten().nonzero()[0]] = True
    assert torch.isfinite(appo.appo_loss(args, agent, batch._replace(mask=alone))[0])


def test_masked_samples_take_no_part(appo):
    """What stands in samples outside the mask and behind the end of an episode changes neither loss nor gradient."""
    args, agent = make_agent(appo)
    batch = make_batch(appo, agent)
    invalid = ~batch.mask
    assert invalid.any()
    changed = batch._replace(
        rewards=torch.where(invalid, 77.0, batch.rewards), logprobs=torch.where(invalid, -9.0, batch.logprobs),
        values=torch.where(invalid, 33.0, batch.values), terminated=batch.terminated ^ invalid,
        actions=torch.where(invalid.unsqueeze(-1), 0, batch.actions),
    )  # fmt: skip
    gradients = []
    for b in (batch, changed):
        agent.zero_grad()
        loss, *_ = appo.appo_loss(args, agent, b)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in agent.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1])


def at(obs: dict, index) -> dict:
    return {name: x[index] for name, x in obs.items()}


@pytest.mark.parametrize("rnn", ["gru", "lstm", "none"])
def test_stretches_between_restarts_equal_single_steps(appo, rnn):
    """The learner's forward over T steps equals acting step by step, and a restart forgets all that was before it."""
    _, agent = make_agent(appo, rnn_type=rnn)
    b = make_batch(appo, agent, T=10)
    with torch.no_grad():
        logits, values, last = agent(b.obs, b.first, b.rnn_state, b.restarts)
        for one, two in zip((logits, values, last), agent(b.obs, b.first, b.rnn_state)):
            assert torch.equal(one, two), "who does not name the restarts gets the same"
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


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_a_reset_forgets_a_state_that_is_not_finite(appo, rnn):
    """Zeroed, not multiplied by zero: a row that once went wrong is well again in its next episode."""
    _, agent = make_agent(appo, rnn_type=rnn)
    b = make_batch(appo, agent, T=3, B=2)
    first = torch.tensor([[True, False], [False, False], [False, True], [False, False]])
    logits, values, state = agent(b.obs, first, torch.full_like(b.rnn_state, torch.nan), [0, 2])
    expected = torch.tensor([[True, False], [True, False], [True, True], [True, True]])
    assert torch.equal(values.isfinite(), expected) and torch.equal(logits.isfinite().all(-1), expected) and state.isfinite().all()


def test_an_epoch_deals_out_every_rollout_once(appo):
    """Four epochs of three batches, each from slots of its own, whose content it has; their age is that of when they were taken. A single
    batch is dealt, too."""
    for parts in (3, 1):
        args, agent = make_agent(appo, num_batches_per_epoch=parts, num_epochs=4, max_policy_lag=2)
        learner, batches, gather, slots = learner_of(appo, args, agent), [], appo.Learner.gather, np.random.default_rng(0).permutation(12)
        learner.gather = lambda slots, version: (slots, gather(learner, slots, version))
        learner.update = lambda batch, *last_epoch: batches.append(batch) or {}
        learner.version, r = 1, learner.inference.rollouts
        learner.iterate(slots)
        orders = [np.concatenate([slots for slots, _ in batches[i : i + parts]]).tolist() for i in range(0, 4 * parts, parts)]
        assert len(batches) == 4 * parts and {len(slots) for slots, _ in batches} == {12 // parts}
        assert [sorted(order) for order in orders] == [list(range(12))] * 4 and len(set(map(tuple, orders))) == 4
        assert learner.version == 1 + 4 * parts
    for columns, batch in batches:
        for name, x in batch._asdict().items():
            for key, part in x.items() if name == "obs" else [(None, x)] if hasattr(r, name) else []:
                field = torch.as_tensor(r.obs[key] if name == "obs" else getattr(r, name))
                assert torch.equal(part, field[columns] if name == "rnn_state" else field[:, columns]), name
        assert torch.equal(batch.mask, ~batch.first[1:])
        assert batch.restarts == [0] + [t for t in range(1, 7) if batch.first[t].any()]


def test_a_step_without_usable_samples_is_none(appo):
    """Of six steps one has usable samples, in a slot: the weights are those of that step alone."""
    results = []
    for parts in (6, 1):
        args, agent = make_agent(appo, num_batches_per_epoch=parts, max_grad_norm=0.0)
        learner = learner_of(appo, args, agent, slots=6)
        learner.version = 1000
        learner.inference.rollouts.versions[:] = 1000 - 999 * (np.arange(6) != 2)
        learner.optimizer = torch.optim.SGD(agent.parameters(), 0.05)
        metrics = learner.iterate(np.arange(6))
        assert all(np.isfinite(value) for value in metrics.values()) and "losses/grad_norm" in metrics
        assert (learner.version, learner.skipped) == (1000 + parts, parts - 1)
        results.append(dict(agent.named_parameters()))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_falls_to_0(appo):
    args, agent = make_agent(appo, learning_rate=0.5, anneal_lr=True, total_timesteps=100)
    learner, rates = learner_of(appo, args, agent, slots=5, T=5), []
    learner.inference.rollouts.first[:] = False
    for _ in range(5):
        learner.inference.rollouts.versions[:] = learner.version
        rates.append((learner.global_step, learner.iterate(np.arange(5)).get("charts/learning_rate", 0.5)))
    assert rates == [(0, 0.5), (25, 0.375), (50, 0.25), (75, 0.125), (100, 0.0)]
    args.anneal_lr = False
    assert learner.learning_rate() == 0.5


def test_estimates_of_the_kl_divergence(appo):
    """The plain one and the better one, by CleanRL's names."""
    args, agent = make_agent(appo)
    batch = make_batch(appo, agent)
    *_, metrics = appo.appo_loss(args, agent, batch)
    with torch.no_grad():
        logits, *_ = agent(batch.obs, batch.first, batch.rnn_state, batch.restarts)
    heads = [agent.heads] if hasattr(agent, "heads") else []
    log_ratio = (appo.evaluate_actions(logits[:-1], batch.actions, *heads)[0] - batch.logprobs)[batch.mask]
    assert metrics["losses/old_approx_kl"].item() == pytest.approx(-log_ratio.mean().item(), rel=1e-4)
    assert metrics["losses/approx_kl"].item() == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-4)


def test_normalizer_merges_to_the_statistics_of_all_samples(appo):
    rng = np.random.default_rng(0)
    unit = 255.0
    norm = appo.Normalizer((5,), unit)
    chunks = [rng.integers(0, 256, (n, 5)).astype(np.uint8) for n in (7, 1, 30)]
    valid = [np.ones(7, bool), np.ones(1, bool), rng.random(30) < 0.5]
    x = torch.from_numpy(chunks[0])
    torch.testing.assert_close(norm(x), (x / unit).clamp(-5, 5), msg="before its first samples it only scales")
    for chunk, mask in zip(chunks, valid):
        norm.update(torch.from_numpy(chunk), torch.from_numpy(mask))
    norm.update(torch.from_numpy(chunks[0]), torch.zeros(7, dtype=torch.bool))  # nothing valid: nothing changes
    data = np.concatenate([chunk[mask] for chunk, mask in zip(chunks, valid)]) / unit
    np.testing.assert_allclose(norm.mean, data.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.var, data.var(0), rtol=1e-4)
    expected = np.clip((chunks[2] / unit - data.mean(0)) / np.sqrt(data.var(0) + 1e-5), -5, 5)
    np.testing.assert_allclose(norm(torch.from_numpy(chunks[2])), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("numbers", [[float("nan")], [float("inf")], [1e30], [1e19, -1e19]])
def test_an_observation_that_is_not_finite_changes_no_statistics(appo, numbers):
    """Nor one whose square is not; nor squares, of several, whose sum is not. Infinities are clipped, so no loss would show them."""
    norm = appo.Normalizer((2,), 1.0)
    x, valid = torch.randn(20, 2), torch.ones(20, dtype=torch.bool)
    norm.update(x, valid)
    before = copy.deepcopy(norm.state_dict())
    x[4:, 1] = torch.tensor(numbers * 16)[:16]
    with pytest.raises(FloatingPointError, match="an observation is not finite, or its square is not"):
        norm.update(x, valid)
    assert all(torch.equal(one, two) for one, two in zip(before.values(), norm.state_dict().values()))
    valid[4:] = False
    norm.update(x, valid)  # what is not valid does not matter
    assert norm.count == 24 and norm(x[:4]).isfinite().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
def test_an_observation_that_is_not_finite_ends_learning(appo, number):
    """Weights and statistics are still good."""
    if hasattr(appo, "LabEnv"):
        pytest.skip("it has no floats in its observations")
    args, agent = make_agent(appo)
    learner = learner_of(appo, args, agent)
    learner.iterate(np.arange(12))
    r, before = learner.inference.rollouts, copy.deepcopy(agent.normalizers["vector"].state_dict())
    assert before["count"] > 0
    r.versions[:] = learner.version
    r.obs["vector"][:, 1, 2] = number
    r.first[:, 1] = False
    with pytest.raises(FloatingPointError):
        learner.iterate(np.arange(12))
    assert all(torch.equal(one, two) for one, two in zip(before.values(), agent.normalizers["vector"].state_dict().values()))
    assert all(x.isfinite().all() for x in agent.state_dict().values()) and learner.version == 1


def test_statistics_are_of_valid_samples_and_of_every_phase(appo):
    """Of a quarter of the steps, drawn at random: an environment with a period of four steps shows all of them."""
    args, agent = make_agent(appo)
    learner = learner_of(appo, args, agent, T=32, slots=6)
    name, norm = next(iter(agent.normalizers.items()))
    r, phase = learner.inference.rollouts, torch.arange(33) % 4
    r.obs[name][:] = torch.where(phase == 3, 200, phase)[(..., *[None] * (r.obs[name].dim() - 1))]
    r.first[:] = (phase == 0).numpy()[:, None]  # so the steps of phase 3 are ignored ones
    for _ in range(40):
        learner.update_statistics(np.arange(6), ~r.first[1:])
    unit = norm.unit
    assert 0.6 * 40 * 8 * 6 < norm.count < 0.9 * 40 * 8 * 6
    assert norm.mean.mean() * unit == pytest.approx(1, abs=0.15) and norm.var.mean() * unit**2 == pytest.approx(2 / 3, abs=0.15)


def test_a_far_off_policy_sample_has_a_finite_gradient(appo):
    """exp(100) is infinite in float32; the ratio's clamp must stand before the exponential."""
    args, agent = make_agent(appo)
    batch = make_batch(appo, agent)
    batch.logprobs[0, 0] = -100.0
    loss, *_ = appo.appo_loss(args, agent, batch)
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(p.grad).all() for p in agent.parameters())


def test_every_buffer_reaches_the_acting_copies(appo):
    """One that is not saved, too. What acts is never half an update, nor the learner's own memory."""
    _, agent = make_agent(appo)
    agent.register_buffer("own", torch.zeros(3), persistent=False)
    acting = appo.ActingPolicy(agent, torch.device("cpu"))
    learned = [*agent.parameters(), *agent.buffers()]
    for version in range(1, 4):
        before = [x.clone() for x in acting.current.tensors]
        with torch.no_grad():
            for x in learned:
                x.add_(1)
        assert all(torch.equal(one, two) for one, two in zip(before, acting.current.tensors))
        acting.publish(version)
        with acting.use(acting.current) as policy:
            assert policy.version == version and policy.agent.own.tolist() == [version] * 3
            assert all(
                torch.equal(one, two) for one, two in zip([*policy.agent.parameters(), *policy.agent.buffers()], learned, strict=True)
            )


def test_every_thread_has_its_own_number_of_cpu_threads(appo):
    before, found, device = torch.get_num_threads(), [], torch.device("cpu")
    chosen, changed = threading.Event(), threading.Event()

    def inference():
        with appo.own_stream(device, 1):
            chosen.set()
            changed.wait()
            torch.zeros(100_000).add_(1)
            found.append(torch.get_num_threads())

    try:
        thread = threading.Thread(target=inference)
        thread.start()
        chosen.wait()
        appo.own_stream(device, 2)  # the learner's, afterwards
        changed.set()
        thread.join()
        assert found == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_sampling_follows_the_policy(appo):
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.0]]).repeat(40_000, 1)
    actions, logprob = appo.sample_actions(logits, (3, 2))
    for h, head in enumerate(logits[0].split((3, 2))):
        frequency = torch.bincount(actions[:, h], minlength=len(head)) / len(actions)
        torch.testing.assert_close(frequency, head.softmax(-1), atol=0.01, rtol=0)
    torch.testing.assert_close(logprob, appo.evaluate_actions(logits, actions, (3, 2))[0])
    best, _ = appo.sample_actions(logits[:1], (3, 2), deterministic=True)
    assert best.tolist() == [[0, 0]]


@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
@pytest.mark.parametrize("precision, bound", [("float32", 1e-4), ("bfloat16", 0.02)])
def test_log_ratio_at_lag_zero(appo, precision, bound, rnn_type):
    """Acting network and learning network of one version: their numerical difference must not look like off-policy data. With a policy
    far from a uniform one, as after training."""
    if precision == "bfloat16" and rnn_type == "lstm" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch has no LSTM in bfloat16 for such a CPU, for which the default is float32")
    args, agent = make_agent(appo, (3, 3, 2, 2, 11), precision=precision, rnn_type=rnn_type)
    assert len(agent.reduced) == (2 if precision == "bfloat16" else 0), "the images' encoders and the core"
    T, B = 16, 16
    obs, first, state, acted = observations(agent.spaces, T, B), torch.rand(T, B) < 0.1, torch.zeros(B, agent.state_size), []
    agent.update_normalizers({name: x.flatten(0, 1) for name, x in obs.items()}, torch.ones(T * B, dtype=torch.bool))
    with torch.no_grad():
        agent.actor.weight.mul_(2 / agent(obs, first, state)[0].std((0, 1)).mean())
    policy = appo.ActingPolicy(agent, torch.device("cpu")).current.agent
    held = {name.split(".")[0] for name, x in policy.named_parameters() if x.dtype == torch.bfloat16}
    assert held == ({"images", "core"} if precision == "bfloat16" else set())
    with torch.no_grad():
        for t in range(T):
            step, new = [], []
            for half in (slice(0, 5), slice(5, B)):  # acting happens in other batch sizes than learning
                logits, _, after = policy(at(obs, (slice(t, t + 1), half)), first[t : t + 1, half], state[half])
                step.append(logits[0])
                new.append(after)
            state = torch.cat(new)
            acted.append(torch.cat(step))
        actions, mu = appo.sample_actions(torch.cat(acted), agent.heads)
    logits, _, _ = agent(obs, first, torch.zeros(B, agent.state_size))
    pi, entropy, *_ = appo.evaluate_actions(logits.flatten(0, 1), actions, agent.heads)
    assert entropy.mean() < 0.8 * np.log([3, 3, 2, 2, 11]).sum()
    assert (pi - mu).std() < bound


def test_actions_that_are_masked_out(appo):
    """A logit of -inf: never drawn, and entropy, symmetric KL and gradients are those of the other actions alone."""
    full, heads = torch.randn(50, 7, requires_grad=True), (4, 3)
    masked = torch.where(torch.tensor([True, False, True, True, False, True, True]), full, -torch.inf)
    actions, _ = appo.sample_actions(masked.detach().repeat(100, 1), heads)
    assert not (actions == torch.tensor([1, 0])).any()
    values = appo.evaluate_actions(masked, actions[:50], heads)
    kept = full.detach()[:, [0, 2, 3, 5, 6]].requires_grad_()
    others = appo.evaluate_actions(kept, torch.stack([actions[:50, 0].clamp(min=1) - 1, actions[:50, 1] - 1], -1), (3, 2))
    for one, two in zip(values, others):
        torch.testing.assert_close(one, two)
    sum(map(torch.sum, values)).backward()
    sum(map(torch.sum, others)).backward()
    torch.testing.assert_close(full.grad[:, [0, 2, 3, 5, 6]], kept.grad)
    assert not full.grad[:, [1, 4]].any()
