"""The plan: which parameters are gathered together, and where every element lies. Arithmetic, no graphs.

Called as a function, ``fsdp_compiled.plan(...)`` is `fsdp_compiled.runtime.plan_search.plan`, which plans before there
are any ranks.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Plan(ModuleType):
    """A package that can be called like the function of the same name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("fsdp_compiled.runtime.plan_search").plan(*args, **options)


sys.modules[__name__].__class__ = _Plan
