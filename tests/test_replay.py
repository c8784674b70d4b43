"""appo_atari_replay.py: which rollouts are kept, which of them are replayed, and what the loss makes of them."""

import gc
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from edited import COUNTING, REPORTS, ROOT, edited, load, with_envs
from forked import python
from test_first_core import direct_vtrace, make_agent, make_batch
from test_command_line import scalars
from torch.distributions import Categorical, kl_divergence

import appo_atari
import appo_atari_replay

SCRIPT = ROOT / "appo_atari_replay.py"


@pytest.fixture(scope="module")
def appo(tmp_path_factory):
    """The file with the counting environment instead of Atari."""
    return load(with_envs(tmp_path_factory.mktemp("replay"), "appo_counting_replay", COUNTING, source=SCRIPT))


def make_learner(appo, **settings):
    """A learner, with random numbers in all of its rollouts."""
    default = dict(num_workers=0, num_envs_per_worker=4, rollout=5, hidden_size=32, device="cpu", precision="float32", replay_rollouts=50)
    args = appo.resolve(appo.Args(**default | settings))
    torch.manual_seed(0)
    spaces, device = appo.spaces_of(args), torch.device("cpu")
    agent = appo.Agent(spaces, args)
    inference = appo.Inference(args, spaces, agent, device)
    r, rng = inference.rollouts, np.random.default_rng(0)
    r.obs["obs"].random_(256)
    for field in (r.obs["vector"], r.values, r.rnn_state, r.logits, r.features):
        field.normal_()
    r.logprobs.uniform_(-3, 0)
    r.actions.random_(3)
    r.rewards[:], r.first[:] = rng.normal(size=r.rewards.shape), rng.random(r.first.shape) < 0.2
    return appo.Learner(args, agent, inference, device)


def fill(learner, count: int) -> None:
    """Of the slots that are KEPT the newest `count` were learned from."""
    learner.inference.rollouts.learned_at[learner.kept[len(learner.kept) - count :]] = 0


# --- choosing


def direct_choice(distance, taken, count: int, strategy: int) -> list[int]:
    """As the publishers describe it, step by step; of equals the first."""
    nearest_first = sorted(range(len(distance)), key=lambda i: distance[i])
    if strategy == 1:
        return nearest_first[:count]
    if strategy == 3:
        chosen = []
        while len(chosen) < count:
            left = [i for i in nearest_first if i not in chosen]
            chosen.append(next(i for i in left if taken[i] == min(taken[j] for j in left)))
        return chosen
    chosen, start = [], 0
    for k in range(count):  # the first strata have one more, where they cannot be equal
        size = len(distance) // count + (k < len(distance) % count)
        stratum = nearest_first[start : start + size]
        start += size
        chosen.append(stratum[0] if strategy == 2 else next(i for i in stratum if taken[i] == min(taken[j] for j in stratum)))
    return chosen


@pytest.mark.parametrize("strategy", [1, 2, 3, 4])
def test_strategies_against_a_direct_implementation(strategy):
    rng = np.random.default_rng(strategy)
    for _ in range(300):
        count = int(rng.integers(1, 9))
        candidates = int(rng.integers(count, 6 * count + 1))
        distance, taken = rng.integers(0, 20, candidates) / 4, rng.integers(0, 4, candidates)  # with equals
        chosen = appo_atari_replay.choose(distance, taken, count, strategy)
        assert chosen.tolist() == direct_choice(distance, taken, count, strategy)


@pytest.mark.parametrize("replay", ["attentive", "elite"])
@pytest.mark.parametrize("distance", ["norm", "cosine", "kl"])
@pytest.mark.parametrize("rnn", ["gru", "none"])
def test_distances_against_a_direct_implementation(appo, replay, distance, rnn):
    """State by state, as the games were played; without a core only every fourth counts."""
    learner = make_learner(appo, replay=replay, replay_distance=distance, rnn_type=rnn)
    agent, r, slots, newest = learner.agent, learner.inference.rollouts, np.array([11, 4, 29, 17]), 7
    assert r.features.numel() == (0 if distance == "kl" else 5 * r.first.shape[1] * agent.features)
    expected = []
    for slot in slots:
        state, parts = r.rnn_state[slot][None], []
        for t in range(5):
            obs = {name: field[t, slot][None, None] for name, field in r.obs.items()}
            with torch.no_grad():
                now, state = agent.hidden(obs, torch.tensor([[bool(r.first[t, slot])]]), state)
                now, logits = now[0, 0].double(), agent.actor(now)[0, 0].double()
            if rnn == "none" and t % 4:
                continue
            at = (4, newest) if replay == "attentive" else (t, slot)
            if distance == "kl":
                heads = zip(r.logits[at].double().split(agent.heads), logits.split(agent.heads))
                parts.append(sum(kl_divergence(Categorical(logits=one), Categorical(logits=two)) for one, two in heads))
            elif distance == "cosine":
                then = r.features[at].double()
                parts.append(1 - now @ then / (now.norm() * then.norm()))
            else:
                parts.append(((now - r.features[at].double()) ** 2).sum())
        expected.append(math.sqrt(sum(parts)) if distance == "norm" else float(sum(parts)))
    np.testing.assert_allclose(learner.distances(slots, newest), expected, rtol=1e-4)


@pytest.mark.parametrize("replay", ["uniform", "attentive", "elite"])
def test_what_is_drawn(appo, replay):
    """Nothing before a fifth of the room is filled; then of those that are kept, the newest, each at most once, from fewer and fewer
    candidates. What is replayed counts how often, until its slot is FREE."""
    learner = make_learner(appo, replay=replay, replay_candidates=6.0, total_timesteps=1000)
    r, kept, asked, times = learner.inference.rollouts, [], [], {}
    free, given_back = list(range(4)), []
    learner.inference.release = given_back.append
    learner.distances = lambda slots, newest: asked.append((slots, newest)) or r.learned_at[slots].astype(float)
    for i in range(60):
        learner.global_step = min(1000, 20 * i)
        fresh = np.array(free[:4])
        asked.clear()
        again = learner.choose_replayed(fresh[-1]).tolist()
        assert len(again) == (4 if 4 * i >= 10 else 0)
        assert set(again) <= set(kept) and len(set(again)) == len(again) and not set(kept) & set(fresh)
        if again and replay != "uniform" and i < 50:
            drawn = np.concatenate([slots for slots, _ in asked])
            assert {newest for _, newest in asked} == {fresh[-1]} and max(len(slots) for slots, _ in asked) <= 8
            assert len(drawn) == len(set(drawn)) == min(len(kept), math.ceil(4 * (1 + 5 * (1 - 20 * i / 1000)))) and set(drawn) <= set(kept)
            assert set(again) == set(drawn[np.argsort(r.learned_at[drawn], kind="stable")[:4]]), "the nearest"
        elif again:
            assert not asked, "candidates are not looked at"
        for slot in again:
            times[slot] = times.get(slot, 0) + 1
        assert {slot: r.times_replayed[slot] for slot in times} == times
        learner.keep(fresh)
        kept += fresh.tolist()
        freed = given_back.pop()
        for slot in freed:
            if slot in kept:
                assert slot == kept.pop(0), "the oldest"
                times.pop(slot, None)
        assert len(kept) == min(4 * (i + 1), 50) and not r.times_replayed[freed].any()
        free = freed.tolist()


def test_uniform_is_uniform(appo):
    learner = make_learner(appo, replay_rollouts=20)
    fill(learner, 12)
    drawn = np.concatenate([learner.choose_replayed(3) for _ in range(3000)])
    slots, counts = np.unique(drawn, return_counts=True)
    assert slots.tolist() == learner.kept[-12:].tolist(), "of those that are filled, the newest"
    assert abs(counts - 1000).max() < 150  # the standard deviation of each is 26


# --- the loss


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_loss_of_replayed_samples(threshold):
    """Loss and gradient of a batch that is half replayed against a direct evaluation: V-trace's policy gradient, no value clip, cloning, and
    the mask; of the fresh half as in appo_atari.py."""
    args, agent = make_agent(appo_atari_replay, vtrace_rho=1.4, vtrace_c=0.7, vtrace_lambda=0.8, clip_coef=0.3, ent_coef=0.1,
                             vf_coef=0.7, policy_cloning_coef=0.3, value_cloning_coef=0.2, replay_kl_mask=threshold)  # fmt: skip
    batch = make_batch(appo_atari_replay, agent, B=8)
    batch.replayed[:, ::2] = True
    batch.logits.mul_(1.5)
    batch.logprobs[0] -= 6  # beyond the band of the ratio
    batch.logprobs[1] += 6
    loss, metrics = appo_atari_replay.appo_loss(args, agent, batch)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in agent.parameters()]
    agent.zero_grad()

    logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state, batch.restarts)
    logprob = entropy = backward = forward = 0
    for h, (head, acting) in enumerate(zip(logits[:-1].double().split(agent.heads, -1), batch.logits.double().split(agent.heads, -1))):
        pi, mu = Categorical(logits=head), Categorical(logits=acting)
        logprob, entropy = logprob + pi.log_prob(batch.actions[..., h]), entropy + pi.entropy()
        backward, forward = backward + kl_divergence(mu, pi), forward + kl_divergence(pi, mu).detach()
    far = batch.replayed & (forward > (threshold or math.inf))
    m, replayed = batch.mask, batch.replayed
    assert (far & m).any() == bool(threshold) and (replayed & ~far & m).any() and (~replayed & m).any()
    ratio = (logprob - batch.logprobs).exp().clamp(0.05, 20)
    rho = torch.where(replayed, (logprob - batch.logprobs).exp().clamp(max=20), ratio).detach()
    assert ((rho < 0.05) & m & replayed & ~far).any()
    vs, advantage = direct_vtrace(rho, values.detach().double(), batch.rewards.double(), args.gamma * (~batch.terminated).double(),
                                  ~batch.first[1:] & ~far, 1.4, 0.7, 0.8)  # fmt: skip
    for kind in (replayed & ~far, ~replayed):
        advantage[kind] -= advantage[kind & m].mean()
    advantage[far] = 0
    advantage = advantage / (advantage[m] ** 2).mean().sqrt()
    ppo = torch.min(ratio * advantage, ratio.clamp(1 / 1.3, 1.3) * advantage)
    own = rho.clamp(max=1.4) * logprob * advantage
    new, old = values[:-1].double(), batch.values.double()
    clip = args.ppo_clip_value
    value = torch.max((new - vs[:-1]) ** 2, (old + (new - old).clamp(-clip, clip) - vs[:-1]) ** 2)
    value = torch.where(replayed, (new - vs[:-1]) ** 2, value)
    total = -torch.where(replayed, own, ppo) + 0.7 * value - 0.1 * entropy + replayed * (0.3 * backward + 0.2 * (new - old) ** 2)
    expected = total[m].mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    for parameter, gradient in zip(agent.parameters(), gradients):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)
    assert metrics["replay/kl"].item() == pytest.approx(backward[m & replayed].mean().item(), rel=1e-4)
    assert metrics["replay/masked"].item() == pytest.approx(far[m & replayed].double().mean().item(), rel=1e-4)
    assert metrics["replay/rho_mean"].item() == pytest.approx(rho[m & replayed].clamp(max=1.4).mean().item(), rel=1e-4)
    clipped = (ratio != ratio.clamp(1 / 1.3, 1.3))[m & ~replayed].double().mean().item()
    assert metrics["losses/clipfrac"].item() == pytest.approx(clipped, rel=1e-4)


def test_kl_of_policies_that_rule_out_actions():
    """A logit of -inf, in both."""
    full, heads = torch.randn(20, 7, requires_grad=True), (4, 3)
    kept = [0, 2, 3, 5, 6]
    keep = torch.zeros(7, dtype=torch.bool).index_fill(0, torch.tensor(kept), True)
    acting = torch.randn(20, 7)
    kl = appo_atari_replay.kl_divergence(*(torch.where(keep, x, -torch.inf) for x in (acting, full)), heads)
    torch.testing.assert_close(kl, appo_atari_replay.kl_divergence(acting[:, kept], full[:, kept], (3, 2)))
    kl.sum().backward()
    assert full.grad.isfinite().all() and not full.grad[:, [1, 4]].any()


def test_a_replayed_rollout_has_the_targets_that_it_had_fresh(appo, monkeypatch):
    """V-trace of the same slots, to the bit; and their age masks them only while they are fresh."""
    learner, slots, seen = make_learner(appo, max_policy_lag=3), np.array([5, 9]), []
    vtrace = appo.vtrace
    monkeypatch.setattr(appo, "vtrace", lambda *arguments: seen.append(vtrace(*arguments)) or vtrace(*arguments))
    for version in (2, 3):
        learner.inference.rollouts.times_replayed[slots] = 0
        fresh = learner.gather(slots, version)
        assert fresh.mask.any() == (version == 2) and not fresh.replayed.any()
        learner.inference.rollouts.times_replayed[slots] = 1
        again = learner.gather(slots, version)
        assert torch.equal(again.mask, ~again.first[1:]) and again.replayed.all()
        for batch in (fresh, again):
            appo.appo_loss(learner.args, learner.agent, batch)
        for one, two in zip(*seen[-2:]):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
    both = learner.gather(np.array([3, 5]), 0)
    assert both.replayed.any(0).tolist() == [False, True] and both.replayed.shape == both.mask.shape


def test_every_batch_has_its_share(appo):
    """Every epoch deals out the fresh and the replayed rollouts once, so many to each step; before the replay begins the fresh ones alone.
    Nothing is given back before the last step, and by then the policy has been published."""
    learner = make_learner(appo, num_batches_per_epoch=3, num_epochs=4, num_envs_per_worker=6, replay_share=0.6)
    fresh, replayed = appo.parts_of_iteration(learner.args)
    assert (fresh, replayed) == (6, 9)
    gather, chosen = learner.gather, np.arange(10, 10 + replayed)
    learner.inference.rollouts.times_replayed[chosen] = 1
    learner.inference.release = lambda slots: given_back.append((learner.version, len(slots)))
    for again in (chosen, chosen[:0]):
        dealt, given_back, learner.version = [], [], 1

        def spy(slots, version):
            batch = gather(slots, version)
            assert version == 1 and batch.replayed[0].tolist() == (slots >= 10).tolist()
            dealt.append(sorted(slots.tolist()))
            return batch

        learner.gather, learner.choose_replayed = spy, lambda newest: again
        learner.iterate(np.arange(fresh))
        assert given_back == [(13, fresh)]
        assert len(dealt) == 12 and all(sum(i < fresh for i in batch) == 2 and len(batch) == (fresh + len(again)) // 3 for batch in dealt)
        assert [sorted(sum(dealt[i : i + 3], [])) for i in range(0, 12, 3)] == [[*range(fresh), *again]] * 4
        assert len({str(dealt[i : i + 3]) for i in range(0, 12, 3)}) == 4


def test_slots_are_enough_in_every_order(appo):
    """As in test_pipeline.py, with any share and any number of slots that are kept, fewer than are fresh, too."""
    rng = random.Random(0)
    for i in range(60):
        workers, splits, n, T, ahead, parts = (rng.randint(low, high) for low, high in ((1, 4), (1, 3), (1, 4), (1, 3), (0, 2), (1, 3)))
        rows, share = workers * splits * n, rng.choice([0.1, 0.3, 0.5, 0.8])
        of_batch = rng.randint(2, 2 * rows + 1)
        if not 0 < round(share * of_batch) < of_batch:
            continue
        kept = parts * round(share * of_batch) + rng.choice([0, 1, 3 * rows])
        learner = make_learner(appo, num_workers=workers, num_envs_per_worker=splits * n, worker_num_splits=splits, rollout=T,
                               max_batches_ahead=ahead, batch_size=of_batch * T, num_batches_per_epoch=parts, replay_share=share,
                               replay_rollouts=kept)  # fmt: skip
        inference, count, replayed = learner.inference, appo.parts_of_iteration(learner.args)[0], 0
        groups, greedy = list(range(workers * splits)), rng.random() < 0.5
        for _ in range(8):
            rng.shuffle(groups)
            moves = True
            while moves:  # greedy: one group as far as it comes, then the next
                moves = any(inference.serve([group]) for group in groups) if greedy else inference.serve(groups)
            while not inference.full.empty():
                learner.full_slots.extend(inference.full.get()[0])
            assert len(learner.full_slots) >= count, f"a deadlock: {learner.args}"
            slots, learner.full_slots = np.array(learner.full_slots[:count]), learner.full_slots[count:]
            replayed += len(learner.choose_replayed(slots[-1]))
            learner.keep(slots)
        assert replayed > 0 or kept > 8 * count


def test_statistics_of_the_inputs_are_of_fresh_samples(appo):
    """And so are the steps that are counted."""
    learner = make_learner(appo)
    fill(learner, 50)
    r, learner.version = learner.inference.rollouts, 1
    r.obs["obs"][:], r.obs["obs"][:, :4], r.first[1:, :4] = 255, 51, False
    learner.iterate(np.arange(4))
    statistics = learner.agent.normalizers["obs"]
    assert learner.about_replay and learner.global_step == 20
    assert statistics.count == 4 and (statistics.mean - 0.2).abs().max() < 1e-6, "of a quarter of their steps"


# --- the pipeline


@pytest.fixture
def train(appo, tmp_path):
    def train(**settings) -> int:
        small = dict(num_workers=2, num_envs_per_worker=4, rollout=5, batch_size=20, hidden_size=32, device="cpu", inference_threads=1,
                     learner_threads=1, total_timesteps=2000, replay_rollouts=30)  # fmt: skip
        gc.collect()
        return appo.train(appo.Args(**small | settings), tmp_path / "run")

    return train


@pytest.mark.parametrize("settings", [
    dict(replay="uniform"), dict(replay="elite", elite_strategy=3, num_epochs=2), dict(replay="attentive", rnn_type="gru", num_batches_per_epoch=2),
    dict(replay="elite", sync=True, batch_size=None), dict(replay="elite", elite_strategy=4, num_workers=0, replay_share=0.8, batch_size=None),
])  # fmt: skip
def test_what_is_replayed_is_what_was_learned_from(appo, train, monkeypatch, settings):
    """The real pipeline: between the two, and until the last step with them, nobody has touched the slot, and no KEPT slot is FREE,
    FILLING, FULL or LEARNING."""
    content, replayed, now = {}, [], dict(slots=[], again=[])
    iterate, choose_replayed, keep = appo.Learner.iterate, appo.Learner.choose_replayed, appo.Learner.keep

    def digest(r, slot: int) -> bytes:
        fields = [field[:, slot] for name, field in vars(r).items() if name not in ("obs", "rnn_state", "learned_at", "times_replayed")]
        fields += [field[:, slot] for field in r.obs.values()] + [r.rnn_state[slot]]
        return b"".join(np.asarray(field).tobytes() for field in fields)

    def spy_iterate(self, slots):
        now.update(slots=slots.tolist(), again=[])
        content.update({slot: digest(self.inference.rollouts, slot) for slot in now["slots"]})
        return iterate(self, slots)

    def spy_choose(self, newest):
        again = choose_replayed(self, newest)
        now["again"] = again.tolist()
        filling = [slot for group in list(self.inference.filling) if group is not None for slot in group]
        others = [*self.inference.free_slots, *filling, *self.full_slots, *now["slots"]]
        assert newest == now["slots"][-1] and not set(self.kept) & set(others)
        assert set(again) <= set(self.kept) and len(set(again)) == len(again)
        replayed.extend(again)
        return again

    def spy_keep(self, slots):
        both = now["slots"] + now["again"]
        assert slots.tolist() == now["slots"] and [digest(self.inference.rollouts, slot) for slot in both] == [
            content[slot] for slot in both
        ]
        keep(self, slots)

    for name, spy in (("iterate", spy_iterate), ("choose_replayed", spy_choose), ("keep", spy_keep)):
        monkeypatch.setattr(appo.Learner, name, spy)
    assert train(**settings) == 0
    assert len(replayed) > 100 and len(set(replayed)) > 30, "the ring has gone round"


@pytest.mark.parametrize("own", [
    dict(num_envs_per_worker=4, rollout=8, num_batches_per_epoch=2, num_epochs=2, rnn_type="gru"),
    dict(num_envs_per_worker=6, rollout=5, max_policy_lag=1, num_epochs=2, exploration_loss="symmetric_kl"),
    dict(num_envs_per_worker=9, rollout=16, num_batches_per_epoch=3, machado=True, vtrace_rho=1.5),
])  # fmt: skip
def test_nothing_replayed_is_appo_atari(tmp_path, own):
    """With --replay-share 0 two runs end with the same checkpoint to the bit."""
    small = dict(num_workers=0, hidden_size=32, device="cpu", learner_threads=1, inference_threads=1, total_timesteps=700)
    ends = []
    for file, more in ((appo_atari, {}), (appo_atari_replay, dict(replay_share=0.0, replay="elite"))):
        gc.collect()
        folder = tmp_path / file.__name__
        assert file.train(file.Args(**small | own | more), folder) == 0
        (path,) = (folder / "checkpoints").glob("checkpoint_*")
        ends.append(torch.load(path, weights_only=True))
    one, two = ends
    assert one["version"] == two["version"] > 10
    torch.testing.assert_close(two["agent"], one["agent"], rtol=0, atol=0)
    torch.testing.assert_close(two["optimizer"], one["optimizer"], rtol=0, atol=0)


def test_as_a_user_runs_it(run, tmp_path):
    """Trains, resumes without a replay, is evaluated; what it says and reports."""
    script = edited(tmp_path, "appo_replay", REPORTS, source=SCRIPT)
    flags = ("--env-id", "Pong-v5", "--num-workers", "2", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "64", "--hidden-size", "32",
             "--device", "cpu", "--replay", "elite", "--replay-rollouts", "40", "--replay-kl-mask", "0.3", "--experiment", "e")  # fmt: skip
    for steps in ("3000", "6000"):
        r = run(*flags, "--total-timesteps", steps, script=script)
        assert r.wait(90) == 0, r.text()
        assert "4 fresh rollouts an iteration, and 4 replayed (elite) from the newest 40, once a fifth of these are there" in r.text()
    assert "; nothing to replay yet\n" in r.text()
    found = scalars(tmp_path / "e")
    tags = {"age_mean", "age_steps", "times_mean", "distance", "distance_drawn", "rho_mean", "kl", "masked"}
    assert {tag.removeprefix("replay/") for tag in found if tag.startswith("replay/")} == tags
    assert all(np.isfinite(event.value) for tag in found for event in found[tag])
    assert all(0 <= event.value < 1 for event in found["stats/choosing"]) and 0 < found["stats/choosing"][-1].value
    assert found["replay/age_steps"][-1].value > 32
    assert all(one.value <= two.value for one, two in zip(found["replay/distance"], found["replay/distance_drawn"]))
    done = python(ROOT / "evaluate.py", tmp_path / "e", "--episodes", "1", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0 and "1 episodes, sampled actions" in done.stdout, done.stdout


def test_a_run_without_replay_is_not_resumed_with_it_in_silence(main, tmp_path):
    """What changes is said, flag by flag."""
    flags = ("--env-id", "Pong-v5", "--num-workers", "0", "--num-envs-per-worker", "4", "--rollout", "8", "--hidden-size", "32", "--device", "cpu",
             "--train-dir", tmp_path, "--experiment", "e")  # fmt: skip
    code, text = main(appo_atari, *flags, "--total-timesteps", "200")
    assert code == 0, text
    code, text = main(appo_atari_replay, *flags, "--total-timesteps", "300", "--batch-size", "64")
    assert code == 0, text
    said = [line.removeprefix("override: ") for line in text.splitlines() if line.startswith("override: ")]
    new = [name for name in vars(appo_atari_replay.Args()) if name not in vars(appo_atari.Args())]
    assert said == ["file appo_atari.py -> appo_atari_replay.py", "total_timesteps 200 -> 300", "batch_size 32 -> 64",
                    *(f"{name} none -> {getattr(appo_atari_replay.Args, name)}" for name in new)]  # fmt: skip
    assert "replay none -> uniform" in said and "replay_share none -> 0.5" in said and len(new) == 9
    assert re.search("resuming .* at step 2[0-9]{2}; .*; nothing to replay yet\n", text), text


@pytest.mark.parametrize("flags, expected", [
    ("--replay-share 0.01", "--replay-share 0.01 makes 8 fresh and 0 replayed rollouts an iteration"),
    ("--replay-share 0.95", "--replay-share 0.95 makes 0 fresh and 8 replayed rollouts an iteration"),
    ("--replay-rollouts 3", "--replay-share 0.5 makes 4 fresh and 4 replayed rollouts an iteration"),
    ("--replay-rollouts 1000000000", "1,000,000,048 slots of rollouts need [0-9,]+ MiB of [0-9,]+ that are free, a fifth of which must remain: "
                                     "use a smaller --replay-rollouts or fewer environments"),
    ("--sync --batch-size 1024", r"--sync \(which --num-workers 0 implies\) needs a fresh rollout of every row: 1 batches of 1024 samples "
                                 "have 16 of these, not 32"),
    ("--sync --num-batches-per-epoch 5", r"--sync \(which --num-workers 0 implies\) needs a fresh rollout of every row: 5 batches of 416 samples "
                                         "have 35 of these, not 32"),
    ("--replay-candidates 0.5", "--replay-candidates 0.5 is out of range: 1 to inf"),
    ("--replay-share 1", "--replay-share 1.0 is out of range: 0 to 0.95"),
    ("--policy-cloning-coef -1", "--policy-cloning-coef -1.0 is out of range: 0 to inf"),
    ("--replay-candidates 3", "--replay-candidates is for --replay attentive or elite, not uniform"),
    ("--elite-strategy 2", "--elite-strategy is for --replay attentive or elite, not uniform"),
    ("--replay-distance kl", "--replay-distance is for --replay attentive or elite, not uniform"),
])  # fmt: skip
def test_what_is_refused(flags, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["appo_atari_replay.py", "--device", "cpu", "--num-workers", "2", *flags.split()])
    monkeypatch.setattr("signal.signal", lambda *handler: None)  # one of these begins to train
    assert appo_atari_replay.main() == 2
    error = capsys.readouterr().err
    assert re.match(f"error: {expected}", error) and error.count("\n") == 1, error


def test_a_containers_memory_counts(appo, monkeypatch):
    """With the slots that are KEPT and the features that are compared; what cannot help is not advised."""
    real, limit = Path.read_text, 2**20
    monkeypatch.setattr(Path, "read_text", lambda path: str(limit) if path.name == "memory.max" else real(path))

    def refused(**settings) -> tuple[int, int, str]:
        learner = make_learner(appo, **settings)
        with pytest.raises(appo.UserError) as error:
            appo.check_memory(learner.args, appo.spaces_of(learner.args), learner.agent.state_size)
        found = re.match(
            "([0-9]+) slots of rollouts need ([0-9]+) MiB of 1 that are free, .*: use a smaller (--.*) or fewer", str(error.value)
        )
        return int(found[1]), int(found[2]), found[3]

    uniform = refused(replay_rollouts=500)
    elite = refused(replay_rollouts=500, replay="elite", hidden_size=512)
    assert uniform[::2] == elite[::2] == (4 + 8 + 500, "--replay-rollouts")
    assert elite[1] - uniform[1] == round(512 * 5 * 4 * 512 / 2**20), "slots x steps x float32 x units"
    none = refused(replay_rollouts=500, replay_share=0.0, num_envs_per_worker=100)
    assert none[::2] == (100 + 100, "--batch-size") and none[1] < uniform[1]
