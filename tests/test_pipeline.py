"""A counting environment through the real actors, mailbox, inference thread and rollouts: who wrote what, where and when.

The observation says which environment it is from, which episode and which step; the reward says which action was taken.
"""

import queue
import threading
import time
from collections import defaultdict, deque

import numpy as np
import pytest
import torch

from edited import load, with_envs

COUNTING = """
class Env(gym.Env):
    observation_space = gym.spaces.Dict(obs=gym.spaces.Box(0, 255, (36, 36, 3), np.uint8),
                                        counter=gym.spaces.Box(-np.inf, np.inf, (4,), np.float32))
    action_space = gym.spaces.MultiDiscrete((3, 4))

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.me, self.episode = seed % 60_000, -1
        self.episode, self.count = self.episode + 1, 0
        self.length = 1 + (self.me * 7 + self.episode * 13) % 9
        return self.observation(), {}

    def observation(self):
        image = np.full((36, 36, 3), 17 * self.count + self.episode, np.uint8)
        image[0, 0] = self.me % 256, self.episode % 256, self.count
        return dict(obs=image, counter=np.array([self.me, self.episode, self.count, self.length], np.float32))

    def step(self, action):
        self.count += 1
        end, kind = self.count == self.length, self.episode % 2
        reward = 0.1 * action[0] + action[1]
        return self.observation(), reward, end and kind == 0, end and kind == 1, {"raw_reward": 2 * reward}
"""


@pytest.fixture(scope="module")
def appo(tmp_path_factory):
    return load(with_envs(tmp_path_factory.mktemp("counting"), "appo_counting", COUNTING))


class Pipeline:
    """Actors and the inference thread, with the test in the place of the learner."""

    def __init__(self, appo, slots: int | None = None, **settings):
        torch.manual_seed(0)
        settings = (
            dict(num_workers=2, num_envs_per_worker=4, worker_num_splits=2, rollout=5, batch_size=20, hidden_size=32)
            | settings
        )
        self.appo, self.args = appo, appo.resolve(appo.Args(device="cpu", precision="float32", **settings))
        args, device = self.args, torch.device("cpu")
        envs = appo.make_envs(args, 1)
        self.spaces = appo.spaces_of(envs)
        self.rows = args.num_workers * args.num_envs_per_worker
        self.agent = appo.Agent(self.spaces, args)
        slots = slots or 2 * self.rows
        self.rollouts = appo.Rollouts(self.spaces, args.rollout, slots, self.agent.state_size, device)
        self.acting = appo.ActingPolicy(self.agent, 0, device)
        self.mailbox = appo.Mailbox(self.spaces, self.rows, args.num_workers)
        self.full, self.free, self.log = queue.SimpleQueue(), queue.SimpleQueue(), []
        self.free.put((np.arange(slots), None))
        self.inference = appo.Inference(args, self.mailbox, self.rollouts, self.acting, device, self.full, self.free)
        self.inference.episodes = deque()  # all of them instead of the last 100

    def __enter__(self):
        self.actors = self.appo.Actors(
            self.args, self.mailbox, lambda text, show=True: self.log.append(text), self.full.put
        )
        self.actors.start_all()
        self.thread = threading.Thread(target=self.inference.run, args=(self.actors,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.inference.stopping = True
        self.actors.wake()
        self.thread.join(10)
        self.actors.stop()
        assert not self.thread.is_alive()

    def take(self) -> list[dict]:
        """Waits for the next full slots; returns copies of their content and frees them."""
        item = self.full.get(timeout=60)
        if isinstance(item, BaseException):
            raise item
        slots, _ = item
        content = []
        for slot in slots:
            fields = {
                name: np.array(np.asarray(field)[:, slot])
                for name, field in vars(self.rollouts).items()
                if name != "rnn_state"
            }
            content.append(fields | dict(rnn_state=self.rollouts.rnn_state[slot].clone(), slot=slot))
        self.free.put((slots, None))
        self.actors.wake()
        return content


def check_rollout(rollout: dict, T: int) -> tuple[int, int, int]:
    """Checks a rollout alone. Returns (environment, valid steps, ends of episodes)."""
    counter = rollout["vector"].astype(int)
    me = counter[0, 0]
    assert (rollout["obs"][:, 0, 0, 0] == me % 256).all(), "image and vector are of the same environment"
    assert (rollout["obs"][:, 0, 0, 1] == counter[:, 1] % 256).all() and (
        rollout["obs"][:, 0, 0, 2] == counter[:, 2]
    ).all()
    ends = 0
    for t in range(T):
        (_, episode, count, length), after = counter[t], counter[t + 1]
        assert rollout["first"][t] == (count == 0)
        if rollout["first"][t + 1]:
            assert count == length and tuple(after[:3]) == (me, episode + 1, 0), (
                "only the ignored action follows a last observation"
            )
        else:
            assert tuple(after[:3]) == (me, episode, count + 1)
            assert rollout["rewards"][t] == pytest.approx(0.1 * rollout["actions"][t, 0] + rollout["actions"][t, 1])
            assert rollout["terminated"][t] == (count + 1 == length and episode % 2 == 0)
            ends += count + 1 == length
    return me, int((~rollout["first"][1:]).sum()), ends


def test_rollouts_are_whole_ordered_and_unmixed(appo):
    with Pipeline(appo) as pipeline:
        by_environment = defaultdict(list)
        while min(map(len, by_environment.values()), default=0) < 12 or len(by_environment) < pipeline.rows:
            for rollout in pipeline.take():
                by_environment[check_rollout(rollout, pipeline.args.rollout)[0]].append(rollout)
    ends = 0
    for rollouts in by_environment.values():
        assert rollouts[0]["first"][0], "a row begins with the first observation of an episode"
        for one, two in zip(rollouts, rollouts[1:]):
            np.testing.assert_array_equal(one["obs"][-1], two["obs"][0], "row T of a rollout is row 0 of the next")
            assert one["first"][-1] == two["first"][0]
        ends += sum(check_rollout(rollout, 5)[2] for rollout in rollouts)
    assert ends > 50
    # What inference recorded is what the network computes from that row's own stream: state, value, log-probability.
    agent = pipeline.agent
    for rollouts in list(by_environment.values())[:3]:
        state = torch.zeros(1, agent.state_size)
        for rollout in rollouts:
            torch.testing.assert_close(rollout["rnn_state"][None], state, rtol=1e-4, atol=1e-4)
            for t in range(5):
                fields = (
                    torch.from_numpy(np.array(rollout[name][t]))[None, None] for name in ("obs", "vector", "first")
                )
                with torch.no_grad():
                    logits, value, state = agent(*fields, state, [0])
                logprob, _, _ = appo.evaluate_actions(
                    logits[0, 0], torch.from_numpy(rollout["actions"][t]), agent.heads
                )
                assert rollout["values"][t] == pytest.approx(value.item(), abs=1e-4)
                assert rollout["logprobs"][t] == pytest.approx(logprob.item(), abs=1e-4)


def test_finished_episodes_are_counted_once(appo):
    with Pipeline(appo) as pipeline:
        rollouts = []
        while len(rollouts) < 150:
            rollouts += pipeline.take()
        episodes = list(pipeline.inference.episodes)
    finished = sum(check_rollout(rollout, 5)[2] for rollout in rollouts)
    assert abs(len(episodes) - finished) <= 4 * pipeline.rows, "up to what is in rollouts that were not taken"
    assert {length for _, _, length in episodes} <= set(range(1, 10))
    assert all(raw == pytest.approx(2 * trained, abs=1e-4) for raw, trained, _ in episodes)


def test_back_pressure(appo):
    """Without free slots everything waits, nothing is lost, and it goes on when slots come back."""
    with Pipeline(appo) as pipeline:
        items, deadline, steps = [pipeline.full.get(timeout=60)], time.monotonic() + 60, -1
        while pipeline.inference.steps > steps:
            assert time.monotonic() < deadline, "inference waits while nobody frees slots"
            steps = pipeline.inference.steps
            time.sleep(1)
        while not pipeline.full.empty():
            items.append(pipeline.full.get())
        owned = np.concatenate([slots for slots, _ in items])
        assert len(set(owned)) == len(owned), "every slot is full once"
        # An actor that waits for one split does not step the other, whose slots then stay as they are.
        assert len(owned) >= 2 * pipeline.rows - pipeline.args.num_workers * pipeline.inference.size
        for item in items:
            pipeline.full.put(item)
        last = {}
        for _ in range(30):
            for rollout in pipeline.take():
                me, _, _ = check_rollout(rollout, 5)
                if me in last:
                    np.testing.assert_array_equal(last[me]["obs"][-1], rollout["obs"][0])
                last[me] = rollout


def test_slots_are_enough_when_a_batch_must_be_full_first(appo):
    """Two splits, and no batch ahead: actors that wait for one split hold the slots of the other."""
    settings = dict(num_workers=1, num_envs_per_worker=6, worker_num_splits=2, rollout=5, batch_size=40, max_batches_ahead=0)
    slots = appo.slots_needed(appo.resolve(appo.Args(device="cpu", **settings)))
    with Pipeline(appo, slots, **settings) as pipeline:
        waiting = []
        for batch in range(20):
            while len(waiting) < 8:  # as the learner: slots come back a whole batch at a time
                waiting.extend(pipeline.full.get(timeout=30)[0])
            pipeline.free.put((np.array(waiting[:8]), None))
            pipeline.actors.wake()
            waiting = waiting[8:]


def test_a_killed_actor_breaks_one_transition_and_no_more(appo):
    with Pipeline(appo, worker_num_splits=1) as pipeline:
        for _ in range(6):
            pipeline.take()
        pipeline.actors.all[0].process.kill()
        rollouts = []
        while not pipeline.log or len(rollouts) < 100:
            rollouts += pipeline.take()
        for _ in range(8):
            rollouts += pipeline.take()
    assert "actor 0 died (exit code -9); starting it again" in pipeline.log[0]
    broken = 0
    for rollout in rollouts:
        counter = rollout["vector"].astype(int)
        for t in range(5):
            same = counter[t + 1, 0] == counter[t, 0] and counter[t + 1, 1] == counter[t, 1]
            if not same:
                assert rollout["first"][t + 1], "whatever does not follow is invalid"
                broken += counter[t, 2] < counter[t, 3]
            elif not rollout["first"][t + 1]:
                assert counter[t + 1, 2] == counter[t, 2] + 1
                assert rollout["rewards"][t] == pytest.approx(0.1 * rollout["actions"][t, 0] + rollout["actions"][t, 1])
    assert broken <= 4, "one transition for each environment of the worker"


@pytest.mark.parametrize("rollouts_per_row", [1, 2])
@pytest.mark.parametrize("workers, splits", [(2, 2), (0, 2)])
def test_sync_has_no_lag(appo, workers, splits, rollouts_per_row, tmp_path):
    """The real `train` with --sync: every sample of an iteration is by the newest version, and all rows have the same share."""
    rows = max(1, workers) * 4
    args = appo.Args(
        num_workers=workers, num_envs_per_worker=4, worker_num_splits=splits, rollout=5, batch_size=rows * 5 * rollouts_per_row, hidden_size=32,
        sync=True, device="cpu", total_timesteps=600, train_dir=str(tmp_path),
    )  # fmt: skip
    seen, iterate = [], appo.Learner.iterate

    def spy(self, slots):
        versions = self.rollouts.versions[:, slots]
        seen.append(
            (self.version, versions.min(), versions.max(), np.bincount(self.rollouts.vector[0, slots, 0].int()).max())
        )
        return iterate(self, slots)

    appo.Learner.iterate = spy
    try:
        assert appo.train(args, tmp_path / "run") == 0
    finally:
        appo.Learner.iterate = iterate
    assert len(seen) > 5
    for version, low, high, most in seen:
        assert low == high == version and most == rollouts_per_row
    assert [version for version, *_ in seen[1:]] == list(range(len(seen) - 1)), (
        "the first batch initialises the statistics"
    )
