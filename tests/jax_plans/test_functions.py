"""Functions of many kinds: their gradients, with plans that save most and least, are those of JAX alone."""

from functools import partial, reduce

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX (extra 'jax')")
pytest.importorskip("ortools", reason="needs OR-Tools (extra 'plan')")

import jax.numpy as jnp  # noqa: E402
from jax.ad_checkpoint import checkpoint_name  # noqa: E402

import recompute.jax as rj  # noqa: E402

pytestmark = pytest.mark.slow


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32) * 0.2)


W, X = [array(16, 16) * s for s in (1, 2)], array(32, 16)


def base(x, w):
    return x + jnp.tanh(x @ w)


def loss(ws, x):
    return (reduce(base, ws, x) ** 2).mean()


def with_none(p, x):
    return loss(p["w"], x), {"x": x, "none": None}


def nested_scans(ws, x):
    def outer(c, _):
        return jax.lax.scan(lambda c, w: (base(c, w), c.sum()), c, jnp.stack(ws))

    x, sums = jax.lax.scan(outer, x, None, length=2)
    return (x * x).mean() + sums.mean()


def carries(ws, x):
    def step(c, w):
        a, b, i = c
        a = base(a, w)
        return (a, b + jnp.sin(a).sum(0), i + 1), (a.mean(), i)

    (a, b, _), (ys, _) = jax.lax.scan(step, (x, jnp.zeros(16), 0), jnp.stack(ws), reverse=True, unroll=2)
    return (a * a).mean() + b.mean() + ys.sum()


def branches(ws, x, i):
    turns, _ = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 1.1, c[1] + 1), (x.mean(), 0))
    x = jax.lax.switch(i, [lambda y: jnp.sin(y @ ws[0]), lambda y: y @ ws[1], lambda y: y], x)
    return loss(ws, x * jax.lax.stop_gradient(turns))


def inner_policies(ws, x):
    saved = jax.checkpoint_policies.save_only_these_names("mine")
    inner = jax.checkpoint(lambda x: reduce(lambda x, w: checkpoint_name(base(x, w), "mine"), ws, x), policy=saved)
    return loss(ws, checkpoint_name(inner(x), "mine"))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def waves(x, n):
    return jnp.sin(x) * n


waves.defvjp(lambda x, n: (jnp.sin(x) * n, x), lambda n, x, g: (g * n * jnp.cos(x),))


def own_derivatives(ws, x):
    x, _ = jax.lax.scan(lambda c, w: (waves(base(c, w), 2), None), waves(x, 3), jnp.stack(ws))
    return loss(ws, x)


def halves(ws, x):
    return loss([w.astype(jnp.bfloat16) for w in ws], x.astype(jnp.bfloat16)).astype(jnp.float32)


def spectrum(x, w):
    return x + jnp.tanh(jnp.abs(jnp.fft.ifft(jnp.fft.fft(x) * jnp.sin(x @ w) * 1j)))


def complex_values(ws, x):
    return (reduce(spectrum, ws, x) ** 2).mean()


def complex_scan(ws, x):
    def step(c, w):
        c = jnp.sin(c * 1j) + c @ w
        return c / (1 + jnp.abs(c)), jnp.abs(c).sum()

    x, sums = jax.lax.scan(step, x + 0j, jnp.stack(ws))
    return jnp.abs(x).mean() + sums.mean()


def linear_algebra(ws, x):
    eye = 3 * jnp.eye(16)
    return jax.vmap(lambda r: loss(ws, r[None]))(x).mean() + jnp.linalg.slogdet(ws[0] + eye)[1]


def calls(ws, x, s):
    x = jax.jit(lambda y: y * 2, donate_argnums=0)(x * 1)
    return loss(ws, jax.jit(lambda y, n: y * n, static_argnums=1)(x, 3)) * s


def numbers(ws, x):
    shaped = jax.jit(lambda a: jnp.reshape(a, (1,)))(2.0)
    return loss(ws, x * checkpoint_name(jnp.float32(2.0), "two") * jax.lax.stop_gradient(3.0)) * shaped[0]


def view(w):
    return w.reshape(())


CASES = [
    (loss, (W, X), {"argnums": (-1, 0)}),
    (numbers, (W, X), {}),
    (view, (array(1),), {}),
    (with_none, ({"w": W, "b": None}, X), {"has_aux": True}),
    (nested_scans, (W, X), {}),
    (carries, (W, X), {}),
    (branches, (W, X, 1), {}),
    (inner_policies, (W, X), {}),
    (own_derivatives, (W, X), {}),
    (halves, (W, X), {}),
    (complex_values, (W, X), {}),
    (complex_scan, (W, X), {}),
    (linear_algebra, (W, X), {}),
    (calls, (W, X, 2.0), {}),
]


@pytest.mark.parametrize(("f", "args", "options"), CASES, ids=[c[0].__name__ for c in CASES])
def test_gradients_are_those_of_jax(f, args, options):
    plans = rj.Plans(f, args, **options)
    given = {"argnums": 0, **options}
    wanted = jax.value_and_grad(f, **given)(*args)
    for rung in {1, len(plans.candidates)}:
        found = jax.jit(jax.value_and_grad(plans.result(rung, 0).apply(f), **given))(*args)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
            assert float(abs(a - b).max()) <= (0.02 if f is halves else 1e-5) * float(abs(a).max())
