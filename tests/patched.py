"""Which patches of a test can change what a program is made of, so that programs are compiled anew."""

from __future__ import annotations

import types
from typing import Any

# Modules of which no line runs while a program is traced, whatever it is (`test_lazily.py`): they decide when a program
# is called and with which arrays, and what becomes of those that it gives.
OF_THE_HOST = (
    "smcjax.cli",
    "smcjax.engine.async_llm",
    "smcjax.engine.engine",
    "smcjax.engine.llm",
    "smcjax.engine.schedule.page_budget",
    "smcjax.engine.schedule.scheduler",
    "smcjax.engine.results.streaming",
    "smcjax.server",
    "smcjax.structured.automaton",
)
OF_PYTHON = ("asyncio", "importlib", "resource", "shutil", "socket", "subprocess", "sys", "time")


def changes_programs(target: Any) -> bool:
    """Tells whether a patch of an attribute of `target`, an object or the name of one, can reach into a trace.

    A name in a module of the host may be that of a class which makes programs. So patches of its classes and instances
    are harmless and those of the module are not, but for the one whose names are of no such class.
    """
    if isinstance(target, str):
        module, harmless = target, OF_PYTHON
    elif isinstance(target, types.ModuleType):
        module, harmless = target.__name__, (*OF_PYTHON, "smcjax.structured.automaton")
    else:
        module = (target if isinstance(target, type | types.FunctionType) else type(target)).__module__
        harmless = OF_PYTHON + OF_THE_HOST
    return not any(module == one or module.startswith(f"{one}.") for one in harmless)
