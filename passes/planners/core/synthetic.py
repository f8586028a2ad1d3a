"""Synthetic problems, for tests, benchmarks and the pictures of the documentation."""

from __future__ import annotations

from .problem import Node, RematerialisationProblem


class _Maker:
    """Collects nodes and values; the backward pass of every operator is added last to first by the caller."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.sizes: list[int] = []
        self.values: list[str] = []

    def value(self, name: str, size: int) -> int:
        self.sizes.append(size)
        self.values.append(name)
        return len(self.sizes) - 1

    def node(
        self, name: str, cost: float, reads: tuple[int, ...], size: int, backward: bool = False, inplace: int = -1
    ) -> int:
        """A node with one output; `inplace`: a value whose place that may take."""
        out = self.value(name, size)
        over = (inplace,) if inplace >= 0 else ()
        self.nodes.append(Node(name, cost, reads, (out,), 0, backward, not backward, over))
        return out

    def problem(self, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...] = ()) -> RematerialisationProblem:
        return RematerialisationProblem(
            tuple(self.nodes), tuple(self.sizes), tuple(self.values), inputs, outputs, name=name
        )


def unit_chain(n: int, size: int = 64, backward: float = 1.0) -> RematerialisationProblem:
    """n nodes of cost 1, each reading the one before; the backward of each reads its input and the gradient.

    The gradient takes the place of the one it comes from, so that the plain peak is n values and a gradient.
    """
    m = _Maker()
    x = m.value("x", 0)
    made = [x]
    for k in range(n):
        made.append(m.node(f"f{k}", 1.0, (made[-1],), size))
    gradient = m.node("loss", 0.0, (made[-1],), size, backward=True)
    for k in range(n - 1, -1, -1):
        gradient = m.node(f"b{k}", backward, (made[k], gradient), size, backward=True, inplace=gradient)
    return m.problem(f"unit_chain_{n}", (x,), (gradient,))


def residual_chain(n: int, size: int = 64, backward: float = 2.0) -> RematerialisationProblem:
    """n blocks y = x + g(f(x)) of forward cost 1, whose backward costs `backward`; three values each are kept."""
    m = _Maker()
    x = m.value("x", size)
    made: list[tuple[int, int, int]] = []
    last = x
    for k in range(n):
        f = m.node(f"f{k}", 0.5, (last,), size)
        g = m.node(f"relu{k}", 0.0, (f,), size)
        made.append((last, f, g))
        last = m.node(f"y{k}", 0.5, (g, last), size)
    gradient = m.node("loss", 0.0, (last,), size, backward=True)
    for k in range(n - 1, -1, -1):
        x_k, f, g = made[k]
        inner = m.node(f"dg{k}", backward / 2, (g, gradient), size, backward=True)
        inner = m.node(f"drelu{k}", 0.0, (f, inner), size, backward=True, inplace=inner)
        gradient = m.node(f"dx{k}", backward / 2, (x_k, inner, gradient), size, backward=True, inplace=gradient)
    return m.problem(f"residual_chain_{n}", (x,), (gradient,))


def recurrent(
    n: int, hidden: int = 64, inside: int = 0, backward: float = 2.0, name: str = "recurrent"
) -> RematerialisationProblem:
    """A recurrent network unrolled over n steps: a step reads its input and the state of `hidden` bytes.

    `inside`: further bytes that a step's backward reads (an LSTM's gates); with 0 the new state is all there is.
    A step costs 1, its backward `backward`.
    """
    m = _Maker()
    inputs = tuple(m.value(f"x{k}", 0) for k in range(n))
    state = start = m.value("h", hidden)
    saved: list[tuple[int, ...]] = []
    for k in range(n):
        gates = (m.node(f"gates{k}", 1.0, (inputs[k], state), inside),) if inside else ()
        new = m.node(f"h{k}", 0.0 if inside else 1.0, (*gates, state) if inside else (inputs[k], state), hidden)
        saved.append((state, *gates, new))
        state = new
    gradient = m.node("loss", 0.0, (state,), hidden, backward=True)
    for k in range(n - 1, -1, -1):
        gradient = m.node(f"dh{k}", backward, (inputs[k], *saved[k], gradient), hidden, backward=True, inplace=gradient)
    return m.problem(f"{name}_{n}", (*inputs, start), (gradient,))


def lstm(n: int, units: int = 64) -> RematerialisationProblem:
    """An LSTM over n steps as `recurrent` has it: (h, c) of 2 · units, gates and tanh(c) of 5 · units, floats."""
    return recurrent(n, hidden=8 * units, inside=20 * units, name="lstm")
