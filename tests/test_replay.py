"""appo_atari_replay.py: which rollouts are kept, which of them are replayed, and what the loss makes of them."""

import gc
import math
import random
import signal
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from edited import COUNTING, REPORTS, ROOT, edited, load, with_envs
from forked import python
from test_algorithm import direct_vtrace, make_agent, make_batch
from test_command_line import scalars
from torch.distributions import Categorical, kl_divergence

import appo_atari
import appo_atari_replay
from dummy_sampler import RandomAgent

SCRIPT = ROOT / "appo_atari_replay.py"


@pytest.fixture(scope="module")
def appo(tmp_path_factory):
    """The file with the counting environment instead of Atari."""
    return load(with_envs(tmp_path_factory.mktemp("replay"), "appo_counting_replay", COUNTING, source=SCRIPT))


def make_learner(appo, **settings):
    """A learner, with random numbers in all of its rollouts."""
    default = dict(num_workers=0, num_envs_per_worker=4, rollout=5, hidden_size=32, device="cpu", precision="float32", replay_rollouts=50,
                   rnn_type="none", batch_size=40)  # fmt: skip
    args = appo.Args(**default | settings)
    torch.manual_seed(0)
    spaces = appo.spaces_of(args)
    agent = appo.Agent(spaces, args)
    inference = appo.Inference(args, spaces, agent, torch.device("cpu"))
    inference.learner_pipe = SimpleNamespace(sent=[], send=lambda blocks: inference.learner_pipe.sent.append(blocks))
    r, rng = inference.rollouts, np.random.default_rng(0)
    r.obs["obs"].random_(256)
    for field in (r.obs["vector"], r.values, r.rnn_state, r.logits, inference.features):
        field.normal_()
    r.logprobs.uniform_(-3, 0)
    r.actions.random_(3)
    r.rewards[:], r.first[:] = rng.normal(size=r.rewards.shape), rng.random(r.first.shape) < 0.2
    return appo.Learner(args, agent, inference)


# --- choosing


@pytest.mark.parametrize("replay", ["attentive", "elite"])
@pytest.mark.parametrize("rnn", ["gru", "none"])
def test_distances_against_a_direct_implementation(appo, replay, rnn):
    """State by state, as the games were played; without a core only every fourth counts."""
    learner = make_learner(appo, replay=replay, rnn_type=rnn)
    agent, r, slots, newest = learner.agent, learner.inference.rollouts, np.array([11, 4, 29, 17]), 7
    features = learner.inference.features
    assert features.numel() == 5 * r.first.shape[1] * agent.features
    expected = []
    for slot in slots:
        state, parts = r.rnn_state[0, slot][None], []
        for t in range(5):
            obs = {name: field[t, slot][None, None] for name, field in r.obs.items()}
            with torch.no_grad():
                now, state = agent.hidden(obs, torch.tensor([[bool(r.first[t, slot])]]), state)
                now = now[0, 0].double()
            if rnn == "none" and t % 4:
                continue
            at = (4, newest) if replay == "attentive" else (t, slot)
            parts.append(((now - features[at].double()) ** 2).sum())
        expected.append(math.sqrt(sum(parts)))
    np.testing.assert_allclose(learner.distances(slots, newest), expected, rtol=1e-4)


def test_distances_copy_no_other_slots(appo):
    """However many are kept. (It once copied all of them for every eight candidates: a third of a run's speed.)"""
    copied = []
    for rollouts in (40, 400):
        learner = make_learner(appo, replay="elite", replay_rollouts=rollouts)
        with torch.profiler.profile(profile_memory=True) as profile:
            learner.distances(np.array([11, 4]), 7)
        copied.append(sum(max(0, event.self_cpu_memory_usage) for event in profile.events()))
    assert 0 < copied[1] < 1.1 * copied[0]


@pytest.mark.parametrize("replay, strategy", [("uniform", 1), ("attentive", 1), ("elite", 1), ("elite", 3)])
def test_what_is_drawn(appo, replay, strategy):
    """Nothing before a fifth of the room is filled; then of those that are kept, the newest, each at most once, from fewer and fewer
    candidates. What is replayed counts how often, until its slot is FREE."""
    learner = make_learner(appo, replay=replay, elite_strategy=strategy, replay_candidates=6.0, total_timesteps=1000, replay_rollouts=48)
    taken, kept, asked, times = learner.inference.rollouts.times_replayed[0], [], [], {}
    learned_at, given_back, free = np.full(len(taken), -1), learner.inference.learner_pipe.sent, slice(0, 4)
    learner.distances = lambda slots, newest: asked.append((slots, newest)) or learned_at[slots].astype(float)
    for i in range(60):
        learner.global_step = min(1000, 20 * i)
        fresh = list(range(free.start, free.stop))
        asked.clear()
        again, about = learner.choose_replayed(fresh[-1])
        again = again.tolist()
        assert len(again) == (4 if 4 * i >= 9.6 else 0) and bool(about) == bool(again)
        assert set(again) <= set(kept) and len(set(again)) == len(again) and not set(kept) & set(fresh)
        if again and replay != "uniform" and i < 50:
            drawn = np.concatenate([slots for slots, _ in asked])
            assert {newest for _, newest in asked} == {fresh[-1]} and max(len(slots) for slots, _ in asked) <= 8
            assert len(drawn) == len(set(drawn)) == min(len(kept), math.ceil(4 * (1 + 5 * (1 - 20 * i / 1000)))) and set(drawn) <= set(kept)
            best = sorted(drawn.tolist(), key=lambda slot: (times.get(slot, 0) if strategy == 3 else 0, learned_at[slot]))[:4]
            assert sorted(learned_at[again]) == sorted(learned_at[best]), "the nearest, or the least often taken"
            assert sum(times.get(slot, 0) for slot in again) <= sum(times.get(slot, 0) for slot in best) or strategy == 1
        elif again:
            assert not asked, "candidates are not looked at"
        for slot in again:
            times[slot] = times.get(slot, 0) + 1
        assert {slot: taken[slot] for slot in times} == times
        learner.keep([free])
        learned_at[fresh] = i
        kept += fresh
        ((free,),) = given_back
        given_back.clear()
        for slot in range(free.start, free.stop):
            if slot in kept:
                assert slot == kept.pop(0), "the oldest"
                times.pop(slot, None)
        assert len(kept) == min(4 * (i + 1), 48) and not taken[free].any()


def test_all_that_are_kept_may_be_candidates(appo):
    learner = make_learner(appo, replay="elite", replay_candidates=math.inf, total_timesteps=1000, replay_rollouts=48)
    learner.keep([slice(0, 4)]), learner.keep([slice(4, 8)]), learner.keep([slice(8, 12)])
    asked = []
    learner.distances = lambda slots, newest: asked.extend(slots) or slots.astype(float)
    assert learner.choose_replayed(12)[0].tolist() == [0, 1, 2, 3] and sorted(asked) == list(range(12))


def test_uniform_is_uniform(appo):
    learner = make_learner(appo, replay_rollouts=20)
    learner.num_filled = 3  # blocks, of four slots
    drawn = np.concatenate([learner.choose_replayed(3)[0] for _ in range(3000)])
    slots, counts = np.unique(drawn, return_counts=True)
    assert slots.tolist() == np.r_[*list(learner.kept)[-3:]].tolist(), "of those that are filled, the newest"
    assert abs(counts - 1000).max() < 150  # the standard deviation of each is 26


# --- the loss


def test_loss_of_replayed_samples():
    """Loss and gradient of a batch that is half replayed against a direct evaluation: V-trace's policy gradient, no value clip, cloning,
    never too old; of the fresh half as in appo_atari.py."""
    args, agent = make_agent(appo_atari_replay, vtrace_rho=1.4, vtrace_c=0.7, vtrace_lambda=0.8, clip_coef=0.3, ent_coef=0.1,
                             vf_coef=0.7, policy_cloning_coef=0.3)  # fmt: skip
    batch = make_batch(appo_atari_replay, agent, B=8)
    batch.times_replayed[0, ::2] = 2
    batch.logits.mul_(1.5)
    batch.logprobs[0] -= 6  # beyond the band of the ratio
    batch.logprobs[1] += 6
    loss, metrics = appo_atari_replay.appo_loss(args, agent, batch)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in agent.parameters()]
    agent.zero_grad()

    logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state[0])
    logprob = entropy = backward = 0
    for h, (head, acting) in enumerate(zip(logits[:-1].double().split(agent.heads, -1), batch.logits.double().split(agent.heads, -1))):
        pi, mu = Categorical(logits=head), Categorical(logits=acting)
        logprob, entropy = logprob + pi.log_prob(batch.actions[..., h]), entropy + pi.entropy()
        backward = backward + kl_divergence(mu, pi)
    replayed = (batch.times_replayed > 0).expand(6, 8)
    m = ~batch.first[1:] & (replayed | (batch.lags < args.max_policy_lag))
    assert (replayed & m & (batch.lags > 0)).any() and (~replayed & ~batch.first[1:] & ~m).any()
    ratio = (logprob - batch.logprobs).exp().clamp(0.05, 20)
    rho = torch.where(replayed, (logprob - batch.logprobs).exp().clamp(max=20), ratio).detach()
    assert ((rho < 0.05) & m & replayed).any()
    vs, advantage = direct_vtrace(rho, values.detach().double(), batch.rewards.double(), args.gamma * (~batch.terminated).double(),
                                  ~batch.first[1:], 1.4, 0.7, 0.8)  # fmt: skip
    for kind in (replayed, ~replayed):
        advantage[kind] -= advantage[kind & m].mean()
    advantage = advantage / (advantage[m] ** 2).mean().sqrt()
    ppo = torch.min(ratio * advantage, ratio.clamp(1 / 1.3, 1.3) * advantage)
    own = rho.clamp(max=1.4) * logprob * advantage
    new, old = values[:-1].double(), batch.values.double()
    clip = args.ppo_clip_value
    value = torch.max((new - vs[:-1]) ** 2, (old + (new - old).clamp(-clip, clip) - vs[:-1]) ** 2)
    value = torch.where(replayed, (new - vs[:-1]) ** 2, value)
    total = -torch.where(replayed, own, ppo) + 0.7 * value - 0.1 * entropy + replayed * 0.3 * backward
    expected = total[m].mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    for parameter, gradient in zip(agent.parameters(), gradients):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)
    assert metrics["replay/kl"].item() == pytest.approx(backward[m & replayed].mean().item(), rel=1e-4)
    assert metrics["replay/rho_mean"].item() == pytest.approx(rho[m & replayed].clamp(max=1.4).mean().item(), rel=1e-4)
    clipped = (ratio != ratio.clamp(1 / 1.3, 1.3))[m & ~replayed].double().mean().item()
    assert metrics["losses/clipfrac"].item() == pytest.approx(clipped, rel=1e-4)


def test_kl_of_policies_that_rule_out_actions():
    """A logit of -inf, in both."""
    full = torch.randn(20, 4, requires_grad=True)
    keep = torch.tensor([True, False, True, True])
    acting = torch.randn(20, 4)
    kl = appo_atari_replay.kl_divergence(*(torch.where(keep, x, -torch.inf).log_softmax(-1) for x in (acting, full)))
    one, two = (Categorical(logits=x[:, keep]) for x in (acting, full.detach()))
    torch.testing.assert_close(kl, kl_divergence(one, two))
    kl.sum().backward()
    assert full.grad.isfinite().all() and not full.grad[:, 1].any()


def test_a_replayed_rollout_has_the_targets_that_it_had_fresh(appo, monkeypatch):
    """V-trace of the same slots, to the bit; and their age masks them only while they are fresh."""
    learner, slots, seen = make_learner(appo, max_policy_lag=3), np.array([5, 9]), []
    vtrace, times = appo.vtrace, learner.inference.rollouts.times_replayed
    monkeypatch.setattr(appo, "vtrace", lambda *arguments: seen.append(vtrace(*arguments)) or vtrace(*arguments))
    learner.inference.publish = lambda version: None
    for version in (2, 3):
        learner.inference.version = learner.version = version
        norms = []
        for replayed in (0, 1):
            times[0, slots] = replayed
            norms.append(learner.update(learner.gather(slots), last_epoch=False)["losses/grad_norm"] if replayed or version == 2 else 0)
            if not replayed and version == 3:
                learner.update(learner.gather(slots), last_epoch=False)
        assert norms[1] > 0 and (norms[0] > 0) == (version == 2)
    learner.optimizer.param_groups[0]["lr"] = 0.0
    for replayed in (0, 1):
        times[0, slots] = replayed
        learner.update(learner.gather(slots), last_epoch=False)
    for one, two in zip(*seen[-2:]):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    times[0, [3, 5]] = 0, 1
    assert learner.gather(np.array([3, 5])).times_replayed.tolist() == [[0, 1]]


def test_every_batch_has_its_share(appo):
    """Every epoch deals out the fresh and the replayed rollouts once, so many to each step; before the replay begins the fresh ones alone.
    Nothing is given back before the last step."""
    learner = make_learner(appo, num_epochs=4, num_envs_per_worker=6, replay_share=0.6, batch_size=25)
    assert appo.replayed_per_iteration(learner.args) == 9
    sent = learner.inference.learner_pipe.sent
    for again, batches in ((np.arange(10, 19), 3), (np.arange(0), 1)):
        shuffled = []
        learner.gather = lambda slots, shuffled=shuffled: shuffled.append(sorted(slots.tolist()))
        learner.update = lambda batch, last_epoch: {"x": torch.tensor(len(sent))}
        learner.choose_replayed = lambda newest, again=again: (again, {"replay/x": 7})
        metrics = learner.iterate([slice(0, 6)])
        assert metrics["x"] == 0 and metrics["replay/x"] == 7 and len(sent) == 1 and len(shuffled) == 4 * batches
        assert all(sum(i < 6 for i in batch) == 6 // batches and len(batch) == (6 + len(again)) // batches for batch in shuffled)
        epochs = [shuffled[i : i + batches] for i in range(0, len(shuffled), batches)]
        assert [sorted(sum(epoch, [])) for epoch in epochs] == [[*range(6), *again]] * 4
        assert batches == 1 or len(set(map(str, epochs))) == 4
        sent.clear()


def test_blocks_are_enough_in_every_order():
    """As in test_pipeline.py, with any share and any number of rollouts that are kept, fewer than are fresh, too."""
    rng, spaces, appo = random.Random(0), appo_atari_replay.Spaces(dict(obs=gym.spaces.Box(0, 255, (2, 2, 1), np.uint8)), (2,)), appo_atari_replay
    replays = 0
    for _ in range(60):
        workers, splits, n, T, ahead, parts = (rng.randint(low, high) for low, high in ((1, 4), (1, 3), (1, 4), (1, 3), (0, 2), (1, 3)))
        rows = workers * splits * n
        args = appo.Args(num_workers=workers, num_envs_per_worker=splits * n, worker_num_splits=splits, rollout=T, max_batches_ahead=ahead,
                         batch_size=rng.randint(2 * T, (2 * rows + 1) * T), num_batches_per_epoch=parts, sync=rng.random() < 0.3,
                         replay_share=rng.choice([0.1, 0.3, 0.5, 0.8]), device="cpu", precision="float32")  # fmt: skip
        args.replay_rollouts = appo.replayed_per_iteration(args) + rng.choice([1, 2, 3 * rows])
        agent = RandomAgent(spaces.heads)
        agent.features, agent.hidden, agent.policy = 1, lambda obs, first, state: (torch.zeros(*first.shape, 2), state), lambda x: x
        agent.critic = lambda x: x[..., :1]
        agent.parameters = lambda: [torch.zeros(1, requires_grad=True)]
        inference = appo.Inference(args, spaces, agent, torch.device("cpu"))
        learner = appo.Learner(args, agent, inference)
        inference.learner_pipe = SimpleNamespace(send=inference.free.extend)
        inference.pipes = [SimpleNamespace(send=lambda message: None)] * workers
        order, greedy, waiting = list(range(workers * splits)), rng.random() < 0.5, []

        def advance(group, inference=inference):
            inference.requests = [group]
            inference.serve()
            return not inference.requests

        for _ in range(8):
            rng.shuffle(order)
            moves = True
            while moves:
                moves = any(advance(group) for group in order) if greedy else any([advance(group) for group in order])
            while not inference.full.empty():
                waiting.append(inference.full.get())
            count = appo.blocks_per_iteration(args)
            assert len(waiting) >= count, f"a deadlock: {args}"
            replays += len(learner.choose_replayed(np.r_[*waiting[:count]][-1])[0]) if args.replay == "uniform" else 0
            learner.keep(waiting[:count])
            waiting = waiting[count:]
    assert replays > 100


def test_statistics_of_the_inputs_are_of_every_batch(appo):
    """Of what is replayed, too; the steps that are counted are fresh."""
    learner = make_learner(appo)
    learner.num_filled, learner.inference.version = 12, 1
    learner.inference.rollouts.first[1:] = False
    learner.iterate([slice(0, 4)])
    assert learner.global_step == 20 and 8 <= learner.agent.normalizers["obs"].count <= 16


# --- the pipeline


@pytest.fixture
def train(tmp_path):
    def train(appo, name="run", **settings) -> int:
        small = dict(num_workers=2, num_envs_per_worker=4, rollout=5, batch_size=40, hidden_size=32, device="cpu", total_timesteps=2000)
        gc.collect()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return appo.train(appo.Args(**small | settings), tmp_path / name)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return train


@pytest.mark.parametrize("settings", [
    dict(replay="uniform"), dict(replay="elite", elite_strategy=3, num_epochs=2), dict(replay="attentive", rnn_type="gru", num_batches_per_epoch=2),
    dict(replay="elite", sync=True), dict(replay="elite", elite_strategy=3, num_workers=0, replay_share=0.8),
])  # fmt: skip
def test_what_is_replayed_is_what_was_learned_from(appo, train, monkeypatch, settings):
    """The real pipeline: between the two, and until the last step with them, nobody has touched the slot, and no KEPT slot is FREE,
    FILLING, FULL or LEARNING."""
    content, replayed, now = {}, [], dict(slots=[], again=[])
    iterate, choose_replayed, keep = appo.Learner.iterate, appo.Learner.choose_replayed, appo.Learner.keep

    def digest(r, slot: int) -> bytes:
        fields = [field[:, slot] for name, field in vars(r).items() if name not in ("obs", "times_replayed")]
        fields += [field[:, slot] for field in r.obs.values()]
        return b"".join(np.asarray(field).tobytes() for field in fields)

    def spy_iterate(self, blocks):
        now.update(slots=np.r_[*blocks].tolist(), again=[])
        content.update({slot: digest(self.inference.rollouts, slot) for slot in now["slots"]})
        return iterate(self, blocks)

    def spy_choose(self, newest):
        again, about = choose_replayed(self, newest)
        now["again"] = again.tolist()
        kept = set(np.r_[*self.kept].tolist())
        owned = [*self.inference.free.copy(), *self.inference.filling.copy().values()]
        others = [*(slot for block in owned for slot in range(block.start, block.stop)), *now["slots"]]
        assert newest == now["slots"][-1] and not kept & set(others)
        assert set(now["again"]) <= kept and len(set(now["again"])) == len(again)
        replayed.extend(now["again"])
        return again, about

    def spy_keep(self, blocks):
        both = now["slots"] + now["again"]
        assert np.r_[*blocks].tolist() == now["slots"]
        assert [digest(self.inference.rollouts, slot) for slot in both] == [content[slot] for slot in both]
        keep(self, blocks)

    for name, spy in (("iterate", spy_iterate), ("choose_replayed", spy_choose), ("keep", spy_keep)):
        monkeypatch.setattr(appo.Learner, name, spy)
    assert train(appo, replay_rollouts=30, **settings) == 0
    assert len(replayed) > 100 and len(set(replayed)) > 30, "the ring has gone round"


@pytest.mark.parametrize("own", [
    dict(num_envs_per_worker=4, rollout=8, batch_size=16, num_epochs=2, rnn_type="gru"),
    dict(num_envs_per_worker=6, rollout=5, max_policy_lag=1, num_epochs=2),
    dict(num_envs_per_worker=9, rollout=16, batch_size=48, sticky_actions=0.25, vtrace_rho=1.5),
])  # fmt: skip
def test_nothing_replayed_is_appo_atari(train, tmp_path, own):
    """With --replay-share 0 two runs end with the same checkpoint to the bit."""
    ends = []
    for file, more in ((appo_atari, {}), (appo_atari_replay, dict(replay_share=0.0, replay="elite"))):
        assert train(file, file.__name__, **dict(num_workers=0, total_timesteps=700) | own | more) == 0
        (path,) = (tmp_path / file.__name__ / "checkpoints").glob("checkpoint_*")
        ends.append(torch.load(path, weights_only=True))
    one, two = ends
    assert one["version"] == two["version"] > 5
    torch.testing.assert_close(two["agent"], one["agent"], rtol=0, atol=0)
    torch.testing.assert_close(two["optimizer"], one["optimizer"], rtol=0, atol=0)


def test_as_a_user_runs_it(run, tmp_path):
    """Trains, resumes without a replay, is evaluated; what it says and reports."""
    script = edited(tmp_path, "appo_replay", REPORTS, source=SCRIPT)
    flags = ("--env-id", "Pong-v5", "--num-workers", "2", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "64", "--hidden-size", "32",
             "--device", "cpu", "--replay", "elite", "--replay-rollouts", "40", "--experiment", "e")  # fmt: skip
    for steps in ("1500", "3000"):
        r = run(*flags, "--total-timesteps", steps, script=script)
        assert r.wait(90) == 0, r.text()
    found = scalars(tmp_path / "e")
    tags = {"age_mean", "times_mean", "distance", "distance_drawn", "rho_mean", "kl"}
    assert {tag.removeprefix("replay/") for tag in found if tag.startswith("replay/")} == tags
    assert all(np.isfinite(event.value) for tag in found for event in found[tag])
    assert all(0 <= event.value < 1 for event in found["stats/choosing"]) and 0 < found["stats/choosing"][-1].value
    assert all(one.value <= two.value for one, two in zip(found["replay/distance"], found["replay/distance_drawn"]))
    done = python(ROOT / "evaluate.py", tmp_path / "e", "--episodes", "1", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0 and "1 episodes, sampled actions" in done.stdout, done.stdout


@pytest.mark.parametrize("flags, expected", [
    ("--replay-share 0.001", "--replay-share 0.001 makes 0 replayed rollouts per iteration: at least 1 is needed, at most"),
    ("--replay-rollouts 3", "--replay-share 0.5 makes 16 replayed rollouts per iteration: at least 1 is needed, at most --replay-rollouts 3"),
    ("--replay-candidates 0.5", "--replay-candidates 0.5 is out of range: at least 1"),
    ("--replay-share 1", "--replay-share 1.0 is out of range: some samples must be fresh"),
    ("--policy-cloning-coef -1", "--policy-cloning-coef -1.0 is out of range: at least 0"),
])  # fmt: skip
def test_what_is_refused(flags, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["appo_atari_replay.py", "--device", "cpu", "--num-workers", "2", *flags.split()])
    assert appo_atari_replay.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {expected}") and error.count("\n") == 1, error
