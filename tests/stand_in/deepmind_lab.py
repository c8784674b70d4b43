"""A stand-in for DeepMind Lab's Python module, for machines without the engine. It keeps the engine's contract, errors
included, as tests/test_dmlab_env.py checks on both. An episode is a walk: its picture and its rewards depend on the
seed alone, so that tests can tell seeds and steps apart. Not on any user's path.

Environment variables make it behave as the engine may: with STAND_IN_END=FOLDER one process ends with exit(1) at its 12th reset and
the next with SIGABRT, which files in the folder note; STAND_IN_RESET and STAND_IN_COMPILE are seconds that a reset takes, or that of a
map that is not cached."""

import contextlib
import ctypes
import hashlib
import os
import shutil
import socket
import tempfile
import zipfile
from pathlib import Path

import numpy as np

LENGTHS = {"seekavoid_arena_01": 40, "contributed/dmlab30/rooms_select_nonmatching_object": 180}  # steps of 4 frames
GENERATED = ("rooms_keys_doors_puzzle", "lasertag_", "skymaze_", "explore_")
DATASET = ("psychlab_arbitrary_visuomotor_mapping", "psychlab_continuous_recognition")
DMLAB_30 = """rooms_collect_good_objects_train rooms_collect_good_objects_test rooms_exploit_deferred_effects_train
rooms_exploit_deferred_effects_test rooms_select_nonmatching_object rooms_watermaze rooms_keys_doors_puzzle
language_select_described_object language_select_located_object language_execute_random_task
language_answer_quantitative_question lasertag_one_opponent_small lasertag_three_opponents_small
lasertag_one_opponent_large lasertag_three_opponents_large natlab_fixed_large_map natlab_varying_map_regrowth
natlab_varying_map_randomized skymaze_irreversible_path_hard skymaze_irreversible_path_varied
psychlab_arbitrary_visuomotor_mapping psychlab_continuous_recognition psychlab_sequential_comparison
psychlab_visual_search explore_object_locations_small explore_object_locations_large explore_obstructed_goals_small
explore_obstructed_goals_large explore_goal_locations_small explore_goal_locations_large explore_object_rewards_few
explore_object_rewards_many""".split()
LEVELS = {f"contributed/dmlab30/{name}" for name in DMLAB_30} | {"seekavoid_arena_01", "stairway_to_melon", "lt_chasm"}
resets = 0
wait = ctypes.PyDLL(None).usleep  # like the engine, it holds the GIL


def lua_error(text):
    return RuntimeError(f'Failed to start environment - "{text}\nstack traceback:\n\t[C]: in function \'error\'"')


class Lab:
    def __init__(self, level, observations, config={}, renderer="software", level_cache=None, temp_folder=""):
        if level not in LEVELS:
            raise RuntimeError(f"Invalid levelName flag '{level}' - \"Level not found: {level}\"")
        if not isinstance(observations, list) or not isinstance(config, dict):
            raise TypeError("observations must be a list, config a dict")
        for name in observations:
            if name not in ("RGB_INTERLEAVED", "INSTR"):
                raise ValueError(f"Unknown observation '{name}'.")
        for key, value in config.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"{key}={value!r}: settings are text")
        if renderer == "hardware":
            raise RuntimeError("Failed to connect RL API")
        self.level, self.config, self.cache, self.names = level, config, level_cache, observations
        self.width, self.height = int(config.get("width", "320")), int(config.get("height", "240"))
        if self.width % 4:
            raise RuntimeError("Failed to init environment - \"width must be a multiple of 4\"")
        if level.endswith("_test") and config.get("allowHoldOutLevels") != "true":
            raise RuntimeError("Failed to init environment - \"held-out level\"")
        self.given, self.folder = temp_folder, temp_folder or tempfile.mkdtemp(prefix="dmlab_temp_folder_")
        self.ports = None if "net_enabled 0" in config.get("appendCommand", "") else socket.socket()  # for networked games
        self.status = "fresh"

    def reset(self, episode=-1, seed=None):
        global resets
        if self.status == "closed":
            os.abort()  # the engine's is a segmentation fault
        if seed is not None and type(seed) is not int:
            raise ValueError(f"seed {seed!r} is no int")
        data = self.config.get("datasetPath", "")
        if any(name in self.level for name in DATASET) and data != "dummy" and not Path(data, "0001.png").exists():
            raise lua_error(f"reader.lua:48: [image.load] - cannot open {data}/0001.png")
        resets += 1
        if resets == 12 and (folder := os.environ.get("STAND_IN_END")):
            for name, end in (("exited", lambda: os._exit(1)), ("aborted", os.abort)):
                with contextlib.suppress(FileExistsError):
                    Path(folder, name).touch(exist_ok=False)
                    end()
        wait(int(1e6 * float(os.environ.get("STAND_IN_RESET", 0))))
        os.write(1, f"log of {self.level}\n".encode())  # as Lua's scripts do, past Python
        Path(self.folder, "dmlab.tmp").touch()
        if any(name in self.level for name in GENERATED):
            self.generate(f"{self.level} {seed}")
        self.rng, self.t, self.status = np.random.default_rng(seed), 0, "running"
        self.goal = int(self.rng.integers(4))  # the action that is rewarded
        self.picture()

    def generate(self, text):
        key = f"map_noaas_{hashlib.md5(text.encode()).hexdigest()}"
        path = os.path.join(self.folder, "map.pk3")  # the same for every map: the one before may still be there
        if self.cache is not None and self.cache.fetch(key, path):
            with zipfile.ZipFile(path) as file:
                if file.read("map").decode() != text:
                    os._exit(1)
            return
        if not all(map(shutil.which, ("bash", "dirname", "mv"))):  # and zip, which a machine that only tests may lack
            raise lua_error("make_map.lua:60: [mapFromTextLevel] - Failed to compile map.\nMap Name:\nluamap\nEntity Layer:\n*****")
        wait(int(1e6 * float(os.environ.get("STAND_IN_COMPILE", 0.05))))
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("map", text)
        if self.cache is not None:
            self.cache.write(key, path)

    def picture(self):
        rng = np.random.default_rng((self.goal, self.t))
        self.image = rng.integers(0, 256, (self.height, self.width, 3), np.uint8)
        self.image[:, : self.width // 2] = 60 * self.goal  # what can be learned: the left half says what to do

    def is_running(self):
        return self.status == "running"

    def num_steps(self):
        return 4 * self.t

    def observations(self):
        if not self.is_running():
            raise RuntimeError("Environment in wrong status for call to observations()")
        text = f"collect the {'red green blue white'.split()[self.goal]} ball" if "language" in self.level else ""
        return {"RGB_INTERLEAVED": self.image.copy(), "INSTR": text} if "INSTR" in self.names else {"RGB_INTERLEAVED": self.image.copy()}

    def action_spec(self):
        names = ("LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", "LOOK_DOWN_UP_PIXELS_PER_FRAME", "STRAFE_LEFT_RIGHT", "MOVE_BACK_FORWARD",
                 "FIRE", "JUMP", "CROUCH")  # fmt: skip
        lows, highs = (-512, -512, -1, -1, 0, 0, 0), (512, 512, 1, 1, 1, 1, 1)
        return [dict(name=name, min=low, max=high) for name, low, high in zip(names, lows, highs)]

    def observation_spec(self):
        return [dict(name="RGB_INTERLEAVED", shape=(self.height, self.width, 3), dtype=np.uint8), dict(name="INSTR", shape=(), dtype=str)]

    def step(self, action, num_steps=1):
        if not isinstance(action, np.ndarray) or action.dtype != np.intc or action.shape != (7,):
            raise ValueError("an action is an array of 7 np.intc")
        if not self.is_running():
            raise RuntimeError("Environment in wrong status for call to step()")
        wait(500)
        self.t += 1
        if "language" in self.level and self.t == 5:  # such levels compile maps within an episode
            try:
                self.generate(f"{self.level} {self.goal}")
            except RuntimeError as error:
                raise ValueError(str(error).replace("Failed to start environment -", "Failed to advance environment")) from None
        done = {0: action[3] == 1, 1: action[3] == -1, 2: action[2] == -1, 3: action[2] == 1}[self.goal]
        if self.t >= LENGTHS.get(self.level, 60):
            self.status = "over"
        else:
            self.picture()
        return float(done)

    def close(self):
        if self.status != "closed" and not self.given:  # a folder that was given stays
            shutil.rmtree(self.folder)
        if self.ports:
            self.ports.close()
        self.status = "closed"


def version():
    return "stand-in"
