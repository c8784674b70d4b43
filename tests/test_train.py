"""The real `train` over the counting environment, in this process: versions, lag, what a resumed run goes on with."""

import builtins
import contextlib
import copy
import gc
import importlib.metadata
import io
import itertools
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from edited import COUNTING, REPORTS, load, with_envs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm


@pytest.fixture
def appo(counting):
    return counting


@pytest.fixture
def train(appo, tmp_path):
    """Trains, or goes on, in a folder of its own; returns the exit code."""

    def train(appo=appo, **settings) -> int:
        small = dict(num_workers=0, num_envs_per_worker=4, rollout=5, hidden_size=32, total_timesteps=200, device="cpu",
                     inference_threads=1, learner_threads=1)  # fmt: skip
        gc.collect()  # the log of the run before it in this process
        return appo.train(appo.Args(**small | settings), tmp_path / "run")

    return train


@pytest.fixture
def often(appo, monkeypatch):
    """A report after every iteration, as if five seconds had passed."""
    update = appo.Reporter.update

    def report(self, metrics):
        self.last["time"] -= 5
        return update(self, metrics)

    monkeypatch.setattr(appo.Reporter, "update", report)


@pytest.fixture
def prepared(appo, monkeypatch):
    """`train` does all that comes before the first step, and nothing more."""
    monkeypatch.setattr(appo, "sampling", lambda inference, actors: contextlib.nullcontext())
    monkeypatch.setattr(appo, "learn", lambda args, checkpoints, learner, reporter: reporter.writer.close())


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
    assert inference.released.qsize() == 3, "all have given their slots back"


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
    held = {name: x.to(acting[name].dtype) for name, x in saved["agent"].items()}  # some of it in bfloat16
    for got, expected in ((agent, saved["agent"]), (acting, held), (moments, saved["optimizer"]["state"])):
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


def test_the_latest_or_the_best_is_loaded(appo, train, tmp_path):
    assert train() == 0
    folder = tmp_path / "run"
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

    learner = SimpleNamespace(version=0, global_step=0, collect=collect)
    nothing = SimpleNamespace(close=lambda: None)
    appo.learn(appo.Args(train_for_seconds=0.0), tmp_path, learner, SimpleNamespace(bar=nothing, writer=nothing))


def test_nothing_new_is_not_saved(appo, train, tmp_path, monkeypatch):
    """Stopped before the first update: an evaluation would play an untrained network."""
    with monkeypatch.context() as stopped:
        stopped.setattr(appo.Learner, "collect", lambda self: None)
        assert train() == 0 and checkpoints(tmp_path) == []
    assert train() == 0
    files = checkpoints(tmp_path)
    monkeypatch.setattr(appo.Learner, "collect", lambda self: None)
    assert train(total_timesteps=400) == 0 and checkpoints(tmp_path) == files


@pytest.mark.parametrize(
    "error, saves", [("FloatingPointError", True), ("UserError", True), ("RuntimeError", False), ("KeyboardInterrupt", False)]
)
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


def test_an_update_that_is_not_finite_ends_the_run_with_a_sentence(appo, tmp_path, monkeypatch, capsys):
    """After the weights before it were saved."""
    small = "--num-workers 0 --num-envs-per-worker 4 --rollout 5 --hidden-size 32 --device cpu --experiment run --learning-rate 1e30 --total-timesteps 400"
    monkeypatch.setattr(sys, "argv", ["appo", "--train-dir", str(tmp_path), *small.split()])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert appo.main() == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    error = capsys.readouterr().err
    assert re.match(
        r"error: the loss \(\S+\) or its gradient is not finite: check observations, or try a lower --learning-rate .*; what was learned before is saved\n$",
        error,
    )
    assert newest(tmp_path)["version"] > 1 and all(x.isfinite().all() for x in newest(tmp_path)["agent"].values())


def test_a_reward_that_is_not_finite_spoils_no_weights(train, tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss \(nan\)"):
        train(reward_scale=float("nan"))
    assert newest(tmp_path)["version"] == 1 and all(x.isfinite().all() for x in newest(tmp_path)["agent"].values())


@pytest.mark.parametrize("sync, workers, batch", [(False, 3, 2000), (True, 1, 3200)])
def test_a_run_keeps_its_batch_on_another_machine(appo, train, prepared, tmp_path, monkeypatch, sync, workers, batch):
    """And with sync the workers, which decide the batch; all else that was not typed follows the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert train(num_workers=None, num_envs_per_worker=16, rollout=200, sync=sync, inference_threads=None) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(3)))
    fresh = appo.resolve(appo.Args(num_envs_per_worker=16, rollout=200, sync=sync, device="cpu"))
    args = appo.resolve(appo.Args(**appo.saved_args(tmp_path / "run")))
    assert (args.num_workers, args.batch_size) == (workers, batch) and (fresh.num_workers, fresh.batch_size) == (3, 9600 if sync else 4000)
    assert json.loads((tmp_path / "run" / "cfg.json").read_text())["args"]["inference_threads"] is None


def test_a_run_holds_the_versions_of_all_packages(train, prepared, tmp_path):
    """Also of those that the file does not import."""
    assert train() == 0
    packages = json.loads((tmp_path / "run" / "cfg.json").read_text())["packages"]
    for name in ("torch", "numpy", "gymnasium", "vizdoom", "pytest"):
        assert packages[name] == importlib.metadata.version(name)


def test_samples_that_will_be_too_old_are_warned_of(train, prepared, capsys):
    for limit in (3, 4):
        assert train(num_workers=2, batch_size=20, max_policy_lag=limit) == 0
        text = capsys.readouterr().out
        assert "expected lag up to 3.0 versions" in text
        assert ("warning: samples with a lag of 3 (--max-policy-lag) are not learned from" in text) == (limit == 3)


def test_a_metric_of_ones_own(appo, train, often, tmp_path, monkeypatch):
    """One name added to EPISODE, of what `info` has in every step. A run of before goes on, whose episodes had no such number."""

    class Env(appo.Env):
        def step(self, action):
            *others, info = super().step(action)
            return *others, info | dict(kills=int(action[1]))

    assert train() == 0
    monkeypatch.setattr(appo, "Env", Env)
    monkeypatch.setattr(appo, "EPISODE", (*appo.EPISODE, "kills"))
    assert train(total_timesteps=600) == 0
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    kills, lengths = (np.array([event.value for event in events.Scalars(f"charts/{name}")]) for name in ("kills", "episodic_length"))
    assert len(lengths) > len(kills) > 10 and 1 < kills[-1] / lengths[-1] < 2, "an action of 0 to 3 in each step"
    assert {len(episode) for episode in newest(tmp_path)["episodes"]} == {4}


def test_the_x_axis_after_a_crash(appo, train, often, tmp_path, monkeypatch):
    """A run goes on from its last checkpoint: what was reported after that does not stand beside what comes now."""
    iterate, crash = appo.Learner.iterate, itertools.count()

    def fail(self, slots):
        if next(crash) == 8:
            raise RuntimeError("now")
        return iterate(self, slots)

    def reported() -> list[int]:
        events = EventAccumulator(str(tmp_path / "run"), size_guidance=dict(scalars=0)).Reload()
        return [event.step for event in events.Scalars("charts/SPS")]

    assert train() == 0
    saved = newest(tmp_path)["global_step"]
    with monkeypatch.context() as crashing:
        crashing.setattr(appo.Learner, "iterate", fail)
        with pytest.raises(RuntimeError, match="now"):
            train(total_timesteps=600)
    before = reported()
    assert before[-1] > saved + 50 and newest(tmp_path)["global_step"] == saved
    assert train(total_timesteps=600) == 0
    after = reported()
    assert after == sorted(set(after)) and after[-1] >= 600
    assert [step for step in after if step <= saved] == [step for step in before if step <= saved], "what came before stays"


def test_a_truncated_checkpoint_is_passed_over(appo, train, tmp_path, capsys):
    assert train(save_every_sec=0.0) == 0
    before, latest = checkpoints(tmp_path)
    step = torch.load(before, weights_only=True)["global_step"]
    latest.write_bytes(latest.read_bytes()[:1000])
    assert train(total_timesteps=400) == 0
    text = capsys.readouterr().out
    assert f"warning: {latest} cannot be read" in text and f"resuming {tmp_path / 'run'} at step {step:,};" in text
    for path in checkpoints(tmp_path):
        path.write_bytes(path.read_bytes()[:1000])
    files = sorted((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(appo.UserError, match="no checkpoint in .* can be read; move them away to start anew"):
        train(total_timesteps=600)
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == files


def test_a_run_of_an_older_file_goes_on(appo, train, main, tmp_path):
    """One of its flags is gone, which nobody misses. Another is new, and has its default, which is said."""
    assert train(learning_rate=0.001) == 0
    path, step = tmp_path / "run" / "cfg.json", newest(tmp_path)["global_step"]
    cfg = json.loads(path.read_text())
    cfg["args"]["flag_of_old"] = 7
    del cfg["args"]["ppo_clip_value"]
    path.write_text(json.dumps(cfg))
    assert appo.load_agent(tmp_path / "run")[2] == step, "it can be played"
    code, text = main(appo, "--train-dir", tmp_path, "--experiment", "run", "--total-timesteps", 400)
    assert code == 0 and f"resuming {tmp_path / 'run'} at step {step:,}; learning rate 0.001\n" in text
    assert f"override: ppo_clip_value none -> {appo.Args.ppo_clip_value}\n" in text and "flag_of_old" not in text
    args = json.loads(path.read_text())["args"]
    assert "flag_of_old" not in args and args["ppo_clip_value"] == appo.Args.ppo_clip_value and newest(tmp_path)["global_step"] >= 400


@pytest.mark.parametrize("change", ["a flag", "the file"])
def test_a_changed_network_does_not_go_on(appo, train, tmp_path, monkeypatch, change):
    """Whatever changed it. What is there stays as it is, and goes on as it was."""
    assert train() == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".json", ".pth")}
    with monkeypatch.context() as changed:
        if change == "the file":
            build = appo.Agent.__init__
            one_more = torch.nn.Linear(2, 2)
            changed.setattr(
                appo.Agent, "__init__", lambda self, *arguments: (build(self, *arguments), self.add_module("more", one_more))[0]
            )
        with pytest.raises(appo.UserError, match="the network in .*run does not fit basic, these flags or this file"):
            train(total_timesteps=400, **dict(hidden_size=16) if change == "a flag" else {})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".json", ".pth")} == before
    assert train(total_timesteps=400) == 0 and newest(tmp_path)["global_step"] >= 400


def test_nothing_grows(appo, train, tmp_path, monkeypatch):
    """Neither tensors nor file descriptors, and no other memory, by as much as one tensor in an update."""
    seen, iterate, count = {}, appo.Learner.iterate, itertools.count()

    def spy(self, slots):
        if (i := next(count)) in (100, 400):
            gc.collect()
            tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            descriptors = min(len(os.listdir("/proc/self/fd")) for _ in range(5) if not time.sleep(0.02))  # TensorBoard opens its file anew
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen[i] = len(tensors), sum(x.nbytes for x in tensors) / 2**20, descriptors, pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return iterate(self, slots)

    monkeypatch.setattr(appo.Learner, "iterate", spy)
    assert train(num_workers=2, batch_size=20, total_timesteps=9000) == 0
    one, two = seen[100], seen[400]
    assert two[0] < one[0] + 150 and two[1] < one[1] + 2, "less than half a tensor in an update"
    assert two[2] <= one[2] and two[3] < one[3] + 15, (one, two)


@pytest.fixture
def reporter(appo, tmp_path, monkeypatch):
    """Of a run that is some minutes old, in a terminal of 80 columns."""
    terminal, log = dict(disable=False, dynamic_ncols=False, ncols=80, file=io.StringIO()), []
    monkeypatch.setattr(appo, "tqdm", lambda **settings: tqdm(**settings | terminal))
    inference = SimpleNamespace(counts=Counter(), episodes=[])
    learner = SimpleNamespace(inference=inference, version=0, global_step=0)
    reporter = appo.Reporter(appo.Args(env_id="deadly_corridor"), learner, tmp_path, lambda text, show=True: log.append(text))
    reporter.bar.start_t -= 200
    reporter.lines = log
    yield reporter
    reporter.bar.close()
    reporter.writer.close()


def report(reporter, **counts) -> None:
    """Of a window of ten seconds."""
    reporter.last["time"] -= 10
    reporter.inference.counts.update(counts)
    reporter.update({})


def test_the_bar_fits_into_80_columns(reporter):
    reporter.inference.episodes.append([-164.114, 0.0, 10.0])
    reporter.learner.global_step, reporter.learner.version = 30_862, 1
    report(reporter, waited=9, idle=9)
    bar = str(reporter.bar)
    assert len(bar) <= 80 and re.search(r"\d% .*1:\d\d:\d\d, return -164.11, 12,3\d\d frames/s, bottleneck: environments", bar), bar


def test_a_window_without_an_update_is_warned_of(reporter):
    for version, warned in ((0, True), (1, False), (1, True)):
        reporter.learner.version = version
        reporter.lines.clear()
        report(reporter)
        assert any("warning: no update in 10 s" in line for line in reporter.lines) == warned


@pytest.mark.parametrize("counts, name", [(dict(blocked=4, waited=3, idle=5), "learner"), (dict(blocked=1, waited=3, idle=5), "environments"),
                                          (dict(blocked=1, waited=3, idle=3), "inference")])  # fmt: skip
def test_the_bottleneck_is_named(reporter, counts, name):
    report(reporter, **counts)
    assert f"bottleneck: {name}, lag" in reporter.lines[0]


@pytest.mark.parametrize("slow", ["learner", "environments", "inference"])
def test_what_is_slow_is_named(tmp_path_factory, train, tmp_path, monkeypatch, slow):
    """Of a real pipeline, in which one part sleeps."""
    line = "        self.count += 1\n"
    envs = COUNTING.replace(line, f"{line}        time.sleep(0.02)\n") if slow == "environments" else COUNTING
    appo = load(with_envs(tmp_path_factory.mktemp(slow), f"appo_slow_{slow}", envs, REPORTS))
    if slow != "environments":
        cls, name = (appo.Learner, "update") if slow == "learner" else (appo.Inference, "act")
        usual = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *arguments: (usual(*arguments), time.sleep(0.05))[0])
    assert train(appo, num_workers=2, batch_size=20, total_timesteps=10**6, train_for_seconds=1.5) == 0
    named = re.findall("bottleneck: (.*), lag", (tmp_path / "run" / "log.txt").read_text())
    assert len(named) > 2 and Counter(named).most_common(1)[0][0] == slow, named
