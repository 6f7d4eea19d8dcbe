"""Import a script of the repository that is not part of the package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(path: str) -> ModuleType:
    file = Path(__file__).parents[2] / path
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent))  # as when the script is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
