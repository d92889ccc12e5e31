"""An extension of griffe: the reference leaves out arguments that exist to be refused, ``NAME: Removed; …``."""

import re
from typing import Any

import griffe

REMOVED = re.compile(r"^ *(\w+): Removed;.*\n", re.MULTILINE)


class WithoutRemoved(griffe.Extension):
    """Takes such arguments out of the signature of a class and its docstring."""

    def on_class_members(self, *, cls: griffe.Class, **arguments: Any) -> None:
        """Change a class that has been read."""
        if cls.docstring is None or "__init__" not in cls.members:
            return
        for name in REMOVED.findall(cls.docstring.value):
            del cls.members["__init__"].parameters[name]
        cls.docstring.value = REMOVED.sub("", cls.docstring.value)
