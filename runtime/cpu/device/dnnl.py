"""ctypes bindings of oneDNN's C API (version 3), as far as the provider needs it.

Handles are integers.  `ok` turns a status into an error; enumeration values are those of the header, the same in all
of version 3.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....support.threads import once

_CPU, _OMP, _ANY = 1, 2, 1
#: element types
_TYPES = {"f16": 1, "bf16": 2, "f32": 3}
_USER_SCRATCHPAD, _DIRECT, _FORWARD, _ADD = 1, 1, 64, 0x1FFF0
#: execution arguments
SRC, SRC1, DST, WEIGHTS, BIAS, SCRATCHPAD, DIFF_SRC, DIFF_DST, DIFF_WEIGHTS = 1, 2, 17, 33, 41, 80, 129, 145, 161
#: queries for the layouts that a primitive wants
_QUERY = {SRC: 129, DIFF_SRC: 130, WEIGHTS: 131, DIFF_WEIGHTS: 132, DST: 133, DIFF_DST: 134, SCRATCHPAD: 136}
_SUBMEMORY_OFFSET = 259
_DISTRIBUTION = "onednn-cpu-gomp"


class DnnlError(Exception):
    """A function of the library gave another status than success."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} gave status {status}")
        self.status = status


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("hash", ctypes.c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("which", ctypes.c_int), ("memory", ctypes.c_void_p))


def _candidates() -> Iterable[str]:
    """Where the library may be: among the files of the installed distribution, then where the loader looks."""
    try:
        for file in importlib.metadata.distribution(_DISTRIBUTION).files or ():
            if file.name == "libdnnl.so.3":
                yield str(Path(str(file.locate())).resolve())
    except importlib.metadata.PackageNotFoundError:
        pass
    yield "libdnnl.so.3"


@once
def load() -> Library | str:
    """The library, or why it cannot be used."""
    why = f"oneDNN is not installed (extra 'onednn', distribution {_DISTRIBUTION})"
    for path in _candidates():
        try:
            loaded = ctypes.CDLL(path)
            loaded.dnnl_version.restype = ctypes.POINTER(_Version)
            version = loaded.dnnl_version().contents
        except (OSError, AttributeError) as e:
            if "/" in path:
                why = f"oneDNN cannot be loaded: {e}"
            continue
        name = f"{version.major}.{version.minor}.{version.patch}"
        if version.major != 3 or version.cpu_runtime != _OMP:
            why = f"oneDNN {name} in {path} is of another kind: version 3 with OpenMP threads is needed"
            continue
        try:
            return Library(loaded, name)
        except (AttributeError, DnnlError) as e:
            why = f"oneDNN {name} in {path} does not work: {e}"
    return why


class Library:
    """The loaded library with one engine, one stream and the attributes of all primitives."""

    def __init__(self, loaded: Any, version: str) -> None:
        self.version = version
        self._lib = loaded
        for name, result, arguments in (
            ("dnnl_primitive_desc_query_md", ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)),
            ("dnnl_memory_desc_get_size", ctypes.c_size_t, (ctypes.c_void_p,)),
            ("dnnl_memory_desc_equal", ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p)),
        ):
            getattr(loaded, name).restype = result
            getattr(loaded, name).argtypes = arguments
        self.engine = self._made("dnnl_engine_create", _CPU, ctypes.c_size_t(0))
        self.stream = self._made("dnnl_stream_create", _p(self.engine), 1)
        self.attributes = self._made("dnnl_primitive_attr_create")
        self._ok("dnnl_primitive_attr_set_scratchpad_mode", _p(self.attributes), _USER_SCRATCHPAD)
        self.execute = self.address("dnnl_primitive_execute")
        self.sgemm = self.address("dnnl_sgemm")

    def address(self, function: str) -> int:
        """Where a C function is."""
        return ctypes.cast(getattr(self._lib, function), ctypes.c_void_p).value or 0

    def _ok(self, function: str, *arguments: Any) -> None:
        status = getattr(self._lib, function)(*arguments)
        if status:
            raise DnnlError(function, status)

    def _made(self, function: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        self._ok(function, ctypes.byref(handle), *arguments)
        return handle.value or 0

    # -- memory ---------------------------------------------------------------------------------------------------

    def layout(self, shape: Sequence[int], strides: Sequence[int] | None, dtype: str = "f32") -> int:
        """A layout with these strides in elements; None: any that a primitive likes."""
        kind = _TYPES[dtype]
        if strides is None:
            return self._made("dnnl_memory_desc_create_with_tag", len(shape), _dims(shape), kind, _ANY)
        return self._made("dnnl_memory_desc_create_with_strides", len(shape), _dims(shape), kind, _dims(strides))

    def part(self, layout: int, shape: Sequence[int], first: Sequence[int]) -> tuple[int, int]:
        """The layout of a part of a memory, and its offset in elements: `shape` elements from the `first` on.

        DnnlError where the layout's blocks do not end there.
        """
        handle = self._made("dnnl_memory_desc_create_submemory", _p(layout), _dims(shape), _dims(first))
        offset = ctypes.c_int64()
        self._ok("dnnl_memory_desc_query", _p(handle), _SUBMEMORY_OFFSET, ctypes.byref(offset))
        return handle, offset.value

    def nbytes(self, layout: int) -> int:
        """Bytes that a buffer of this layout takes."""
        return int(self._lib.dnnl_memory_desc_get_size(_p(layout)))

    def same(self, a: int, b: int) -> bool:
        """Whether two layouts are one."""
        return bool(self._lib.dnnl_memory_desc_equal(_p(a), _p(b)))

    # -- primitives -----------------------------------------------------------------------------------------------

    def wanted(self, descriptor: int, which: int) -> int:
        """The layout that a primitive wants for an argument."""
        return int(self._lib.dnnl_primitive_desc_query_md(_p(descriptor), _QUERY[which], 0) or 0)

    def implementation(self, descriptor: int) -> str:
        """The library's name of the code behind a primitive."""
        name = ctypes.c_char_p()
        self._ok("dnnl_primitive_desc_query", _p(descriptor), 8, 0, ctypes.byref(name))
        return (name.value or b"").decode()

    def primitive(self, descriptor: int) -> int:
        """The code itself; it lives as long as the process."""
        return self._made("dnnl_primitive_create", _p(descriptor))

    def reorder(self, source: int, target: int) -> int:
        """Descriptor of a copy from one layout to another."""
        engine = _p(self.engine)
        return self._made(
            "dnnl_reorder_primitive_desc_create", _p(source), engine, _p(target), engine, _p(self.attributes)
        )

    def add(self, a: int, b: int, out: int) -> int:
        """Descriptor of an addition, b broadcast."""
        return self._made(
            "dnnl_binary_primitive_desc_create", _p(self.engine), _ADD, _p(a), _p(b), _p(out), _p(self.attributes)
        )

    def convolution(self, kind: str, layouts: Sequence[int], bias: int, window: Sequence[Sequence[int]]) -> int:
        """Descriptor of a convolution ("output") or of its gradient by the "input" or the "weight".

        `layouts`: those of x, w and y; `window`: strides, dilations, padding before and after.  0: no bias.
        """
        x, w, y = map(_p, layouts)
        strides, dilations, before, after = window
        shape = (_dims(strides), _dims([d - 1 for d in dilations]), _dims(before), _dims(after))
        engine, attributes = _p(self.engine), _p(self.attributes)
        forward = self._made(
            "dnnl_convolution_forward_primitive_desc_create",
            engine, _FORWARD, _DIRECT, x, w, _p(bias), y, *shape, attributes,
        )  # fmt: skip
        if kind == "output":
            return forward
        arguments: tuple[Any, ...] = (x, w, y) if kind == "input" else (x, w, _p(0), y)
        what = "data" if kind == "input" else "weights"
        function = f"dnnl_convolution_backward_{what}_primitive_desc_create"
        return self._made(function, engine, _DIRECT, *arguments, *shape, _p(forward), attributes)

    def product(self, a: int, b: int, bias: int, out: int) -> int:
        """Descriptor of a matrix product out = a b + bias (0: no bias), of batches alike."""
        arguments = (_p(a), _p(b), _p(bias), _p(out), _p(self.attributes))
        return self._made("dnnl_matmul_primitive_desc_create", _p(self.engine), *arguments)

    def memory(self, layout: int, address: int) -> Memory:
        """Memory of a layout at an address."""
        return Memory(self._lib, self._made("dnnl_memory_create", _p(layout), _p(self.engine), _p(address)))

    def arguments(self, given: Mapping[int, tuple[int, int]]) -> Arguments:
        """The arguments of a primitive: argument → (layout, address)."""
        return Arguments({which: self.memory(*place) for which, place in given.items()})


class Memory:
    """A memory object of the library; as an integer, its handle, which goes with the object."""

    def __init__(self, lib: Any, handle: int) -> None:
        self._handle = handle
        weakref.finalize(self, _destroy, lib, handle).atexit = False

    def __int__(self) -> int:
        return self._handle


class Arguments:
    """Execution arguments in the library's form; as an integer, their address."""

    def __init__(self, memories: Mapping[int, Memory]) -> None:
        self._array = (_Argument * len(memories))(*(_Argument(which, int(m)) for which, m in memories.items()))
        self._memories = tuple(memories.values())
        self._which = list(memories)
        self.count = len(memories)

    def place(self, which: int) -> int:
        """The position of an argument among them; 0 where it is not there."""
        return self._which.index(which) if which in self._which else 0

    def __int__(self) -> int:
        return ctypes.addressof(self._array)


def _destroy(lib: Any, memory: int) -> None:
    lib.dnnl_memory_destroy(_p(memory))


def _p(handle: int) -> Any:
    return ctypes.c_void_p(handle)


def _dims(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * 12)(*values)
