"""The pickle in a torch.distributed.checkpoint folder, read as data.

A pickle is a program. The unpickler here admits the names that a checkpoint needs and no others. The names stand for
records without behaviour instead of PyTorch's classes, so that nothing but data can come out.

A few bytes can ask for endless work: nested tuples whose hash takes many times longer with each level, a memo of
gigabytes, a list that is copied a million times. So this extends the unpickler in Python, not the one in C, and checks
each such operation before it runs.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from onward.errors import CheckpointError, one_line


class Record:
    """Stands for an instance of an admitted class: its state without behaviour."""

    kind = ""
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self, kind: str) -> dict[str, Any]:
        if self.kind != kind or not isinstance(self.state, dict):
            raise TypeError(f"a {kind} was expected; got a {self.kind}")
        return self.state


def read_pickle(file: Path) -> Any:
    """The root object: `Record`s, dtypes and Python's own containers.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or names what no checkpoint of tensors needs.
    """
    try:
        return _Unpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a stranger's program may raise
        raise CheckpointError(f"{file} cannot be read ({one_line(error)}): save the checkpoint again") from error


# PyTorch before 2.3 kept the tensors' properties elsewhere. Paths become records, too: of their parts.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    **{("builtins", kind.__name__): kind for kind in (dict, frozenset, list, set, tuple)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
_KEYS = (str, int, float, bytes, type(None), torch.dtype, Record)
# Instructions that no checkpoint uses: objects outside the stream, extensions, classes by protocol 0, bytearrays.
_UNUSED = (
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.INST,
    pickle.OBJ,
    pickle.NEWOBJ_EX,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)
# How many elements may be copied into containers, for each byte of the file. PyTorch's pickles copy less than one.
_COPIED_PER_BYTE = 4


class _Unpickler(pickle._Unpickler):
    # The function of each instruction; those that need a check get it below.
    dispatch = dict(pickle._Unpickler.dispatch)  # noqa: RUF012 (the base class's own attribute)
    stack: list[Any]

    def __init__(self, file: Path) -> None:
        content = file.read_bytes()
        super().__init__(io.BytesIO(content))
        self._file = file
        self._copies_left = _COPIED_PER_BYTE * len(content)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _RECORDS.get(module_name, ()):
            return type(global_name, (Record,), {"kind": global_name})
        if (module_name, global_name) in _PLAIN:
            return _PLAIN[module_name, global_name]
        raise CheckpointError(
            f"{self._file} is a pickle that wants {module_name}.{global_name}, which no checkpoint of tensors needs: "
            "it was not run. Read it only with the program that wrote it, if you trust where it is from"
        )

    def _check_call(self) -> None:
        """Check the call of a class, with the arguments on top of the stack: Python's containers copy and hash them."""
        function, arguments = self.stack[-2:]
        if not isinstance(function, type) or issubclass(function, Record):
            return
        for argument in arguments:
            self._copies_left -= len(argument)
            if issubclass(function, dict | set | frozenset):
                self._check_keys(argument)
        if self._copies_left < 0:
            raise ValueError("it copies more than it holds")

    def _check_items(self) -> None:
        """Check the keys of a mapping's new items: `stack` holds those above the mark, key and value in turn."""
        self._check_keys(self.stack[::2])

    def _check_item(self) -> None:
        self._check_keys(self.stack[-2:-1])

    def _check_members(self) -> None:
        self._check_keys(self.stack)

    def _check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse nested tuples as keys: they are hashed as a tree, however few objects they are made of."""
        for key in keys:
            if not isinstance(key, _KEYS) and not (type(key) is tuple and all(isinstance(part, _KEYS) for part in key)):
                raise TypeError(f"a name, a number or a place was expected as a key; got a {type(key).__name__}")


def _checked(check: Callable[[Any], None], instruction: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(unpickler: _Unpickler) -> None:
        check(unpickler)
        instruction(unpickler)

    return run


for _code, _check in {
    pickle.REDUCE: _Unpickler._check_call,
    pickle.NEWOBJ: _Unpickler._check_call,
    pickle.SETITEM: _Unpickler._check_item,
    pickle.SETITEMS: _Unpickler._check_items,
    pickle.DICT: _Unpickler._check_items,
    pickle.ADDITEMS: _Unpickler._check_members,
    pickle.FROZENSET: _Unpickler._check_members,
}.items():
    _Unpickler.dispatch[_code[0]] = _checked(_check, _Unpickler.dispatch[_code[0]])
for _code in _UNUSED:
    del _Unpickler.dispatch[_code[0]]
