"""The shapes in signatures, checked at every call: jaxtyping's annotations, beartype's checks.

jaxtyping has an import hook for this, which took most of the tests' time: it checks arguments twice for the sake of its messages,
and decorates an inner function anew each time the outer one is called, which takes longer than the outer one's work. Here
arguments and result are checked once, and inner functions are not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import isgeneratorfunction, signature
from types import CodeType, ModuleType
from typing import Any, get_type_hints

from beartype import beartype
from beartype.door import die_if_unbearable
from jaxtyping import jaxtyped


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """One call, one meaning of every name in a shape."""
    if isgeneratorfunction(function):
        return _checked_generator(function)
    check = beartype(function)

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        with jaxtyped("context"):
            return check(*arguments, **named)

    return call


def _checked_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its body runs later, among other calls, whose names of shapes are not its own: what it is given is checked at the call."""
    parameters = signature(function)
    hints = cache(lambda: get_type_hints(function, include_extras=True))

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        with jaxtyped("context"):
            for name, value in parameters.bind(*arguments, **named).arguments.items():
                if name in hints():  # all but self
                    die_if_unbearable(value, hints()[name])
        return function(*arguments, **named)

    return call


def checked_fields(cls: type[Any]) -> type[Any]:
    """What a dataclass is made of is checked when it is made."""
    if is_dataclass(cls) and "__init__" in vars(cls):
        make = vars(cls)["__init__"]
        hints = get_type_hints(cls, include_extras=True)  # those of inherited fields in the modules where they are written
        make.__annotations__ = {field.name: hints[field.name] for field in fields(cls) if field.init}
        setattr(cls, "__init__", checked(make))  # noqa: B010  (mypy allows no assignment)
    return cls


class _Decorated(ast.NodeTransformer):
    """Functions next to their `def`, below other decorators; classes above theirs, which may make them dataclasses."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list.append(ast.Name(checked.__name__, ast.Load()))
        return node  # without a visit of its body

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list.insert(0, ast.Name(checked_fields.__name__, ast.Load()))
        self.generic_visit(node)
        return node


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache of what was compiled without checks, nor into one."""
        path = self.get_filename(fullname)
        tree = _Decorated().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update({function.__name__: function for function in (checked, checked_fields)})
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def check_shapes_in(*names: str) -> None:
    """In these modules, and all of these packages, from their import on."""
    assert not [name for name in names if name in sys.modules], "imported before its checks"
    sys.meta_path.insert(0, _Finder(names))
