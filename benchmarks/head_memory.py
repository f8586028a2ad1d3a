"""Bytes of a language model's head, compiled and not allocated: product with the vocabulary, soft cap, cross entropy.

    python benchmarks/head_memory.py [--rows 8192] [--width 2304] [--words 256000] [--cap 30]

The default is Gemma 2's 2B head, as in Apple's Cut Cross-Entropy (arXiv 2411.09009, table 1).  Prints, unfused and as
one operator, in bfloat16 and float32, the arena for the loss alone, and for the loss with the gradients of its input
and of the matrix; inputs and weights are not counted, gradients are.
"""

from __future__ import annotations

import argparse

import recompute as rc
from recompute.language.ir import Block
from recompute.passes import memory_report, plan_memory
from recompute.passes.gradient.autodiff import differentiate
from recompute.passes.loss.find_head import find_head
from recompute.runtime.lowering import resolved


def head(args: argparse.Namespace, dtype: str) -> Block:
    """The head in operators of ONNX."""
    rows, width, words = args.rows, args.width, args.words
    t = f"{dtype}[{rows},{words}]"
    return rc.parse(f"""program head {{
      param %x: {dtype}[{rows},{width}]
      param %w: {dtype}[{words},{width}]
      input %y: i64[{rows}]
      const %cap: {dtype}[] = [{args.cap}]
      %logits: {t} = MatMul(%x, %w) {{transB=1}}
      %small: {t} = Div(%logits, %cap)
      %tanh: {t} = Tanh(%small)
      %capped: {t} = Mul(%tanh, %cap)
      %wide: f32[{rows},{words}] = Cast(%capped) {{to="f32"}}
      loss %loss: f32[] = SoftmaxCrossEntropyLoss(%wide, %y) {{reduction="mean",ignore_index=-100}}
      output %loss
    }}""")


def arena(block: Block, *, gradients: bool) -> int:
    """Bytes that the step takes beside inputs and weights."""
    if gradients:
        block, pairs = differentiate(block, "loss")
        block = block.with_operators(block.operators, outputs=("loss", *(g.name for _, g in pairs)))
    planned = rc.verify(plan_memory(block, resolved(rc.Target())))
    return memory_report(planned).arena - sum(v.nbytes for v in planned.inputs)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 8192), ("width", 2304), ("words", 256_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cap", type=float, default=30.0)
    args = parser.parse_args()
    print(f"{'MiB':10} {'loss':>12} {'with gradients':>15}")
    for dtype in ("bf16", "f32"):
        plain = rc.verify(head(args, dtype))
        for name, block in (("unfused", plain), ("fused", find_head(plain, "loss")[0])):
            found = [arena(block, gradients=g) / 2**20 for g in (False, True)]
            print(f"{dtype:4} {name:8} {found[0]:9,.1f} {found[1]:15,.1f}")


if __name__ == "__main__":
    main()
