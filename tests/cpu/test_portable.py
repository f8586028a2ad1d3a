"""Kernels whose bits every processor gives: functions of ours beside exact ones, sums in order, what is refused."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

import recompute as rc
from recompute.errors import UsageError
from recompute.importer.exact import converted
from recompute.language import kernels
from recompute.language.types import DTYPES
from recompute.runtime.cpu.code import emit
from recompute.runtime.cpu.device import building, crew, native, portable
from recompute.runtime.cpu.device.toolchain import Toolchain
from recompute.runtime.cpu.loops import expressions

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())
ONE = """
declare double @NAME(double)
define void @kernel(ptr %x, i64 %begin, i64 %end) {
  %v = load double, ptr %x
  %y = call double @NAME(double %v)
  store double %y, ptr %x
  ret void
}
"""
TWO = """
declare double @pow(double, double)
define void @kernel(ptr %x, i64 %begin, i64 %end) {
  %v = load double, ptr %x
  %at = getelementptr double, ptr %x, i64 1
  %w = load double, ptr %at
  %y = call double @pow(double %v, double %w)
  store double %y, ptr %x
  ret void
}
"""
FMA = """
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
define void @kernel(ptr %x, i64 %begin, i64 %end) {
  %b.at = getelementptr float, ptr %x, i64 8
  %c.at = getelementptr float, ptr %x, i64 16
  %a = load <8 x float>, ptr %x, align 4
  %b = load <8 x float>, ptr %b.at, align 4
  %c = load <8 x float>, ptr %c.at, align 4
  %y = call <8 x float> @llvm.fma.v8f32(<8 x float> %a, <8 x float> %b, <8 x float> %c)
  store <8 x float> %y, ptr %x, align 4
  ret void
}
"""


@functools.cache
def tools() -> Toolchain:
    return Toolchain(portable=True)


def function(ir: str) -> Callable[[np.ndarray], np.ndarray]:
    """The first argument's place takes the result."""
    address = native.compile_ir(ir, tools())
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(address)

    def run(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        call(x.ctypes.data, 0, 1)
        return x

    return run


#: some of all sizes, near quarters of a turn, and the one that is nearest to them (Muller 2016, table 11.1)
ANGLES = np.r_[
    np.linspace(-10, 10, 501), np.logspace(-300, 300, 301), np.arange(1, 300) * (np.pi / 2),
    6381956970095103 * 2.0**797, 2.0**1023, np.pi / 4,
]  # fmt: skip
#: function → arguments, and how many units in the last place it may be off
CASES = {
    "exp": (np.r_[np.linspace(-745, 709, 901), np.linspace(-1, 1, 301), 1e-300], 2),
    "log": (np.r_[np.logspace(-320, 308, 901), np.linspace(0.5, 2, 301), 1 + 2.0**-52], 2),
    "expm1": (np.r_[np.linspace(-40, 700, 701), np.linspace(-1, 1, 301), 1e-300, -1e-20], 3),
    "log1p": (np.r_[np.logspace(-300, 308, 701), np.linspace(-0.99, 1, 301), -1e-20], 3),
    "tanh": (np.r_[np.linspace(-22, 22, 701), np.linspace(-0.1, 0.1, 301), 1e-300], 4),
    "sin": (ANGLES, 2),
    "cos": (ANGLES, 2),
    "tan": (ANGLES, 4),
    "asin": (np.r_[np.linspace(-1, 1, 701), 1e-300, 1 - 2.0**-53], 4),
    "acos": (np.r_[np.linspace(-1, 1, 701), 1e-300, 1 - 2.0**-53], 4),
    "atan": (np.r_[np.linspace(-9, 9, 701), np.logspace(-300, 300, 301)], 4),
    "sinh": (np.r_[np.linspace(-710, 710, 701), np.linspace(-2, 2, 701), 1e-300], 4),
    "cosh": (np.r_[np.linspace(-710, 710, 701), np.linspace(-2, 2, 701)], 4),
    "asinh": (np.r_[np.linspace(-9, 9, 701), np.logspace(-300, 300, 301)], 4),
    "acosh": (np.r_[np.linspace(1, 9, 701), 1 + np.logspace(-15, 300, 301)], 4),
    "atanh": (np.r_[np.linspace(-0.999, 0.999, 701), np.logspace(-300, -1, 301)], 4),
}
#: NumPy's names of them, where these are others
NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh",
         "atanh": "arctanh"}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_functions_are_near_the_exact_ones(name: str) -> None:
    xs, most = CASES[name]
    run, exact = function(ONE.replace("NAME", name)), getattr(np, NAMES.get(name, name))
    found = np.array([run(np.array([x]))[0] for x in xs])
    with np.errstate(all="ignore"):
        want = exact(xs.astype(np.longdouble))
    unit = np.spacing(np.abs(want.astype(np.float64)))
    assert np.abs((found - want) / unit).max() < most


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("exp", {-np.inf: 0, np.inf: np.inf, 0: 1, -800: 0, 800: np.inf, np.nan: np.nan}),
        ("log", {0: -np.inf, -1: np.nan, np.inf: np.inf, 1: 0, np.nan: np.nan}),
        ("expm1", {-np.inf: -1, np.inf: np.inf, -0.0: -0.0, np.nan: np.nan}),
        ("log1p", {-1: -np.inf, -2: np.nan, np.inf: np.inf, -0.0: -0.0, np.nan: np.nan}),
        ("tanh", {-np.inf: -1, np.inf: 1, -0.0: -0.0, np.nan: np.nan}),
        ("sin", {-0.0: -0.0, np.inf: np.nan, -np.inf: np.nan, np.nan: np.nan}),
        ("cos", {0: 1, np.inf: np.nan, -np.inf: np.nan, np.nan: np.nan}),
        ("tan", {-0.0: -0.0, np.inf: np.nan, np.nan: np.nan}),
        ("asin", {-0.0: -0.0, 1: np.pi / 2, -1: -np.pi / 2, 2: np.nan, np.inf: np.nan, np.nan: np.nan}),
        ("acos", {1: 0, -1: np.pi, 1.5: np.nan, -2: np.nan, np.nan: np.nan}),
        ("atan", {-0.0: -0.0, np.inf: np.pi / 2, -np.inf: -np.pi / 2, np.nan: np.nan}),
        ("sinh", {-0.0: -0.0, np.inf: np.inf, -np.inf: -np.inf, 800: np.inf, np.nan: np.nan}),
        ("cosh", {0: 1, np.inf: np.inf, -np.inf: np.inf, 800: np.inf, np.nan: np.nan}),
        ("asinh", {-0.0: -0.0, np.inf: np.inf, -np.inf: -np.inf, np.nan: np.nan}),
        ("acosh", {1: 0, 0.5: np.nan, -2: np.nan, -1e8: np.nan, np.inf: np.inf, -np.inf: np.nan, np.nan: np.nan}),
        ("atanh", {-0.0: -0.0, 1: np.inf, -1: -np.inf, 2: np.nan, np.inf: np.nan, np.nan: np.nan}),
        ("erf", {-0.0: -0.0, np.inf: 1, -np.inf: -1, 9: 1, np.nan: np.nan}),
    ],
)
def test_special_arguments(name: str, special: dict[float, float]) -> None:
    run = function(ONE.replace("NAME", name))
    for x, want in special.items():
        found = run(np.array([x], "f8"))[0]
        np.testing.assert_equal(found, np.float64(want))
        assert want or np.signbit(found) == np.signbit(want), (x, found)


@functools.cache
def quarter() -> Decimal:
    """π/4 by Machin's formula, with 400 digits."""
    with localcontext(Context(420)):
        total, t, u = Decimal(0), Decimal(4) / 5, Decimal(1) / 239
        for k in range(600):
            total += (t - u) / (2 * k + 1)
            t, u = -t / 25, -u / 239**2
        return total


def exact_circle(x: Fraction) -> tuple[Decimal, Decimal]:
    """(sin x, cos x), by exact reduction and series."""
    with localcontext(Context(400)) as context:
        angle = Decimal(x.numerator) / x.denominator
        angle -= (angle / (8 * quarter())).to_integral_value() * 8 * quarter()
        context.prec = 60
        sums, term = [Decimal(0), Decimal(0)], Decimal(1)
        for k in range(80):
            sums[k % 2] += term * (-1) ** (k // 2)
            term = term * angle / (k + 1)
    return sums[1], sums[0]


def units(found: np.ndarray, want: Decimal) -> Decimal:
    """How far a result is off, in units of its last place."""
    return abs(Decimal(float(found[0])) - want) / Decimal(float(np.spacing(abs(float(want)))))


@pytest.mark.parametrize("which", [0, 1])
def test_angles_against_exact_arithmetic(which: int) -> None:
    """Sizes up to the largest, and neighbours of multiples of π/2, also of large ones, where most is lost."""
    run, rng = function(ONE.replace("NAME", ("sin", "cos")[which])), np.random.default_rng(which)
    xs = [6381956970095103 * 2.0**797, 5706674932067741 * 2.0**-1, 2.0**1023, 1.7976931348623157e308, 1e22]
    xs += [*(float(k) * np.pi / 2 for k in rng.integers(1, 10**6, 8)), *(10.0 ** rng.uniform(-3, 308, 20))]
    for x in xs:
        assert units(run(np.array([x])), exact_circle(Fraction(x))[which]) < 1, x


def test_error_function_against_exact_arithmetic() -> None:
    """By its series, 2 / √π Σ (-1)ⁿ x²ⁿ⁺¹ / (n! (2n + 1))."""
    run = function(ONE.replace("NAME", "erf"))
    with localcontext(Context(80)):
        root = (4 * quarter()).sqrt()
        for x in np.r_[np.linspace(-6.5, 6.5, 41), 1e-300, 0.999999, 1.000001]:
            exact = Decimal(float(x))
            term = total = exact
            for n in range(1, 260):
                term = -term * exact * exact / n
                total += term / (2 * n + 1)
            assert units(run(np.array([x])), 2 * total / root) < 2, x


def test_powers() -> None:
    run = function(TWO)
    for x, y in ((0.999, 1000.0), (0.9, 1.0), (2.0, 0.5), (10.0, -300.0), (-2.0, 3.0), (-2.0, 4.0), (3.0, 0.0)):
        want = np.float64(x) ** np.float64(y)
        share = 2.0**-51 * (1 + abs(y * np.log(abs(x))))
        assert abs(run(np.array([x, y]))[0] - want) <= share * abs(want), (x, y)
    in_c = ctypes.CDLL(None).pow
    in_c.restype, in_c.argtypes = ctypes.c_double, [ctypes.c_double] * 2
    special = [0, -0.0, 1, -1, 2, -2, 0.5, np.inf, -np.inf, np.nan]
    for x in special:
        for y in (0, 1, -1, 2, -2, 3, 0.5, np.inf, -np.inf, np.nan):
            want = in_c(x, y)
            found = run(np.array([x, y], "f8"))[0]
            np.testing.assert_allclose(found, want, rtol=1e-15, err_msg=f"{x} ** {y}")
            assert np.isnan(want) or np.signbit(found) == np.signbit(want), (x, y)


def rounded_once(a: float, b: float, c: float) -> np.float32:
    """a · b + c of finite numbers, by exact arithmetic."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return np.float32(np.float32(a) * np.float32(b) + np.float32(c))
    near = np.float32(np.float64(exact))  # twice rounded: at most one float32 away
    around = [np.nextafter(near, np.float32(s), dtype="f4") for s in (-np.inf, np.inf)]
    errors = [(abs(Fraction(float(x)) - exact), int(x.view("u4")) & 1, x) for x in (near, *around) if np.isfinite(x)]
    return min(errors, key=lambda e: e[:2])[2]


@pytest.mark.parametrize("fused", [False, True])
def test_products_and_sums_round_once(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a processor has no instruction for them: halves that a second rounding would turn, subnormals."""
    monkeypatch.setattr(tools(), "fused", fused)
    run, rng = function(FMA), np.random.default_rng(0)
    one, tie = np.float32(1 + 2.0**-23), np.float32(2.0**-24)
    rows = [(one, one, np.float32(-1)), (np.float32(1), tie, one), (np.float32(1), -tie, one), (one, tie, one),
            (np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60))]  # fmt: skip
    for scale in (0, 20, -30, -70, -74):
        a, b, c = rng.standard_normal((3, 40)).astype("f4")
        shift = np.float32(2.0**scale)
        rows += list(
            zip(a * shift, b * shift, c * np.float32(2.0 ** (2 * scale + int(rng.integers(-30, 30)))), strict=True)
        )
    rows += [(np.float32(x), np.float32(2), np.float32(y)) for x in (0, -0.0) for y in (0, -0.0)]
    for at in range(0, len(rows), 8):
        part = np.array((rows[at : at + 8] * 8)[:8], "f4")
        found = run(part.T.copy().ravel())[:8]
        want = np.array([rounded_once(*map(float, row)) for row in part], "f4")
        assert found.view("u4").tolist() == want.view("u4").tolist(), part
    huge = np.array([[3e38, 10, 1], [np.inf, 1, 1], [1, 1, -np.inf], [3e38, -10, 0]] * 2, "f4")
    assert run(huge.T.copy().ravel())[:4].tolist() == [np.inf, np.inf, -np.inf, -np.inf]


def test_nothing_may_be_reordered() -> None:
    ir = """
define float @f(float %a, float %b) {
  %x = fadd reassoc nsz contract float %a, %b
  %y = fmul fast float %x, %b
  %z = call nnan float @llvm.maximum.f32(float %x, float %y)
  ret float %z
}
declare float @llvm.maximum.f32(float, float)
"""
    found = portable.adapted(ir, fused=True)
    assert not any(flag in found for flag in ("reassoc", "nsz", "contract", "fast", "nnan")), found
    assert "%x = fadd float %a, %b" in found and "%y = fmul float %x, %b" in found


@pytest.mark.parametrize("name", ["lgamma", "llvm.exp2.f64", "cbrt"])
def test_functions_of_a_library_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"calls '{name}'"):
        function(ONE.replace("NAME", name))


@pytest.mark.parametrize(("size", "lanes"), [("float", 1), ("float", 8), ("double", 4)])
def test_numbers_that_an_integer_cannot_hold(size: str, lanes: int) -> None:
    """The same on every processor: x86-64 gives the least integer for all of them, AArch64 the nearest."""
    of, to = (f"<{lanes} x {t}>" if lanes > 1 else t for t in (size, "i32"))
    run = function(f"""
define void @kernel(ptr %x, i64 %begin, i64 %end) {{
  %v = load {of}, ptr %x, align 4
  %y = fptosi {of} %v to {to}
  store {to} %y, ptr %x, align 4
  ret void
}}
""")
    xs = np.array([1e10, -1e10, np.nan, np.inf, -np.inf, 2.7, -2.7, 5], "f4" if size == "float" else "f8")
    want = [2**31 - 1, -(2**31), 0, 2**31 - 1, -(2**31), 2, -2, 5]
    found = [n for i in range(0, 8, lanes) for n in run(xs[i : i + lanes]).view("i4")[:lanes]]
    assert found == want


@pytest.mark.parametrize("to", ["bool", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"])
def test_casts_take_the_nearest_integer(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the type itself: NumPy and ordinary loops go through a wider one."""
    monkeypatch.setattr(native, "toolchain", tools)
    f = expressions.Code(8)
    y = f.cast(f.let("load <8 x float>, ptr %args, align 4"), "f32", to)
    if to == "bool":
        y = f.convert("zext", y, "i1", "i8")
    f.line(f"store {f.of(expressions.stored(to))} {y}, ptr %args, align 1")
    x = np.array([np.inf, -np.inf, np.nan, 300, -300, 2.75, 2.0**63, 0], "f4")
    found = function(emit.module(f))(np.r_[x, x]).view(DTYPES[to])[:8]
    assert found.tolist() == converted(x, to).tolist()


@pytest.mark.parametrize("way", ["widened", "narrowed"])
def test_float16_by_integers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a processor has no instructions; also numbers between two, beyond the largest and below the least."""
    monkeypatch.setattr(native, "converts_float16", lambda: False)
    halves = np.arange(1 << 16, dtype=np.uint16).view("f2")
    with np.errstate(all="ignore"):
        middle = (halves.astype("f4") + np.nextafter(halves, np.float16(np.inf)).astype("f4")) / 2
        x = np.r_[halves.astype("f4"), middle, np.nextafter(middle, np.float32(np.inf)), np.float32([1e5, 3e38, 1e-45])]
        x = halves if way == "widened" else np.r_[x, -x, np.zeros(2, "f4")]
        want = x.astype("f4" if way == "widened" else "f2")
    kinds = ("i16", "float") if way == "widened" else ("float", "i16")
    f = expressions.Code(8)
    with f.loop(0, x.size, 8) as i:
        y = getattr(f, way)(f.let(f"load <8 x {kinds[0]}>, ptr {f.at('%args', i, kinds[0])}, align 2"), "f16")
        f.line(
            f"store <8 x {kinds[1]}> {y}, ptr {f.at('%args', f.add(x.size * 4 // want.itemsize, i), kinds[1])}, align 2"
        )
    room = np.zeros(x.size * 8, np.uint8)
    room[: x.nbytes] = x.view(np.uint8)
    found = function(emit.module(f))(room)[x.size * 4 :].view(want.dtype)[: x.size]
    assert (np.isnan(found) == np.isnan(want)).all()
    numbers = ~np.isnan(want)
    assert (found.view(f"u{want.itemsize}") == want.view(f"u{want.itemsize}"))[numbers].all()


@pytest.mark.parametrize(
    "declared", ["double @llvm.maxnum.f64(double, double)", "double @llvm.vector.reduce.fmax.v4f64(<4 x double>)"]
)
def test_the_larger_of_two_zeros_depends_on_the_processor(declared: str) -> None:
    with pytest.raises(UsageError, match="not for a kernel that calls 'llvm"):
        portable.check(tools().llvm.parse_assembly(f"declare {declared}"))
    portable.check(tools().llvm.parse_assembly(f"declare {re.sub('max(num)?', 'maximum', declared)}"))


HALVED = """
define void @kernel(ptr %args, i64 %begin, i64 %end) {
  %x = load ptr, ptr %args
  %v = load double, ptr %x
  %y = fmul double %v, 0.5
  store double %y, ptr %x
  ret void
}
"""
CONTROL = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define void @kernel(ptr %x, i64 %begin, i64 %end) {
  %old = getelementptr i32, ptr %x, i64 1
  call void @llvm.x86.sse.stmxcsr(ptr %old)
  call void @llvm.x86.sse.ldmxcsr(ptr %x)
  ret void
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about a register of x86")
def test_subnormal_numbers_are_kept_whatever_a_process_is_set_to() -> None:
    """A library compiled with -ffast-math sets the processor to take them for zero."""
    signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    control = signature(native.compile_ir(CONTROL, native.here()))
    ir = crew.driver(threads=False, flush=False)
    run = ctypes.CFUNCTYPE(*(ctypes.c_int64,) * 5)(native.compile_ir(ir, native.here()))
    x, status = np.array([2.0**-1030]), np.zeros(4, np.int64)
    words = np.array([x.ctypes.data], np.int64)
    rows, counters = np.zeros((1, crew.WORDS), np.int64), np.zeros(2, np.int64)
    rows[0] = native.compile_ir(HALVED, tools()), words.ctypes.data, 1, 1, 1, 0, counters.ctypes.data
    setting = 0x8040 | 0x6000  # subnormal numbers are zero, and others rounded towards it
    register, after = np.array([0x1F80 | setting, 0], np.uint32), np.zeros(2, np.uint32)
    control(register.ctypes.data, 0, 0)
    failed = run(rows.ctypes.data, 1, 1, status.ctypes.data)
    after[0] = register[1]
    control(after.ctypes.data, 0, 0)
    assert failed == -1 and x[0].hex() == (2.0**-1031).hex()
    assert after[1] & setting == setting, "the process has its own setting back"


def test_portable_bits_come_before_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_chosen", [])
    monkeypatch.setattr(native.toolchain, "_results", [])
    monkeypatch.setattr(kernels, "_by_numpy", [])
    kernels.numpy_computed("a constant of a model, by Exp")
    with pytest.raises(UsageError, match="NumPy has computed a constant of a model, by Exp, with this machine's bits"):
        rc.portable_bits()


def test_a_device_has_no_portable_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    program = rc.load(rc.models.build("mlp"), batch=2)
    monkeypatch.setattr(kernels, "_portable", [True])
    with pytest.raises(UsageError, match="portable bits are those of processors, and this executor is on"):
        rc.Executor(rc.EmulatedCUDAPlace()).session(program)
