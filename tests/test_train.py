"""The real `train` over the counting environment, in this process: versions, lag, what a resumed run goes on with."""

import builtins
import contextlib
import copy
import gc
import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch


@pytest.fixture
def appo(counting):
    return counting


@pytest.fixture
def train(appo, tmp_path):
    """Trains, or goes on, in a folder of its own; returns the exit code."""

    def train(**settings) -> int:
        small = dict(num_workers=0, num_envs_per_worker=4, rollout=5, hidden_size=32, total_timesteps=200, device="cpu",
                     inference_threads=1, learner_threads=1)  # fmt: skip
        gc.collect()  # the log of the run before it in this process
        return appo.train(appo.Args(**small | settings), tmp_path / "run")

    return train


@pytest.fixture
def iterations(appo, monkeypatch):
    """Of every iteration: the learner's version, the versions and slots of the batch, the metrics, and the batch's environments."""
    seen, iterate = [], appo.Learner.iterate

    def spy(self, slots):
        r = self.inference.rollouts
        before = self.version, r.versions[:, slots].copy(), slots.tolist()
        environments = r.obs["vector"][0, slots, 0].int().tolist()
        metrics = iterate(self, slots)
        seen.append((*before, metrics, environments))
        return metrics

    monkeypatch.setattr(appo.Learner, "iterate", spy)
    return seen


@pytest.mark.parametrize("workers, splits", [(2, 2), (0, 2)])
def test_sync_has_no_lag(train, iterations, workers, splits):
    """Every sample of an iteration is by the newest version, every slot is used, and all rows have the same share. What acted is what
    learns: all ratios are 1, with statistics of the inputs that have moved since the last iteration."""
    rows = max(1, workers) * 4
    assert train(num_workers=workers, worker_num_splits=splits, sync=True, total_timesteps=600, precision="float32") == 0
    learned = [metrics for *_, metrics, _ in iterations if "losses/approx_kl" in metrics]
    assert len(learned) == len(iterations) - 1 > 5
    assert all(metrics["losses/approx_kl"] < 1e-5 and metrics["losses/clipfrac"] == 0 for metrics in learned)
    for version, versions, slots, _, environments in iterations:
        assert (versions == version).all()
        assert sorted(slots) == list(range(rows)) and len(set(environments)) == rows
    assert [version for version, *_ in iterations] == list(range(len(iterations)))


def test_every_published_policy_has_a_version_of_its_own(appo, train, iterations, monkeypatch):
    """Two epochs: a version each. The first batch only initialises the statistics of the inputs: a version, too."""
    published, publish = [], appo.ActingPolicy.publish

    def spy(self, version):
        published.append((version, [tensor.clone() for tensor in self.learned]))
        publish(self, version)

    monkeypatch.setattr(appo.ActingPolicy, "publish", spy)
    assert train(num_epochs=2) == 0
    assert len(published) == 2 * len(iterations) - 1 > 10 and [version for version, _ in published] == list(range(1, len(published) + 1))
    for (_, one), (_, two) in itertools.pairwise(published):
        assert any((a != b).any() for a, b in zip(one, two)), "no policy is published twice"


def test_an_iteration_of_several_steps(appo, train, iterations, tmp_path, capsys):
    """A version for each, and lag 0 with --sync as before. What is collected is said, and what each step learns from."""
    assert train(sync=True, num_batches_per_epoch=2, num_epochs=2) == 0
    assert "20 samples an iteration, 10 (2 rollouts of 5 steps) an optimiser step; expected lag up to 0.0" in capsys.readouterr().out
    assert [version for version, *_ in iterations] == [0, *range(1, 4 * len(iterations) - 4, 4)] and len(iterations) > 9
    for version, versions, slots, _, environments in iterations:
        assert (versions == version).all() and sorted(slots) == [0, 1, 2, 3] and len(set(environments)) == 4
    agent, args, _ = appo.load_agent(tmp_path / "run", num_envs_per_worker=1)
    assert args.num_batches_per_epoch == 1, "any number of environments can be played"


def test_a_batch_without_a_usable_sample_is_no_update(appo):
    """Nothing but resets, or all too old: nothing is published, and it is counted."""
    args = appo.resolve(appo.Args(num_workers=0, num_envs_per_worker=4, rollout=5, hidden_size=32, device="cpu", max_policy_lag=3))
    spaces, device = appo.spaces_of(args), torch.device("cpu")
    agent = appo.Agent(spaces, args)
    inference = appo.Inference(args, spaces, agent, device)
    learner, slots = appo.Learner(args, agent, inference, device), np.arange(4)
    r = inference.rollouts
    r.first[:] = True
    before = [weight.clone() for weight in agent.state_dict().values()]
    assert learner.iterate(slots) == {}
    assert (learner.skipped, learner.version, learner.global_step, inference.acting.current.version) == (1, 0, 0, 0)
    r.first[:], r.versions[:] = False, -3
    assert learner.iterate(slots)["lag/masked"] == 1
    assert (learner.skipped, learner.version, learner.global_step, inference.acting.current.version) == (2, 0, 20, 0)
    assert all(torch.equal(one, two) for one, two in zip(before, agent.state_dict().values()))
    r.versions[:] = -2
    learner.iterate(slots)
    assert (learner.skipped, learner.version, learner.global_step, inference.acting.current.version) == (2, 1, 40, 1)
    assert inference.free.qsize() == 3, "all have given their slots back"


@pytest.mark.parametrize("norm, moves", [(1e-12, False), (0.0, True)])
def test_the_gradient_is_clipped_unless_the_limit_is_0(train, tmp_path, norm, moves):
    """Adam makes a step of any gradient that is large beside its eps of 1e-6. Biases begin at 0."""
    assert train(max_grad_norm=norm) == 0
    assert (newest(tmp_path)["agent"]["actor.bias"].abs().max() > 1e-4) == moves


def checkpoints(folder) -> list:
    return sorted((folder / "run" / "checkpoints").glob("checkpoint_*"))


def newest(folder) -> dict:
    return torch.load(checkpoints(folder)[-1], weights_only=True)


def test_a_finished_run_says_so_and_a_resumed_one_where_it_goes_on(train, tmp_path, capsys):
    assert train() == 0
    before, files = newest(tmp_path), sorted(tmp_path.rglob("*"))
    assert train() == 0
    assert f"has its {before['global_step']:,} steps already; raise --total-timesteps to go on" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == files
    assert train(total_timesteps=400) == 0
    assert f"resuming {tmp_path / 'run'} at step {before['global_step']:,}; learning rate 0.0004\n" in capsys.readouterr().out
    after = newest(tmp_path)
    assert after["global_step"] >= 400 and after["version"] > before["version"]


def test_a_falling_learning_rate_goes_on_where_it_was(appo, train, iterations, tmp_path, capsys, monkeypatch):
    """By the step that was reached; after the end it rises with --total-timesteps, and that is said."""
    settings = dict(anneal_lr=True, learning_rate=1.0, total_timesteps=300)
    with monkeypatch.context() as stopped:
        calls, collect = itertools.count(), appo.Learner.collect
        stopped.setattr(appo.Learner, "collect", lambda self: collect(self) if next(calls) < 5 else None)
        assert train(**settings) == 0
    step = newest(tmp_path)["global_step"]
    assert 0 < step < 300 and train(**settings) == 0
    assert f"at step {step:,}; learning rate {1 - step / 300:.3g}\n" in capsys.readouterr().out
    rates = [metrics["charts/learning_rate"] for *_, metrics, _ in iterations if "charts/learning_rate" in metrics]
    assert rates[4] == pytest.approx(1 - step / 300), "the first session made four updates"
    assert rates == sorted(rates, reverse=True) and rates[0] > 0.9 and rates[-1] < 0.1
    end = newest(tmp_path)["global_step"]
    assert train(**settings | dict(total_timesteps=600)) == 0
    assert f"at step {end:,}; learning rate {1 - end / 600:.3g}\n" in capsys.readouterr().out


def test_statistics_of_the_inputs_are_of_the_valid_samples(appo, train, tmp_path, monkeypatch):
    """Of every fourth step."""
    sums, gather = np.zeros(2), appo.Learner.gather

    def spy(self, slots):
        batch, lags = gather(self, slots)
        valid = ~batch.first[1:][::4]
        sums[:] += int(valid.sum()), float(batch.obs["vector"][:-1:4, :, 2][valid].sum())  # the number of the step in its episode
        return batch, lags

    monkeypatch.setattr(appo.Learner, "gather", spy)
    assert train() == 0
    agent = newest(tmp_path)["agent"]
    assert agent["normalizers.vector.count"] == agent["normalizers.obs.count"] == sums[0] > 50
    assert agent["normalizers.vector.mean"][2].item() == pytest.approx(sums[1] / sums[0], rel=1e-4)


def test_a_resumed_run_goes_on_with_what_was_saved(appo, train, tmp_path, monkeypatch):
    """The weights, Adam's moments, and the policy that acts."""
    assert train() == 0
    saved, seen, iterate = newest(tmp_path), [], appo.Learner.iterate

    def spy(self, slots):
        acting = self.inference.acting.current
        found = self.agent.state_dict(), acting.agent.state_dict(), self.optimizer.state_dict()["state"], acting.version
        seen.append(copy.deepcopy(found))
        return iterate(self, slots)

    monkeypatch.setattr(appo.Learner, "iterate", spy)
    assert train(total_timesteps=400) == 0
    agent, acting, moments, version = seen[0]
    assert moments and version == saved["version"]
    for got, expected in ((agent, saved["agent"]), (acting, saved["agent"]), (moments, saved["optimizer"]["state"])):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_best_is_kept(appo, train, tmp_path, monkeypatch):
    clock, means = itertools.count(0.0, 40.0), itertools.chain([1.0, 5.0, 3.0], itertools.repeat(2.0))
    monkeypatch.setattr(appo, "time", SimpleNamespace(**vars(time) | dict(monotonic=lambda: next(clock))))
    monkeypatch.setattr(appo.Reporter, "update", lambda self, metrics: next(means))
    assert train() == 0
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.pth", weights_only=True)
    assert (best["best_return"], best["version"]) == (5.0, 2) and newest(tmp_path)["best_return"] == 5.0


def test_the_last_two_are_kept_and_whole(appo, train, tmp_path, monkeypatch):
    assert train(save_every_sec=0.0) == 0
    files, version = checkpoints(tmp_path), newest(tmp_path)["version"]
    assert len(files) == 2 and version - 4 < int(files[0].name[11:20]) < int(files[1].name[11:20]) == version

    def full(content, file):
        with contextlib.nullcontext(file) if hasattr(file, "write") else open(file, "wb") as file:
            file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(appo.torch, "save", full)
    with pytest.raises(OSError):
        train(total_timesteps=400)
    assert checkpoints(tmp_path) == files and newest(tmp_path)["version"] == version


def test_evaluation_keeps_its_state_and_plays_as_told(appo, train, tmp_path, monkeypatch):
    assert train() == 0
    folder, passes, played = tmp_path / "run", [], []
    forward, step = appo.Agent.forward, appo.WorkerEnvs.step

    def spy(self, obs, first, state, *rest):
        passes.append((state, *forward(self, obs, first, state, *rest)))
        return passes[-1][1:]

    monkeypatch.setattr(appo.Agent, "forward", spy)
    monkeypatch.setattr(appo.WorkerEnvs, "step", lambda self, split: (played.append(self.mailbox.action.copy()), step(self, split)))
    args = appo.Args(**appo.saved_args(folder) | dict(eval_episodes=20, eval_deterministic=True))
    assert len(appo.evaluate(args, folder)) == 20
    assert len(passes) == len(played) > 5
    for (_, _, _, state), (then, *_) in itertools.pairwise(passes):
        assert torch.equal(state, then)
    for (_, logits, *_), actions in zip(passes, played):
        assert actions.T.tolist() == [head.argmax(-1).tolist() for head in logits[0].split((3, 4), -1)]
    torch.save(newest(tmp_path) | dict(global_step=7), folder / "checkpoints" / "best.pth")
    assert appo.load_agent(folder, "best")[2] == 7 and appo.load_agent(folder)[2] >= 200


@pytest.mark.parametrize("damaged", [False, True])
def test_a_best_checkpoint_is_not_beaten_by_a_worse_one_after_a_crash(train, tmp_path, damaged):
    """It may be newer than the latest: a run that is killed has no time to write that. A damaged one does not matter."""
    assert train() == 0
    best = tmp_path / "run" / "checkpoints" / "best.pth"
    torch.save(newest(tmp_path) | dict(best_return=1e6), best)
    if damaged:
        best.write_bytes(best.read_bytes()[:1000])
    assert train(total_timesteps=400) == 0
    assert newest(tmp_path)["best_return"] == (-float("inf") if damaged else 1e6)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_does_not_play_the_same_games_again(appo, train, iterations, workers):
    """The counting environment is named after its seed."""
    sessions = []
    for steps in (200, 400, 600):
        iterations.clear()
        assert train(num_workers=workers, batch_size=20, total_timesteps=steps) == 0
        sessions.append({environment for *_, environments in iterations for environment in environments})
    assert len(set.union(*sessions)) == 3 * 4


def test_a_time_limit_of_no_seconds_is_one(appo, tmp_path):
    def collect():
        assert time.monotonic() >= learner.deadline

    learner = SimpleNamespace(version=0, global_step=0, collect=collect, sum_counts=lambda **counts: None)
    appo.learn(appo.Args(train_for_seconds=0.0), tmp_path, learner, None)


def test_nothing_new_is_not_saved(appo, train, tmp_path, monkeypatch):
    """Stopped before the first update: an evaluation would play an untrained network."""
    with monkeypatch.context() as stopped:
        stopped.setattr(appo.Learner, "collect", lambda self: None)
        assert train() == 0 and checkpoints(tmp_path) == []
    assert train() == 0
    files = checkpoints(tmp_path)
    monkeypatch.setattr(appo.Learner, "collect", lambda self: None)
    assert train(total_timesteps=400) == 0 and checkpoints(tmp_path) == files


@pytest.mark.parametrize("error, saves", [("FloatingPointError", True), ("UserError", True), ("RuntimeError", False), ("KeyboardInterrupt", False)])
def test_what_nobody_foresaw_does_not_save(appo, train, tmp_path, monkeypatch, error, saves):
    """Its weights may be what is wrong, and an older good checkpoint would go."""
    update, count = appo.Reporter.update, itertools.count()
    error = getattr(appo, error, None) or getattr(builtins, error)

    def fail(self, metrics):
        if next(count) == 5:
            raise error("now")
        return update(self, metrics)

    monkeypatch.setattr(appo.Reporter, "update", fail)
    with pytest.raises(error):
        train()
    assert bool(checkpoints(tmp_path)) == saves


def test_an_evaluation_gives_the_last_action_and_reward_too(appo, train, tmp_path, monkeypatch):
    assert train(last_action_reward=True) == 0
    seen, forward = [], appo.Agent.forward

    def spy(self, obs, first, state, *rest):
        seen.append((obs["last_action_reward"][0].clone(), first[0].clone()))
        return forward(self, obs, first, state, *rest)

    monkeypatch.setattr(appo.Agent, "forward", spy)
    assert len(appo.evaluate(appo.Args(**appo.saved_args(tmp_path / "run") | dict(eval_episodes=20)), tmp_path / "run")) == 20
    given, first = map(torch.cat, zip(*seen))
    assert not given[first].any() and (given[~first][:, :7].sum(-1) == 2).all() and (~first).sum() > 20


def test_an_evaluation_that_fails_closes_its_environments(appo, train, tmp_path, monkeypatch):
    assert train() == 0
    closed = []
    monkeypatch.setattr(appo.WorkerEnvs, "close", lambda self: closed.append(self))
    monkeypatch.setattr(appo.WorkerEnvs, "step", lambda self, split: [][0])
    with pytest.raises(IndexError):
        appo.evaluate(appo.Args(**appo.saved_args(tmp_path / "run")), tmp_path / "run")
    assert len(closed) == 1
