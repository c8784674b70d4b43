"""The real `train` in this process, over the counting environment and in the base: versions, lag, what a resumed run goes on with."""

import copy
import gc
import io
import itertools
import json
import os
import re
import signal
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from edited import COUNTING, REPORTS, load, with_envs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

import appo_gym

BASE = dict(num_workers=0, num_envs=4, rollout=8, batch_size=16, total_timesteps=300, device="cpu")


@pytest.fixture
def appo(counting):
    return counting


@pytest.fixture
def train(appo, tmp_path):
    """Trains, or goes on, in a folder of its own; returns the exit code."""

    def train(appo=appo, **settings) -> int:
        small = dict(num_workers=0, num_envs_per_worker=4, rollout=5, hidden_size=32, total_timesteps=200, device="cpu")
        small = BASE if appo is appo_gym else small
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return appo.train(appo.Args(**small | dict(train_dir=str(tmp_path), experiment="run") | settings), tmp_path / "run")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return train


@pytest.fixture
def often(appo, monkeypatch):
    """A report after every iteration, as if five seconds had passed."""
    update = appo.Reporter.update

    def report(self, metrics):
        self.last["seconds"] -= 5
        return update(self, metrics)

    monkeypatch.setattr(appo.Reporter, "update", report)


@pytest.fixture
def iterations(appo, monkeypatch):
    """Of every iteration: the version before it, the versions and slots of its samples, the metrics, and its environments."""
    seen, iterate = [], appo.Learner.iterate

    def spy(self, blocks):
        r, slots = self.inference.rollouts, np.r_[*blocks]
        before = self.inference.version, r.versions[:, slots].copy(), slots.tolist()
        environments = r.obs["vector"][0, slots, 0].int().tolist()
        metrics = iterate(self, blocks)
        seen.append((*before, metrics, environments))
        return metrics

    monkeypatch.setattr(appo.Learner, "iterate", spy)
    return seen


def stop_after(appo, monkeypatch, iterations: int, error=KeyboardInterrupt) -> None:
    """As a signal, or an error of the inference thread."""
    calls, collect = itertools.count(), appo.Learner.collect

    def stops(self):
        if next(calls) == iterations:
            raise error("now")
        return collect(self)

    monkeypatch.setattr(appo.Learner, "collect", stops)


def learner_of(appo, **settings):
    """A Learner and its Inference, without threads."""
    args = appo.Args(num_workers=0, num_envs_per_worker=4, rollout=5, hidden_size=32, device="cpu", **settings)
    spaces = appo.spaces_of(args)
    agent = appo.Agent(spaces, args)
    return appo.Learner(args, agent, appo.Inference(args, spaces, agent, torch.device("cpu")))


def checkpoints(folder: Path) -> list[Path]:
    return [*(folder / "run").glob("latest.pth"), *sorted((folder / "run" / "checkpoints").glob("checkpoint_*"))]


def newest(folder: Path) -> dict:
    return torch.load(checkpoints(folder)[-1], weights_only=True)


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "run"), size_guidance=dict(scalars=0)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


# ---- versions and lag


@pytest.mark.parametrize("workers, splits", [(2, 2), (0, 2)])
def test_sync_has_no_lag(train, iterations, workers, splits):
    """Every sample of an iteration is by the newest version, every slot is used, and all rows have the same share. What acted is what
    learns: all ratios are 1, with statistics of the inputs that have moved since the last iteration."""
    rows = max(1, workers) * 4
    assert train(num_workers=workers, worker_num_splits=splits, sync=True, total_timesteps=600, precision="float32") == 0
    assert len(iterations) > 5
    for version, versions, slots, metrics, environments in iterations:
        assert (versions == version).all() and metrics["lag/max"] == 0
        assert sorted(slots) == list(range(rows)) and len(set(environments)) == rows
        assert metrics["losses/approx_kl"] < 1e-5 and metrics["losses/clipfrac"] == 0
    assert [version for version, *_ in iterations] == list(range(len(iterations)))


def test_every_published_policy_has_a_version_of_its_own(appo, train, iterations, monkeypatch):
    """Two epochs: a version each. The first batch only initialises the statistics of the inputs: a version, too."""
    published, publish = [], appo.Inference.publish

    def spy(self, version):
        weights = [learned.clone() for pairs in self.copies.values() for _, learned in pairs]
        published.append((version, weights, weights[0]))
        publish(self, version)

    monkeypatch.setattr(appo.Inference, "publish", spy)
    assert train(num_epochs=2) == 0
    assert len(published) == 2 * len(iterations) > 10 and [version for version, *_ in published] == list(range(1, len(published) + 1))
    for (_, one, _), (_, two, _) in itertools.pairwise(published):
        assert any((a != b).any() for a, b in zip(one, two)), "no policy is published twice"


def test_the_first_batch_only_initialises_the_inputs_statistics(appo, train, monkeypatch):
    built, build = [], appo.Learner.__init__

    def spy(self, args, agent, inference):
        build(self, args, agent, inference)
        built.append((agent, copy.deepcopy(agent.state_dict())))

    monkeypatch.setattr(appo.Learner, "__init__", spy)
    stop_after(appo, monkeypatch, 1)
    assert train() == 130
    (agent, before), *_ = built
    changed = {name for name, now in agent.state_dict().items() if (now != before[name]).any()}
    assert changed and all(name.startswith("normalizers.") for name in changed)


def test_an_iteration_of_several_steps(train, iterations):
    """A version for each, and lag 0 at the first of them with --sync as before."""
    assert train(sync=True, batch_size=10, num_batches_per_epoch=2, num_epochs=2) == 0
    assert [version for version, *_ in iterations] == list(range(0, 4 * len(iterations), 4)) and len(iterations) > 9
    for version, versions, slots, _, environments in iterations:
        assert (versions == version).all() and sorted(slots) == [0, 1, 2, 3] and len(set(environments)) == 4


def test_the_lag_is_that_of_the_samples(train, iterations):
    """What is collected ahead bounds it: at most one iteration FULL, one FILLING for each group, one LEARNING; but for an actor that the
    machine has held up."""
    assert train(num_workers=2, batch_size=20, total_timesteps=1000) == 0
    assert len(iterations) > 20
    longest = [(version - versions).max() for version, versions, *_ in iterations]
    assert all(metrics["lag/max"] <= lag for lag, (*_, metrics, _) in zip(longest, iterations)) and np.median(longest) <= 5
    assert max(metrics["lag/max"] for *_, metrics, _ in iterations) > 0


def test_a_batch_without_a_usable_sample_changes_no_weight(appo):
    """Nothing but resets, or all too old: Adam's momentum would move them."""
    learner = learner_of(appo, max_policy_lag=3)
    r, inference, blocks = learner.inference.rollouts, learner.inference, [slice(0, 4)]
    r.logprobs[:], r.values[:], r.rewards[:] = -1.0, 0.0, 1.0
    inference.version, r.versions[:] = 2, 2
    learner.iterate(blocks)

    def weights():
        return [weight.clone() for weight in learner.agent.parameters()]

    before = weights()
    r.first[:] = True
    metrics = learner.iterate(blocks)
    assert (learner.global_step, inference.version) == (20, 4) and all(np.isfinite(value) for value in metrics.values())
    assert all(torch.equal(one, two) for one, two in zip(before, weights()))
    r.first[:], r.versions[:] = False, 1
    assert learner.iterate(blocks)["lag/masked"] == 1
    assert (learner.global_step, inference.version) == (40, 5)
    assert all(torch.equal(one, two) for one, two in zip(before, weights()))
    r.versions[:] = 3
    assert learner.iterate(blocks)["lag/masked"] == 0
    assert not all(torch.equal(one, two) for one, two in zip(before, weights()))
    assert [inference.returned.recv() for _ in range(4)] == 4 * [blocks], "all have been given back"


def test_an_iteration_of_many_steps_masks_none_of_its_own_samples(appo):
    """Their age is that at its beginning."""
    learner = learner_of(appo, max_policy_lag=3, num_epochs=5)
    r = learner.inference.rollouts
    r.logprobs[:], r.values[:], r.rewards[:] = -1.0, 0.0, 1.0
    learner.inference.version, r.versions[:] = 2, 2
    metrics = learner.iterate([slice(0, 4)])
    assert learner.inference.version > 5 and metrics["lag/masked"] == 0 and metrics["losses/grad_norm"] > 0


@pytest.mark.parametrize("norm, moves", [(1e-12, False), (0.0, True)])
def test_the_gradient_is_clipped_unless_the_limit_is_0(train, tmp_path, norm, moves):
    """Adam makes a step of any gradient that is large beside its eps of 1e-6. Biases begin at 0."""
    assert train(max_grad_norm=norm) == 0
    assert (newest(tmp_path)["agent"]["policy.bias"].abs().max() > 1e-4) == moves


# ---- a resumed run


@pytest.mark.parametrize("base", [True, False])
def test_a_finished_run_says_so_and_a_resumed_one_where_it_goes_on(appo, train, tmp_path, capsys, base):
    appo = appo_gym if base else appo
    assert train(appo) == 0
    before, files = newest(tmp_path), sorted(tmp_path.rglob("*"))
    last = f"{before['global_step']:,} steps, return [-.0-9]+\nplay: python evaluate.py {tmp_path / 'run'}( --env-id .*)?\n"
    assert re.search(f"^done: {last}", capsys.readouterr().out, re.M)
    assert train(appo) == 0
    assert capsys.readouterr().out.endswith("Already complete: raise --total-timesteps to continue.\n")
    assert sorted(tmp_path.rglob("*")) == files
    assert train(appo, total_timesteps=600) == 0
    assert f"resuming {tmp_path / 'run'} at step {before['global_step']:,}\n" in capsys.readouterr().out
    after = newest(tmp_path)
    assert after["global_step"] >= 600 and after["version"] > before["version"]


def test_a_falling_learning_rate_goes_on_where_it_was(appo, train, iterations, tmp_path, monkeypatch):
    """By the step that was reached."""
    settings = dict(anneal_lr=True, learning_rate=1.0, total_timesteps=300)
    with monkeypatch.context() as stopped:
        stop_after(appo, stopped, 4)
        assert train(**settings) == 130
    step = newest(tmp_path)["global_step"]
    assert 0 < step < 300 and train(**settings) == 0
    rates = [metrics["charts/learning_rate"] for *_, metrics, _ in iterations]
    assert rates[0] == 1.0 and rates[4] == pytest.approx(1 - step / 300), "the first session made four iterations"
    assert rates == sorted(rates, reverse=True) and 0 < rates[-1] < 0.1


@pytest.mark.parametrize("base", [True, False])
def test_a_resumed_run_goes_on_with_what_was_saved(appo, train, tmp_path, monkeypatch, base):
    """The weights, Adam's moments, and the policy that acts. A learning rate that was typed is used."""
    appo = appo_gym if base else appo
    assert train(appo) == 0
    saved, seen, iterate = newest(tmp_path), [], appo.Learner.iterate

    def spy(self, blocks):
        acting = self.inference.agent.state_dict()
        found = self.agent.state_dict(), acting, self.optimizer.state_dict()["state"], self.inference.version
        seen.append(copy.deepcopy(found))
        metrics = iterate(self, blocks)
        assert metrics["charts/learning_rate"] == self.optimizer.param_groups[0]["lr"] == 0.001
        return metrics

    monkeypatch.setattr(appo.Learner, "iterate", spy)
    assert train(appo, total_timesteps=600, learning_rate=0.001) == 0
    agent, acting, moments, version = seen[0]
    assert moments and version == saved["version"]
    held = {name: x.to(acting[name].dtype) for name, x in saved["agent"].items()}  # some of it in bfloat16
    for got, expected in ((agent, saved["agent"]), (acting, held), (moments, saved["optimizer"]["state"])):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_does_not_play_the_same_games_again(train, iterations, workers):
    """The counting environment is named after its seed."""
    sessions = []
    for steps in (200, 400, 600):
        iterations.clear()
        assert train(num_workers=workers, batch_size=20, total_timesteps=steps) == 0
        sessions.append({environment for *_, environments in iterations for environment in environments})
    assert len(set.union(*sessions)) == 3 * 4


SMALL = ("--num-workers", 0, "--num-envs-per-worker", 4, "--rollout", 5, "--hidden-size", 32, "--device", "cpu", "--experiment", "run")


def test_what_is_typed_again_overrides_and_the_network_stays(appo, main, tmp_path):
    flags = ("--train-dir", tmp_path, "--experiment", "run", "--total-timesteps")
    assert main(appo, *SMALL, *flags, 200)[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".json", ".pth")}
    code, text = main(appo, *flags, 400, "--hidden-size", 16)
    assert code == 2 and text.endswith(f"error: {tmp_path / 'run'} was made with hidden_size 32, not 16: choose another --experiment\n"), text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".json", ".pth")} == before
    code, text = main(appo, *flags, 400, "--learning-rate", 0.001)
    assert code == 0 and re.findall("^override: (.*)", text, re.M) == ["total_timesteps 200 -> 400", "learning_rate 0.0004 -> 0.001"]
    args = json.loads((tmp_path / "run" / "cfg.json").read_text())["args"]
    assert (args["learning_rate"], args["hidden_size"]) == (0.001, 32) and newest(tmp_path)["global_step"] >= 400


@pytest.mark.parametrize("base", [True, False])
def test_a_run_of_another_version_of_the_file_is_refused(appo, main, tmp_path, base):
    """And the flags that differ are named."""
    appo = appo_gym if base else appo
    flags = ("--train-dir", tmp_path, "--experiment", "run", "--total-timesteps", 100, "--num-workers", 0, "--device", "cpu")
    assert main(appo, *flags)[0] == 0
    path = tmp_path / "run" / "cfg.json"
    cfg = json.loads(path.read_text())
    cfg["args"]["flag_of_old"] = 7
    path.write_text(json.dumps(cfg))
    code, text = main(appo, *flags)
    assert code == 2 and re.fullmatch("error: .*/run/cfg.json is damaged or was written by another version of this file: .*flag_of_old.*\n", text), text


# ---- checkpoints


def test_the_best_is_kept(appo, tmp_path):
    """By the mean return of the last 100 episodes; not of fewer. A resumed run knows how good it was."""
    learner, best = learner_of(appo), tmp_path / "checkpoints" / "best.pth"
    learner.inference.episodes.extend([[9.0, 1.0]] * 99)
    appo.save_checkpoint(tmp_path, learner)
    assert not best.exists()
    for step, score, kept in ((1, 1.0, 1), (2, 5.0, 2), (3, 3.0, 2), (4, float("nan"), 2)):
        learner.global_step = step
        learner.inference.episodes.extend([[score, 1.0]] * 100)
        appo.save_checkpoint(tmp_path, learner)
        assert torch.load(best, weights_only=True)["global_step"] == kept
    resumed = learner_of(appo)
    appo.load_checkpoint(tmp_path, resumed)
    assert (resumed.best_return, resumed.global_step) == (5.0, 4)
    resumed.inference.episodes.extend([[4.0, 1.0]] * 100)
    appo.save_checkpoint(tmp_path, resumed)
    assert torch.load(best, weights_only=True)["global_step"] == 2
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_best_is_written_again_where_writing_has_failed(appo, tmp_path, monkeypatch):
    learner, replace = learner_of(appo), os.replace
    learner.inference.episodes.extend([[5.0, 1.0]] * 100)

    def full(source, target):
        if target.name == "best.pth":
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as context:
        context.setattr(os, "replace", full)
        with pytest.raises(OSError):
            appo.save_checkpoint(tmp_path, learner)
    appo.save_checkpoint(tmp_path, learner)
    assert torch.load(tmp_path / "checkpoints" / "best.pth", weights_only=True)["best_return"] == learner.best_return == 5.0


def test_a_damaged_one_is_not_kept_in_the_place_of_a_good_one(appo, tmp_path):
    """It has more steps than the one that the run goes on with, and one is to be kept."""
    learner, folder = learner_of(appo, keep_checkpoints=1), tmp_path / "checkpoints"
    for step in (800, 1000):
        learner.global_step = step
        appo.save_checkpoint(tmp_path, learner)
    (folder / "checkpoint_000000001000.pth").write_bytes(b"damaged")
    os.utime(folder / "checkpoint_000000001000.pth", (1, 1))
    learner.global_step = 850
    appo.save_checkpoint(tmp_path, learner)
    assert [path.name for path in folder.iterdir()] == ["checkpoint_000000000850.pth"]


@pytest.mark.parametrize("keep", [2, 0])
def test_the_last_ones_are_kept(train, iterations, tmp_path, keep):
    """One is written after each iteration, and one at the end."""
    assert train(save_every_sec=0.0, keep_checkpoints=keep) == 0
    found = [torch.load(path, weights_only=True) for path in checkpoints(tmp_path)]
    assert [int(path.stem.split("_")[1]) for path in checkpoints(tmp_path)] == [content["global_step"] for content in found]
    last = len(iterations)
    assert [content["version"] for content in found] == list(range(last - 1 if keep else 1, last + 1)) and last > 9


@pytest.mark.parametrize("seed", range(5))
def test_statistics_begin_with_the_first_batch_of_short_rollouts_too(appo, train, tmp_path, monkeypatch, seed):
    """They are of every fourth step, and a rollout has one."""
    stop_after(appo, monkeypatch, 1)
    assert train(rollout=1, seed=seed) == 130 and newest(tmp_path)["agent"]["normalizers.vector.count"] > 0


def test_checkpoints_come_every_so_often(appo, train, tmp_path, monkeypatch):
    """An iteration takes a hundred seconds."""
    clock, iterate = [0.0], appo.Learner.iterate
    monkeypatch.setattr(appo, "time", SimpleNamespace(**vars(time) | dict(monotonic=lambda: clock[0])))

    def slow(self, blocks):
        clock[0] += 100
        return iterate(self, blocks)

    monkeypatch.setattr(appo.Learner, "iterate", slow)
    saved, save = [], appo.save_checkpoint
    monkeypatch.setattr(appo, "save_checkpoint", lambda folder, learner: (saved.append(learner.inference.version), save(folder, learner)))
    assert train(save_every_sec=250.0) == 0
    last = newest(tmp_path)["version"]
    assert saved == [*range(3, last + 1, 3), last] and last > 9


def test_nothing_new_is_not_saved(appo, train, tmp_path, monkeypatch, capsys):
    """Stopped before the first update: an evaluation would play an untrained network."""
    with monkeypatch.context() as stopped:
        stop_after(appo, stopped, 0)
        assert train() == 130 and checkpoints(tmp_path) == []
    left = "stopped: 0 steps, no episode has ended\ncontinue: the same command with --experiment run\n"
    assert capsys.readouterr().out.endswith(f"\n{left}")
    assert train() == 0
    files = checkpoints(tmp_path)
    stop_after(appo, monkeypatch, 0)
    assert train(total_timesteps=400) == 130 and checkpoints(tmp_path) == files


@pytest.mark.parametrize("base", [True, False])
def test_an_error_of_ones_own_is_raised_as_it_is(appo, train, tmp_path, monkeypatch, base):
    """Wherever it comes from; what was learned before is saved."""
    appo = appo_gym if base else appo
    stop_after(appo, monkeypatch, 3, RuntimeError)
    with pytest.raises(RuntimeError, match="now"):
        train(appo)
    assert newest(tmp_path)["version"] == (3 * 8 if base else 3)


def test_of_two_reasons_to_end_the_first_is_told(appo):
    """An actor has died, and the user is impatient."""
    learner = learner_of(appo)
    learner.inference.end_with(appo.UserError("actor 0 died"))
    learner.inference.end_with(KeyboardInterrupt())
    with pytest.raises(BaseException, match="actor 0 died"):
        learner.collect()


@pytest.mark.parametrize("base", [True, False])
def test_an_update_that_is_not_finite_ends_the_run_with_a_sentence(appo, train, main, tmp_path, base):
    """The checkpoint before it is kept: the step before may have spoiled the weights."""
    appo = appo_gym if base else appo
    assert train(appo) == 0
    before = newest(tmp_path)
    code, text = main(appo, "--train-dir", tmp_path, "--experiment", "run", "--learning-rate", 1e30, "--total-timesteps", 1000)
    assert code == 2 and "Traceback" not in text, text
    assert re.search(r"\nerror: (the loss \(\S+\) or its gradient is not finite: check observations and rewards, or try a lower --learning-rate .*|"
                     r"an observation.* is not finite, or its square is not)\n\Z", text), text  # fmt: skip
    assert newest(tmp_path)["version"] == before["version"]


def test_a_truncated_checkpoint_is_passed_over(appo, train, tmp_path, capsys):
    assert train(save_every_sec=0.0) == 0
    before, last = checkpoints(tmp_path)
    step = torch.load(before, weights_only=True)["global_step"]
    last.write_bytes(last.read_bytes()[:1000])
    assert train(total_timesteps=400) == 0
    text = capsys.readouterr().out
    assert f"warning: {last} cannot be read\n" in text and f"resuming {tmp_path / 'run'} at step {step:,}\n" in text
    for path in checkpoints(tmp_path):
        path.write_bytes(path.read_bytes()[:1000])
    files = sorted((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(appo.UserError, match="no checkpoint in .* can be read: move them away to start over"):
        train(total_timesteps=600)
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == files


@pytest.mark.parametrize("base", [True, False])
@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"version https://git-lfs.github.com/spec/v1\n", [1], {"agent": {}}, "other"])
def test_a_file_that_is_no_checkpoint_of_ours_is_a_sentence(appo, train, main, tmp_path, base, content):
    appo = appo_gym if base else appo
    assert train(appo) == 0
    for path in (tmp_path / "run").rglob("*.pth"):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            other = dict(agent={"weight": torch.zeros(3)}, optimizer={}, version=1, global_step=1, best_return=0.0)
            torch.save(other if content == "other" else content, path)
    code, text = main(appo, "--train-dir", tmp_path, "--experiment", "run", "--total-timesteps", 600)
    last = text.splitlines()[-1]
    assert code == 2 and "Traceback" not in text and str(tmp_path / "run") in last
    assert re.match("error: .*(is damaged or belongs to another network|belongs to another network or is damaged|can be read: move them away)", last), text


def test_what_was_waited_for_before_the_first_report_is_no_share_of_it(appo, train, tmp_path, monkeypatch):
    """However long TensorBoard takes to import."""
    init = appo.Reporter.__init__

    def slow(self, *arguments):
        time.sleep(1)
        init(self, *arguments)

    reset = appo.Env.reset
    monkeypatch.setattr(appo.Env, "reset", lambda self, **options: time.sleep(0.5) or reset(self, **options))
    monkeypatch.setattr(appo.Reporter, "__init__", slow)
    monkeypatch.setattr(appo.Reporter, "SECONDS", 0.0)
    assert train() == 0
    shares = [value for _, value in scalars(tmp_path, "stats/inference_idle")]
    assert shares and max(shares) <= 1


# ---- time and reports


@pytest.mark.parametrize("limit, iterations", [(0.0, 1), (250.0, 4)])
def test_a_time_limit_counts_from_the_end_of_the_first_iteration(appo, train, tmp_path, monkeypatch, limit, iterations):
    """An iteration takes a hundred seconds. A time limit of no seconds is one, too."""
    clock, iterate = [0.0], appo.Learner.iterate
    monkeypatch.setattr(appo, "time", SimpleNamespace(**vars(time) | dict(monotonic=lambda: clock[0])))

    def slow(self, blocks):
        metrics = iterate(self, blocks)
        clock[0] += 100
        return metrics

    monkeypatch.setattr(appo.Learner, "iterate", slow)
    assert train(train_for_seconds=limit) == 0
    assert newest(tmp_path)["version"] == iterations


class Eleven(gym.Env):
    """One a step, eleven steps. A kill in every second step, of which the others do not speak."""

    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), gym.spaces.Discrete(3)
    ended = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        Eleven.ended += self.t == 11
        return np.full(2, self.t, np.float32), 1.0, self.t == 11, False, {} if self.t % 2 else {"kills": 2.0}


def test_a_short_run_reports_every_episode_once(train, tmp_path, capsys, monkeypatch):
    """It ends before the first report is due. And a metric of one's own: one name added to EXTRA_METRICS, of what `info` may have."""
    gym.register("Eleven-v0", Eleven)
    monkeypatch.setattr(Eleven, "ended", 0)
    monkeypatch.setattr(appo_gym.Reporter, "SECONDS", 1000)
    monkeypatch.setattr(appo_gym, "EXTRA_METRICS", ("kills",))
    monkeypatch.setattr(appo_gym, "EPISODE", (*appo_gym.EPISODE, "kills"))
    built, build = [], appo_gym.Inference.__init__
    monkeypatch.setattr(appo_gym.Inference, "__init__", lambda self, *given: (build(self, *given), built.append(self))[0])
    assert train(appo_gym, env_id="Eleven-v0", total_timesteps=800) == 0
    (inference,) = built
    episodes, step = list(inference.episodes), newest(tmp_path)["global_step"]
    assert Eleven.ended - 4 <= len(episodes) <= Eleven.ended and 50 < len(episodes) < 100, "at most one of each row was not served any more"
    assert set(map(tuple, episodes)) == {(11.0, 11.0, 10.0)}
    for tag, value in dict(episodic_return=11.0, episodic_length=11.0, kills=10.0).items():
        assert scalars(tmp_path, f"charts/{tag}") == [(step, value)]
    ((reported, sps),) = scalars(tmp_path, "charts/SPS")
    assert reported == step and sps > 0
    text = capsys.readouterr().out
    last = rf"\nstep {step:,}: return 11.00, [\d,]+ steps/s, learner waits \d+%, lag 0.0\n"
    assert re.search(rf"{last}done: {step:,} steps, return 11.00\n", text), text


def test_the_x_axis_after_a_crash(appo, train, often, tmp_path, monkeypatch):
    """A run goes on from its last checkpoint: what was reported after that does not stand beside what comes now."""
    assert train() == 0
    saved = newest(tmp_path)["global_step"]
    with monkeypatch.context() as crashing:
        stop_after(appo, crashing, 8, RuntimeError)
        crashing.setattr(appo, "save_checkpoint", lambda *arguments: None)
        with pytest.raises(RuntimeError, match="now"):
            train(total_timesteps=600)
    before = [step for step, _ in scalars(tmp_path, "charts/SPS")]
    assert before[-1] > saved + 50 and newest(tmp_path)["global_step"] == saved
    assert train(total_timesteps=600) == 0
    after = [step for step, _ in scalars(tmp_path, "charts/SPS")]
    assert after == sorted(set(after)) and after[-1] >= 600
    assert [step for step in after if step <= saved] == [step for step in before if step <= saved], "what came before stays"


@pytest.mark.parametrize("base", [True, False])
def test_nothing_grows(appo, train, tmp_path, monkeypatch, base):
    """Neither tensors nor file descriptors, and no other memory, by as much as one tensor in an update."""
    appo = appo_gym if base else appo
    seen, iterate, count = {}, appo.Learner.iterate, itertools.count()

    def spy(self, blocks):
        if (i := next(count)) in (60, 260):
            gc.collect()
            tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            descriptors = min(len(os.listdir("/proc/self/fd")) for _ in range(5) if not time.sleep(0.02))  # TensorBoard opens its file anew
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen[i] = len(tensors), sum(x.nbytes for x in tensors) / 2**20, descriptors, pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return iterate(self, blocks)

    monkeypatch.setattr(appo.Learner, "iterate", spy)
    settings = dict(num_epochs=1, rollout=4, total_timesteps=4500) if base else dict(batch_size=20, total_timesteps=5500)
    assert train(appo, num_workers=2, **settings) == 0
    one, two = seen[60], seen[260]
    assert two[0] < one[0] + 100 and two[1] < one[1] + 2, "less than half a tensor in an update"
    assert two[2] <= one[2] and two[3] < one[3] + 15, (one, two)


@pytest.fixture
def reporter(appo, tmp_path, monkeypatch):
    """Of a run that is some minutes old, in a terminal of 80 columns."""
    terminal = dict(disable=False, dynamic_ncols=False, ncols=80, file=io.StringIO())
    monkeypatch.setattr(appo, "tqdm", lambda **settings: tqdm(**settings | terminal))
    args = appo.Args(env_id="deadly_corridor")
    learner = SimpleNamespace(inference=SimpleNamespace(counts=Counter(), waited=Counter(), episodes=deque()), args=args, global_step=0)
    reporter = appo.Reporter(args, learner, tmp_path)
    reporter.bar.start_t -= 200
    yield reporter
    reporter.bar.close()
    reporter.writer.close()


def report(reporter, **counts) -> str:
    """Of a window of ten seconds: the last line of the log."""
    reporter.last["seconds"] -= 10
    reporter.learner.inference.counts.update(counts)
    reporter.update({"lag/mean": 1.25})
    return (reporter.folder / "log.txt").read_text().splitlines()[-1]


def test_the_bar_fits_into_80_columns(reporter):
    reporter.learner.inference.episodes.append([-164.114, 10.0])
    reporter.learner.global_step = 30_862
    report(reporter, learner=9, requests=9)
    bar = str(reporter.bar)
    assert len(bar) <= 80 and re.search(r"\d% .* \d:\d\d:\d\d, return -164.11, 12,3\d\d frames/s, limit: environments, lag 1$", bar), bar


@pytest.mark.parametrize("counts, name", [(dict(blocks=4, learner=3, requests=6), "learner"), (dict(blocks=1, learner=3, requests=6), "environments"),
                                          (dict(blocks=1, learner=3, requests=4), "inference")])  # fmt: skip
def test_the_limit_is_named(reporter, counts, name):
    assert report(reporter, **counts).endswith(f", limit: {name}, lag 1")


@pytest.mark.parametrize("slow", ["learner", "environments", "inference"])
def test_what_is_slow_is_named(tmp_path_factory, train, tmp_path, monkeypatch, slow):
    """Of a real pipeline, in which one part sleeps."""
    line = "        self.count += 1\n"
    envs = COUNTING.replace(line, f"{line}        time.sleep(0.02)\n") if slow == "environments" else COUNTING
    appo = load(with_envs(tmp_path_factory.mktemp(slow), f"appo_slow_{slow}", envs, REPORTS))
    if slow != "environments":
        cls, name = (appo.Learner, "update") if slow == "learner" else (appo.Inference, "act")
        usual = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *arguments, **named: (usual(*arguments, **named), time.sleep(0.1))[0])
    usual_report, reports = appo.Reporter.report, itertools.count(1)

    def stops(self):
        usual_report(self)
        if next(reports) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(appo.Reporter, "report", stops)
    assert train(appo, num_workers=2, batch_size=20, total_timesteps=10**6) == 130
    named = re.findall("limit: (.*),", (tmp_path / "run" / "log.txt").read_text())[1:]  # the first one has the start in it
    assert Counter(named).most_common(1)[0][0] == slow, named


def test_a_first_update_that_is_long_in_coming_says_what_it_waits_for(tmp_path_factory, train, tmp_path, capsys):
    slow = COUNTING.replace("        self.count += 1\n", "        self.count += 1\n        time.sleep(0.5)\n")
    assert train(load(with_envs(tmp_path_factory.mktemp("slow"), "appo_slow_first", slow)), total_timesteps=1) == 0  # 5 steps of 4 environments
    assert re.search(r"^4 of 4 environments have started, (12|16|20) steps collected$", capsys.readouterr().out, re.M)
