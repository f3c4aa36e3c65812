"""Tests of a processor without a JVM, in milliseconds, on the real core: with moves, crashes and time.

trial.py is the public entry for users' tests, determinism.py the check that a processor may move live, and
in_memory_driver.py the driver below both, which the core's own tests use too. The product never imports this.

    from tiercel.testing import Trial, check_deterministic

    speeds, means = "car string, speed double", "car string, mean double"
    trial = Trial(SpeedMonitor(60), schema=speeds, key="car", output=means)
    trial.send({"car": "a", "speed": 70.0})
    trial.move("a")
    trial.crash()
    assert trial.outputs("a") == [("a", 70.0)]
"""

from tiercel.testing.determinism import NotDeterministic, check_deterministic
from tiercel.testing.trial import Trial

__all__ = ["NotDeterministic", "Trial", "check_deterministic"]
