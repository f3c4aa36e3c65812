"""Try a processor without a JVM, in milliseconds, on the real core: with moves, crashes and time.

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
