"""Which decoder is fastest at a load, by what was measured of a pair on one device. Without JAX, as `smcjax.decoders`.

profile.py      the file that `smcjax profile` writes: times of cycles, and how many drafts were accepted
laws.py         which decoders may stand for each other: never one of another law
prediction.py   tokens a second of each, at a load and a context
switch.py       the choice cycle by cycle, as the load and the accepted drafts change
report.py       what choosing gains: regret, and gains over loads and prompts
"""

from smcjax.planner.laws import law_of
from smcjax.planner.prediction import Planner
from smcjax.planner.profile import Cell, Measured, Profile
from smcjax.planner.switch import Rule, Switch

__all__ = ["Cell", "Measured", "Planner", "Profile", "Rule", "Switch", "law_of"]
