"""The random stream of ops/random for kernels that are C: the text of runtime/shared/kernels/random.py."""

from __future__ import annotations

from ...shared.kernels.random import half, words
from .python_kernels import header
from .python_text import Writer


def _text() -> str:
    writer, (numbers, _, rest) = Writer(), header().partition("// -- arrays")
    names = [writer.called(part, name, "") for part, name in ((words, "words"), (half, "half"))]
    results = rest[rest.index("// -- several results") : rest.index("// -- numbers")]
    parts = "".join([numbers, results, *writer.parts.values()])
    return f"""
namespace stream {{
{parts}}}
DEVICE void philox(unsigned long long block, unsigned long long seed, unsigned long long step, unsigned* u)
{{
    const auto drawn = stream::{names[0]}(block, seed, step);
    for (int i = 0; i < 8; i++) u[i] = stream::{names[1]}(drawn, stream::Natural(i)).v;
}}
"""


#: numbers 8 · block ... 8 · block + 7 of the stream, 24 bits each
PHILOX = _text()
