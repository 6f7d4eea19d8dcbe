"""Where in a YAML file a value is, for messages."""

from __future__ import annotations

from pathlib import Path

import yaml

Key = tuple[str | int, ...]


class Lines:
    """Line numbers of everything in a file, by the keys and indices that lead to it."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._lines: dict[Key, int] = {}
        root = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
        if root is not None:
            self._note((), root)

    def _note(self, key: Key, node: yaml.Node) -> None:
        self._lines.setdefault(key, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                self._lines[(*key, name.value)] = name.start_mark.line + 1
                self._note((*key, name.value), value)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._note((*key, index), value)

    def where(self, key: Key) -> str:
        """FILE, line N; of the nearest thing that is there."""
        while key and key not in self._lines:
            key = key[:-1]
        return f"{self._name}, line {self._lines.get(key, 1)}"
