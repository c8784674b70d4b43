"""DeepMind Lab's environments, tasks and level cache. The engine is in no package registry: the stand-in of
tests/stand_in keeps its contract, which the first tests check on both, where the engine can be imported."""

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import zipfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from edited import REPORTS, ROOT, edited
from forked import python

STAND_IN = Path(__file__).parent / "stand_in"


def load_stand_in():
    spec = importlib.util.spec_from_file_location("deepmind_lab", STAND_IN / "deepmind_lab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


real = importlib.util.find_spec("deepmind_lab")
MODULES = [load_stand_in(), *([importlib.import_module("deepmind_lab")] if real else [])]
# tests that need no engine of their own use what can be imported; else the stand-in, as a user has the engine
sys.modules.setdefault("deepmind_lab", MODULES[0])

import appo_dmlab as appo  # noqa: E402
import evaluate  # noqa: E402

WATERMAZE, EXPLORE = "contributed/dmlab30/rooms_watermaze", "contributed/dmlab30/explore_object_locations_small"
SIZE = dict(width="96", height="72")
NOTHING = np.zeros(7, np.intc)


class Cache:
    """What the engine calls, in order, and the maps."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder, []

    def fetch(self, key, pk3_path):
        self.calls.append(("fetch", key))
        if (self.folder / key).exists():
            shutil.copyfile(self.folder / key, pk3_path)
        return (self.folder / key).exists()

    def write(self, key, pk3_path):
        self.calls.append(("write", key))
        shutil.copyfile(pk3_path, self.folder / key)


@pytest.fixture(params=MODULES, ids=["stand-in", "engine"][: len(MODULES)])
def module(request):
    return request.param


def test_contract_observations(module):
    lab = module.Lab(WATERMAZE, ["RGB_INTERLEAVED", "INSTR"], config=SIZE)
    lab.reset(seed=1)
    first = lab.observations()
    assert first["RGB_INTERLEAVED"].shape == (72, 96, 3) and first["RGB_INTERLEAVED"].dtype == np.uint8
    assert type(first["INSTR"]) is str and first["RGB_INTERLEAVED"].flags.c_contiguous
    reward = lab.step(NOTHING, num_steps=4)
    assert type(reward) is float and lab.is_running() and lab.num_steps() == 4
    assert not np.shares_memory(first["RGB_INTERLEAVED"], lab.observations()["RGB_INTERLEAVED"])
    lab.close()
    lab.close()


def test_contract_errors(module):
    with pytest.raises(RuntimeError, match="[Ll]evel"):
        module.Lab("rooms_of_nowhere", ["RGB_INTERLEAVED"])
    with pytest.raises(ValueError):
        module.Lab(WATERMAZE, ["RGB_OF_NOWHERE"])
    with pytest.raises(TypeError):
        module.Lab(WATERMAZE, ["RGB_INTERLEAVED"], config=dict(width=96))
    lab = module.Lab(WATERMAZE, ["RGB_INTERLEAVED"], config=SIZE)
    with pytest.raises(ValueError):
        lab.reset(seed=np.int64(1))
    lab.reset(seed=1)
    for wrong in (NOTHING.astype(np.int64), NOTHING[:6], NOTHING.tolist()):
        with pytest.raises((ValueError, TypeError)):
            lab.step(wrong, num_steps=4)
    lab.close()


def test_contract_end(module):
    """seekavoid_arena_01: after the end there is no observation and no step."""
    lab = module.Lab("seekavoid_arena_01", ["RGB_INTERLEAVED"], config=SIZE)
    lab.reset(seed=1)
    while lab.is_running():
        lab.step(NOTHING, num_steps=4)
    for call in (lab.observations, lambda: lab.step(NOTHING, num_steps=4)):
        with pytest.raises(RuntimeError):
            call()
    lab.reset(seed=2)
    assert lab.is_running()
    lab.close()


def test_contract_actions(module):
    lab = module.Lab(WATERMAZE, ["RGB_INTERLEAVED"], config=SIZE)
    spec = lab.action_spec()
    assert [part["name"][:4] for part in spec] == ["LOOK", "LOOK", "STRA", "MOVE", "FIRE", "JUMP", "CROU"]
    low, high = ([part[side] for part in spec] for side in ("min", "max"))
    for actions, n in ((appo.ACTIONS, 9), (appo.EXTENDED_ACTIONS, 15)):
        assert len(set(actions)) == len(actions) == n and all(any(action) for action in actions)
        assert (np.array(actions) >= low).all() and (np.array(actions) <= high).all()
    lab.close()


def test_contract_level_cache(module, tmp_path):
    cache = Cache(tmp_path)
    lab = module.Lab(EXPLORE, ["RGB_INTERLEAVED"], config=SIZE, level_cache=cache)
    for seed in (1, 2, 1):
        lab.reset(seed=seed)
    kinds, keys = zip(*cache.calls)
    assert kinds == ("fetch", "write", "fetch", "write", "fetch") and keys[0] == keys[1] == keys[4] != keys[2]
    assert all(zipfile.is_zipfile(tmp_path / key) for key in keys)
    lab.close()


def test_contract_missing_programs(module, monkeypatch):
    """Without zip and the others that compile a map."""
    monkeypatch.setenv("PATH", "")
    lab = module.Lab(EXPLORE, ["RGB_INTERLEAVED"], config=SIZE)
    with pytest.raises(RuntimeError, match="Failed to compile map"):
        lab.reset(seed=1)
    lab.close()


def test_contract_temporary_folder_and_ports(module, tmp_path, monkeypatch):
    """The folder is left to us; with the settings of make_lab the engine opens no socket."""

    def sockets() -> int:
        files = (os.path.realpath(file).rpartition("/")[2] for file in Path("/proc/self/fd").iterdir())
        return sum(file.startswith("socket:") for file in files)

    monkeypatch.setattr(appo, "lab_module", lambda: module)
    before, args = sockets(), make_args(tmp_path)
    lab = appo.make_lab(args, "rooms_watermaze", temp_folder=str(tmp_path))
    lab.reset(seed=1)
    assert sockets() == before and list(tmp_path.iterdir())
    lab.close()
    assert list(tmp_path.iterdir())


def test_contract_time_limit(module):
    lab = module.Lab("contributed/dmlab30/rooms_select_nonmatching_object", ["RGB_INTERLEAVED"], config=SIZE)
    lab.reset(seed=1)
    steps = 0
    while lab.is_running():
        lab.step(NOTHING, num_steps=4)
        steps += 1
    assert 4 * steps == appo.TASKS["rooms_select_nonmatching_object"].frames
    lab.close()


def make_args(tmp_path, **settings):
    usual = dict(env_id="rooms_watermaze", train_dir=str(tmp_path), experiment="e", num_workers=0, device="cpu")
    return appo.Args(**usual | dict(dataset_path="dummy") | settings)


@pytest.fixture
def make_env(tmp_path, monkeypatch):
    """Makes environments of the stand-in. The real silence_engines would take descriptor 1."""
    monkeypatch.setitem(sys.modules, "deepmind_lab", MODULES[0])
    appo.lab_module.cache_clear()
    monkeypatch.setattr(appo, "silence_engines", lambda: None)
    made = []

    def make(place=0, **settings):
        made.append(appo.LabEnv(make_args(tmp_path, **settings), place))
        return made[-1]

    yield make
    for env in made:
        env.close()
    appo.lab_module.cache_clear()


def play(env, action=0):
    """Plays an episode; returns the observations, rewards and infos, and how it ended."""
    steps = []
    while True:
        observation, *rest = env.step(np.array([action]))
        steps.append((observation, *rest))
        if rest[1] or rest[2]:
            return steps


def test_the_last_observation_is_kept_and_a_time_limit_is_no_end(make_env):
    env = make_env(env_id="rooms_select_nonmatching_object")
    env.reset(seed=3)
    steps = play(env)
    (before, *_), (last, _, terminated, truncated, _) = steps[-2:]
    assert len(steps) == 720 / 4 and not terminated and truncated
    assert before.keys() == last.keys() == {"obs", "words", "task"}
    assert all(np.array_equal(before[name], last[name]) for name in last)
    env = make_env(env_id="rooms_watermaze")  # the stand-in ends it early: not by the time limit, which is 7,200 frames
    env.reset(seed=3)
    _, _, terminated, truncated, _ = play(env)[-1]
    assert terminated and not truncated


def test_rewards_are_squashed_and_scores_are_not(make_env, monkeypatch):
    env = make_env()
    env.reset(seed=0)
    one = np.tanh(0.2)
    for raw, expected in ((0.0, 0.0), (1.0, 5 * one), (-1.0, -1.5 * one), (100.0, 5.0), (-100.0, -1.5)):
        monkeypatch.setattr(env.lab, "step", lambda action, num_steps, raw=raw: raw)
        _, reward, *_, info = env.step(np.array([0]))
        assert reward == pytest.approx(expected) and info["raw_reward"] == raw


def test_actions_reach_the_engine_as_it_wants_them(make_env, monkeypatch):
    env, seen = make_env(extended_action_set=True), []
    env.reset(seed=0)
    monkeypatch.setattr(env.lab, "step", lambda action, num_steps: seen.append((action.copy(), num_steps)) or 0.0)
    for a in range(env.action_space.nvec[0]):
        env.step(np.array([a]))
    assert [tuple(action) for action, _ in seen] == list(appo.EXTENDED_ACTIONS)
    assert all(action.dtype == np.intc and action.flags.c_contiguous and n == 4 for action, n in seen)


def test_words():
    assert not appo.words_of("").any()
    ball = int(hashlib.md5(b"ball").hexdigest(), 16) % 999 + 1
    assert appo.words_of("red  ball").tolist() == [appo.words_of("red")[0], ball, *[0] * 14]
    many = appo.words_of(" ".join(f"word{i}" for i in range(40)))
    assert len(many) == 16 and all(1 <= word <= 999 for word in many)


def test_the_instruction_is_in_the_observation(make_env, monkeypatch):
    env = make_env(env_id="rooms_watermaze,language_select_described_object", place=1)
    observation, _ = env.reset(seed=0)
    text = env.lab.observations()["INSTR"]
    words = appo.words_of(text)
    assert np.count_nonzero(words) == 4 and observation["words"].tolist() == words.tolist() and observation["task"] == 1
    assert env.observation_space.contains(observation)
    later = env.lab.observations() | dict(INSTR="touch it")
    monkeypatch.setattr(env.lab, "observations", lambda: later)
    shorter = env.step(np.array([0]))[0]["words"].tolist()
    assert shorter == [*appo.words_of("touch it")[:2], *[0] * 14], "it leaves nothing behind of the one before"


def test_tasks_and_their_environments(tmp_path):
    one = make_args(tmp_path, env_id="contributed/dmlab30/rooms_watermaze", num_workers=2, num_envs_per_worker=4)
    assert appo.tasks_of(one) == ["rooms_watermaze"]
    names = "rooms_collect_good_objects_train,seekavoid_arena_01,rooms_collect_good_objects_train"
    two = make_args(tmp_path, env_id=names, num_workers=1, num_envs_per_worker=4)
    assert appo.tasks_of(two) == ["rooms_collect_good_objects_train", "seekavoid_arena_01"]
    assert len(appo.TASKS) == 30 and sum(task.generated for task in appo.TASKS.values()) == 15


def test_a_task_without_an_environment_is_refused(make_env, tmp_path):
    args = make_args(tmp_path, env_id="dmlab_30", num_workers=2, num_envs_per_worker=14)
    with pytest.raises(appo.UserError, match="30 tasks need 30 environments or more, one for each; there are 28"):
        appo.train(args, tmp_path / "e")


def test_observations_and_statistics_agree_on_the_task_of_a_row(make_env, tmp_path):
    """Episodes have 60 and 40 steps here. Three environments a worker, so that workers begin with different tasks."""
    args = make_args(tmp_path, env_id="rooms_watermaze,seekavoid_arena_01", num_workers=2, rollout=70, num_envs_per_worker=3,
                     worker_num_splits=3, batch_size=70, encoder="convnet", hidden_size=32, precision="float32",
                     episode_seconds=120.0)  # fmt: skip
    spaces = appo.spaces_of(args)
    inference = appo.Inference(args, spaces, appo.Agent(spaces, args), torch.device("cpu"))
    groups = [appo.WorkerEnvs(args, group, inference.mailbox, group) for group in range(6)]
    with torch.inference_mode():
        for step in range(65):
            for envs in groups:
                envs.step() if step else envs.reset()
            inference.act(list(range(6)))
    for envs in groups:
        envs.envs.close()
    assert inference.mailbox.obs["task"].tolist() == [0, 1, 0, 1, 0, 1]
    assert [[episode[1] for episode in episodes] for episodes in inference.episodes] == [[60] * 3, [40] * 3]


@pytest.mark.parametrize("settings, sentence", [
    (dict(env_id="rooms_colect_good_objects", episode_seconds=60.0), "--env-id rooms_colect_good_objects: DeepMind Lab fails: .*Level not found.*; check the level's name"),
    (dict(env_id="rooms_watermaze,seekavoid_arena_01"), "--episode-seconds is missing: the time limit of seekavoid_arena_01, which is not one"),
    (dict(env_id="dmlab_30", dataset_path=None), "--dataset-path None has no pictures .*, which psychlab_arbitrary_visuomotor_mapping needs: make"),
    (dict(env_id="psychlab_continuous_recognition", dataset_path="/nowhere"), "--dataset-path /nowhere has no pictures"),
    (dict(renderer="hardware"), "--env-id rooms_watermaze: DeepMind Lab fails: Failed to connect RL API; check .*--renderer"),
])  # fmt: skip
def test_wrong_levels_and_missing_data_sets(tmp_path, make_env, settings, sentence):
    with pytest.raises(appo.UserError, match=sentence):
        appo.check_levels(make_args(tmp_path, **settings))


def test_a_data_set_has_the_engines_names(tmp_path, make_env):
    """0001.png to 2400.png: not what is unzipped, which the engine's README converts."""
    args = make_args(tmp_path, env_id="psychlab_continuous_recognition", dataset_path=str(tmp_path))
    (tmp_path / "apple.jpg").touch()
    with pytest.raises(appo.UserError, match="has no pictures 0001.png to 2400.png, which psychlab_continuous_recognition needs"):
        appo.check_levels(args)
    (tmp_path / "2400.png").touch()
    appo.check_levels(args)


@pytest.mark.parametrize("level, programs, sentence", [
    ("psychlab_continuous_recognition", True, "reader.lua:48: .* cannot open .*/0001.png; check .* that the engine's files are complete"),
    ("explore_object_locations_small", False, 'Failed to start environment - "make_map.lua:60: .* Failed to compile map.; install zip, .*'),
    ("language_select_described_object", False, 'Failed to advance environment "make_map.lua:60: .* Failed to compile map.; install zip, .*'),
])  # fmt: skip
def test_the_engines_errors_are_one_line(make_env, tmp_path, monkeypatch, level, programs, sentence):
    """In a reset; on levels that compile maps within an episode, in a step, too."""
    if not programs:
        monkeypatch.setenv("PATH", "")
    env = make_env(env_id=level, dataset_path=str(tmp_path))
    with pytest.raises(appo.UserError) as caught:
        env.reset(seed=0)
        play(env)
    assert re.fullmatch(f"--env-id {level}: DeepMind Lab fails: .*{sentence}", str(caught.value))


@pytest.mark.parametrize("script, code, sentence", [
    ("appo_dmlab.py", 2, r"error: actor \d: --env-id lasertag_one_opponent_small: .*; install zip"),
    ("benchmark/fill_level_cache.py", 1, "map 1 is skipped: --env-id lasertag_one_opponent_small: .*; install zip"),
], ids=["training", "filling"])  # fmt: skip
def test_a_missing_program_ends_without_a_traceback(tmp_path, script, code, sentence):
    flags = RUN if code == 2 else ("--maps", "2", "--num-workers", "1")
    done = python(ROOT / script, "--env-id", "lasertag_one_opponent_small", "--train-dir", tmp_path / "runs", *flags, folder=tmp_path,
                  **with_stand_in()["env"] | dict(PATH=""))  # fmt: skip
    assert done.returncode == code and re.search(sentence, done.stdout) and "Traceback" not in done.stdout, done.stdout
    assert not [*tmp_path.rglob("engines"), *tmp_path.rglob("level_cache"), *tmp_path.rglob("fill*")]


def test_a_level_of_dmlab_30_keeps_its_limit(tmp_path):
    args = make_args(tmp_path, env_id="rooms_watermaze,seekavoid_arena_01", episode_seconds=20.0)
    assert [appo.task_of(args, task).frames for task in appo.tasks_of(args)] == [7200, 1200]


def test_names_of_runs_are_of_one_folder(tmp_path, monkeypatch):
    """Of a level with its folder; of many levels."""
    monkeypatch.chdir(tmp_path)
    for env_id in ("contributed/dmlab30/rooms_watermaze", ",".join(appo.TASKS)):
        monkeypatch.setattr(sys, "argv", ["appo_dmlab.py", "--env-id", env_id])
        args, folder = appo.parse_args()
        assert folder.parent == tmp_path / "train_dir" and len(folder.name) < 200
        folder.mkdir(parents=True)


def test_a_level_that_is_not_known_has_the_limit_that_is_told(make_env):
    """The stand-in ends it after 160 frames. By the limit that is no death, sooner it is one."""
    for seconds, ended in ((160 / 60, False), (3.0, True)):
        env = make_env(env_id="seekavoid_arena_01", episode_seconds=seconds)
        env.reset(seed=1)
        steps = play(env)
        assert len(steps) == 40 and steps[-1][2:4] == (ended, not ended)


def test_a_missing_engine_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    appo.lab_module.cache_clear()
    with pytest.raises(appo.UserError, match="no package registry has it.*the folder that holds deepmind_lab.so on PYTHONPATH"):
        appo.lab_module()
    appo.lab_module.cache_clear()


# --- the level cache


def cache(tmp_path):
    return appo.LevelCache(tmp_path / "cache")


def store(one: appo.LevelCache, folder: Path, seed: int) -> None:
    """What the engine does for a new seed."""
    key, path = f"map_{seed}", folder / f"engine_{seed}.pk3"
    assert not one.fetch(key, str(path))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("map", str(seed))
    one.write(key, str(path))


def test_a_map_is_whole_or_compiled_anew(tmp_path):
    one = cache(tmp_path)
    store(one, tmp_path, 7)
    target = tmp_path / "target.pk3"
    target.write_bytes(b"the map before")
    assert one.fetch("map_7", str(target)) and zipfile.ZipFile(target).read("map") == b"7"
    stored = tmp_path / "cache" / "map_7.pk3"
    whole = stored.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole.replace(b"map7", b"map8", 1)):  # not a 7 of the header's date
        stored.write_bytes(damaged)
        assert not one.fetch("map_7", str(target))
    store(one, tmp_path, 7)
    assert one.fetch("map_7", str(target))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["map_7.pk3"], "nothing half-written"


def test_a_full_disk_is_told_and_survived(tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    one = cache(tmp_path)
    monkeypatch.setattr(appo.os, "replace", full)
    store(one, tmp_path, 1)
    assert re.match("could not save a map in .*cache .*No space left", capsys.readouterr().err)
    assert not list((tmp_path / "cache").iterdir())


def seed_of(env, **options) -> int:
    """That of the map, which the engine is given."""
    seeds, reset = [], env.lab.reset if env.lab else None
    if env.lab is None:
        env.start(0)
        reset = env.lab.reset
    env.lab.reset = lambda seed: seeds.append(seed) or reset(seed=seed)
    env.reset(**options)
    env.lab.reset = reset
    return seeds[0]


def test_runs_play_the_same_maps_and_compile_each_once(make_env, tmp_path):
    """Of a level that generates maps an episode draws one of so many."""
    one, other = (make_env(env_id="explore_object_locations_small", experiment=name, num_maps=3) for name in ("e", "f"))
    found = [{seed_of(env, seed=i if t == 0 else None) for t in range(40)} for i, env in enumerate((one, other))]
    assert found == [{0, 1, 2}] * 2
    assert len(list((tmp_path / "level_cache").glob("*.pk3"))) == 3
    fixed = make_env(env_id="rooms_watermaze", num_maps=3)
    assert len({seed_of(fixed, seed=i) for i in range(10)}) == 10, "it has one map; seeds differ in what else is drawn"


def test_an_evaluation_can_be_repeated(make_env):
    """Other maps than in training, the same each time."""
    one, two = (make_env(env_id="explore_object_locations_small", test_levels=True, num_maps=3) for _ in range(2))
    seeds = [[seed_of(env, seed=1), *(seed_of(env) for _ in range(5))] for env in (one, two)]
    assert seeds[0] == seeds[1] and min(seeds[0]) > 3
    training = make_env(env_id="explore_object_locations_small")
    training.reset(seed=1)
    assert one.lab.config["mixerSeed"] == str(0x600D5EED) and "mixerSeed" not in training.lab.config


def test_an_engines_folder_goes_with_it(make_env, tmp_path):
    env = make_env()
    env.reset(seed=0)
    assert len(list((tmp_path / "e" / "engines").iterdir())) == 1
    other = make_env()
    other.reset(seed=0)
    for _ in range(2):
        env.close()
        assert len(list((tmp_path / "e" / "engines").iterdir())) == 1
    other.close()
    assert not (tmp_path / "e" / "engines").exists(), "with the last one"
    broken = make_env(renderer="hardware")
    with pytest.raises(appo.UserError):
        broken.reset(seed=0)
    broken.close()
    assert not (tmp_path / "e" / "engines").exists(), "also of one that did not start"
    env.reset(seed=0)


def test_evaluation_plays_the_chosen_tasks_and_keeps_its_state(make_env, tmp_path, monkeypatch):
    """In the order asked for; the one that is not played may lack its data set. Returns are raw; each task starts
    without a state."""
    torch.manual_seed(0)
    trained = "rooms_watermaze,psychlab_continuous_recognition,seekavoid_arena_01"
    args = make_args(tmp_path, env_id=trained, encoder="convnet", hidden_size=32, precision="float32",
                     dataset_path="/of/another/machine", episode_seconds=120.0)  # fmt: skip
    folder, states, raw = tmp_path / "e", [], Counter()
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "cfg.json").write_text(json.dumps(dict(file=appo.__file__, args=asdict(args))))
    weights = appo.Agent(appo.spaces_of(args), args).state_dict()
    torch.save(dict(agent=weights, global_step=5), folder / "checkpoints" / "checkpoint_1.pth")
    forward, step = appo.Agent.forward, appo.LabEnv.step

    def spy(self, action):
        result = step(self, action)
        raw[appo.tasks_of(self.args)[self.number]] += result[-1]["raw_reward"]
        return result

    monkeypatch.setattr(appo.LabEnv, "step", spy)
    monkeypatch.setattr(appo.Agent, "forward", lambda self, *inputs: states.append(inputs[2]) or forward(self, *inputs))
    chosen = ["seekavoid_arena_01", "rooms_watermaze"]
    now = replace(args, env_id=",".join(chosen))
    means = evaluate.evaluate_tasks(appo, now, evaluate.Options(folder, episodes=3))
    assert len(states) == 40 + 60 and [i for i, state in enumerate(states) if not state.any()] == [0, 40]
    assert min(means) > 0 and means == pytest.approx([raw[task] / 3 for task in chosen])


def test_evaluation_plays_held_out_levels(make_env):
    env = make_env(env_id="rooms_collect_good_objects_train", test_levels=True)
    env.reset(seed=0)
    assert env.lab.level.endswith("rooms_collect_good_objects_test")


# --- the network


def agent(tmp_path, **settings):
    args = make_args(tmp_path, hidden_size=32, precision="float32", extended_action_set=False, episode_seconds=60.0, **settings)
    torch.manual_seed(0)
    return args, appo.Agent(appo.spaces_of(args), args)


def random_pictures(T: int, B: int) -> dict[str, torch.Tensor]:
    """Observations [T, B, ...] without instructions, of task 0."""
    obs = torch.randint(0, 256, (T, B, *appo.IMAGE), dtype=torch.uint8)
    words, task = torch.zeros(T, B, appo.WORDS, dtype=torch.int64), torch.zeros(T, B, dtype=torch.int64)
    return dict(obs=obs, words=words, task=task)


@pytest.mark.parametrize("encoder", ["impala", "convnet"])
def test_instructions_are_read_to_their_last_word(tmp_path, encoder):
    _, network = agent(tmp_path, encoder=encoder)
    texts = ["", "red", "collect the red ball", " ".join(["x"] * 16), "red", ""]
    words = torch.zeros(len(texts), 16, dtype=torch.int64)
    for i, text in enumerate(texts):
        words[i] = torch.from_numpy(appo.words_of(text))
    read = network.read(words)
    for i, text in enumerate(texts):
        n = max(1, len(text.split()))
        output, _ = network.reader(network.embedding(words[i : i + 1, :n]))
        torch.testing.assert_close(read[i], output[0, -1])
    assert not torch.allclose(read[1], read[2])


def test_input_statistics_do_not_touch_word_numbers(tmp_path):
    _, network = agent(tmp_path)
    obs = random_pictures(4, 2)
    obs["words"][:] = 900
    first = {name: part[0] for name, part in obs.items()}
    before = network.encode(first)[:, -64:]
    network.normalizers["obs"].update(obs["obs"], torch.ones(4, 2, dtype=torch.bool))
    assert network.normalizers["obs"].count > 0 and torch.equal(network.encode(first)[:, -64:], before)
    assert network.normalizers.keys() == {"obs"}


def test_only_the_critic_reads_the_tasks_number(tmp_path):
    _, network = agent(tmp_path, env_id="dmlab_30", encoder="convnet")
    obs = {name: part.repeat_interleave(3, 1) for name, part in random_pictures(1, 1).items()}
    words, task, first = obs["words"], obs["task"], torch.zeros(1, 3, dtype=torch.bool)
    words[0, :, 0], task[0, 1], words[0, 2, 1] = 5, 7, 9  # the same word; another task; a second word
    logits, values, _ = network(obs, first, torch.zeros(3, network.state_size))
    torch.testing.assert_close(logits[0, 0], logits[0, 1])
    assert not torch.isclose(values[0, 0], values[0, 1]) and not torch.allclose(logits[0, 0], logits[0, 2])


def test_popart_normalises_each_tasks_targets_and_keeps_every_value():
    """Two tasks with rewards of different size; the second gets no targets at first."""
    torch.manual_seed(0)
    critic, x, task = appo.PopArt(appo.init_layer(torch.nn.Linear(16, 3))), torch.randn(50, 16), torch.arange(50) % 2
    values, seen = critic(x, task), [[], []]
    for i in range(20):
        of = torch.randint(0, 2, (200,))
        targets = torch.randn(200) * torch.tensor([300.0, 0.01])[of] + torch.tensor([50.0, 3.0])[of]
        mask = torch.rand(200) < torch.tensor([0.5, 0.0 if i < 3 else 0.3])[of]
        critic.update(torch.where(mask, targets, 1e6), of, mask)
        torch.testing.assert_close(critic(x, task), values, rtol=1e-5, atol=1e-4)
        for k in range(2):
            seen[k].append(targets[mask & (of == k)])
    for k, targets in enumerate(map(torch.cat, seen)):
        total = 1000 + len(targets)  # it starts as if it had seen some with mean 0 and deviation 1
        mean = targets.sum() / total
        std = ((targets.square().sum() + 1000) / total - mean.square()).sqrt()
        found, expected = torch.stack([critic.mean[k], critic.std[k]]), torch.stack([mean, std])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    untouched = critic.mean[2], critic.std[2], critic.count[2]
    assert untouched == (0, 1, 1000), "a task without targets stays as it was"


def test_popart_forgets_what_is_long_ago():
    critic = appo.PopArt(torch.nn.Linear(4, 1))
    mask, task = torch.ones(1000, dtype=torch.bool), torch.zeros(1000, dtype=torch.int64)
    for mean in (0.0, 100.0):
        for _ in range(2000):
            critic.update(torch.randn(1000) + mean, task, mask)
    assert critic.mean.item() == pytest.approx(100, abs=0.1) and critic.std.item() == pytest.approx(1, abs=0.1)


def test_popart_of_a_task_that_never_rewards():
    critic = appo.PopArt(torch.nn.Linear(4, 1))
    mask, task = torch.ones(1000, dtype=torch.bool), torch.zeros(1000, dtype=torch.int64)
    for _ in range(2000):
        critic.update(torch.zeros(1000), task, mask)
    assert critic.std.item() == pytest.approx(0.01) and critic.linear.weight.isfinite().all()


@pytest.mark.parametrize("batches, epochs", [(1, 1), (3, 2)])
def test_popart_gets_the_targets_of_valid_samples(tmp_path, batches, epochs):
    """With gamma 0 and on-policy they are the rewards. Every sample counts once, in the last epoch."""
    tasks = "rooms_watermaze,seekavoid_arena_01"
    T, B = 4, 6
    args, network = agent(tmp_path, env_id=tasks, encoder="convnet", rnn_type="none", gamma=0.0, learning_rate=0.0, num_epochs=epochs,
                          rollout=T, batch_size=T * B // batches, num_envs_per_worker=B)  # fmt: skip
    inference = appo.Inference(args, appo.spaces_of(args), network, torch.device("cpu"))
    inference.version, r = 200, inference.rollouts
    for name, part in random_pictures(T + 1, B).items():
        r.obs[name][:] = part
    r.obs["task"][:, 3:] = 1
    r.first[1:] = np.random.default_rng(0).random((T, B)) < 0.4
    r.rewards[:] = torch.randn(T, B) + torch.tensor([100.0] * 3 + [5.0] * 3)
    r.actions.random_(9)
    r.versions[:] = 200
    with torch.no_grad():
        logits, values, _ = network(r.obs, torch.from_numpy(r.first), torch.zeros(B, 0))
        r.logprobs[:] = appo.log_prob(appo.log_distributions(logits[:-1], network.heads), r.actions)
        r.values[:] = values[:-1]
    network.normalizers["obs"].update = lambda x, valid: None  # which would change the policy
    appo.Learner(args, network, inference).iterate([slice(0, B)])
    assert inference.version == 200 + batches * epochs
    for k, columns in enumerate((slice(0, 3), slice(3, 6))):
        seen, count = r.rewards[:, columns][~r.first[1:, columns]], network.critic.count[k].item()
        assert count == 1000 + len(seen)
        assert network.critic.mean[k].item() == pytest.approx(seen.sum().item() / count, rel=1e-3)
    acting = inference.agent.critic
    assert torch.equal(acting.mean, network.critic.mean) and torch.equal(acting.std, network.critic.std), "they are published"


def test_the_size_of_a_tasks_rewards_does_not_matter(tmp_path):
    """The gradient is the same with the rewards of one of two tasks a hundred times as large, when PopArt knows it."""
    args, network = agent(tmp_path, env_id="dmlab_30", encoder="convnet", rnn_type="none")
    T, B = 4, 6
    obs, first = random_pictures(T + 1, B), torch.zeros(T + 1, B, dtype=torch.bool)
    obs["task"][:, 3:] = 7
    rewards, actions = torch.randn(T, B), torch.randint(0, 9, (T, B, 1))
    shift = 0.3 * torch.randn(T, B)  # of the old values, so that the value clip of 0.2 acts here and there
    gradients = []
    for size in (1.0, 100.0):
        scale = torch.where(obs["task"] == 7, size, 1.0)
        network.critic.std[7] = size
        with torch.no_grad():
            logits, values, state = network(obs, first, torch.zeros(B, 0))
            logprobs = appo.log_prob(appo.log_distributions(logits[:-1], network.heads), actions)
        old = values[:-1] + shift * scale[1:]
        batch = SimpleNamespace(obs=obs, first=first, rnn_state=state[None], actions=actions, logprobs=logprobs, values=old,
                                rewards=rewards * scale[1:], terminated=torch.zeros(T, B, dtype=torch.bool),
                                lags=torch.zeros(T, B, dtype=torch.int64))  # fmt: skip
        network.zero_grad()
        appo.appo_loss(args, network, batch)[0].backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_the_score_is_capped_after_the_mean(tmp_path):
    """A task with returns of 0 % and 300 % counts as 100 %; every other one is at 0 %."""
    args = make_args(tmp_path, env_id="dmlab_30")
    episodes = [[[task.random, 10.0]] * 10 for task in appo.TASKS.values()]
    people = next(iter(appo.TASKS.values()))
    episodes[0] = [[people.random, 10.0], [people.random + 3 * (people.human - people.random), 10.0]] * 5
    metrics, score = appo.scores(args, SimpleNamespace(episodes=episodes))
    assert metrics["charts/human_normalized"] == pytest.approx(150 / 30)
    assert metrics["charts/human_normalized_capped"] == score == pytest.approx(100 / 30)
    episodes[3] = []
    assert appo.scores(args, SimpleNamespace(episodes=episodes)) == ({}, -np.inf)


def test_the_score_of_levels_without_scores_of_people_is_the_mean_return(tmp_path):
    args = make_args(tmp_path, env_id="rooms_watermaze,seekavoid_arena_01")
    episodes = [[[2.0, 10.0]] * 50, []]
    inference = SimpleNamespace(episodes=episodes)
    assert appo.scores(args, inference) == ({}, -np.inf), "one of the tasks has no episode yet"
    episodes[1] = [[4.0, 10.0]] * 49
    assert appo.scores(args, inference)[1] == -np.inf, "a hundred are enough, 99 are not"
    episodes[1] = [[4.0, 10.0]] * 50
    metrics, score = appo.scores(args, inference)
    assert score == metrics["charts/episodic_return"] == 3.0
    assert metrics["tasks/seekavoid_arena_01/episodic_return"] == 4.0 and "charts/human_normalized" not in metrics


def test_the_score_of_one_task_is_its_return(tmp_path):
    inference = SimpleNamespace(episodes=[[[54.0, 10.0]] * 100])
    metrics, score = appo.scores(make_args(tmp_path), inference)
    assert score == 54 and metrics["charts/human_normalized"] == pytest.approx(100)


# --- runs


RUN = ("--num-workers", "2", "--num-envs-per-worker", "2", "--rollout", "8", "--batch-size", "16",
       "--hidden-size", "32", "--device", "cpu", "--precision", "float32", "--encoder", "convnet")  # fmt: skip


def with_stand_in(**variables):
    return dict(env=dict(PYTHONPATH=f"{STAND_IN}:{os.environ['PYTHONPATH']}") | variables)


@pytest.fixture
def run(run, tmp_path_factory):
    """As in conftest.py, with a report every second instead of every five: less to wait for."""
    folder, source = tmp_path_factory.mktemp("copy"), Path(appo.__file__)
    return functools.partial(run, script=edited(folder, "edited_dmlab", REPORTS, source=source))


def play_run(folder: Path, *flags: str, code: int = 0) -> str:
    """What evaluate.py prints."""
    file = json.loads((folder / "cfg.json").read_text())["file"]
    done = python(ROOT / "evaluate.py", folder, "--file", file, *flags, folder=folder.parent, **with_stand_in()["env"])
    assert done.returncode == code, done.stdout
    return done.stdout


def test_train_resume_evaluate_on_generated_levels(run, tmp_path):
    r = run(*RUN, "--env-id", "lasertag_one_opponent_small", "--experiment", "e", "--total-timesteps", "1500", "--num-maps", "5",
            **with_stand_in(STAND_IN_COMPILE="0.3"))  # fmt: skip
    assert r.wait(90) == 0, r.text()
    assert "log of" not in r.text(), "what engines print"
    assert 2 <= len(list((tmp_path / "level_cache").glob("*.pk3"))) <= 5, "each episode draws one of them"
    newest = max((tmp_path / "e" / "checkpoints").glob("checkpoint_*"))
    checkpoint = torch.load(newest, weights_only=True)
    assert checkpoint["agent"]["critic.count"] > 1000, "PopArt counts the targets"
    r = run("--experiment", "e", "--total-timesteps", "2500", **with_stand_in())
    assert r.wait(90) == 0, r.text()
    assert not (tmp_path / "e" / "engines").exists()
    text = play_run(tmp_path / "e", "--episodes", "3", "--save-video")
    assert "3 episodes per task" in text and "% of the human score" in text
    assert (tmp_path / "e" / "video.mp4").stat().st_size > 1000
    assert not (tmp_path / "engines").exists()


def test_what_a_killed_run_leaves_goes_with_the_next_one(run, tmp_path):
    """Its engines hold the GIL, in resets for a second."""
    engines = tmp_path / "e" / "engines"
    r = run(*RUN, "--experiment", "e", "--total-timesteps", "1000000", **with_stand_in(STAND_IN_RESET="1"))
    r.wait_for(lambda: len(list(engines.glob("*/dmlab*"))) == 4, 60, "four engines")
    r.process.kill()
    r.process.wait()
    r = run("--experiment", "e", "--total-timesteps", "1", **with_stand_in())
    assert r.wait(60) == 0, r.text()
    assert not engines.exists() and not (tmp_path / "level_cache").exists(), "nothing empty stays"


def test_an_engine_that_ends_its_process_is_replaced(run, tmp_path):
    """exit(1), as for a missing map; SIGABRT, as of an error in a callback of Lua."""
    r = run(*RUN, "--experiment", "e", "--total-timesteps", "3000", **with_stand_in(STAND_IN_END=str(tmp_path)))
    assert r.wait(120) == 0, r.text()
    assert "died (exit code 1); starting another" in r.text() and "died (exit code -6); starting another" in r.text()


def test_filling_the_cache(run, tmp_path):
    """Also by more workers than maps, and with engines that end their processes."""
    fill = functools.partial(run, script=ROOT / "benchmark" / "fill_level_cache.py")
    r = fill("--env-id", "explore_object_locations_small", "--maps", "2", "--num-workers", "3", **with_stand_in())
    assert r.wait(60) == 0 and "2 of 2 maps are in the cache" in r.text(), r.text()
    assert "Traceback" not in r.text() and len(list((tmp_path / "level_cache").glob("*.pk3"))) == 2
    tasks = "explore_object_locations_small", "lasertag_one_opponent_small"
    r = fill("--env-id", ",".join(["rooms_watermaze", *tasks]), "--maps", "18", "--num-workers", "2",
             **with_stand_in(STAND_IN_END=str(tmp_path)))  # so many that two processes start a twelfth # fmt: skip
    assert r.wait(60) == 1 and "34 of 36 maps are in the cache" in r.text(), r.text()
    assert "died (exit code 1), so its map is skipped" in r.text() and "died (exit code -6)" in r.text()
    folder = tmp_path / "level_cache"
    texts = [f"contributed/dmlab30/{task} {seed}" for task in tasks for seed in range(18)]
    maps = {f"map_noaas_{hashlib.md5(text.encode()).hexdigest()}.pk3" for text in texts}
    found = {path.name for path in folder.glob("*.pk3")}
    assert found <= maps and len(found) == 34, "runs find them by their seeds"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["level_cache"], "no experiment was made, and no folder left"
    r = fill("--env-id", "rooms_watermaze", **with_stand_in())
    assert r.wait(60) == 2 and "error: --env-id rooms_watermaze generates no maps" in r.text()


@pytest.mark.parametrize("stop", [
    lambda process: os.killpg(process.pid, signal.SIGINT),  # Ctrl-C, which a terminal sends to all processes
    lambda process: process.send_signal(signal.SIGTERM),
], ids=["Ctrl-C", "SIGTERM"])  # fmt: skip
def test_filling_the_cache_is_stopped(run, tmp_path, stop):
    """What was compiled stays."""
    r = run("--maps", "100", "--num-workers", "2", script=ROOT / "benchmark" / "fill_level_cache.py",
            **with_stand_in(STAND_IN_COMPILE="0.3"))  # fmt: skip
    r.wait_for(lambda: len(list((tmp_path / "level_cache").glob("*.pk3"))) > 2, 60, "the third map")
    stop(r.process)
    assert r.wait(30) == 130 and "stopped" in r.text() and "Traceback" not in r.text()
    assert len(list((tmp_path / "level_cache").glob("*.pk3"))) < 100
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"level_cache"}


def test_every_task_is_reported(run, tmp_path):
    from test_command_line import scalars

    r = run(*RUN[4:], "--num-workers", "1", "--num-envs-per-worker", "30", "--env-id", "dmlab_30",
            "--dataset-path", "dummy", "--experiment", "e", "--total-timesteps", "9000", "--batch-size", "240",
            **with_stand_in())  # fmt: skip
    assert r.wait(120) == 0, r.text()
    assert ": episodes of 29/30 tasks, " in r.text(), "one has longer ones"
    found = scalars(tmp_path / "e")
    assert {f"tasks/{task}/episodic_return" for task in appo.TASKS} < set(found)
    assert {"charts/human_normalized", "charts/human_normalized_capped"} < set(found)
    text = play_run(tmp_path / "e", "--episodes", "1")
    rows = [line.split()[0] for line in text.splitlines() if line.endswith("% of the human score")]
    assert rows == [task.test or name for name, task in appo.TASKS.items()]
    assert text.splitlines()[-1].startswith("mean over tasks: ")
    text = play_run(tmp_path / "e", "--episodes", "1", "--env-id", "rooms_watermaze")
    assert text.splitlines()[-1].startswith("rooms_watermaze "), "one of those it was trained on"
    text = play_run(tmp_path / "e", "--env-id", "seekavoid_arena_01", "--episode-seconds", "60", code=2)
    assert "was trained on dmlab_30, not on seekavoid_arena_01" in text
