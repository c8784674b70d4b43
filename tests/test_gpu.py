"""benchmark/gpu.py is for a machine that is rarely at hand: what can be tested of it without one."""

import json
import os
import sys
import time

import pytest
from conftest import marked
from edited import ROOT
from forked import MARK, new_mark

sys.path.insert(0, str(ROOT / "benchmark"))
import gpu  # noqa: E402


def test_what_nvidia_smi_says_is_read(tmp_path, monkeypatch):
    """Half a line at the end, where it was stopped, and what is no number do not matter."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '2026/11/25 01:02:03.500, 40, 1024'\necho '2026/11/25 01:02:04.000, [N/A], 1024'\n"
                   "echo '2026/11/25 01:02:04.500, 60, 2048'\nprintf '2026/11/25 01:02:05.000, 7'\nexec sleep 60\n")  # fmt: skip
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with gpu.gpu_use() as samples:
        time.sleep(1)
    assert [sample[1:] for sample in samples] == [(0.4, 1024), (0.6, 2048)] and samples[1][0] - samples[0][0] == 1.0
    monkeypatch.setenv("PATH", "")
    with gpu.gpu_use() as samples:
        pass
    assert samples == []


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, mark := new_mark())
    options = gpu.Options(tmp_path)
    child = "import subprocess, time; print('$', flush=True); subprocess.Popen(['sleep', '100']); time.sleep(100)"
    with pytest.raises(gpu.subprocess.TimeoutExpired):
        gpu.run(options, 2.0, "-c", child)
    time.sleep(0.5)
    assert marked(mark) == set()
    with pytest.raises(RuntimeError, match="exit code 3\nwhy"):
        gpu.run(options, 30.0, "-c", "print('why'); raise SystemExit(3)")
    assert gpu.run(options, 30.0, "-c", "print(1 + 1)") == "2\n"


def test_the_first_run_of_a_machine_is_a_table_whatever_failed(tmp_path, monkeypatch, capsys):
    """One step is real: a training of a few seconds has too few reports, which is said."""
    profiled = dict(samples=512, milliseconds=1.5, gpu_milliseconds=0.9, launches=93, copies_and_fills=20, waits=1, operators=400)
    speed = dict(frames_per_second=100_000, lag=1.5, learner_learns=0.5, inference_waits_for_games=0.4, inference_waits_for_slots=0.1,
                 rows_in_an_inference_batch=64.0, precision="bfloat16", worker_num_splits=2, batch_size=8192, num_envs_per_worker=32)  # fmt: skip
    real = gpu.train

    def train(options, limit, family, **flags):
        if family == "atari" and flags == dict(worker_num_splits=2):
            return real(options, limit, family, **flags | dict(train_for_seconds=1))
        return speed | (dict(gpu_busy=0.3, gpu_memory_gib=5.5) if family == "doom" else {})

    def ceiling(options, limit, family):
        if family == "atari":
            raise OSError("no such game")
        return dict(frames_per_second=250_000)

    monkeypatch.setattr(gpu, "train", train)
    monkeypatch.setattr(gpu, "ceiling", ceiling)
    monkeypatch.setattr(gpu, "profiled", lambda *arguments: dict(precision="bfloat16", inference=profiled, learner=profiled))
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path), "--device", "cpu", "--num-workers", "1", "--num-envs-per-worker", "2"])
    assert gpu.main() == 1
    table, results = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert "| doom (bfloat16, batch 8,192) | 100,000 | 40% | 1.5 | 50% | 40%, 10% | 64.0 | 30% | 5.5 GiB |" in table
    assert "| doom, learner | 512 | 1.5 | 0.9 | 93 | 20 | 1 | 400 |" in table and "* ceiling atari: OSError: no such game" in table
    assert results["atari"]["failed"].startswith("ValueError: fewer than four reports") and table in capsys.readouterr().out
