"""The providers "cudnn" and "cudnn_tf32": convolutions and attention by cuDNN, through nvidia-cudnn-frontend.

They are there where that package and a device are.  Convolutions add up sums as they are defined (no FFT, no Winograd);
whatever cuDNN does not plan (../device/cudnn.py) is left to the other providers.  Plans are kept: an operator has one
in a process.

With channels last the weight is turned to cuDNN's layout, [m, kernel..., c], and its gradient turned back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....errors import JobError
from ....language.kernels import register
from ....language.types import TensorType, need
from ....ops.tiles import wide
from ...shared.convolved import Convolved, convolved, operands
from ..code.strided import Axis, gather_to
from ..device import cudnn
from ..device.kernel import Buffer, Call, Library
from ..families import Buffers
from ..kernels.cudnn_attention import Attention
from ..kernels.loops import added, computed

if TYPE_CHECKING:
    from ....language.ir import Operator

#: bytes that a plan of a convolution may work in
WORKSPACE = 128 << 20
#: properties of engines that are not wanted, of float32 only, and of float32 that is not to be rounded to TF32
_UNWANTED = ("FFT", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")
_ROUNDING, _TENSOR_CORES = "DOWN_CONVERT_INPUTS", "TENSOR_CORE"


def ends(c: Convolved) -> tuple[int, ...] | None:
    """Padding behind each axis for which cuDNN counts as many windows: as in front where that fits.

    None where the input would have to be cropped.
    """
    places = []
    for least, begin, stride in zip(c.end, c.geometry.window.begin, c.geometry.window.strides, strict=True):
        if begin < 0 or least + stride <= 0:
            return None
        places.append(begin if least <= begin < least + stride else max(least, 0))
    return tuple(places)


def layout(shape: Sequence[int], *, last: bool) -> tuple[list[int], list[int]]:
    """Dimensions, channels second and at least two more, and their strides."""
    shape = [*shape[:2], *(1,) * (4 - len(shape)), *shape[2:]]
    order = [0, *range(2, len(shape)), 1] if last else list(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis], step = step, step * shape[axis]
    return shape, strides


@functools.lru_cache(maxsize=4096)
def plan(c: Convolved, dtype: str, device: int, *, tf32: bool, aligned: int = 16, room: int = WORKSPACE) -> Any:
    """cuDNN's plan for addresses that are multiples of `aligned` bytes, in `room` bytes, or why there is none (str)."""
    unwanted = [*_UNWANTED, *([_ROUNDING] if dtype == "f32" else []),
                *([_TENSOR_CORES] if dtype == "f32" and not tf32 else [])]  # fmt: skip
    try:
        graph = cudnn.begun(c.kind, dtype, device)
        return cudnn.planned(graph, _tensors(graph, c, cudnn.kind(dtype), aligned), device, unwanted, room)
    except Exception as e:  # cuDNN says in many ways that it cannot
        return f"{type(e).__name__}: {e}"


def _tensors(graph: Any, c: Convolved, kind: Any, aligned: int) -> tuple[Any, Any, Any]:
    """The graph's x, w and y, with the operation between them."""
    window, behind = c.geometry.window, ends(c)
    if behind is None:
        raise JobError("the input is cropped")
    pad = [0] * (2 - len(window.out)) if len(window.out) < 2 else []
    one = [1] * len(pad)
    options = {
        "pre_padding": [*pad, *window.begin], "post_padding": [*pad, *behind],
        "stride": [*one, *window.strides], "dilation": [*one, *window.dilations],
    }  # fmt: skip
    shapes = dict(zip("xwy", (c.x, c.w, c.y), strict=True))
    output_of = {"output": "y", "input": "x", "weight": "w"}[c.kind]
    tensors = {}
    for name, shape in shapes.items():
        if name != output_of:
            dim, stride = layout(shape, last=c.last)
            tensors[name] = graph.tensor(name=name, dim=dim, stride=stride, data_type=kind)
    if output_of == "y":
        out = graph.conv_fprop(image=tensors["x"], weight=tensors["w"], **options)
    elif output_of == "x":
        out = graph.conv_dgrad(loss=tensors["y"], filter=tensors["w"], **options)
    else:
        out = graph.conv_wgrad(image=tensors["x"], loss=tensors["y"], **options)
    dim, stride = layout(shapes[output_of], last=c.last)
    out.set_output(True).set_dim(dim).set_stride(stride)
    out.set_data_type(kind)
    tensors[output_of] = out
    for tensor in tensors.values():
        tensor.set_alignment(aligned)
    return tensors["x"], tensors["w"], tensors["y"]


# -- around it --------------------------------------------------------------------------------------------------------


class Cudnn:
    """Attention, and convolutions that are neither depthwise nor products of matrices.

    `tf32`: of float32 only, with factors that may be rounded to TF32.
    """

    def __init__(self, *, tf32: bool = False) -> None:
        self.tf32, self.name = tf32, "cudnn_tf32" if tf32 else "cudnn"
        self._attention = Attention()

    def _attends(self, op: Operator) -> bool:
        return not self.tf32 and self._attention.knows(op)

    def _found(self, op: Operator) -> tuple[Convolved, str, cudnn.Plan] | None:
        c = convolved(op, ("f32",) if self.tf32 else tuple(cudnn.FLOATS))
        if c is None or len(c.geometry.window.out) > 3 or c.geometry.pointwise:
            return None
        if c.geometry.cg == 1 and c.geometry.group > 1:
            return None
        dtype = next(iter(op.writes())).dtype
        chosen = plan(c, dtype, cudnn.current_device(), tf32=self.tf32)
        return None if isinstance(chosen, str) else (c, dtype, chosen)

    def _unaligned(self, c: Convolved, dtype: str, room: int) -> cudnn.Plan:
        item = TensorType(dtype, ()).nbytes
        chosen = plan(c, dtype, cudnn.current_device(), tf32=self.tf32, aligned=item, room=room)
        if isinstance(chosen, str):
            raise JobError(f"cuDNN has no plan for what begins at any element: {chosen}")
        return chosen

    def accepts(self, op: Operator) -> bool:
        """Whether cuDNN has a plan."""
        return self._attention.accepts(op) if self._attends(op) else self._found(op) is not None

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The plan's workspace; the weight in cuDNN's layout."""
        if self._attends(op):
            return self._attention.scratch(op)
        c, dtype, planned = need(self._found(op))
        turned = (TensorType(dtype, c.w),) if _turns(c) else ()
        return (TensorType("u8", (planned.workspace,)), *turned)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The plan, between copies of the weight where it is turned, and the bias."""
        if self._attends(op):
            return self._attention.bind(op, ins, outs, scratch)
        c, dtype, planned = need(self._found(op))
        x, w, y, bias = operands(op, ins, outs)
        weight = scratch[1] if _turns(c) else w
        addresses = (x.address, weight.address, y.address)
        if any(a % 16 for a in addresses):  # a part of another value
            planned = self._unaligned(c, dtype, planned.workspace)
        run = functools.partial(planned.run, addresses, scratch[0].address)
        calls: list[Call] = [Library(f"cudnn {c.kind}", run, (planned,))]
        taps = c.geometry.window.taps
        if weight is not w and c.kind == "weight":
            calls += _turned(weight, w, taps, c.geometry.cg)
        elif weight is not w:
            calls = [*_turned(w, weight, c.geometry.cg, taps), *calls]
        if bias is not None:
            out = y if c.kind == "output" else x
            shaped = bias if c.last else bias.reshape(-1, *[1] * (len(out.shape) - 2))
            calls += computed(added, wide(dtype), [out, shaped], [out])
        return calls


def _turned(x: Buffer, y: Buffer, rows: int, columns: int) -> list[Call]:
    """y [count, columns, rows] from x [count, rows, columns]."""
    sizes = x.size // (rows * columns), columns, rows
    steps = rows * columns, 1, columns
    return gather_to(y, x, [Axis("copied", n, step) for n, step in zip(sizes, steps, strict=True)])


def _turns(c: Convolved) -> bool:
    """Whether cuDNN's layout of the weight is another one."""
    return c.last and c.geometry.window.taps > 1 and c.geometry.cg > 1


if not cudnn.unavailable():
    register(Cudnn())
    register(Cudnn(tf32=True))
