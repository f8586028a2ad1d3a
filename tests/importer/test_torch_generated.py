"""Bytes alive in code that Inductor has written, on code by hand (of Inductor itself: test_torch_compile.py)."""

from __future__ import annotations

import ast

import pytest

torch = pytest.importorskip("torch")
from recompute.errors import UsageError  # noqa: E402
from recompute.torch.plan.generated import Alive  # noqa: E402


def most(code: str, *inputs: object) -> int:
    alive = Alive({})
    alive.inputs = alive.stored(list(inputs))
    alive.run(ast.parse(code).body)
    return alive.most


@pytest.mark.parametrize(
    ("code", "bytes_"),
    [
        ("buf0 = empty_strided_cpu((4, 4), (8, 1), torch.float16)", 56),
        ("buf0 = empty_strided_cpu((0, 4), (4, 1), torch.float32)", 0),
        ("a, b, c = args\nargs.clear()\ncpp_fused(a, b, c)", 48),  # b is a view of a, c is held
        ("a, b, c = args\ndel a\nbuf0 = empty_strided_cpu((16,), (1,), torch.float32)", 112),  # b still holds it
        ("a, b, c = args\ndel a, b\nbuf0 = empty_strided_cpu((16,), (1,), torch.float32)", 64),
        (
            "a, b, c = args\ndel b\nbuf0 = reinterpret_tensor(a, (6,), (1,), 0); del a\nextern.mm(c, out=buf0)",
            48,
        ),
        ("a, b, c = args\nwith guard(0):\n    a = empty_strided_cpu((1,), (1,), torch.int64)\n    assert a\n", 56),
    ],
)
def test_names_hold_storages_until_the_last_one_goes(code: str, bytes_: int) -> None:
    a = torch.zeros(12)
    assert most(code, a, a[2:], None) == bytes_


def test_results_of_one_call_are_held_together_and_apart() -> None:
    alive = Alive({})
    alive.names["buf0"] = both = alive.stored((torch.zeros(2), [torch.zeros(4), None]))
    assert both == (0, (1, ())) and alive.sizes == [8, 16]
    alive.names = {}
    alive.bind("buf0", both)
    alive.run(ast.parse("buf1 = buf0[1][0]\ndel buf0\nbuf2 = empty_strided_cpu((5,), (1,), torch.float32)").body)
    assert alive.most == 36  # buf1 with buf2: the first of both is gone


@pytest.mark.parametrize("code", ["while x:\n    pass", "a, b = args", "a.b = c", "a, b = c"])
def test_code_that_is_not_understood_is_refused(code: str) -> None:
    with pytest.raises(UsageError, match="has an unknown form"):
        most(code, None)
