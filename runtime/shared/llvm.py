"""Types of what numba hands to functions that write LLVM code: imported by type checkers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite.ir import IRBuilder
from llvmlite.ir import Value as Word
from numba.core.base import BaseContext
from numba.core.types import Type as Kind
from numba.core.typing.context import BaseContext as TypingContext
from numba.core.typing.templates import Signature

__all__ = ["BaseContext", "Generated", "IRBuilder", "Kind", "Signature", "TypingContext", "Word"]

#: the result of an intrinsic: its signature, and the function that writes its code
Generated = tuple[Signature, Callable[[BaseContext, IRBuilder, Signature, Sequence[Word]], Word]]
