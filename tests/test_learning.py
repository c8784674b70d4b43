"""A small real environment is learned: the whole pipeline, asynchronous, with the default hyper-parameters."""

import re


def test_basic_is_learned(run):
    """`basic` starts at about -150; the default flags pass 0 within 80,000 steps (see benchmark/results/learning_basic.csv)."""
    r = run("--experiment", "e", "--env-id", "basic", "--num-workers", "2", "--device", "cpu", "--total-timesteps", "80000")

    def returns(after: int) -> list[float]:
        """Those of the reports after so many steps."""
        found = re.findall(r"step ([\d,]+): return (-?[\d.]+)", r.text())
        return [float(value) for step, value in found if int(step.replace(",", "")) > after]

    # The first episodes that end are the lucky ones: their mean says nothing
    r.wait_for(lambda: max(returns(after=20_000), default=-200) > 0, 400, "a return of 0")
    assert min(returns(after=0)) < -50
