"""appo_pbt_doom.py: who plays where, what each policy learns from, exchanges, matches, and what a population survives."""

import contextlib
import importlib
import json
import math
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import carry
import numpy as np
import pytest
import torch
from conftest import shared_memory
from edited import REPORTS, ROOT, edited, load, replacing
from forked import python
from test_command_line import TAGS, scalars

import appo_doom
import appo_pbt_doom as appo

sys.path.insert(0, str(ROOT / "benchmark"))
import collect  # noqa: E402
import plot  # noqa: E402

SCRIPT = ROOT / "appo_pbt_doom.py"
# Two agents. The observation says which game, agent, episode and step it is; the reward says which action was taken. In odd
# episodes player_1 leaves in the middle; every fourth step is inactive.
COUNTING = """
class Env:
    possible_agents, metadata = ["player_0", "player_1"], {}

    def observation_space(self, agent):
        return gym.spaces.Dict(obs=gym.spaces.Box(0, 255, (36, 36, 3), np.uint8), vector=gym.spaces.Box(-np.inf, np.inf, (5,), np.float32))

    def action_space(self, agent):
        return gym.spaces.MultiDiscrete((3, 4))

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.me, self.episode = seed % 60_000, -1
        self.episode, self.count, self.agents = self.episode + 1, 0, list(self.possible_agents)
        self.length = 2 + (self.me * 7 + self.episode * 13) % 9
        return {a: self.observation(a) for a in self.agents}, {a: dict(inactive=self.episode % 2 == 1) for a in self.agents}

    def observation(self, agent):
        leaves = agent == "player_1" and self.episode % 2
        end = (self.length + 1) // 2 if leaves else self.length
        vector = np.array([self.me, int(agent[-1]), self.episode, self.count, end], np.float32)
        return dict(obs=np.full((36, 36, 3), int(vector.sum()) % 256, np.uint8), vector=vector)

    def step(self, actions):
        assert sorted(actions) == self.agents
        self.count += 1
        playing = self.agents
        seen = {a: self.observation(a) for a in playing}
        over = {a: self.count == seen[a]["vector"][4] for a in playing}
        kind = self.episode % 3 == 0
        rewards = {a: 0.1 * actions[a][0] + actions[a][1] for a in playing}
        infos = {a: dict(inactive=self.count % 4 == 3, frags=self.count, raw_reward=2 * rewards[a]) for a in playing}
        self.agents = [a for a in playing if not over[a]]
        return seen, rewards, {a: over[a] and kind for a in playing}, {a: over[a] and not kind for a in playing}, infos

    def close(self):
        pass
"""



OWN = """

def make_game(args, **options):
    return Env()
"""


def spaces(image: tuple, vector: int, heads: tuple):
    """Of one image, and a vector of that length beside it, or none."""
    box = appo.gym.spaces.Box
    numbers = dict(vector=box(-np.inf, np.inf, (vector,), np.float32)) if vector else {}
    return appo.Spaces(dict(obs=box(0, 255, image, np.uint8)) | numbers, heads)


@pytest.fixture(scope="session")
def counting(tmp_path_factory):
    return load(edited(tmp_path_factory.mktemp("pbt"), "pbt_counting", replacing(COUNTING + OWN), source=SCRIPT))


@pytest.mark.parametrize("policies, games, agents", [(2, 4, 2), (3, 3, 2), (4, 4, 2), (2, 2, 4), (4, 8, 1), (1, 3, 2), (3, 6, 4)])
def test_every_policy_has_the_same_share_and_meets_the_others_as_often(policies, games, agents, monkeypatch):
    monkeypatch.setattr(appo.Args, "seats", agents)
    args = appo.Args(num_policies=policies, num_envs_per_worker=2 * games, worker_num_splits=2, num_workers=12, device="cpu")
    rows = appo.seat_rows(args, session=0)
    assert rows.shape == (12, 2, games * agents) and sorted(rows.ravel()) == list(range(rows.size))
    table, share = rows // appo.num_rows(args), games * agents // policies  # who plays; rows of a group
    for group, (seats, who) in enumerate(zip(rows.reshape(24, -1), table.reshape(24, -1))):
        for policy in range(policies):
            first = policy * appo.num_rows(args) + group * share
            assert seats[who == policy].tolist() == list(range(first, first + share)), "its share, in order, where `slice_of` finds it"
    met, table = np.zeros((policies, policies)), table.reshape(-1, agents)
    for game in table:
        for i in range(agents):
            for j in range(agents):
                met[game[i], game[j]] += i != j
    if agents == 2:
        assert met.max() - met.min() <= 2 * (24 * games / policies % policies > 0) * policies, met
    elif agents > 1:
        assert met.max() < 1.5 * met.min()
    assert len(np.unique(np.bincount(table[:, 0]))) == 1, "each is the host as often"
    if policies > 1 and agents > 1:
        assert (rows != appo.seat_rows(args, session=1)).any()


def test_another_session_has_other_pairs(monkeypatch):
    """Eight policies in sixteen games: in one session each meets four others at most, in many all."""
    monkeypatch.setattr(appo.Args, "seats", 2)
    args = appo.Args(num_policies=8, num_envs_per_worker=8, worker_num_splits=1, num_workers=2, device="cpu")

    def pairs(session):
        table = appo.seat_rows(args, session).reshape(-1, 2) // appo.num_rows(args)
        return {frozenset(game) for game in table.tolist()}

    met = [pairs(session) for session in range(40)]
    assert met[0] != met[1] and len(set.union(*met)) == 8 * 7 / 2, "all of two policies, none of one with itself"


class Pipeline:
    """Actors and the inference thread, with the test in the place of the learners."""

    def __init__(self, appo, folder, **settings):
        torch.manual_seed(0)
        small = dict(num_policies=2, num_workers=2, num_envs_per_worker=4, worker_num_splits=2, rollout=5, batch_size=20, hidden_size=32,
                     device="cpu", precision="float32")  # fmt: skip
        self.args, self.folder = appo.Args(**small | settings), folder
        space = appo.spaces_of(self.args)
        self.inference = appo.Inference(self.args, space, [appo.Agent(space, self.args) for _ in range(self.args.num_policies)])
        self.policies = self.inference.policies
        for policy in self.policies:
            policy.episodes = deque()  # all of them
        self.running = appo.running(self.inference, folder)

    def __enter__(self):
        self.running.__enter__()
        return self

    def __exit__(self, *error):
        self.running.__exit__(*error)

    def log(self) -> str:
        return (self.folder / "log.txt").read_text() if (self.folder / "log.txt").exists() else ""

    def take(self) -> list[list[dict]]:
        """Waits for the next full block; returns copies of its slots' content, for each policy, and gives it back."""
        try:
            block = self.inference.full.get(timeout=60)
        except queue.Empty:
            raise AssertionError(f"no full block within a minute; {self.log()}") from None
        if self.inference.error:
            raise self.inference.error
        content = []
        for policy in self.policies:
            fields = {name: field for name, field in vars(policy.rollouts).items() if name not in ("obs", "rnn_state")}
            fields |= {name.removeprefix("obs/"): field for name, field in policy.rollouts.obs.items()}
            content.append([{name: np.array(np.asarray(field)[:, slot]) for name, field in fields.items()} for slot in range(block.start, block.stop)])
        self.inference.learner_pipe.send([block])
        return content


def check_rollout(rollout: dict, T: int) -> tuple[tuple[int, int], int]:
    """Checks a rollout alone. Returns ((game, agent), valid steps)."""
    counter, valid = rollout["vector"].astype(int), 0
    me, agent = counter[0, :2]
    for t in range(T):
        (_, _, episode, count, end), after = counter[t], counter[t + 1]
        assert rollout["obs"][t, 0, 0, 0] == counter[t].sum() % 256, "image and vector are of the same agent"
        assert tuple(after[:2]) == (me, agent)
        expected = count % 4 == 3 and not rollout["first"][t] if count else episode % 2 == 1
        assert rollout["inactive"][t] == expected
        if rollout["first"][t + 1]:
            assert count == end, "only what follows a last observation is ignored"
            assert tuple(after[2:4]) in ((episode + 1, 0), (episode, count)), "the next episode, or waiting for it"
        else:
            valid += 1
            assert tuple(after[2:4]) == (episode, count + 1)
            assert rollout["rewards"][t] == pytest.approx(0.1 * rollout["actions"][t, 0] + rollout["actions"][t, 1])
            assert rollout["terminated"][t] == (count + 1 == end and episode % 3 == 0)
    return (me, agent), valid


def test_rollouts_of_two_policies_are_whole_ordered_and_unmixed(counting, tmp_path):
    with Pipeline(counting, tmp_path) as pipeline:
        args, found = pipeline.args, [defaultdict(list) for _ in range(2)]
        while min(min(map(len, rollouts.values()), default=0) for rollouts in found) < 8 or min(map(len, found)) < 8:
            for policy, rollouts in enumerate(pipeline.take()):
                for rollout in rollouts:
                    found[policy][check_rollout(rollout, args.rollout)[0]].append(rollout)
    games = {game for game, _ in found[0].keys() | found[1].keys()}
    assert len(games) == 8 and not found[0].keys() & found[1].keys(), "an agent is of one policy"
    assert found[0].keys() | found[1].keys() == {(game, agent) for game in games for agent in range(2)}
    for rollouts in found:
        for row in rollouts.values():
            assert row[0]["first"][0]
            for one, two in zip(row, row[1:]):
                assert (one["vector"][-1] == two["vector"][0]).all() and one["first"][-1] == two["first"][0]
        assert any(rollout["inactive"].any() for row in rollouts.values() for rollout in row)
    for policy in pipeline.policies:
        assert len(policy.episodes) > 20
        for raw, length, *scores in policy.episodes:
            assert scores == [0, length * (length + 1) / 2, 0, 0, 0] and 0 <= raw <= 2 * 3.2 * length + 1e-4


def test_an_actor_that_dies_is_replaced_for_all_policies(counting, tmp_path):
    with Pipeline(counting, tmp_path, worker_num_splits=1, batch_size=10) as pipeline:
        before = set()
        while len(before) < 16:  # agents of both actors
            before |= {check_rollout(rollout, 5)[0] for rollouts in pipeline.take() for rollout in rollouts}
        torch.multiprocessing.active_children()[0].kill()
        for policy in pipeline.policies:
            policy.version = 7  # as learners would have made
        deadline, seen = time.monotonic() + 60, set()
        while "starting another" not in pipeline.log() or len(seen - before) < 8:
            assert time.monotonic() < deadline, pipeline.log()
            for rollouts in pipeline.take():
                for rollout in rollouts:
                    if rollout["vector"][0, 0] == rollout["vector"][-1, 0]:  # not the one that the death has cut
                        seen.add(check_rollout(rollout, 5)[0])
    assert re.fullmatch(r"\S+ \S+ actor [01]: died \(exit code -9\); starting another\n", pipeline.log())


def test_an_agent_that_is_absent_at_the_very_first_reset_makes_no_sample(tmp_path):
    """Until it is there its steps are invalid."""
    late = COUNTING.replace("        return {a: self.observation(a) for a in self.agents}, {", "        return {'player_1': self.observation('player_1')}, {")
    late = late.replace("        assert sorted(actions) == self.agents\n", "        actions = {a: actions.get(a, [0, 0]) for a in self.agents}\n")
    module = load(edited(tmp_path, "pbt_late", replacing(late + OWN), source=SCRIPT))
    args = module.Args(num_policies=1, num_workers=0, num_envs_per_worker=1, worker_num_splits=1, device="cpu")
    mailbox = module.Mailbox(module.spaces_of(args), 2, 0).share()
    worker = module.WorkerEnvs(args, np.arange(2), mailbox, 0)
    worker.reset()
    assert mailbox.first.tolist() == [True, True] and worker.ended == {0: True, 1: False}
    worker.step()
    assert mailbox.first.tolist() == [True, False], "what stood there before was no observation"
    worker.step()
    assert mailbox.first.tolist() == [False, False]


def test_the_last_reward_of_an_agent_that_leaves_without_an_observation(monkeypatch):
    class Game:
        possible_agents, close = ["a"], lambda self: None

        def observation_space(self, agent):
            return appo.gym.spaces.Box(0, 9, (1,))

        def action_space(self, agent):
            return appo.gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.agents = ["a"]
            return dict(a=np.ones(1)), {}

        def step(self, actions):
            self.agents = []
            return {}, dict(a=-5.0), dict(a=True), dict(a=False), {}

    monkeypatch.setattr(appo, "make_game", lambda args: Game())
    args = appo.Args(device="cpu", reward_clip=np.inf)
    mailbox = appo.Mailbox(appo.spaces_of(args), 1, 0).share()
    worker = appo.WorkerEnvs(args, np.arange(1), mailbox, 0)
    worker.reset()
    worker.step()
    assert (mailbox.reward.tolist(), mailbox.terminated.tolist(), mailbox.episode[0, :2].tolist()) == ([-5], [True], [-5, 1])
    worker.step()
    assert mailbox.first.all() and not mailbox.terminated.any() and not mailbox.episode.any(), "it begins anew"


def test_a_game_of_ones_own(monkeypatch):
    """Actions begin where the space says; `reset` is called by name; an episode also ends where `agents` is empty without flags; and
    a score that is not finite spoils its own episode alone."""
    told, scores = [], [1.0, np.nan, 1.0, 1.0]

    class Game:
        possible_agents, close = ["a"], lambda self: None

        def observation_space(self, agent):
            return appo.gym.spaces.Box(0, 9, (1,))

        def action_space(self, agent):
            return appo.gym.spaces.MultiDiscrete([2, 3], start=[5, 7])

        def reset(self, *, seed=None, options=None):
            self.agents, self.count = ["a"], 0
            return dict(a=np.ones(1)), {}

        def step(self, actions):
            told.append(actions["a"].tolist())
            self.count += 1
            self.agents = ["a"] if self.count < 2 else []
            return dict(a=np.ones(1)), dict(a=1.0), dict(a=False), dict(a=False), dict(a=dict(raw_reward=scores.pop(0)))

    monkeypatch.setattr(appo, "make_game", lambda args: Game())
    args = appo.Args(device="cpu")
    mailbox = appo.Mailbox(appo.spaces_of(args), 1, 0).share()
    worker = appo.WorkerEnvs(args, np.arange(1), mailbox, 0)
    worker.reset()
    found = []
    for _ in range(6):
        mailbox.action[:] = [[1, 2]]
        worker.step()
        found.append((bool(mailbox.first[0]), *mailbox.episode[0, :2].tolist()))
    assert told == [[6, 9]] * 4
    episodes = [(False, 0, 0), (False, pytest.approx(np.nan, nan_ok=True), 2), (True, 0, 0), (False, 0, 0), (False, 2, 2), (True, 0, 0)]
    assert found == episodes


@pytest.mark.parametrize("before, now, paid", [
    (dict(HEALTH=10), dict(HEALTH=100, DEATHCOUNT=1), -0.75), (dict(DEAD=1), dict(HEALTH=100, FRAGCOUNT=1), 1.0),
    (dict(HEALTH=10), dict(HEALTH=20), 0.05), (dict(HEALTH=10), dict(HEALTH=0, DEAD=1, DEATHCOUNT=1), -0.78),
    (dict(DEAD=1), dict(HEALTH=100, DEATHCOUNT=1), -0.75),
])  # fmt: skip
def test_a_life_that_begins_within_a_step_pays_no_health(before, now, paid):
    """A death costs the same, whether the player is seen dead or has returned in the same step."""
    player = SimpleNamespace(scenario=appo.SCENARIOS["deathmatch_bots"], shaping=appo.SHAPING["bots"], weapons=deque(maxlen=5))
    nothing = dict.fromkeys(appo.VARIABLES, 0.0)
    assert appo.DoomEnv.bonus(player, nothing | before, nothing | now) == pytest.approx(paid)


def test_inactive_steps_are_in_no_loss_and_do_not_cut_the_trace():
    args = appo.Args(hidden_size=32, precision="float32", device="cpu")
    torch.manual_seed(0)
    agent, T, B = appo.Agent(spaces((72, 128, 3), 3, (3, 4)), args), 4, 2
    inactive = torch.zeros(T + 1, B, dtype=torch.bool)
    inactive[1] = True

    def loss(**changes):
        torch.manual_seed(1)
        obs = dict(obs=torch.randint(256, (T + 1, B, 72, 128, 3), dtype=torch.uint8), vector=torch.randn(T + 1, B, 3))
        fields = dict(obs=obs, first=torch.zeros(T + 1, B, dtype=torch.bool), rnn_state=torch.zeros(1, B, agent.state_size),
                      actions=torch.ones(T, B, 2, dtype=torch.int64), logprobs=torch.full((T, B), -2.5), values=torch.randn(T, B),
                      rewards=torch.randn(T, B), terminated=torch.zeros(T, B, dtype=torch.bool), inactive=inactive, lags=torch.zeros(T, B))  # fmt: skip
        for name, (t, value) in changes.items():
            fields[name][t] = value
        return appo.appo_loss(args, agent, SimpleNamespace(**fields))[0].item()

    assert loss() == loss(actions=(1, 0)) == loss(logprobs=(1, -9.0)), "what was done meanwhile does not matter"
    assert loss() != loss(rewards=(1, 5.0)), "what happened does"


@pytest.fixture
def population_of(tmp_path):
    def make(objectives, step=2000, **settings):
        """A Population after so many steps, whose policies have these returns."""
        own = dict(num_policies=len(objectives), with_pbt=True, env_id="battle", pbt_start_mutation=1500, pbt_period_env_steps=1000, num_workers=1,
                   num_envs_per_worker=len(objectives), worker_num_splits=1, rollout=2, device="cpu", hidden_size=8, precision="float32")  # fmt: skip
        args = appo.Args(**own | settings)
        appo.seed_generators(args.seed)  # as `train` does
        space = spaces((36, 36, 3), 0, (2,))
        agents = [appo.Agent(space, args) for _ in objectives]
        policies = appo.Inference(args, space, agents).policies
        learners = [appo.Learner(args, i, agent, policy) for i, (agent, policy) in enumerate(zip(agents, policies))]
        for learner, objective in zip(learners, objectives):
            learner.global_step = step
            learner.inference.episodes.extend([[objective] + [0.0] * (len(appo.EPISODE) - 1)] * 100)
        return appo.Population(args, learners)

    return make


def kinds(lines) -> list[tuple[int, str]]:
    """Of an exchange: which policy, and what became of it."""
    found = [re.fullmatch(r"policy (\d) \(episodic_return [\d.-]+\) is (kept|mutated|replaced)( by .*)?", line) for line in lines]
    return [(int(match[1]), match[2]) for match in found]


@pytest.mark.parametrize("objectives, replaced", [
    ([10.0, 1.0, 9.0, 2.0], {1, 3}),
    ([-10.0, -100.0, -9.0, -20.0], {1, 3}),  # the relative gap of negative objectives
    ([10.0, 9.5, 9.8, 9.9], set()),  # too close
    ([-10.0, -9.5, -9.8, -9.6], set()),
    ([1.0, 9.0, 10.0, 2.0], {0, 3}),  # policy 0 can be replaced
])  # fmt: skip
def test_the_worst_are_replaced_by_the_best(population_of, objectives, replaced):
    population = population_of(objectives, pbt_mutation_rate=1.0)
    learners = population.learners
    before = [learner.genes for learner in learners]
    weights = [learner.agent.critic.weight.clone() for learner in learners]
    learners[2].global_step = 1499
    assert population.exchange() == [], "all must have made their steps"
    learners[2].global_step = 1999
    last = learners[1].inference.episodes.pop()
    assert population.exchange() == [], "and episodes"
    learners[1].inference.episodes.append(last)
    lines = population.exchange()
    best, found = set(np.argsort(objectives)[2:]), dict(kinds(lines))
    assert [policy for policy, _ in kinds(lines)] == [0, 1, 2, 3] and population.exchange() == [], "each has its turn once in a period"
    assert {policy for policy, kind in found.items() if kind == "replaced"} == replaced
    assert all(found[policy] == "kept" for policy in best)
    for policy, learner in enumerate(learners):
        donors = [other for other in best if torch.equal(learner.agent.critic.weight, weights[other])]
        assert bool(donors) == (policy in replaced | best), "weights of one of the best"
        assert (learner.genes == before[policy]) == (found[policy] == "kept")
        assert learner.inference.version == (100 if policy in replaced else 0)
        if policy in replaced:
            assert [episode[0] for episode in learner.inference.episodes] == [objectives[donors[0]]] * 100
    likely = [before[policy] for policy in best] if 0 in replaced else [population.defaults]
    assert learners[0].genes in likely, "policy 0 never mutates"
    for learner in learners:
        learner.global_step = 50_000
    assert len(population.exchange()) == 4 and population.exchange() == [], "periods without an exchange are not made up for"
    for learner in learners:
        row = learner.inference.mailbox.shaping[0].tolist()
        assert row == [learner.genes[name] for name in appo.shaping_of(learner.args)]


def test_exchanges_that_wait_for_episodes_say_so_once(population_of, capsys):
    population = population_of([10.0, 1.0])
    population.learners[1].inference.episodes.pop()
    for learner in population.learners:
        learner.global_step = 1499
    assert population.exchange() == [] and capsys.readouterr().out == "", "no exchange is due"
    for learner in population.learners:
        learner.global_step = 1500
    assert population.exchange() == population.exchange() == []
    assert capsys.readouterr().out == "the exchange of policies waits until each has 100 episodes; they have [100, 99]\n"


@pytest.mark.parametrize("fraction", [0.5, 1.0, math.inf])
def test_nobody_is_among_the_best_and_the_worst(population_of, fraction):
    population = population_of([3.0, 2.0, 1.0], pbt_mutation_rate=1.0, pbt_replace_fraction=fraction)
    assert kinds(population.exchange()) == [(0, "kept"), (1, "mutated"), (2, "replaced")]


def test_a_copy_goes_its_own_way(population_of):
    """What the donor learns afterwards does not change it."""
    population = population_of([10.0, 1.0])
    donor, learner = population.learners
    for parameter in donor.agent.parameters():
        parameter.grad = torch.ones_like(parameter)
    donor.optimizer.step()
    population.exchange()
    state = [learner.optimizer.state[parameter] for parameter in learner.agent.parameters()]
    kept = [x["exp_avg"].clone() for x in state] + [x.detach().clone() for x in learner.agent.parameters()]
    assert kept[0].any() and torch.equal(kept[0], donor.optimizer.state[next(donor.agent.parameters())]["exp_avg"])
    donor.optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(kept, [x["exp_avg"] for x in state] + list(learner.agent.parameters())))


def test_what_was_sampled_before_a_replacement_is_not_learned_from(population_of):
    population = population_of([10.0, 1.0], max_policy_lag=7)
    learner = population.learners[1]
    learner.inference.version = 3
    learner.inference.rollouts.versions[:] = 3
    for field in (learner.inference.rollouts.rewards, learner.inference.rollouts.logprobs, learner.inference.rollouts.values):
        field[:] = 0.0
    assert learner.iterate([slice(0, 1)])["lag/masked"] == 0
    population.exchange()
    metrics = learner.iterate([slice(0, 1)])
    assert metrics["lag/masked"] == 1 and metrics["losses/grad_norm"] == 0


def threads_of(population) -> dict:
    return {learner.device: appo.concurrent.futures.ThreadPoolExecutor(1) for learner in population.learners}


def spoil(learner):
    """What acted and acts for it is not finite."""
    for field in (learner.inference.state, learner.inference.rollouts.rnn_state, learner.inference.rollouts.logprobs):
        field[:] = torch.nan
    learner.inference.rollouts.values[:] = 1e30  # its square is not
    for weight in learner.agent.parameters():
        weight.data[:] = torch.nan
    learner.inference.publish(learner.inference.version + 1)


def test_a_policy_that_diverges_is_replaced_by_the_best_of_the_others(population_of, tmp_path):
    """At once, though no exchange is due. It acts and learns again: what is in the air of it does no harm."""
    population = population_of([3.0, 9.0, 5.0], pbt_start_mutation=10**6, pbt_mutation_rate=1.0)
    learners, threads = population.learners, threads_of(population)
    for learner in learners:
        for field in (learner.inference.rollouts.rewards, learner.inference.rollouts.logprobs, learner.inference.rollouts.values):
            field[:] = 0.0
    spoil(learners[1])
    genes = learners[2].genes
    metrics = appo.iterate_all(population, [slice(0, 1)], threads, tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert re.fullmatch(r"\S+ \S+ policy 1 is replaced by policy 2: .* not finite.*\n", log) and metrics[1] == metrics[2], "5 is the best now"
    assert all(torch.equal(one, two) for one, two in zip(learners[1].inference.agent.parameters(), learners[2].inference.agent.parameters()))
    assert learners[1].genes != genes == learners[2].genes
    learners[1].inference.mailbox.reward[:] = 0.0  # its games have started
    with torch.inference_mode():
        learners[1].inference.act([0])
    assert learners[1].inference.state.isfinite().all()
    for _ in range(3):
        metrics = appo.iterate_all(population, [slice(0, 1)], threads, tmp_path)
        assert np.isfinite(list(metrics[1].values())).all() and (tmp_path / "log.txt").read_text() == log


def test_a_policy_that_fails_twice_in_a_row_ends_the_run(population_of, tmp_path):
    """As in an environment that always gives observations that are not finite: replacing it forever would hide that."""
    population = population_of([3.0, 9.0])
    threads = threads_of(population)
    for learner in population.learners:
        for field in (learner.inference.rollouts.rewards, learner.inference.rollouts.logprobs, learner.inference.rollouts.values):
            field[:] = 0.0

    def iterate(reward: float):
        population.learners[1].inference.rollouts.rewards[:] = reward
        appo.iterate_all(population, [slice(0, 1)], threads, tmp_path)

    for reward in (np.nan, 0.0, np.nan):
        iterate(reward)
    assert (tmp_path / "log.txt").read_text().count("policy 1 is replaced by policy 0: ") == 2
    with pytest.raises(FloatingPointError, match="check observations and rewards"):
        iterate(np.nan)


@pytest.mark.parametrize("with_pbt, spoiled", [(False, [1]), (True, [0, 1])])
def test_a_policy_that_diverges_ends_the_run_if_none_can_take_its_place(population_of, tmp_path, with_pbt, spoiled):
    population = population_of([3.0, 9.0], with_pbt=with_pbt)
    for i in range(2):
        for field in (population.learners[i].inference.rollouts.rewards, population.learners[i].inference.rollouts.logprobs):
            field[:] = 0.0
        population.learners[i].inference.rollouts.values[:] = 0.0
        if i in spoiled:
            spoil(population.learners[i])
    with pytest.raises(FloatingPointError, match="not finite"):
        appo.iterate_all(population, [slice(0, 1)], threads_of(population), tmp_path)


@pytest.mark.parametrize("seats, moments, expected", [
    (1, ([1.0, 5.0], [4.0, 4.0], [2.0, 6.0]), [1, 1, 3]), (2, ([0.0, 1.0], [0.6, 0.6], [0.1, 0.9]), [1, 2, 2]),
])  # fmt: skip
def test_best_is_by_the_objective(population_of, tmp_path, seats, moments, expected):
    """Of the best policy; where they play each other of all, since what one wins another loses. Returns fall meanwhile."""
    population = population_of([9.0, 9.0], pbt_target_objective="win")
    vars(population.args)["seats"] = seats
    found = []
    for step, objectives in enumerate(moments, 1):
        for learner, objective in zip(population.learners, objectives):
            learner.global_step = step
            learner.inference.episodes.extend([[-step, 0, 0, 0, 0, 0, objective]] * 100)
        appo.save_checkpoint(tmp_path, population)
        found.append(torch.load(tmp_path / "checkpoints" / "best.pth", weights_only=True)["policies"][0]["global_step"])
    assert found == expected


def test_mutation_follows_its_rates(population_of):
    population = population_of([1.0, 1.0], pbt_mutation_rate=0.15)
    learner = population.learners[1]
    population.give(learner, population.defaults | dict(learning_rate=2 * population.defaults["learning_rate"], max_grad_norm=0.0))
    results = [population.mutated(learner.genes) for _ in range(20_000)]
    factors = np.array([result["learning_rate"] / learner.args.learning_rate for result in results])
    changed = factors != 1
    assert changed.mean() == pytest.approx(0.15, abs=0.01)
    reset = np.isclose(factors, 0.5)
    assert reset.sum() / changed.sum() == pytest.approx(0.05, abs=0.01)
    sizes = np.maximum(factors, 1 / factors)[changed & ~reset]
    assert sizes.min() >= 1.05 and sizes.max() <= 1.5 and (factors[changed & ~reset] > 1).mean() == pytest.approx(0.5, abs=0.05)
    assert {result["max_grad_norm"] for result in results} <= {0, population.defaults["max_grad_norm"]}, "what is 0 stays 0, but for a reset"


def test_policies_begin_with_their_own_settings(population_of):
    settings = '{"1": {"HEALTH-": -0.01, "vf_coef": 0.9}, "0": {"learning_rate": 0.5}}'
    population = population_of([1.0, 1.0], with_pbt=False, policy_settings=settings)
    defaults = population.defaults
    expected = [defaults | dict(learning_rate=0.5), defaults | {"HEALTH-": -0.01, "vf_coef": 0.9}]
    assert [learner.genes for learner in population.learners] == expected
    assert [learner.inference.mailbox.shaping[0, 1] for learner in population.learners] == [defaults["HEALTH-"], -0.01]


def test_all_but_the_first_policy_begin_mutated(population_of):
    population = population_of([1.0, 1.0, 1.0], pbt_mutation_rate=1.0, policy_settings='{"2": {"learning_rate": 0.01}}')
    defaults, (first, second, third) = population.defaults, [learner.genes for learner in population.learners]
    assert first == defaults and third["learning_rate"] == 0.01 and second != third
    assert {name for name in defaults if second[name] == defaults[name]} <= {name for name in defaults if defaults[name] == 0}


def test_a_population_that_is_resumed(population_of, tmp_path):
    """Each policy has its weights, steps, version and genes; but a flag that is typed anew is for all."""
    one = population_of([1.0, 5.0])
    for i, learner in enumerate(one.learners):
        learner.global_step, learner.inference.version = 900 + i, 30 + i
    one.give(one.learners[1], one.learners[1].genes | {"learning_rate": 0.01, "HEALTH+": 0.5})
    one.exchanged = 700
    appo.save_checkpoint(tmp_path, one)
    two = population_of([0.0, 0.0], vf_coef=0.25)
    appo.load_checkpoint(tmp_path, two)
    assert [learner.genes for learner in two.learners] == [learner.genes | dict(vf_coef=0.25) for learner in one.learners]
    assert (two.exchanged, two.best_objective, appo.mean_step(two.learners)) == (700, 5.0, 900)
    for i, (learner, before) in enumerate(zip(two.learners, one.learners)):
        assert (learner.global_step, learner.inference.version) == (900 + i, 30 + i)
        assert torch.equal(learner.inference.agent.critic.weight, before.agent.critic.weight)
        assert learner.inference.mailbox.shaping[0].tolist() == pytest.approx([learner.genes[name] for name in appo.shaping_of(learner.args)])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best.pth", "checkpoint_000000000900.pth"]


def test_policies_are_dealt_to_the_gpus_whose_learners_work_at_the_same_time():
    """Those of one device take turns."""
    both, order = threading.Barrier(2, timeout=10), []

    class Learner:
        def __init__(self, number):
            self.number, self.device = number, f"cuda:{number % 2}"

        def iterate(self, blocks):
            if self.number < 2:
                both.wait()
            order.append(self.number)
            return self.number

    learners = [Learner(number) for number in range(4)]
    threads = {learner.device: appo.concurrent.futures.ThreadPoolExecutor(1) for learner in learners}
    population = SimpleNamespace(learners=learners, args=appo.Args(device="cpu"))
    assert appo.iterate_all(population, [], threads, Path()) == [0, 1, 2, 3]
    assert order.index(0) < order.index(2) and order.index(1) < order.index(3)


@pytest.mark.parametrize("env_id, logits", [("duel_bots", 41), ("deathmatch_bots", 39), ("duel", 41), ("deathmatch", 41)])
def test_the_heads_of_a_match_are_sample_factorys(env_id, logits):
    player = appo.DoomEnv(appo.Args(env_id, device="cpu"))
    buttons = [button.name for button in player.game.get_available_buttons()]
    assert sum(player.scenario.heads) == logits and ("USE" in buttons) == (logits == 41)
    assert sum(press.shape[1] for press in player.presses) == len(buttons), "every button belongs to one head, in order"
    assert buttons[-1] == "TURN_LEFT_RIGHT_DELTA" and player.presses[-1].shape == (21, 1) and player.presses[-1].max() == 12.5
    assert (player.presses[-1][10] == 0).all()


def test_settings_of_one_players_games_are_the_base_files():
    for env_id, scenario in appo_doom.SCENARIOS.items():
        assert appo.SCENARIOS[env_id][: len(scenario)] == scenario


def test_a_scenario_file_with_the_name_of_a_match_is_none():
    args = appo.Args(cfg_path="deathmatch.cfg", num_policies=2, device="cpu")
    assert args.env_id == "deathmatch" and args.pbt_target_objective == "episodic_return"
    assert appo.shaping_of(args) == {} and args.seats == 1


@pytest.mark.parametrize("env_id", ["basic", "battle", "health_gathering", "defend_the_center"])
def test_a_game_of_one_player_is_that_of_the_base_file(env_id):
    base = appo_doom.DoomEnv(appo_doom.Args(env_id=env_id, reward_clip=np.inf, device="cpu"))
    env = appo.DoomMatch(appo.Args(env_id=env_id, reward_clip=np.inf, device="cpu"))
    try:
        seen, _ = base.reset(seed=3)
        first, _ = env.reset(seed=3)
        base.action_space.seed(0)
        steps, bonus = [(seen, first["player_0"])], 0.0
        for _ in range(150):
            action = base.action_space.sample()
            seen, reward, terminated, truncated, info = base.step(action)
            results = [result["player_0"] for result in env.step({"player_0": action})]
            assert results[1:4] == [pytest.approx(reward, abs=1e-9), terminated, truncated] and results[4]["raw_reward"] == info["raw_reward"]
            bonus += abs(reward - info["raw_reward"] * base.scenario.reward_scale)
            steps.append((seen, results[0]))
            if terminated or truncated:
                assert env.agents == []
                steps.append((base.reset()[0], env.reset()[0]["player_0"]))
        for one, two in steps:
            assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
        assert (bonus > 0) == (env_id in ("battle", "health_gathering")), "shaping was seen, where there is some"
    finally:
        base.close()
        env.close()


def test_every_seat_is_shaped_as_its_policy_says(monkeypatch):
    """When an episode begins."""
    told = []

    class Match:
        possible_agents, close = ["player_0", "player_1"], lambda self: None

        def observation_space(self, agent):
            return appo.gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)

        def action_space(self, agent):
            return appo.gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            told.append({agent: coefficients["HEALTH-"] for agent, coefficients in options["shaping"].items()})
            self.agents = list(self.possible_agents)
            return dict.fromkeys(self.agents, np.zeros((36, 36, 1), np.uint8)), {}

        def step(self, actions):
            self.agents = []
            return *(dict.fromkeys(actions, value) for value in (np.zeros((36, 36, 1), np.uint8), 3.0, True, False)), {}

    monkeypatch.setattr(appo, "make_game", lambda args: Match())
    monkeypatch.setattr(appo.Args, "seats", 2)
    args = appo.Args(env_id="battle", num_workers=1, reward_scale=0.5, reward_clip=0.5, device="cpu")
    mailbox = appo.Mailbox(spaces((36, 36, 1), 0, (2,)), 2, len(appo.shaping_of(args))).share()
    mailbox.shaping[0], mailbox.shaping[1] = 1, 2
    worker = appo.WorkerEnvs(args, np.array([1, 0]), mailbox, 0)
    worker.reset()
    mailbox.shaping[1] = 3
    worker.step()
    assert mailbox.reward.tolist() == [0.5, 0.5], "scaled and clipped, whatever the game; the score is as it came"
    assert mailbox.episode[:, 0].tolist() == [3.0, 3.0]
    assert told == [dict(player_0=2, player_1=1)], "not before the next episode"
    worker.step()
    assert told[1:] == [dict(player_0=3, player_1=1)]


@pytest.fixture
def duel():
    """A duel, whose game and seeds are the same each time."""
    env = appo.DoomMatch(appo.Args("duel", device="cpu", reward_clip=np.inf))
    env.reset(seed=1)
    yield env
    env.close()


def test_a_match_has_a_port_of_its_own(duel):
    """Nobody else gets the number while it lasts."""
    number = duel.port.getsockname()[1]
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", number))
    assert not os.get_inheritable(duel.port.fileno()) and number < 32768, "nor any joining engine"


def test_a_duel(duel):
    """Both players see the same time; shaping and scores are their own; who waits for its return is inactive."""
    still, fire = np.array([0, 0, 0, 0, 0, 0, 10]), np.array([0, 0, 0, 1, 0, 0, 10])
    assert {agent: part.shape for agent, parts in duel.reset(seed=1)[0].items() for part in parts.values()} == dict.fromkeys(duel.possible_agents, (23,))
    assert [type(info["inactive"]) for info in duel.reset(seed=1)[1].values()] == [bool, bool], "also before the first step"
    inactive = []
    for step in range(60):
        observations, rewards, terminated, truncated, infos = duel.step(dict(player_0=fire, player_1=still))
        inactive.append([infos[agent]["inactive"] for agent in duel.possible_agents])
        assert observations["player_0"]["vector"][6] == pytest.approx(2 / 5), "two players"
        assert not any((terminated | truncated).values())
    assert not all(inactive[-1]) and duel.players[0].now["SELECTED_WEAPON_AMMO"] < 50, "it has fired"
    for player in duel.players:
        player.tics = 4 * 60 * 35 - 4
    *_, terminated, truncated, infos = duel.step(dict.fromkeys(duel.possible_agents, still))
    assert truncated == dict(player_0=True, player_1=True) and not any(terminated.values()) and duel.agents == []
    for agent in duel.possible_agents:
        assert {"kills", "frags", "deaths", "place", "win", "raw_reward"} <= infos[agent].keys()
    assert sorted(infos[agent]["place"] for agent in duel.possible_agents) in ([1, 1], [1, 2])
    assert duel.reset()[0].keys() == set(duel.possible_agents)


def test_large_images_are_made_smaller():
    image = np.arange(280 * 480 * 3, dtype=np.uint32).astype(np.uint8).reshape(280, 480, 3)
    assert np.array_equal(appo.smaller(image), image[::3, ::4]) and appo.smaller(image[:36]).shape == (36, 120, 3)
    assert appo.smaller(image[:128, :128]).shape == (128, 128, 3) and appo.smaller(np.ones(1000)).shape == (1000,)


@pytest.mark.parametrize("piece", ["NUMERIC_SPACES", "IMAGE_SIDE", "parts_of", "as_array", "heads_of"])
def test_games_of_pettingzoo_get_what_the_base_does(piece):
    base, ours = (carry.pieces((ROOT / name).read_text())[piece] for name in (carry.BASE, SCRIPT.name))
    assert base == ours and base


# As PettingZoo allows it: `possible_agents` does not exist, spaces differ in bounds, and some of what is given is in arrays of one number
ZOO = """
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Text


class Zoo:
    spaces = dict.fromkeys("ab", Box(-1, 1, (3,)))
    actions = {"a": Discrete(2), "b": Discrete(2, start=-1)}

    def observation_space(self, agent):
        return self.spaces[agent]

    def action_space(self, agent):
        return self.actions[agent]

    def observations(self):
        return {agent: self.spaces[agent].sample() for agent in "ab"}

    def reset(self, seed=None, options=None):
        self.count, self.agents = 0, ["a", "b"]
        return self.observations(), {agent: {} for agent in "ab"}

    def step(self, actions):
        self.count += 1
        assert all(self.actions[agent].contains(action) for agent, action in actions.items()), actions
        rewards = {agent: np.array([float(np.sum(action))]) for agent, action in actions.items()}
        over = dict.fromkeys(actions, np.array(self.count == 10))
        if self.count == 10:
            self.agents = []
        return self.observations(), rewards, dict.fromkeys(actions, False), over, {agent: dict(win=np.array([0.5])) for agent in actions}

    def close(self):
        pass


parallel_env = Zoo
"""


@pytest.fixture
def worker_of(tmp_path, monkeypatch):
    """Of the lines that a module of one's own has below ZOO: `WorkerEnvs` of two of its games, and the spaces."""
    monkeypatch.syspath_prepend(tmp_path)

    def worker_of(lines: str = ""):
        name = f"zoo{len(list(tmp_path.iterdir()))}_{tmp_path.name}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "game.py").write_text(ZOO + lines)
        args = appo.Args(env_id=f"{name}.game", device="cpu", reward_clip=np.inf)
        space = appo.spaces_of(args)
        return appo.WorkerEnvs(args, np.arange(4), appo.Mailbox(space, 4, 0).share(), 0), space

    return worker_of


@pytest.mark.parametrize("space, shape", [
    ("Box(0, 255, (7, 7, 3), np.uint8)", (147,)), ("Box(0, 255, (4, 84, 84), np.uint8)", (84, 84, 4)),
    ("Box(0, 255, (64, 64), np.uint8)", (64, 64, 1)), ("Box(0, 255, (3, 300, 100), np.uint8)", (100, 100, 3)),
    ("Box(0, 1, (64, 64, 3))", (64 * 64 * 3,)), ("Discrete(3)", (3,)), ("MultiBinary((2, 2))", (4,)),
])  # fmt: skip
def test_observations_become_images_and_vectors(worker_of, space, shape):
    worker, spaces = worker_of(f'Zoo.spaces = dict.fromkeys("ab", {space})')
    assert {name: box.shape for name, box in spaces.obs.items()} == dict(obs=shape)
    worker.reset()
    worker.step()
    assert worker.mailbox.obs["obs"].shape == (4, *shape) and worker.mailbox.obs["obs"].any()


def test_rewards_flags_and_scores_that_are_arrays(worker_of):
    worker, _ = worker_of()
    worker.reset()
    for _ in range(10):
        assert not worker.mailbox.episode.any()
        worker.mailbox.action[:] = 1
        worker.step()
    assert worker.mailbox.reward.tolist() == [1, 0] * 2 and not worker.mailbox.terminated.any(), "b's actions begin at -1"
    assert worker.mailbox.episode.tolist() == [[10.0, 10, 0, 0, 0, 0, 5], [0.0, 10, 0, 0, 0, 0, 5]] * 2


def test_actions_of_several_dimensions(worker_of):
    worker, spaces = worker_of('Zoo.actions = dict.fromkeys("ab", MultiBinary((2, 3)))')
    worker.reset()
    worker.mailbox.action[0] = [1, 0, 1, 1, 0, 0]
    worker.step()
    assert spaces.heads == (2,) * 6 and worker.mailbox.reward.tolist() == [3, 0, 0, 0]


def test_spaces_that_differ_in_bounds_only(worker_of):
    """And texts are left out."""
    with pytest.warns(UserWarning, match="obs/text is left out of the observation: Text"):
        worker, spaces = worker_of('Zoo.spaces = {agent: Dict(x=Box(-i, i, (3,)), text=Text(5)) for i, agent in zip((1, 1e6), "ab")}')
    worker.reset()
    assert spaces.obs.keys() == {"obs/x"} and (np.abs(worker.mailbox.obs["obs/x"]) > 1).any()


@pytest.mark.parametrize("lines, answer", [
    ('Zoo.spaces = dict(a=Box(0, 1, (2,)), b=Box(0, 1, (3,)))', "agents' spaces may differ in bounds only"),
    ('Zoo.spaces = dict.fromkeys("ab", Text(5))', "observations must have numbers"),
    ('Zoo.actions = dict.fromkeys("ab", Box(0, 1, (3,)))', "actions be Discrete, MultiDiscrete or MultiBinary"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*is left out")
def test_spaces_that_are_not_supported(worker_of, lines, answer):
    with pytest.raises(appo.UserError, match=answer):
        worker_of(lines)


@pytest.mark.parametrize("given, answer", [
    ("np.zeros((64, 64, 3))", "the observation's part obs/x has type float64, but its space uint8"),
    ("np.zeros((3, 64, 64), np.uint8)", "the observation's part obs/x has shape \\(3, 64, 64\\), but its space is Box"),
])  # fmt: skip
def test_an_observation_that_does_not_fit_its_space(worker_of, given, answer):
    worker, _ = worker_of(f"""
Zoo.spaces = dict.fromkeys("ab", Dict(x=Box(0, 255, (64, 64, 3), np.uint8)))
Zoo.observations = lambda self: dict.fromkeys("ab", dict(x={given}))
""")
    with pytest.raises(ValueError, match=answer):
        worker.reset()


def test_names_that_a_module_could_not_have(main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/named.py").write_text(ZOO + 'Zoo.spaces = dict.fromkeys("ab", Dict({"type": Box(0, 1, (4,)), "self.pos": Box(0, 1, (2,))}))')
    code, text = main(appo, "--train-dir", tmp_path, *SMALL, "--env-id", "zoo.named", "--num-workers", 0, "--total-timesteps", 300)
    assert code == 0 and "\ndone: " in text, text
    names = newest(tmp_path / "e")["policies"][0]["agent"]
    assert "normalizers.obs/type.mean" in names and "normalizers.obs/self:pos.mean" in names


def test_a_dev_shm_without_room_for_the_mailbox_is_a_sentence(tmp_path):
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/large.py").write_text(ZOO + 'Zoo.spaces = dict.fromkeys("ab", Box(0, 255, (128, 128, 3), np.uint8))')
    small = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "-"]
    if subprocess.run([*small, "true"]).returncode:
        pytest.skip("no file system of one's own can be mounted here")
    flags = [*SMALL, "--env-id", "zoo.large", "--train-dir", str(tmp_path)]
    done = subprocess.run([*small, sys.executable, SCRIPT, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"\nerror: .*No space left on device.*: use fewer games or a larger /dev/shm .*\n\Z", done.stderr), done.stderr


SMALL = ("--experiment", "e", "--num-policies", "2", "--num-workers", "2", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "32",
         "--hidden-size", "32", "--device", "cpu", "--total-timesteps", "1000000")  # fmt: skip


@pytest.fixture
def start(run, tmp_path):
    def start(*flags: str, edits=()):
        return run(*SMALL, *flags, script=edited(tmp_path, "pbt_edited", REPORTS, *edits, source=SCRIPT))

    return start


def steps(r) -> int:
    found = re.findall(r"step ([\d,]+): .*frames/s", r.text())
    return int(found[-1].replace(",", "")) if found else 0


def exchanges(r) -> list[tuple[str, str, str]]:
    """In the order in which they were made: policy, objective, what became of it."""
    return re.findall(r"step [\d,]+: policy (\d) \(episodic_return ([\d.-]+)\) is (kept|mutated|replaced by policy \d)", r.text())


def goes_on(r) -> None:
    before = steps(r)
    r.wait_for(lambda: steps(r) > before + 100, 90, "more steps")


def stop(r, send=os.kill, number=signal.SIGINT) -> str:
    send(r.process.pid, number)
    assert r.wait(40) == 130, r.text()
    return r.text()


def played(folder: Path, *flags: str, code: int = 0) -> str:
    """What evaluate.py says of a run."""
    file = json.loads((folder / "cfg.json").read_text())["file"]
    done = python(ROOT / "evaluate.py", folder, "--file", file, *flags, folder=folder.parent)
    assert done.returncode == code, done.stdout
    return done.stdout


def newest(folder: Path) -> dict:
    return torch.load(sorted((folder / "checkpoints").glob("checkpoint_*"))[-1], weights_only=True)


PBT = ("--with-pbt", "--pbt-start-mutation", "300", "--pbt-period-env-steps", "300", "--pbt-mutation-rate", "1", "--pbt-replace-reward-gap", "0")
# One agent. Which third of the image is bright says which of three actions is rewarded, 20 times an episode.
BRIGHT = """
class Env:
    possible_agents, metadata = ["player_0"], {}

    def observation_space(self, agent):
        return gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = random.Random(seed)
        self.count, self.agents = 0, list(self.possible_agents)
        return self.observations(), {"player_0": {}}

    def observations(self):
        self.bright, image = self.random.randrange(3), np.zeros((36, 36, 3), np.uint8)
        image[:, 12 * self.bright : 12 * self.bright + 12] = 255
        return {"player_0": image}

    def step(self, actions):
        self.count += 1
        reward, over = float(actions["player_0"] == self.bright), self.count == 20
        self.agents = [] if over else self.agents
        return self.observations(), {"player_0": reward}, {"player_0": False}, {"player_0": over}, {"player_0": {}}

    def close(self):
        pass
"""


def test_a_population_trains_exchanges_stops_and_goes_on(start, tmp_path):
    settings = ("--policy-settings", '{"1": {"learning_rate": 0.01}}')
    r = start(*PBT, *settings, edits=[replacing(BRIGHT + OWN)])
    r.wait_for(lambda: len(exchanges(r)) >= 4, 120, "exchanges")
    text = stop(r)
    assert re.search(r"step [\d,]+: return [\d.-]+, [\d.-]+, [\d,]+ frames/s, limit: (environments|learner|inference), lag \d+\n", text)
    folder, saved = tmp_path / "e", newest(tmp_path / "e")
    more = {f"charts/{name}" for name in ("kills", "frags", "deaths", "place", "win")}
    assert all(f"`{tag}`" in (ROOT / "benchmark" / "METRICS.md").read_text() for tag in more)
    for index, policy in enumerate(saved["policies"]):
        written = scalars(folder / f"policy_{index:02d}")
        genes = {f"pbt/{name}" for name in policy["genes"]}
        assert set(written) == TAGS | more | genes
        assert {f"pbt/{name}": value for name, value in policy["genes"].items()} == pytest.approx({tag: written[tag][-1].value for tag in genes})
        assert len(written["pbt/learning_rate"]) == 1 + len(exchanges(r)) // 2, "at the start, and after each exchange"
    r = start("--vf-coef", "0.25", edits=[replacing(BRIGHT + OWN)])
    goes_on(r)
    text = stop(r, os.killpg, signal.SIGTERM)  # as `timeout` and batch systems send it: to all
    assert "override: vf_coef 0.5 -> 0.25" in text and "starting another" not in text and re.search(r"resuming .* at step [\d,]+\n", text)
    again = newest(folder)
    assert all(two["global_step"] > one["global_step"] and two["genes"]["vf_coef"] != one["genes"]["vf_coef"]
               for one, two in zip(saved["policies"], again["policies"]))  # fmt: skip
    r = start("--total-timesteps", "301", edits=[replacing(BRIGHT + OWN)])
    assert r.wait(30) == 0 and "Already complete: raise --total-timesteps" in r.text()
    assert len(re.findall(r"policy [01]: 5 episodes, return -?[\d.]+ ", played(folder, "--episodes", "5"))) == 2
    assert len(re.findall(r"policy 1: 5 episodes", played(folder, "--episodes", "5", "--policies", "1", "--best"))) == 1
    assert "--policies 2: " in played(folder, "--policies", "2", code=2)


def test_a_population_mends_what_ruinous_learning_rates_spoil(start, tmp_path):
    """Three of four policies begin with rates that learn nothing. In the end all of them play as well as the fourth: at each exchange
    the worst becomes a copy of the best."""
    rates = '{"1": {"learning_rate": 1e-8}, "2": {"learning_rate": 1e-8}, "3": {"learning_rate": 0.5}}'
    r = start("--num-policies", "4", "--num-envs-per-worker", "8", "--frameskip", "1", "--gamma", "0", "--rnn-type", "none", "--learning-rate",
              "0.002", "--with-pbt", "--pbt-start-mutation", "2500", "--pbt-period-env-steps", "1000", "--pbt-replace-fraction", "0.25",
              "--policy-settings", rates, edits=[replacing(BRIGHT + OWN)])  # fmt: skip

    def returns() -> list[float]:
        """The last ones."""
        found = re.findall(r"step [\d,]+: return ([\d., -]+), [\d,]+ frames/s", r.text())
        return [float(value) for value in found[-1].split(", ")] if found else []

    r.wait_for(lambda: len(returns()) == 4 and min(returns()) > 17, 150, "four good policies")
    stop(r)
    collect.write_population(tmp_path / "population.csv", tmp_path / "e")  # what `benchmark/learning.sh pbt_basic` draws
    rows = plot.read_csv(tmp_path / "population.csv")
    assert len(rows) == 4 + len(exchanges(r)) and any(row["weights_of"] != row["policy"] for row in rows)
    first = {policy: float(objective) for policy, objective, _ in exchanges(r)[:4]}
    assert first.pop("0") > 13 and max(first.values()) < 12, first
    assert {"1", "2", "3"} <= {policy for policy, _, kind in exchanges(r) if kind.startswith("replaced")}
    last = [policy["genes"]["learning_rate"] for policy in newest(tmp_path / "e")["policies"]]
    assert min(last) > 1e-4 and max(last) < 0.02, "no ruinous rate is left"


def test_a_population_in_which_one_policy_diverges_trains_on(start, tmp_path):
    """It is replaced once, and then learns as the other one does."""
    r = start("--with-pbt", "--pbt-start-mutation", "900000", "--policy-settings", '{"1": {"learning_rate": 1e30}}', edits=[replacing(BRIGHT + OWN)])
    r.wait_for(lambda: "is replaced by" in r.text(), 60, "the replacement")
    goes_on(r)
    text = stop(r)
    assert re.findall(r"policy \d is replaced by policy \d: .*", text) == re.findall("policy 1 is replaced by policy 0: .* not finite.*", text)
    assert text.count("is replaced by") == 1 and "nan" not in text.split("is replaced by")[1].split("\n", 1)[1], text
    for policy in newest(tmp_path / "e")["policies"]:
        assert all(x.isfinite().all() for x in policy["agent"].values())


def test_a_signal_in_the_middle_of_an_exchange_ends_the_run_after_it(start, tmp_path):
    """After the first of two copies. What is saved has both, and a resumed run does not make the exchange again."""
    interrupt = """
become = Learner.become


def interrupted(self, donor):
    become(self, donor)
    if self.number == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)


Learner.become = interrupted
"""
    flags = ("--num-policies", "4", "--pbt-replace-fraction", "0.5", "--pbt-replace-reward-gap", "-10")
    settings = ("--policy-settings", '{"1": {"learning_rate": 0}, "2": {"learning_rate": 0}}')
    # policies 0 and 3 learn; the worst two are 1 and 2, or else others, but two are always replaced
    edits = [replacing(BRIGHT + OWN + interrupt)]
    r = start(*PBT, *flags, *settings, "--pbt-period-env-steps", "2500", "--gamma", "0", "--learning-rate", "0.002", edits=edits)
    assert r.wait(120) == 130, r.text()
    made, saved = exchanges(r), newest(tmp_path / "e")
    assert len(made) == 4 and [kind for _, _, kind in made].count("kept") == 2 and saved["exchanged"] >= 2500
    replaced = [int(policy) for policy, _, kind in made if "replaced" in kind]
    assert len(replaced) == 2 and 1 in replaced
    assert [policy["version"] > 100 for policy in saved["policies"]].count(True) >= 2
    r = start("--num-policies", "4", edits=[replacing(BRIGHT + OWN)])
    goes_on(r)
    assert exchanges(r) == [] and "stopped: " in stop(r)
    assert [policy["genes"] for policy in newest(tmp_path / "e")["policies"]] == [policy["genes"] for policy in saved["policies"]]


def playing(r) -> int:
    """Number of engines whose games have started: their shared memory has lost its name."""

    def started(engine: int) -> bool:
        try:
            return bool(re.search(r"/dev/shm/ViZDoom.*\(deleted\)", Path(f"/proc/{engine}/maps").read_text()))
        except OSError:  # it has just ended
            return False

    return sum(map(started, r.engines()))


def all_play(r, seconds=60) -> None:
    """An engine that dies before its actor has asked for actions ends the run. With eight, the last may still begin its first episode."""
    r.wait_for(lambda: playing(r) == 8, seconds, "the games")
    for _ in range(3):
        goes_on(r)


def test_what_is_killed_one_after_the_other(start):
    """An actor and an engine cost an actor, which is replaced. The fixture `run` looks for what stays behind."""
    r = start("--env-id", "basic", "--actor-timeout", "20")
    all_play(r)
    before = r.engines()  # those of the other actor, which has played, are left when one has died
    # An engine that was killed with the message queue's lock in its hand, once in some forty times, hangs
    for victims, how in ((r.actors, r"died \(exit code -9\)"), (r.engines, r"(Traceback[\s\S]+ViZDoom[\s\S]+|no answer for \d+ s \(--actor-timeout\))")):
        victim = next(one for one in victims() if victims == r.actors or one in before)
        os.kill(victim, signal.SIGKILL)
        r.wait_for(lambda how=how: re.search(rf"actor [01]: {how}; starting another", r.text()), 60, "the new actor")
        r.wait_for(lambda victim=victim: victim not in r.engines(), 60, "its end")
        all_play(r)
    os.kill(r.process.pid, signal.SIGKILL)
    r.wait()


MATCH = ("--env-id", "duel", "--num-envs-per-worker", "2")


def test_ctrl_c_while_matches_start(start):
    """More of them than start in the five seconds after which actors are killed. The fixture sees whether their shared memory is left."""
    r = start("--env-id", "duel", "--num-envs-per-worker", "16")
    r.wait_for(lambda: len(r.engines()) > 2, 60, "the first games")
    os.kill(r.process.pid, signal.SIGINT)
    assert r.wait(30) == 130 and "stopped: 0 steps" in r.text(), r.text()


def test_a_match_with_a_dead_or_hanging_player_costs_an_actor_and_ends_with_main(start):
    """The other players' engines wait for it."""
    before = set(os.listdir("/dev/shm"))
    r = start(*MATCH, "--actor-timeout", "15")  # on a loaded machine a match takes several seconds to start
    all_play(r, 90)
    engines = r.engines()
    # One that was killed with the message queue's lock in its hand hangs, too
    for number, how in ((signal.SIGKILL, r"(Traceback[\s\S]+|no answer for \d+ s \(--actor-timeout\))"), (signal.SIGSTOP, r"no answer for \d+ s \(--actor-timeout\)")):
        # The second is of the other actor: three early deaths of one actor end the run
        engines = [engine for engine in engines if engine in r.engines()]
        victim, seen = engines[0], len(r.text())
        os.kill(victim, number)
        r.wait_for(lambda: re.search(rf"actor \d: {how}; starting another", r.text()[seen:]), 60, "the new actor")
        r.wait_for(lambda: victim not in r.engines(), 60, "its end")
        all_play(r)
    os.kill(r.process.pid, signal.SIGKILL)  # the fixture `run` looks for what stays behind
    r.wait()
    if "exit code -11" in r.text():  # an engine died by itself while its match started, and its actor by that: these names are left
        for left in shared_memory(r.mark) - before:
            Path("/dev/shm", left).unlink(missing_ok=True)


def short_duels(seconds: int) -> tuple[str, str]:
    changed = "{name: SCENARIOS[name]._replace(time_limit=35 * %d) for name in ('duel', 'duel_bots')}" % seconds
    return replacing(f"SCENARIOS.update({changed})")


def test_matches_between_checkpoints(start, tmp_path):
    r = start(*MATCH, "--total-timesteps", "300", edits=[short_duels(5)])
    assert r.wait(120) == 0 and re.search(r"done: [\d,]+ steps, win [\d.]+, [\d.]+\nplay: ", r.text()), r.text()
    text = played(tmp_path / "e", "--episodes", "4", "--save-video")
    found = re.search(r"0 against 1: (\d+) wins, (\d+) losses, (\d+) ties; (none|\d+% \(\d+% to \d+%\)) of the decided", text)
    assert found and sum(map(int, found.groups()[:3])) == 4
    assert len(re.findall(r"policy [01]: 4 episodes, return", text)) == 2
    assert (tmp_path / "e" / "video.mp4").stat().st_size > 1000
    shutil.copytree(tmp_path / "e", tmp_path / "other" / "e")
    edited(tmp_path, "pbt_edited", short_duels(1), source=SCRIPT)
    text = played(tmp_path / "e", "--episodes", "2", "--opponents", str(tmp_path / "other" / "e"), "--policies", "1")
    assert re.search(r"e/1 against other/e/1: \d wins, \d losses, \d ties", text), text
    text = played(tmp_path / "e", "--episodes", "2", "--env-id", "duel_bots")
    assert len(re.findall(r"[01] against bots: \d wins, \d losses, \d ties", text)) == 2, text
    cfg = json.loads((tmp_path / "other" / "e" / "cfg.json").read_text())
    cfg["args"]["frameskip"] = 2
    (tmp_path / "other" / "e" / "cfg.json").write_text(json.dumps(cfg))
    text = played(tmp_path / "e", "--opponents", str(tmp_path / "other" / "e"), code=2)
    assert "were trained with different frameskips" in text


def test_an_engine_that_dies_while_a_match_is_played_ends_the_evaluation(start, run, tmp_path):
    """With a traceback, though the other player's thread and engine wait for it. And Ctrl-C ends it, too."""
    r = start(*MATCH, "--total-timesteps", "100")
    assert r.wait(120) == 0, r.text()

    def evaluation():
        r = run("--episodes", "4", "--file", str(tmp_path / "pbt_edited.py"), launcher=(str(ROOT / "evaluate.py"),), script=tmp_path / "e")
        r.wait_for(lambda: playing(r) == 8, 60, "the matches")
        time.sleep(1)
        return r

    for _ in range(2):  # once in some forty times it is killed with the message queue's lock in its hand, and nobody hears of it
        r = evaluation()
        os.kill(r.engines()[0], signal.SIGKILL)
        with contextlib.suppress(AssertionError):  # still running: `wait` has killed it
            r.wait(60)
            break
    assert r.wait(60) == 1 and "Traceback" in r.text(), r.text()
    r = evaluation()
    os.kill(r.process.pid, signal.SIGINT)
    assert r.wait(30) == 130 and "Traceback" not in r.text(), r.text()


def test_the_arena_of_the_benchmarks(tmp_path, monkeypatch):
    """A match starts there, and neither pistol (50 shots at first) nor shotgun (8) runs out of ammunition: the engine would change weapons."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    importlib.import_module("arena").main(tmp_path / "arena.wad")
    env = appo.DoomMatch(appo.Args("duel", match_wad=str(tmp_path / "arena.wad"), device="cpu"))

    def play(steps: int, *heads: int) -> float:
        """Steps of player 0, while the other waits. Returns the weapon in hand."""
        for _ in range(steps):
            env.step(dict(player_0=np.array(heads), player_1=np.array([0, 0, 0, 0, 0, 0, 10])))
        return env.players[0].now["SELECTED_WEAPON"]

    try:
        env.reset(seed=1)
        assert play(300, 0, 0, 0, 1, 0, 0, 10) == 2, "the pistol, after 34 seconds of firing"
        assert play(10, 1, 0, 3, 0, 0, 0, 10) == 3, "a shotgun lies where a player starts"
        assert play(200, 0, 0, 0, 1, 0, 0, 10) == 3
    finally:
        env.close()


def test_a_loss_that_is_not_finite_ends_both_policies(start, tmp_path):
    """The second one's, after a while. The checkpoints before it are kept."""
    broken = """
loss_of, count = appo_loss, [0]


def appo_loss(*arguments):
    loss, *others = loss_of(*arguments)
    count[0] += 1
    return loss * (torch.nan if count[0] == 20 else 1), *others
"""
    r = start("--save-every-sec", "0", "--keep-checkpoints", "0", edits=[replacing(BRIGHT + OWN + broken)])
    assert r.wait(90) == 2
    assert re.fullmatch(r"error: the loss \(nan\) .* is not finite.*", r.text().strip().splitlines()[-1]), r.text()[-2000:]
    assert "Traceback" not in r.text() and [policy["version"] for policy in newest(tmp_path / "e")["policies"]] == [9, 9]


def test_a_game_of_ones_own_is_found_where_the_user_is(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    imports = "import gymnasium as gym\nimport numpy as np\n"
    (tmp_path / "mine/tag.py").write_text(imports + COUNTING + "\n\nparallel_env = Env\n")
    (tmp_path / "mine/broken.py").write_text(imports + COUNTING + "\n\ndef parallel_env():\n    return Env().missing\n")
    flags = ["--env-id", "mine.tag", *SMALL, "--num-workers", "1", "--total-timesteps", "300"]
    done = python(SCRIPT, *flags, "--train-dir", tmp_path, folder=tmp_path)
    assert done.returncode == 0 and "\ndone: " in done.stdout, done.stdout
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="missing"):  # a mistake in it, with its place
        appo.make_game(appo.Args(env_id="mine.broken", device="cpu"))


@pytest.mark.parametrize("flags, answer", [
    ("--with-pbt --num-policies 1", "--with-pbt needs"),
    ("--with-pbt --total-timesteps 5000000", "--with-pbt needs"),
    ("--num-policies 3", "4 games in a split are not divisible by --num-policies 3"),
    ('--policy-settings {"1":{"learning_rat":1}}', 'is not like {"1": {"vf_coef": 0.2}}, for policies below 2 and '),
    ('--policy-settings {"5":{"learning_rate":1}}', "for policies below 2"),
    ('--policy-settings {"1":{"vf_coef":"high"}}', 'is not like {"1": {"vf_coef": 0.2}}'),
    ('--policy-settings {"1":{"vf_coef":-1}}', 'is not like {"1": {"vf_coef": 0.2}}'),
    ('--policy-settings {"1":{"vf_coef":NaN}}', 'is not like {"1": {"vf_coef": 0.2}}'),
    ("--pbt-perturb-min 0", "--pbt-perturb-min 0.0 is out of range: at least 1"),
    ("--pbt-perturb-max -1", "--pbt-perturb-max -1.0 is out of range: at least 1"),
    ("--policy-settings 1:gamma=0.9", 'is not like {"1": {"vf_coef": 0.2}}'),
    ("--num-policies 0", "--num-policies 0 is out of range: at least 1"),
    ("--env-id dule", "unknown --env-id dule; there are basic, "),
    ("--env-id no.such_game", "--env-id no.such_game: No module named 'no'"),
    ("--env-id duel --match-wad none.wad", "none.wad"),
])  # fmt: skip
def test_wrong_combinations_are_refused_with_a_sentence(flags, answer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["appo_pbt_doom.py", "--train-dir", str(tmp_path), *SMALL, *flags.split()])
    before = signal.getsignal(signal.SIGINT)
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, before)
        assert appo.main() == 2
    assert re.fullmatch(rf"error: .*{re.escape(answer)}.*", capsys.readouterr().err.strip())
    assert not list(tmp_path.rglob("*.json"))
