"""Which decoder is fastest at a load, by what was measured of a pair on one device. Without JAX, as `smcjax.decoders`.

profile.py      the file that `smcjax profile` writes: times of cycles, and how many drafts were accepted
laws.py         which decoders may stand for each other: never one of another law
prediction.py   tokens a second of each, at a load and a context, and the best of them over several
switch.py       how a sparse target's blocks are read, cycle by cycle, as the load changes
report.py       tables of a profile
"""

from smcjax.planner.laws import law_of
from smcjax.planner.prediction import Planner
from smcjax.planner.profile import Cell, Counted, Measured, Profile
from smcjax.planner.switch import Switch

__all__ = ["Cell", "Counted", "Measured", "Planner", "Profile", "Switch", "law_of"]
