"""The real `train` over the counting environment, in this process: versions, lag, what a resumed run goes on with."""

import itertools

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
        return appo.train(appo.Args(**small | settings), tmp_path / "run")

    return train


@pytest.fixture
def iterations(appo, monkeypatch):
    """Of every iteration: the learner's version, and the versions, slots and environments of the batch."""
    seen, iterate = [], appo.Learner.iterate

    def spy(self, slots, timed_out):
        r = self.inference.rollouts
        seen.append((self.version, r.versions[:, slots].copy(), slots.tolist(), r.vector[0, slots, 0].int().tolist()))
        return iterate(self, slots, timed_out)

    monkeypatch.setattr(appo.Learner, "iterate", spy)
    return seen


@pytest.mark.parametrize("workers, splits", [(2, 2), (0, 2)])
def test_sync_has_no_lag(train, iterations, workers, splits):
    """Every sample of an iteration is by the newest version, every slot is used, and all rows have the same share."""
    rows = max(1, workers) * 4
    assert train(num_workers=workers, worker_num_splits=splits, sync=True, total_timesteps=600) == 0
    assert len(iterations) > 5
    for version, versions, slots, environments in iterations:
        assert (versions == version).all()
        assert sorted(slots) == list(range(rows)) and len(set(environments)) == rows
    assert [version for version, *_ in iterations] == list(range(len(iterations)))


def test_every_published_policy_has_a_version_of_its_own(appo, train, monkeypatch):
    """Two epochs: a version each. The first batch only initialises the statistics of the inputs: a version, too."""
    published, publish = [], appo.ActingPolicy.publish

    def spy(self, version):
        published.append((version, [tensor.clone() for tensor in self.learned]))
        publish(self, version)

    monkeypatch.setattr(appo.ActingPolicy, "publish", spy)
    assert train(num_epochs=2) == 0
    assert len(published) > 10 and [version for version, _ in published] == list(range(1, len(published) + 1))
    for (_, one), (_, two) in itertools.pairwise(published):
        assert any((a != b).any() for a, b in zip(one, two)), "no policy is published twice"


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


def newest(folder) -> dict:
    return torch.load(sorted((folder / "run" / "checkpoints").glob("checkpoint_*"))[-1], weights_only=True)


def test_a_finished_run_says_so_and_a_resumed_one_where_it_goes_on(train, tmp_path, capsys):
    assert train() == 0
    before, files = newest(tmp_path), sorted(tmp_path.rglob("*"))
    assert train() == 0
    assert f"has its {before['global_step']:,} steps already; raise --total-timesteps to go on" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == files
    assert train(total_timesteps=400) == 0
    assert f"resuming {tmp_path / 'run'} at step {before['global_step']:,}\n" in capsys.readouterr().out
    assert newest(tmp_path)["global_step"] >= 400 and newest(tmp_path)["version"] > before["version"]


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
