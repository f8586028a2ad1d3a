"""Source of the pooling kernels: windows are constants, sizes are arguments.

A thread has one place of the side that it writes ("near": windows, or the input's elements for gradients) and reads
the other ("far"), for `lanes` planes there (channels first: neighbouring threads are neighbouring places) or for
`lanes` neighbouring channels (channels last: a vector).  Gradients are gathered: each element looks for the windows
that it is in.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from ....language.types import DTYPES
from ..device.kernel import C_TYPES, COMPUTE, Kernel
from .parts import division, indented

#: taps up to which the loops over a window are unrolled
_UNROLLED = 32

_SOME = """
// `LANES` elements, `step` apart; only the first `here` are there
template <class T> DEVICE Pack<T, LANES> some(const T* p, Index step, int here)
{
    Pack<T, LANES> found = {};
    #pragma unroll
    for (int l = 0; l < LANES; l++)
        if (l < here) found.of[l] = p[l * step];
    return found;
}
template <class T> DEVICE void give(T* p, const Pack<T, LANES>& x, Index step, int here)
{
    #pragma unroll
    for (int l = 0; l < LANES; l++)
        if (l < here) p[l * step] = x.of[l];
}
"""
_VECTOR = """
template <class T> DEVICE Pack<T, LANES> some(const T* p, Index, int) { return *(const Pack<T, LANES>*)p; }
template <class T> DEVICE void give(T* p, const Pack<T, LANES>& x, Index, int) { *(Pack<T, LANES>*)p = x; }
"""


@dataclass(frozen=True)
class Form:
    """A window, one entry an axis, and how operands lie; `end`: pads behind, which only counting needs."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    last: bool
    lanes: int
    wide: bool

    @property
    def rank(self) -> int:
        """Spatial axes."""
        return len(self.kernel)

    @property
    def name(self) -> str:
        """The kernel's name."""
        sizes = "_".join("x".join(map(str, n)) for n in (self.kernel, self.strides))
        return f"{sizes}{'_last' if self.last else ''}_{self.lanes}{'_wide' if self.wide else ''}"

    @property
    def before(self) -> str:
        """Device functions."""
        head = f"{division(wide=self.wide)}enum {{ LANES = {self.lanes} }};\n"
        return head + (_VECTOR if self.last else _SOME)

    @property
    def parameters(self) -> str:
        """Behind the operands: elements per thread's lanes, sizes of both sides."""
        whole = "Divisor groups" if self.last else "long long planes"
        near = ", ".join(f"Divisor m{a}" for a in range(1, self.rank))
        far = ", ".join(f"int n{a}" for a in range(self.rank))
        return f"long long work, {whole}, Divisor area, {near + ', ' if near else ''}{far}, int last0"

    def head(self) -> str:
        """`p{a}`: the place; `near`, `far`: offsets of the first lane; `step`, `far_step`: to the next lane."""
        lines = [
            "const long long me = (long long)blockIdx.x * blockDim.x + threadIdx.x;",
            "if (me >= work) return;",
            "const Index e = (Index)me;",
        ]
        volume = " * ".join(f"(Index)n{a}" for a in range(self.rank))
        if self.last:
            lines += [
                "const Index q = over(e, groups), image = over(q, area), place = q - image * (Index)area.by;",
                "const Index across = (Index)groups.by * LANES, near = e * LANES, step = 1, far_step = 1;",
                f"const Index far = image * ({volume}) * across + (e - q * (Index)groups.by) * LANES;",
                "const int here = LANES;",
            ]
        else:
            lines += [
                "const Index group = over(e, area), place = e - group * (Index)area.by, across = 1;",
                f"const Index step = area.by, near = group * LANES * step + place, far_step = {volume};",
                "const Index far = group * LANES * far_step;",
                "const int here = (int)min((long long)LANES, planes - (long long)group * LANES);",
            ]
        rest = "place"
        for a in range(self.rank - 1, 0, -1):
            lines += [f"const Index q{a} = over({rest}, m{a});", f"const int p{a} = (int)({rest} - q{a} * m{a}.by);"]
            rest = f"q{a}"
        return indented([*lines, f"const int p0 = (int){rest};"])

    def far_place(self) -> str:
        """The offset of the far side's place `i{a}`."""
        text = "(Index)i0"
        for a in range(1, self.rank):
            text = f"({text} * n{a} + i{a})"
        return f"far + {text} * across"

    def tap(self) -> str:
        """The number of tap `k{a}` in its window."""
        text = "k0"
        for a in range(1, self.rank):
            text = f"({text} * {self.kernel[a]} + k{a})"
        return text

    def of_number(self) -> tuple[str, str, int]:
        """Statements that make `i{a}`, where tap number `t` of the window at the place is; the test whether that is
        inside; how many taps there are.
        """
        lines, rest = [], "t"
        for a in range(self.rank - 1, -1, -1):
            k = f"{rest} % {self.kernel[a]}" if a else rest
            lines.append(f"const int i{a} = p{a} * {self.strides[a]} + {k} * {self.dilations[a]} - {self.begin[a]};")
            rest = f"{rest} / {self.kernel[a]}"
        inside = " && ".join(f"i{a} >= 0 && i{a} < n{a}" for a in range(self.rank))
        return " ".join(lines), inside, math.prod(self.kernel)

    def over_taps(self, body: str) -> str:
        """`body` for each element of the window at the place that is inside, in the order of the taps."""
        lines = []
        for a in range(self.rank):
            pad = "    " * a
            lines += [f"{pad}#pragma unroll"] if math.prod(self.kernel) <= _UNROLLED else []
            lines += [
                f"{pad}for (int k{a} = 0; k{a} < {self.kernel[a]}; k{a}++) {{",
                f"{pad}    const int i{a} = p{a} * {self.strides[a]} + k{a} * {self.dilations[a]} - {self.begin[a]};",
                f"{pad}    if (i{a} < 0 || i{a} >= n{a}) continue;",
            ]
        return indented([*lines, *self._closed(body)])

    def over_windows(self, body: str) -> str:
        """`body` for each window (`i{a}`) that the place is in, as its tap `k{a}`, in the order of the taps."""
        lines = []
        for a in range(self.rank):
            pad, stride, dilation = "    " * a, self.strides[a], self.dilations[a]
            reach = (self.kernel[a] - 1) * dilation
            lines += [
                f"{pad}const int a{a} = p{a} + {self.begin[a]}, to{a} = min(a{a} / {stride}, n{a} - 1);",
                f"{pad}const int from{a} = a{a} > {reach} ? (a{a} - {reach} + {stride - 1}) / {stride} : 0;",
                f"{pad}for (int i{a} = to{a}; i{a} >= from{a}; i{a}--) {{",
            ]
            lines += [f"{pad}    if ((a{a} - i{a} * {stride}) % {dilation}) continue;"] if dilation > 1 else []
            lines.append(f"{pad}    const int k{a} = (a{a} - i{a} * {stride}) / {dilation};")
        return indented([*lines, *self._closed(body)])

    def _closed(self, body: str) -> list[str]:
        """The lines inside of one loop for each axis, and the loops' ends."""
        inside = ["    " * self.rank + line for line in body.strip("\n").split("\n")]
        return [*inside, *("    " * a + "}" for a in reversed(range(self.rank)))]

    def counted(self, at: str, sizes: str, *, include: bool) -> str:
        """How many elements the window at `{at}{a}` counts, of inputs of `{sizes}{a}`."""
        terms = []
        for a in range(self.rank):
            start = f"({at}{a} * {self.strides[a]} - {self.begin[a]})"
            low, high = (f"{-self.begin[a]}", f"{sizes}{a} + {self.end[a]}") if include else ("0", f"{sizes}{a}")
            terms.append(f"counted({start}, {low}, {high}, {self.kernel[a]}, {self.dilations[a]})")
        return " * (long long)".join(terms)


_COUNTED = """
// elements start, start + step, ... of `size` that are in [low, high); at least 1
DEVICE int up(int a, int b) { return a > 0 ? (a + b - 1) / b : -(-a / b); }
DEVICE int counted(int start, int low, int high, int size, int step)
{
    return max(min(size, up(high - start, step)) - max(0, up(low - start, step)), 1);
}
"""


def _each_lane(line: str) -> str:
    return f"#pragma unroll\nfor (int l = 0; l < LANES; l++) {line}"


def _lowest(dtype: str) -> str:
    """The smallest value of a type, as text."""
    kind = DTYPES[dtype]
    if kind.kind in "iu":
        return {"i64": "-9223372036854775807ll - 1"}.get(dtype, f"({C_TYPES[dtype]})({np.iinfo(kind).min}ll)")
    return f"-infinity<{COMPUTE[dtype]}>()"


def _numbered(form: Form) -> str:
    """The flat position (channels first) of a lane's tap number `t`."""
    flat = "(long long)i0"
    for a in range(1, form.rank):
        flat = f"({flat} * n{a} + i{a})"
    volume = " * ".join(["1ll", *(f"n{a}" for a in range(form.rank))])
    plane = "image * across + (e - q * groups.by) * LANES + l" if form.last else "group * LANES + l"
    return f"{form.of_number()[0]} at.of[l] = {flat} + (long long)({plane}) * ({volume});"


@functools.cache
def max_pool(form: Form, dtype: str, number: str, *, indices: bool) -> Kernel:
    """The largest of each window; `number`: the type of its first place's number in the window, "" if unwanted."""
    c = COMPUTE[dtype]
    track = bool(number) or indices
    better = f"if (v > most[l]) which[l] = {form.tap()}; " if track else ""
    body = f"""    {c} most[LANES];
    {"unsigned which[LANES] = {};" if track else ""}
    {_each_lane(f"most[l] = {_lowest(dtype)};").replace(chr(10), chr(10) + "    ")}
"""
    body += form.over_taps(
        f"const Pack<{C_TYPES[dtype]}, LANES> found = some(x + ({form.far_place()}), far_step, here);\n"
        + _each_lane(
            f"{{ const {c} v = widen(found.of[l]); {better}"
            "most[l] = most[l] >= v || most[l] != most[l] ? most[l] : v; }"
        )
    )
    stores = [f"Pack<{C_TYPES[dtype]}, LANES> best;", _each_lane(f"best.of[l] = narrow<{C_TYPES[dtype]}>(most[l]);")]
    stores.append("give(y + near, best, step, here);")
    if number:
        n = C_TYPES[number]
        stores += [f"Pack<{n}, LANES> tap;", _each_lane(f"tap.of[l] = ({n})which[l];")]
        stores.append("give(numbers + near, tap, step, here);")
    if indices:
        stores += ["Pack<long long, LANES> at;", _each_lane(f"{{ const int t = (int)which[l]; {_numbered(form)} }}")]
        stores.append(
            "#pragma unroll\nfor (int l = 0; l < LANES; l++)\n    if (l < here) indices[near + l * step] = at.of[l];"
        )
    text = form.head() + body + indented("\n".join(stores).split("\n"))
    outs = "long long* indices, " if indices else ""
    outs += f"{C_TYPES[number]}* numbers, " if number else ""
    parameters = f"const {C_TYPES[dtype]}* x, {C_TYPES[dtype]}* y, {outs}{form.parameters}"
    name = f"max_pool_{dtype}{'_numbers' if number else ''}{'_indices' if indices else ''}_{form.name}"
    return Kernel(name, parameters, text, form.before)


def _sum_store(dtype: str, target: str, value: str = "s[l]") -> str:
    """Each lane's sum to the near side."""
    lines = f"Pack<{C_TYPES[dtype]}, LANES> found;\n"
    lines += (
        _each_lane(f"found.of[l] = narrow<{C_TYPES[dtype]}>({value});") + f"\ngive({target} + near, found, step, here);"
    )
    return indented(lines.split("\n"))


@functools.cache
def max_gradient(form: Form, dtype: str, number: str) -> Kernel:
    """Each element's dy from the windows whose largest it was."""
    a = COMPUTE[dtype]
    body = f"    {a} s[LANES] = {{}};\n" + form.over_windows(
        f"const Index at = {form.far_place()};\nconst unsigned t = {form.tap()};\n"
        f"const Pack<{C_TYPES[number]}, LANES> tap = some(numbers + at, far_step, here);\n"
        f"const Pack<{C_TYPES[dtype]}, LANES> given = some(dy + at, far_step, here);\n"
        + _each_lane(f"s[l] += tap.of[l] == t ? widen(given.of[l]) : ({a})0;")
    )
    parameters = (
        f"const {C_TYPES[number]}* numbers, const {C_TYPES[dtype]}* dy, {C_TYPES[dtype]}* dx, {form.parameters}"
    )
    text = form.head() + body + _sum_store(dtype, "dx")
    return Kernel(f"max_pool_gradient_{dtype}_{form.name}", parameters, text, form.before)


@functools.cache
def max_gather(form: Form, dtype: str, number: str) -> Kernel:
    """The elements at the numbered places of their windows."""
    lines, inside, taps = form.of_number()
    body = f"""    const Pack<{C_TYPES[number]}, LANES> tap = some(numbers + near, step, here);
    Pack<{C_TYPES[dtype]}, LANES> found = {{}};
    #pragma unroll
    for (int l = 0; l < LANES; l++) {{
        const int t = (int)tap.of[l];
        {lines}
        if (l < here && {inside} && t < {taps}) found.of[l] = x[{form.far_place()} + l * far_step];
    }}
    give(y + near, found, step, here);
"""
    parameters = f"const {C_TYPES[number]}* numbers, const {C_TYPES[dtype]}* x, {C_TYPES[dtype]}* y, {form.parameters}"
    return Kernel(f"max_pool_gather_{dtype}_{form.name}", parameters, form.head() + body, form.before)


@functools.cache
def mean_pool(form: Form, dtype: str, *, include: bool) -> Kernel:
    """The mean of each window; `include`: padding counts."""
    body = f"    {COMPUTE[dtype]} s[LANES] = {{}};\n" + form.over_taps(
        f"const Pack<{C_TYPES[dtype]}, LANES> given = some(x + ({form.far_place()}), far_step, here);\n"
        + _each_lane("s[l] += widen(given.of[l]);")
    )
    count = form.counted("p", "n", include=include)
    body += f"    const {COMPUTE[dtype]} count = ({COMPUTE[dtype]})({count});\n" + _sum_store(
        dtype, "y", "s[l] / count"
    )
    parameters = f"const {C_TYPES[dtype]}* x, {C_TYPES[dtype]}* y, {form.parameters}"
    name = f"mean_pool_{dtype}{'_all' if include else ''}_{form.name}"
    return Kernel(name, parameters, form.head() + body, form.before + _COUNTED)


@functools.cache
def mean_of_large(form: Form, dtype: str, *, include: bool) -> Kernel:
    """`mean_pool` for large windows and channels first: a warp for each window."""
    lines, inside, taps = form.of_number()
    head = form.head().replace("* blockDim.x + threadIdx.x;", "* (blockDim.x / 32) + threadIdx.x / 32;")
    body = f"""    {COMPUTE[dtype]} s = 0;
    #pragma unroll 8
    for (int t = threadIdx.x % 32; t < {taps}; t += 32) {{
        {lines}
        if ({inside}) s += widen(x[{form.far_place()}]);
    }}
    s = warp_reduce(s, Plus());
    const {COMPUTE[dtype]} count = ({COMPUTE[dtype]})({form.counted("p", "n", include=include)});
    if (threadIdx.x % 32 == 0) y[near] = narrow<{C_TYPES[dtype]}>(s / count);
"""
    parameters = f"const {C_TYPES[dtype]}* x, {C_TYPES[dtype]}* y, {form.parameters}"
    name = f"mean_of_large_{dtype}{'_all' if include else ''}_{form.name}"
    return Kernel(name, parameters, head + body, form.before + _COUNTED)


@functools.cache
def mean_gradient(form: Form, dtype: str, *, include: bool) -> Kernel:
    """Each element's share of dy from all windows that it is in."""
    a, count = COMPUTE[dtype], form.counted("i", "size", include=include)
    sizes = "".join(f"    const int size{d} = {f'(int)m{d}.by' if d else 'last0'};\n" for d in range(form.rank))
    body = f"{sizes}    {a} s[LANES] = {{}};\n" + form.over_windows(
        f"const Pack<{C_TYPES[dtype]}, LANES> given = some(dy + ({form.far_place()}), far_step, here);\n"
        f"const {a} share = 1 / ({a})({count});\n" + _each_lane("s[l] += widen(given.of[l]) * share;")
    )
    parameters = f"const {C_TYPES[dtype]}* dy, {C_TYPES[dtype]}* dx, {form.parameters}"
    text = form.head() + body + _sum_store(dtype, "dx")
    name = f"mean_pool_gradient_{dtype}{'_all' if include else ''}_{form.name}"
    return Kernel(name, parameters, text, form.before + _COUNTED)


@functools.cache
def columns_of(form: Form, dtype: str) -> Kernel:
    """[planes, taps, windows]: the elements of each window, 0 outside."""
    lines, inside, taps = form.of_number()
    body = f"""    const Index to = group * LANES * step * {taps} + place;
    for (int t = 0; t < {taps}; t++) {{
        {lines}
        Pack<{C_TYPES[dtype]}, LANES> found = {{}};
        if ({inside}) found = some(x + ({form.far_place()}), far_step, here);
        give(y + to + t * step, found, step * {taps}, here);
    }}
"""
    parameters = f"const {C_TYPES[dtype]}* x, {C_TYPES[dtype]}* y, {form.parameters}"
    return Kernel(f"columns_{dtype}_{form.name}", parameters, form.head() + body, form.before)


@functools.cache
def image_of(form: Form, dtype: str) -> Kernel:
    """Each element's sum over all windows [planes, taps, windows] that it is in."""
    taps = math.prod(form.kernel)
    body = f"    {COMPUTE[dtype]} s[LANES] = {{}};\n" + form.over_windows(
        f"const Index at = ({form.far_place()}) - far + far * {taps} + {form.tap()} * far_step;\n"
        f"const Pack<{C_TYPES[dtype]}, LANES> given = some(x + at, far_step * {taps}, here);\n"
        + _each_lane("s[l] += widen(given.of[l]);")
    )
    parameters = f"const {C_TYPES[dtype]}* x, {C_TYPES[dtype]}* y, {form.parameters}"
    return Kernel(f"image_{dtype}_{form.name}", parameters, form.head() + body + _sum_store(dtype, "y"), form.before)
