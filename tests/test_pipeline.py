"""A counting environment through the real actors, mailbox, inference thread and rollouts: who wrote what, where and when."""

import queue
import random
import re
import threading
import time
from collections import defaultdict, deque

import gymnasium as gym
import numpy as np
import pytest
import torch
from edited import COUNTING, load, with_envs

from dummy_sampler import RandomAgent


@pytest.fixture
def appo(counting):
    return counting


class Pipeline:
    """Actors and the inference thread, with the test in the place of the learner."""

    def __init__(self, appo, **settings):
        torch.manual_seed(0)
        default = dict(
            num_workers=2, num_envs_per_worker=4, worker_num_splits=2, rollout=5, batch_size=20, hidden_size=32, inference_threads=1
        )
        default |= dict(batch_size=None) if settings.get("num_workers") == 0 else {}
        self.args = args = appo.resolve(appo.Args(device="cpu", precision="float32", **default | settings))
        spaces = appo.spaces_of(args)
        self.rows, self.slots = max(1, args.num_workers) * args.num_envs_per_worker, appo.slots_needed(args)
        self.agent, self.log = appo.Agent(spaces, args), []
        self.inference = appo.Inference(args, spaces, self.agent, torch.device("cpu"))
        self.inference.episodes = deque()  # all of them instead of the last 100
        self.full, self.rollouts = self.inference.full, self.inference.rollouts
        self.actors = appo.Actors(args, self.inference, 0, lambda text, show=True: self.log.append(text))
        self.sampling, self.stop = appo.sampling(self.inference, self.actors), appo.STOP

    def __enter__(self):
        timer = threading.Timer(60, setattr, (self.stop, "asked_at", 1.0))
        timer.start()
        self.sampling.__enter__()
        timer.cancel()
        assert not self.stop.asked_at, f"the environments did not start within a minute; {self.log}"
        return self

    def __exit__(self, *error):
        self.sampling.__exit__(*error)
        self.stop.asked_at = None
        assert not [thread for thread in threading.enumerate() if thread.name == "inference"]

    def get(self) -> np.ndarray:
        """Waits for the next full slots."""
        try:
            item = self.full.get(timeout=60)
        except queue.Empty:
            raise AssertionError(f"no full slots within a minute; {self.log}") from None
        if isinstance(item, BaseException):
            raise item
        return item[0]

    def batches(self):
        """Generator: yields whenever a whole batch was full and has been released."""
        slots, size = [], self.args.batch_size // self.args.rollout
        while True:
            while len(slots) < size:
                slots.extend(self.get())
            self.inference.release(np.array(slots[:size]))
            slots = slots[size:]
            yield

    def take(self) -> list[dict]:
        """Waits for the next full slots; returns copies of their content and frees them."""
        slots, content = self.get(), []
        for slot in slots:
            fields = {
                name: np.array(np.asarray(field)[:, slot])
                for name, field in vars(self.rollouts).items()
                if name not in ("obs", "rnn_state")
            }
            fields |= {name: field[:, slot].numpy().copy() for name, field in self.rollouts.obs.items()}
            content.append(fields | dict(rnn_state=self.rollouts.rnn_state[slot].clone(), slot=slot))
        self.inference.release(slots)
        return content


def check_rollout(rollout: dict, T: int) -> tuple[int, int, int]:
    """Checks a rollout alone. Returns (environment, valid steps, ends of episodes)."""
    counter = rollout["vector"].astype(int)
    me = counter[0, 0]
    assert (rollout["obs"][:, 0, 0, 0] == me % 256).all(), "image and vector are of the same environment"
    assert (rollout["obs"][:, 0, 0, 1] == counter[:, 1] % 256).all() and (rollout["obs"][:, 0, 0, 2] == counter[:, 2]).all()
    ends = 0
    for t in range(T):
        (_, episode, count, length), after = counter[t], counter[t + 1]
        assert rollout["first"][t] == (count == 0)
        if rollout["first"][t + 1]:
            assert count == length and tuple(after[:3]) == (me, episode + 1, 0), "only the ignored action follows a last observation"
        else:
            assert tuple(after[:3]) == (me, episode, count + 1)
            assert rollout["rewards"][t] == pytest.approx(0.1 * rollout["actions"][t, 0] + rollout["actions"][t, 1])
            assert rollout["terminated"][t] == (count + 1 == length and episode % 2 == 0)
            ends += count + 1 == length
    return me, int((~rollout["first"][1:]).sum()), ends


def test_environments_of_different_actors_draw_different_numbers_and_may_keep_actions(tmp_path):
    vector = "np.array([self.me, self.episode, self.count, self.length], np.float32)"
    draws = COUNTING.replace(vector, "np.array([np.random.random(), random.random(), torch.rand(()), self.changed], np.float32)")
    draws = draws.replace("    def reset(", "    kept, changed = None, 0\n\n    def reset(", 1)
    keep = "        self.changed += self.kept is not None and tuple(self.kept) != self.was\n        self.kept, self.was = action, tuple(action)\n"
    draws = draws.replace("        self.count += 1\n", f"{keep}        self.count += 1\n")
    with Pipeline(load(with_envs(tmp_path, "appo_draws", draws))) as pipeline:
        rollouts = [rollout for _ in range(12) for rollout in pipeline.take()]
    vectors = np.concatenate([rollout["vector"][:-1] for rollout in rollouts])  # the last observation is the next rollout's first
    assert [len(np.unique(vectors[:, i])) for i in range(3)] == [len(vectors)] * 3, "also between the two actors"
    assert not vectors[:, 3].any(), "an action does not change after its step"


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
                obs, vector, first = (torch.from_numpy(np.array(rollout[name][t]))[None, None] for name in ("obs", "vector", "first"))
                with torch.no_grad():
                    logits, value, state = agent(dict(obs=obs, vector=vector), first, state)
                logprob, _, _ = appo.evaluate_actions(logits[0, 0], torch.from_numpy(rollout["actions"][t]), agent.heads)
                assert rollout["values"][t] == pytest.approx(value.item(), abs=1e-4)
                assert rollout["logprobs"][t] == pytest.approx(logprob.item(), abs=1e-4)


def test_finished_episodes_are_counted_once(appo):
    with Pipeline(appo, actor_timeout=0.0) as pipeline:
        rollouts = []
        while len(rollouts) < 150:
            rollouts += pipeline.take()
        episodes = list(pipeline.inference.episodes)
    assert pipeline.log == [], "no actor_timeout is no limit"
    finished = sum(check_rollout(rollout, 5)[2] for rollout in rollouts)
    assert abs(len(episodes) - finished) <= 4 * pipeline.rows, "up to what is in rollouts that were not taken"
    assert {length for _, _, length in episodes} <= set(range(1, 10))
    assert all(raw == pytest.approx(2 * trained, abs=1e-4) for raw, trained, _ in episodes)


def test_back_pressure(appo):
    """Without free slots everything waits, nothing is lost, and it goes on when slots come back; also when an actor was replaced."""
    with Pipeline(appo) as pipeline:
        deadline, actors = time.monotonic() + 60, pipeline.actors
        while pipeline.full.qsize() * pipeline.inference.size < pipeline.slots:
            assert time.monotonic() < deadline, pipeline.log
            time.sleep(0.1)
        time.sleep(0.5)  # all groups ask again, and are held
        items = []
        while not pipeline.full.empty():
            items.append(pipeline.full.get())
        owned = np.concatenate([slots for slots, _ in items])
        assert sorted(owned) == list(range(pipeline.slots)), "every slot is full, once"
        for item in items:
            pipeline.full.put(item)
        actors.actors[0].kill()  # the requests that it leaves behind must not be served beside its successor's
        while not (actors.deaths and actors.requested[0] == 2):
            assert time.monotonic() < deadline, pipeline.log
            time.sleep(0.05)
        assert sorted(actors.requests) == [0, 1, 2, 3]
        last, taken = {}, 0
        while taken < 30 or len(last) < pipeline.rows + 4:  # more than 30 when the new actor is slow
            assert time.monotonic() < deadline, f"{len(last)} games: the new actor must play others than the one before"
            taken += 1
            for rollout in pipeline.take():
                me, _, _ = check_rollout(rollout, 5)
                if me in last:
                    np.testing.assert_array_equal(last[me]["obs"][-1], rollout["obs"][0])
                last[me] = rollout
    assert len(last) == pipeline.rows + 4 and pipeline.inference.counts["blocked"] > 0.5


def test_slots_are_enough_in_every_order(appo):
    """Any number of workers, games, splits, batches and parts; groups that come in the worst order, one at a time or all at once; and
    a learner that takes a batch only when nothing else can move: there is always one to take."""
    rng, spaces = random.Random(0), appo.Spaces(dict(obs=gym.spaces.Box(0, 255, (2, 2, 1), np.uint8)), (2,))
    for i in range(60):
        workers, splits, n, T, ahead, parts = (rng.randint(low, high) for low, high in ((1, 4), (1, 3), (1, 4), (1, 3), (0, 2), (1, 3)))
        rows, sync = workers * splits * n, rng.random() < 0.3
        parts = 1 if sync and rows % parts else parts
        B = rows if sync else parts * rng.randint(1, 2 * rows)
        if i == 0:  # more rollouts in a batch than rows
            workers, splits, n, T, ahead, rows, sync, B, parts = 1, 2, 3, 5, 0, 6, False, 8, 1
        args = appo.resolve(appo.Args(num_workers=workers, num_envs_per_worker=splits * n, worker_num_splits=splits, rollout=T, batch_size=B * T // parts,
                                      num_batches_per_epoch=parts, max_batches_ahead=ahead, sync=sync, device="cpu", precision="float32"))  # fmt: skip
        inference, waiting = appo.Inference(args, spaces, RandomAgent(spaces.heads), torch.device("cpu")), []
        groups, greedy = list(range(workers * splits)), rng.random() < 0.5
        for _ in range(8):
            rng.shuffle(groups)
            moves = True
            while moves:  # greedy: one group as far as it comes, then the next
                moves = any(inference.serve([group]) for group in groups) if greedy else inference.serve(groups)
            while not inference.full.empty():
                waiting.extend(inference.full.get()[0])
            assert len(waiting) >= B, f"a deadlock: {args}"
            inference.release(np.array(waiting[:B]))
            waiting = waiting[B:]


def test_a_killed_actor_breaks_one_transition_and_no_more(appo):
    with Pipeline(appo, worker_num_splits=1) as pipeline:
        for _ in range(6):
            pipeline.take()
        pipeline.actors.actors[0].kill()
        rollouts = []
        while not pipeline.log or len(rollouts) < 100:
            rollouts += pipeline.take()
        for _ in range(8):
            rollouts += pipeline.take()
    assert pipeline.log == ["actor 0 died of SIGKILL; starting another"]
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


def test_sync_survives_an_actor_killed_between_its_splits(tmp_path):
    """One split is then a step ahead of the other, and at the end of its rollout waits until the other is there too."""
    line = "        if seed is not None:\n"
    appo = load(with_envs(tmp_path, "appo_slow_reset", COUNTING.replace(line, f"{line}            time.sleep(0.05)\n")))
    with Pipeline(appo, sync=True, batch_size=40) as pipeline:
        actors, batches = pipeline.actors, pipeline.batches()
        actors.SHORT_LIFE = 0  # killed more often than it would put up with
        for deaths in (1, 3, 5):
            next(batches)
            actors.actors[0].kill()
            deadline = time.monotonic() + 60
            while actors.deaths < deaths or actors.requested[0] == 0:  # until one split has asked, and mostly not the other
                assert time.monotonic() < deadline, pipeline.log
                time.sleep(0.01)
            actors.actors[0].kill()
            for _ in range(4):
                next(batches)
    assert actors.deaths == 6


SLOW = """
class Env(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8), gym.spaces.Discrete(2)
    started = False

    def reset(self, *, seed=None, options=None):
        if not self.started:
            time.sleep(1)
        self.started = True
        return np.zeros((36, 36, 3), np.uint8), {}

    def step(self, action):
        return np.zeros((36, 36, 3), np.uint8), 0.0, False, False, {}
"""


def test_environments_that_start_slowly_are_no_hang(tmp_path):
    """Four seconds together, but each of them less than --actor-timeout."""
    appo = load(with_envs(tmp_path, "appo_slow", SLOW))
    with Pipeline(appo, num_workers=1, worker_num_splits=1, actor_timeout=2.0) as pipeline:
        pipeline.get()
    assert pipeline.log == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_actor_in_this_process_that_ends_says_why(tmp_path):
    """Whatever its end is. When it dies in a step the learner learns of it."""
    line = "        self.count += 1\n"
    appo = load(with_envs(tmp_path, "appo_exit", COUNTING.replace(line, f"{line}        self.count < 2 or sys.exit('of its own')\n")))
    with Pipeline(appo, num_workers=0) as pipeline:
        with pytest.raises(appo.UserError, match="^actor 0 died: SystemExit: of its own$"):
            pipeline.get()
    (text,) = pipeline.log
    assert re.fullmatch(r"actor 0:\nTraceback .*\n(  .*\n)+SystemExit: of its own", text)
