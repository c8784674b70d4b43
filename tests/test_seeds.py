"""benchmark/seeds.py: settings and seeds, one run after the other, and what they reached."""

import subprocess
import sys
import time

import numpy as np

from edited import REPORTS, ROOT, edited

sys.path.insert(0, str(ROOT / "benchmark"))
import seeds  # noqa: E402


def test_settings_and_seeds(tmp_path):
    """Every setting is trained, what failed is said, a run that is cut off goes on, and the same line again makes only what is missing."""
    out, log = tmp_path / "out.csv", tmp_path / "out" / "default_1" / "log.txt"
    script = edited(tmp_path, "appo_edited", REPORTS)
    settings = "", "no-such-flag=1", "vf-coef=0.25"
    line = [sys.executable, ROOT / "benchmark" / "seeds.py", "--out", out, "--folder", tmp_path, "--seeds", "1", "--goals", "-1000", "1000",
            "--settings", *settings, "--", sys.executable, script, "--env-id", "basic", "--num-workers", "1",
            "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "32", "--hidden-size", "32", "--device", "cpu",
            "--train-for-seconds", "3"]  # fmt: skip
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and "frames/s" in log.read_text()):
        time.sleep(0.1)
    process.terminate()  # ends the run too, which saves
    assert process.wait(30) == 143 and "stopped: " in log.read_text() and not out.exists()

    first = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert "resuming " in log.read_text() and "failed (2); see" in first.stderr
    curves = seeds.read_curves(out)
    assert set(curves) == {"", "vf-coef=0.25"} and all(set(runs) == {1} for runs in curves.values())
    for runs in curves.values():
        assert (np.diff(runs[1][:, 1]) > 0).all() and -500 < runs[1][:, 2].mean() < 100
    assert len(curves[""][1]) >= 2, "of both sessions"
    assert "| `vf-coef=0.25` | 1 |" in first.stdout and "(1 of 1) | - (0 of 1)" in first.stdout
    before = out.read_text()
    assert '"command": "' in before and '"lag": ' in before and "--vf-coef=0.25" in before and '"cpu"' in before
    line.remove("no-such-flag=1")
    again = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and "seed 1" not in again.stdout and out.read_text() == before


def test_the_table():
    def curve(*points):
        return np.array([(0.0, step, value) for step, value in points])

    text = seeds.table({"": {1: curve((0, 0), (100_000, 10)), 2: curve((0, 0), (50_000, 0), (100_000, 4))},
                        "x": {1: curve((0, 2), (100_000, 2))}}, [4])  # fmt: skip
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[2][:3] == ["default", "2", "100k (2 of 2)"] and rows[3][:3] == ["`x`", "1", "- (0 of 1)"]
    assert rows[2][3].startswith("3.00 (1.00 to 5.00)"), "means over steps of 5 and of 1"
    assert rows[2][4].startswith("7.00 (4.00 to 10.00)") and rows[3][3].startswith("2.00 (2.00 to 2.00)")
