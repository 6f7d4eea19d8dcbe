"""Merge fine-tuned models into one, from the weights alone.

    import acemerge

    acemerge.merge("base", ["expert-a", "expert-b"], "merged")

Names are imported when first used, so that `acemerge --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from acemerge.calibration.suite import offer_suites
from acemerge.version import __version__ as __version__

if TYPE_CHECKING:
    from acemerge.api import diagnose, extract, merge, merge_state_dicts, merge_task_vectors, plan, push, report, sweep, verify
    from acemerge.bench.suites.registry import Suite
    from acemerge.errors import AcemergeError, InputError, MergeError, PreflightError
    from acemerge.execute.pipeline import MergeResult
    from acemerge.methods import Context, Merged, Method, Options, all_methods, get_method, method
    from acemerge.output.task_models import export_expert, load_expert_head
    from acemerge.planning.plan import Plan
    from acemerge.routing.model import load_routed
    from acemerge.sweeps.run import SweepResult

_HOME = {
    "diagnose": "acemerge.api",
    "extract": "acemerge.api",
    "merge": "acemerge.api",
    "merge_state_dicts": "acemerge.api",
    "merge_task_vectors": "acemerge.api",
    "plan": "acemerge.api",
    "push": "acemerge.api",
    "report": "acemerge.api",
    "sweep": "acemerge.api",
    "verify": "acemerge.api",
    "AcemergeError": "acemerge.errors",
    "InputError": "acemerge.errors",
    "MergeError": "acemerge.errors",
    "PreflightError": "acemerge.errors",
    "MergeResult": "acemerge.execute.pipeline",
    "Context": "acemerge.methods",
    "Merged": "acemerge.methods",
    "Method": "acemerge.methods",
    "Options": "acemerge.methods",
    "all_methods": "acemerge.methods",
    "get_method": "acemerge.methods",
    "method": "acemerge.methods",
    "export_expert": "acemerge.output.task_models",
    "load_expert_head": "acemerge.output.task_models",
    "Plan": "acemerge.planning.plan",
    "load_routed": "acemerge.routing.model",
    "SweepResult": "acemerge.sweeps.run",
}

__all__ = [
    "AcemergeError",
    "Context",
    "InputError",
    "MergeError",
    "MergeResult",
    "Merged",
    "Method",
    "Options",
    "Plan",
    "PreflightError",
    "SweepResult",
    "all_methods",
    "diagnose",
    "export_expert",
    "extract",
    "get_method",
    "load_expert_head",
    "load_routed",
    "merge",
    "merge_state_dicts",
    "merge_task_vectors",
    "method",
    "plan",
    "push",
    "report",
    "sweep",
    "verify",
]


def _bench_suite(name: str) -> "Suite":
    from acemerge.bench.suites.registry import get_suite

    return get_suite(name)


# Whatever is imported of acemerge, in whatever process, this file runs first: so `data="text-8"` works everywhere.
offer_suites(_bench_suite)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'acemerge' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
