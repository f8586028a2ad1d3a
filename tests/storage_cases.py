"""Programs and the allocations that they take: (what is shown, program, allocations, allocations with joined parts).

An allocation: name, bytes, first..last position, its values with their offsets.  Positions count operators and frees,
as `liveness` places them.
"""

from __future__ import annotations

CASES: list[tuple[str, str, list[str], list[str] | None]] = [
    (
        "a dying input is overwritten, one that is read later is not",
        """\
  input %x: f32[16]
  %a: f32[16] = Tanh(%x)
  %b: f32[16] = Relu(%a)
  %c: f32[16] = Add(%a, %b)
  output %c
""",
        ["x 64 -1..5 x+0 a+0 c+0", "b 64 2..3 b+0"],
        None,
    ),
    (
        "two operands die, the first is taken; both the same, none",
        """\
  input %x: f32[16]
  input %y: f32[16]
  %a: f32[16] = Sub(%x, %y)
  %b: f32[16] = Add(%a, %a)
  output %b
""",
        ["x 64 -1..2 x+0 a+0", "y 64 -1..0 y+0", "b 64 2..4 b+0"],
        None,
    ),
    (
        "persistent and output",
        """\
  input %x: f32[16]
  param %w: f32[16]
  %a: f32[16] = Add(%w, %x)
  %b: f32[16] = Relu(%a)
  %c: f32[16] = Neg(%b)
  output %b, %c
""",
        ["x 64 -1..5 x+0 a+0 b+0", "c 64 4..5 c+0"],
        None,
    ),
    (
        "views live on",
        """\
  input %x: f32[16]
  %a: f32[16] = Tanh(%x)
  %r: f32[4,4] = Reshape(%a) {shape=[4,4]}
  %b: f32[16] = Relu(%a)
  %c: f32[4,4] = Neg(%r)
  output %b, %c
""",
        ["x 64 -1..7 x+0 a+0 r+0 c+0", "b 64 3..7 b+0"],
        None,
    ),
    (
        "an operand and a view of it",
        """\
  input %x: f32[16]
  %a: f32[16] = Tanh(%x)
  %r: f32[1,16] = Reshape(%a) {shape=[1,16]}
  %b: f32[1,16] = Add(%r, %a)
  output %b
""",
        ["x 64 -1..3 x+0 a+0 r+0", "b 64 3..5 b+0"],
        None,
    ),
    (
        "parts",
        """\
  input %x: f32[32]
  %a: f32[32] = Tanh(%x)
  %p: f32[16], %q: f32[16] = Split(%a) {sizes=[16,16]}
  %b: f32[16] = Relu(%q)
  %c: f32[16] = Neg(%p)
  output %b, %c
""",
        ["x 128 -1..6 x+0 a+0 p+0 q+64", "b 64 4..8 b+0", "c 64 6..8 c+0"],
        None,
    ),
    (
        "parts that are not aligned",
        """\
  input %x: f32[32]
  %a: f32[32] = Tanh(%x)
  %p: f32[8], %q: f32[24] = Split(%a) {sizes=[8,24]}
  %b: f32[24] = Relu(%q)
  %c: f32[8] = Neg(%p)
  output %b, %c
""",
        ["x 128 -1..2 x+0 a+0", "p 32 2..8 p+0 c+0", "q 96 2..8 q+0 b+0"],
        None,
    ),
    (
        "a view at an offset of a view",
        """\
  input %x: f32[48]
  %p: f32[16], %q: f32[32] = Split(%x) {sizes=[16,32]}
  %r: f32[16], %s: f32[16] = Split(%q) {sizes=[16,16]}
  %t: f32[4,4] = Reshape(%s) {shape=[4,4]}
  %b: f32[4,4] = Relu(%t)
  output %b, %p
""",
        ["x 192 -1..8 x+0 p+0 q+64 r+64 s+128 t+128", "b 64 6..8 b+0"],
        None,
    ),
    (
        "views of persistent",
        """\
  input %x: f32[4,4]
  param %w: f32[16]
  %r: f32[4,4] = Reshape(%w) {shape=[4,4]}
  %b: f32[4,4] = Add(%r, %x)
  output %b
""",
        ["x 64 -1..1 x+0", "r 64 0..3 r+0 b+0"],
        None,
    ),
    (
        "another type of as many bytes",
        """\
  input %x: f32[16]
  input %y: f32[1,16]
  %a: f32[16] = Tanh(%x)
  %b: f32[1,16] = Add(%a, %y)
  %c: i32[1,16] = Cast(%b) {to="i32"}
  output %c
""",
        ["x 64 -1..2 x+0 a+0", "y 64 -1..4 y+0 b+0", "c 64 4..6 c+0"],
        None,
    ),
    (
        "broadcast",
        """\
  input %x: f32[1,16]
  input %y: f32[16,16]
  %b: f32[16,16] = Add(%x, %y)
  %c: f32[16,16] = Relu(%b)
  output %c
""",
        ["x 64 -1..0 x+0", "y 1024 -1..4 y+0 b+0 c+0"],
        None,
    ),
    (
        "scratch",
        """\
  input %x: f32[2,8]
  %a: f32[2,8] = Softmax(%x)
  %b: f32[2,8] = Softmax(%a)
  output %b
""",
        ["x 64 -1..4 x+0 a+0 b+0", "a#0 8 0..0 a#0+0", "b#0 8 2..2 b#0+0"],
        None,
    ),
    (
        "joined",
        """\
  input %x: f32[16]
  input %k: f32[16]
  %b: f32[16] = Relu(%k)
  %a: f32[16] = Tanh(%x)
  %y: f32[32] = Concat(%a, %b) {axis=0}
  %z: f32[32] = Neg(%y)
  output %z
""",
        ["x 64 -1..4 x+0 a+0", "k 64 -1..4 k+0 b+0", "y 128 4..8 y+0 z+0"],
        ["x 64 -1..2 x+0", "k 64 -1..0 k+0", "y 128 0..8 y+0 b+64 a+0 z+0"],
    ),
    (
        "read twice",
        """\
  input %x: f32[16]
  %a: f32[16] = Tanh(%x)
  %b: f32[16] = Relu(%x)
  %y: f32[32] = Concat(%a, %b) {axis=0}
  %z: f32[16] = Neg(%a)
  output %z, %y
""",
        ["x 64 -1..3 x+0 b+0", "a 64 0..7 a+0 z+0", "y 128 3..7 y+0"],
        None,
    ),
    (
        "both the same part",
        """\
  input %x: f32[16]
  %a: f32[16] = Tanh(%x)
  %y: f32[32] = Concat(%a, %a) {axis=0}
  output %y
""",
        ["x 64 -1..2 x+0 a+0", "y 128 2..4 y+0"],
        None,
    ),
    (
        "an input as a part",
        """\
  input %x: f32[16]
  %a: f32[16] = Tanh(%x)
  %y: f32[32] = Concat(%x, %a) {axis=0}
  output %y
""",
        ["x 64 -1..1 x+0", "a 64 0..1 a+0", "y 128 1..3 y+0"],
        None,
    ),
    (
        "an output as a part",
        """\
  input %x: f32[16]
  input %k: f32[16]
  %a: f32[16] = Tanh(%x)
  %b: f32[16] = Relu(%k)
  %y: f32[32] = Concat(%a, %b) {axis=0}
  output %y, %b
""",
        ["x 64 -1..4 x+0 a+0", "k 64 -1..6 k+0 b+0", "y 128 4..6 y+0"],
        None,
    ),
    (
        "a view as a part",
        """\
  input %x: f32[4,4]
  input %k: f32[16]
  %t: f32[4,4] = Tanh(%x)
  %a: f32[16] = Reshape(%t) {shape=[16]}
  %b: f32[16] = Relu(%k)
  %y: f32[32] = Concat(%b, %a) {axis=0}
  output %y
""",
        ["x 64 -1..6 x+0 t+0 a+0", "k 64 -1..6 k+0 b+0", "y 128 6..8 y+0"],
        None,
    ),
    (
        "a joined value as a part",
        """\
  input %x: f32[16]
  input %k: f32[16]
  %a: f32[16] = Tanh(%x)
  %b: f32[16] = Relu(%k)
  %y: f32[32] = Concat(%a, %b) {axis=0}
  %c: f32[16] = Exp(%x)
  %z: f32[48] = Concat(%y, %c) {axis=0}
  output %z
""",
        ["x 64 -1..7 x+0 c+0", "k 64 -1..3 k+0 b+0", "a 64 0..3 a+0", "y 128 3..7 y+0", "z 192 7..9 z+0"],
        ["x 64 -1..7 x+0 c+0", "k 64 -1..1 k+0", "y 128 0..7 y+0 a+0 b+64", "z 192 7..9 z+0"],
    ),
    (
        "parts not aligned",
        """\
  input %x: f32[8]
  input %k: f32[16]
  %a: f32[8] = Tanh(%x)
  %b: f32[16] = Relu(%k)
  %y: f32[24] = Concat(%a, %b) {axis=0}
  output %y
""",
        ["x 32 -1..4 x+0 a+0", "k 64 -1..4 k+0 b+0", "y 96 4..6 y+0"],
        None,
    ),
    (
        "parts of rows",
        """\
  input %x: f32[2,16]
  input %k: f32[2,16]
  %a: f32[2,16] = Tanh(%x)
  %b: f32[2,16] = Relu(%k)
  %y: f32[2,32] = Concat(%a, %b) {axis=1}
  output %y
""",
        ["x 128 -1..4 x+0 a+0", "k 128 -1..4 k+0 b+0", "y 256 4..6 y+0"],
        None,
    ),
    (
        "an updated parameter as a part",
        """\
  input %x: f32[16]
  input %g: f32[16]
  param %w: f32[16]
  const %lr: f32[] = [0.1]
  optimize %w: f32[16] = SGDUpdate(%w, %g, %lr)
  %a: f32[16] = Tanh(%x)
  %y: f32[32] = Concat(%a, %w) {axis=0}
  output %y
""",
        ["x 64 -1..4 x+0 a+0", "g 64 -1..0 g+0", "w#0 64 0..0 w#0+0", "y 128 4..6 y+0"],
        None,
    ),
    (
        "several outputs of one operator",
        """\
  input %x: f32[2,32]
  %p: f32[2,16], %q: f32[2,16] = Split(%x) {sizes=[16,16], axis=1}
  %y: f32[4,16] = Concat(%q, %p) {axis=0}
  output %y
""",
        ["x 256 -1..0 x+0", "p 128 0..2 p+0", "q 128 0..2 q+0", "y 256 2..4 y+0"],
        ["x 256 -1..0 x+0", "y 256 0..4 y+0 p+128 q+0"],
    ),
    (
        "a loop",
        """\
  input %x: f32[4,16]
  input %k: f32[4,16]
  %a: f32[4,16], %b: f32[4,16] = Loop(%x, %k) {body="%2 = Add(%0, %1); %3 = Mul(%0, %1)", yields=[2,3]}
  %c: f32[4,16], %d: f32[4,16] = Loop(%a) {body="%1 = Relu(%0); %2 = Neg(%0)", yields=[1,2]}
  output %b, %c, %d
""",
        [
            "x 256 -1..4 x+0 a+0 c+0",
            "k 256 -1..4 k+0 b+0",
            "a#0 256 0..0 a#0+0",
            "a#1 256 0..0 a#1+0",
            "d 256 2..4 d+0",
            "c#0 256 2..2 c#0+0",
            "c#1 256 2..2 c#1+0",
        ],
        None,
    ),
    (
        "a loop of which one is freed at once",
        """\
  input %x: f32[4,16]
  %c: f32[4,16], %d: f32[4,16] = Loop(%x) {body="%1 = Relu(%0); %2 = Neg(%0)", yields=[1,2]}
  %e: f32[4,16] = Exp(%d)
  output %e
""",
        ["x 256 -1..0 x+0 c+0", "d 256 0..4 d+0 e+0", "c#0 256 0..0 c#0+0", "c#1 256 0..0 c#1+0"],
        None,
    ),
    (
        "host",
        """\
  input %x: f32[16]
  %a: f32[16] = Tanh(%x)
  %h: host f32[16] = Offload(%a)
  %b: f32[16] = Relu(%a)
  %m: host f32[16] = CopyWait(%h, %a)
  output %b
""",
        ["x 64 -1..4 x+0 a+0", "h 64 2..4 h+0 m+0", "b 64 3..6 b+0"],
        None,
    ),
    (
        "a part of two",
        """\
  input %x: f32[16]
  input %k: f32[16]
  %a: f32[16] = Tanh(%x)
  %b: f32[16] = Relu(%k)
  %c: f32[16] = Exp(%x)
  %y: f32[32] = Concat(%a, %b) {axis=0}
  %z: f32[32] = Concat(%b, %c) {axis=0}
  output %y, %z
""",
        ["x 64 -1..7 x+0 c+0", "k 64 -1..7 k+0 b+0", "a 64 0..5 a+0", "y 128 5..9 y+0", "z 128 7..9 z+0"],
        None,
    ),
    (
        "three parts, the last first",
        """\
  input %x: f32[32]
  input %k: f32[16]
  %c: f32[16] = Tanh(%k)
  %b: f32[32] = Tanh(%x)
  %a: f32[16] = Relu(%k)
  %y: f32[64] = Concat(%a, %b, %c) {axis=0}
  %t: f32[64] = Tanh(%y)
  %z: f32[64] = Relu(%t)
  output %z
""",
        ["x 128 -1..5 x+0 b+0", "k 64 -1..5 k+0 a+0", "c 64 0..5 c+0", "y 256 5..11 y+0 t+0 z+0"],
        ["x 128 -1..1 x+0", "k 64 -1..3 k+0", "y 256 0..11 y+0 c+192 b+64 a+0 t+0 z+0"],
    ),
    (
        "an empty part",
        """\
  input %x: f32[16]
  %e: f32[0] = Fill() {dtype="f32", shape=[0]}
  %a: f32[16] = Tanh(%x)
  %y: f32[16] = Concat(%a, %e) {axis=0}
  output %y
""",
        ["x 64 -1..3 x+0 a+0", "e 0 0..3 e+0", "y 64 3..5 y+0"],
        ["x 64 -1..1 x+0", "y 64 0..5 y+0 e+64 a+0"],
    ),
    (
        "one part that dies, one that is read again",
        """\
  input %x: f32[16]
  input %k: f32[16]
  %a: f32[16] = Tanh(%x)
  %b: f32[16] = Relu(%k)
  %y: f32[32] = Concat(%a, %b) {axis=0}
  %z: f32[32] = Neg(%y)
  %s: f32[32] = Add(%y, %z)
  output %s
""",
        ["x 64 -1..4 x+0 a+0", "k 64 -1..4 k+0 b+0", "y 128 4..9 y+0 s+0", "z 128 6..7 z+0"],
        ["x 64 -1..0 x+0", "k 64 -1..2 k+0", "y 128 0..9 y+0 a+0 b+64 s+0", "z 128 6..7 z+0"],
    ),
    (
        "absent operands",
        """\
  input %p: f32[2,16]
  input %l: i64[2]
  input %d: f32[]
  param %s: f32[16]
  param %o: f32[16]
  %a: f32[2,16] = SoftmaxCrossEntropyGrad(%p, %l, _, %d)
  %y: f32[2,16], _, %i: f32[2,1] = LayerNormalization(%a, %s, %o)
  output %y, %i
""",
        [
            "p 128 -1..4 p+0 a+0 y+0",
            "l 16 -1..0 l+0",
            "d 4 -1..0 d+0",
            "a#0 16 0..0 a#0+0",
            "a#1 0 0..0 a#1+0",
            "a#2 8 0..0 a#2+0",
            "a#3 0 0..0 a#3+0",
            "i 8 2..4 i+0",
            "y#0 8 2..2 y#0+0",
            "y#1 128 2..2 y#1+0",
        ],
        None,
    ),
    (
        "an input that only the joined value reads",
        """\
  input %x: f32[16]
  input %k: f32[16]
  %a: f32[16] = Tanh(%x)
  %y: f32[32] = Concat(%k, %a) {axis=0}
  output %y
""",
        ["x 64 -1..2 x+0 a+0", "k 64 -1..2 k+0", "y 128 2..4 y+0"],
        None,
    ),
]
