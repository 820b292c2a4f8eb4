"""A pickle interpreter that treats pickles as data.

A global is an entry of a table (`_pickle_globals.py`); calling it runs that entry on checked arguments; only objects
created by this pickle accept items or a state. So a pickle can reach only its own plain data and immutable values.
Memory is bounded by the size of the pickle (BUDGET). The result, counted as a tree, has bounded size and depth, so code
that walks it needs no further checks.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ._lazy_tensor import ConversionError, LazyTensor
from ._pickle_globals import (
    ATOMIC_TYPES,
    OPAQUE_MODULES,
    AllowedCall,
    BytesIOContent,
    DcpObject,
    OpaqueObject,
    checked_keys,
)

BUDGET = 64  # bytes of containers, and nodes of the tree, per byte of the pickle
MAX_DEPTH = 64  # levels of nesting
MAX_INT_BYTES = 255
MAX_NAME = 256  # characters of the module and name of a class
Globals = dict[tuple[str, str], Any]  # by module and name


class UnknownClassError(ConversionError):
    """A pickle contains an object of an unsupported class."""


class Unpickler:
    """Interprets one pickle. `known` has its globals by (module, name); `storage` resolves persistent ids."""

    def __init__(self, content: bytes, where: str, known: Globals, storage: Callable[[Any], Any] | None = None) -> None:
        self.content, self.where, self.known, self.storage = content, where, known, storage
        self.position, self.budget = 0, 4096 + BUDGET * len(content)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def load(self) -> Any:
        while (opcode := self.byte()) != pickle.STOP[0]:
            if opcode not in OPCODES:
                raise ValueError(f"opcode {bytes([opcode])!r} at byte {self.position - 1} is not supported")
            OPCODES[opcode](self)
        value = self.pop()
        check_tree(value, 4096 + BUDGET * len(self.content))
        return value

    # ---- bytes ----

    def take(self, count: int) -> bytes:
        if count > len(self.content) - self.position:
            raise ValueError(f"it ends at byte {len(self.content)} within an object")
        self.position += count
        return self.content[self.position - count : self.position]

    def byte(self) -> int:
        if self.position == len(self.content):
            raise ValueError(f"it ends at byte {self.position} within an object")
        self.position += 1
        return self.content[self.position - 1]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def text(self, count: int) -> None:
        self.push(self.take(count).decode("utf-8", "surrogatepass"))

    def line(self) -> str:
        end = self.content.find(b"\n", self.position)
        if end < 0:
            raise ValueError("it has a name without an end")
        return self.take(end + 1 - self.position)[:-1].decode()

    def integer(self, count: int) -> int:
        if not 0 <= count <= MAX_INT_BYTES:
            raise ValueError(f"it has an integer of {count} bytes")
        return int.from_bytes(self.take(count), "little", signed=True)

    # ---- stack ----

    def push(self, value: Any, size: int = 0) -> None:
        self.budget -= size
        if self.budget < 0:
            raise ValueError(f"its objects need more than {BUDGET} times its bytes")
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("it pops from an empty stack")
        return self.stack.pop()

    def top(self, *kinds: type) -> Any:
        if not self.stack or type(self.stack[-1]) not in kinds:
            raise ValueError(f"it modifies an object that is not a {kinds[0].__name__}")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("it ends a list that was not started")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple([self.pop() for _ in range(count)][::-1])

    # ---- memo and globals ----

    def put(self, index: int) -> None:
        if not self.stack:
            raise ValueError("it memoizes from an empty stack")
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError(f"it reads object {index}, which is not in the memo")
        self.push(self.memo[index])

    def find_global(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("the name of a class is not a string")
        if len(module) + len(name) > MAX_NAME:
            raise ValueError(f"the name of a class has {len(module) + len(name)} characters")
        if (module, name) in self.known:
            return self.known[module, name]
        if self.storage and module.startswith(OPAQUE_MODULES):
            self.budget -= 128 + len(module) + len(name)
            return OpaqueObject(f"{module}.{name}")
        raise UnknownClassError(
            f"{self.where} contains an object of {module}.{name}, which torchweft.convert does not support; nothing "
            "was executed. Save the checkpoint without that object, or do not trust the file"
        )

    def call(self) -> None:
        function, args = self.pop_many(2)
        if not isinstance(function, (AllowedCall, OpaqueObject)) or type(args) is not tuple:
            raise ValueError(f"it calls a {type(function).__name__}")
        made = function.make(*args)
        self.push(made, bytes_of(made))

    def persistent(self) -> None:
        if self.storage is None:
            raise ConversionError(f"{self.where} contains a tensor where none is expected")
        self.push(self.storage(self.pop()))

    # ---- changes of objects created by this pickle ----

    def append(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def set_items(self, items: Sequence[Any]) -> None:
        self.top(dict).update(zip(checked_keys(items[::2]), items[1::2], strict=True))

    def add_items(self, items: list[Any]) -> None:
        self.top(set).update(checked_keys(items))

    def build(self) -> None:
        state = self.pop()
        target = self.top(argparse.Namespace, DcpObject, BytesIOContent, OpaqueObject, dict)
        if isinstance(target, argparse.Namespace):
            if type(state) is not dict or not all(type(key) is str for key in state):
                raise ValueError("the attributes of a Namespace are not a dict of names")
            target.__dict__ = state
        elif isinstance(target, DcpObject):
            target.state = state
        elif isinstance(target, BytesIOContent):
            target.set_state(state)
        # Attributes of state dicts and opaque objects are ignored.


U2, I4, U4, U8, F8 = map(struct.Struct, ("<H", "<i", "<I", "<Q", ">d"))
OPCODE_HANDLERS: dict[bytes, Callable[[Unpickler], Any]] = {
    pickle.PROTO: lambda self: self.take(1),
    pickle.FRAME: lambda self: self.take(8),
    pickle.MARK: lambda self: self.marks.append(len(self.stack)),
    pickle.POP: lambda self: self.pop(),
    pickle.POP_MARK: lambda self: self.pop_mark(),
    pickle.NONE: lambda self: self.push(None),
    pickle.NEWTRUE: lambda self: self.push(True),
    pickle.NEWFALSE: lambda self: self.push(False),
    pickle.BININT: lambda self: self.push(self.number(I4)),
    pickle.BININT1: lambda self: self.push(self.byte()),
    pickle.BININT2: lambda self: self.push(self.number(U2)),
    pickle.LONG1: lambda self: self.push(self.integer(self.byte())),
    pickle.LONG4: lambda self: self.push(self.integer(self.number(I4))),
    pickle.BINFLOAT: lambda self: self.push(self.number(F8)),
    pickle.SHORT_BINUNICODE: lambda self: self.text(self.byte()),
    pickle.BINUNICODE: lambda self: self.text(self.number(U4)),
    pickle.BINUNICODE8: lambda self: self.text(self.number(U8)),
    pickle.SHORT_BINBYTES: lambda self: self.push(self.take(self.byte())),
    pickle.BINBYTES: lambda self: self.push(self.take(self.number(U4))),
    pickle.BINBYTES8: lambda self: self.push(self.take(self.number(U8))),
    pickle.EMPTY_DICT: lambda self: self.push({}, 64),
    pickle.EMPTY_LIST: lambda self: self.push([], 64),
    pickle.EMPTY_SET: lambda self: self.push(set(), 224),
    pickle.EMPTY_TUPLE: lambda self: self.push(()),
    pickle.TUPLE1: lambda self: self.push(self.pop_many(1), 48),
    pickle.TUPLE2: lambda self: self.push(self.pop_many(2), 56),
    pickle.TUPLE3: lambda self: self.push(self.pop_many(3), 64),
    pickle.TUPLE: lambda self: self.push(tuple(self.pop_mark()), 48),
    pickle.FROZENSET: lambda self: self.push(frozenset(checked_keys(self.pop_mark())), 224),
    pickle.APPEND: lambda self: self.append([self.pop()]),
    pickle.APPENDS: lambda self: self.append(self.pop_mark()),
    pickle.SETITEM: lambda self: self.set_items(self.pop_many(2)),
    pickle.SETITEMS: lambda self: self.set_items(self.pop_mark()),
    pickle.ADDITEMS: lambda self: self.add_items(self.pop_mark()),
    pickle.BINPUT: lambda self: self.put(self.byte()),
    pickle.LONG_BINPUT: lambda self: self.put(self.number(U4)),
    pickle.MEMOIZE: lambda self: self.put(len(self.memo)),
    pickle.BINGET: lambda self: self.get(self.byte()),
    pickle.LONG_BINGET: lambda self: self.get(self.number(U4)),
    pickle.GLOBAL: lambda self: self.push(self.find_global(self.line(), self.line())),
    pickle.STACK_GLOBAL: lambda self: self.push(self.find_global(*self.pop_many(2))),
    pickle.REDUCE: Unpickler.call,
    pickle.NEWOBJ: Unpickler.call,
    pickle.BUILD: Unpickler.build,
    pickle.BINPERSID: Unpickler.persistent,
}
OPCODES = {code[0]: run for code, run in OPCODE_HANDLERS.items()}


def bytes_of(made: Any) -> int:
    """Returns about how many bytes the result of a call takes."""
    if isinstance(made, LazyTensor):
        return 1024
    if isinstance(made, torch.Tensor):
        return 1024 + made.nbytes
    return 256 + 8 * (len(made) if isinstance(made, (str, bytes, tuple, set)) else 0)


def children(value: Any) -> Iterable[Any] | None:
    """Returns the children of an object; None for a leaf."""
    if isinstance(value, dict):
        return itertools.chain(value, value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, argparse.Namespace):
        return vars(value).values()
    if isinstance(value, DcpObject):
        return (value.args, value.state)
    if isinstance(value, OpaqueObject):
        return value.args or ()
    return (value.content,) if isinstance(value, BytesIOContent) else None


def check_tree(value: Any, limit: int) -> None:
    """Raises for a value that contains itself, is nested too deeply, or, counted as a tree, is larger than `limit`."""
    size, path = 0, [iter((value,))]
    while path:
        for item in path[-1]:
            size += 1 + (len(item) if type(item) in (str, bytes) else 0)
            if size > limit:
                raise ValueError(f"its objects repeat each other and expand to more than {BUDGET} times its bytes")
            if type(item) not in ATOMIC_TYPES and (inner := children(item)) is not None:
                path.append(iter(inner))
                break
        else:
            path.pop()
        if len(path) > MAX_DEPTH:
            raise ValueError(f"an object contains itself, or has more than {MAX_DEPTH} levels of nesting")


def load(content: bytes, where: str, known: Globals, storage: Callable[[Any], Any] | None = None) -> Any:
    try:
        return Unpickler(content, where, known, storage).load()
    except ConversionError as error:
        if where in str(error):
            raise
        raise ConversionError(f"{where}: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        reason = str(error) or type(error).__name__
        raise ConversionError(f"{where} is damaged: {reason}. Copy the checkpoint again") from error
