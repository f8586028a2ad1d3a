"""JAX functions within budgets (`recompute.jax.policy`), beside what users of `jax.checkpoint` write by hand.

A transformer of 12 layers with dropout, unrolled and by `jax.lax.scan`, and a small residual CNN.  Peaks are XLA's
(arguments, outputs and temporaries of the compiled gradient), FLOPs XLA's (which counts the body of a scan once);
"model ms" are seconds by the rates of an H200, of the gradient's jaxpr; s/step are processor seconds of one step, the
least of three that alternate with the others. `--layers 32 --plan-only` times planning alone.

    python benchmarks/jax_policy.py > benchmarks/results/jax_policy.txt
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from recompute.devices import device
from recompute.errors import BudgetError
from recompute.jax import Plans
from recompute.jax.costs import seconds

DEFAULT = ({},)
SCHEDULERS = ({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}, {})
BARRIERS = tuple({"xla_disable_hlo_passes": "cse_barrier_expander", **s} for s in SCHEDULERS)
SHARES = ("85%", "65%", "50%")
WIDTH, HEADS, BATCH, LENGTH, WORDS = 128, 4, 4, 128, 512


def norm(x, scale):
    """Layer normalisation without a shift."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def layer(p, x, key):
    """A pre-norm transformer layer, causal, with dropout behind the attention."""
    h = norm(x, p["norm1"])
    q, k, v = ((h @ p[n]).reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3) for n in "qkv")
    causal = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH))) > 0, 0.0, -1e9)
    a = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / q.shape[-1] ** 0.5 + causal, -1)
    o = (a @ v).transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH) @ p["o"]
    x = x + jnp.where(jax.random.bernoulli(key, 0.9, o.shape), o / 0.9, 0)
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def head(p, x, words):
    """Mean cross-entropy of the words themselves, with the embedding as the last layer."""
    scores = jax.nn.log_softmax(x @ p["embedding"].T)
    return -jnp.take_along_axis(scores, words[..., None], -1).mean()


def unrolled(layer, p, words, key):
    """The loss, layer after layer in Python."""
    x = p["embedding"][words]
    for i in range(len(p["layers"])):
        x = layer(p["layers"][i], x, jax.random.fold_in(key, i))
    return head(p, x, words)


def scanned(layer, p, words, key):
    """The loss, by `jax.lax.scan` over stacked parameters."""
    count = len(p["layers"]["q"])
    step = lambda x, pi: (layer(pi[0], x, jax.random.fold_in(key, pi[1])), None)  # noqa: E731
    x, _ = jax.lax.scan(step, p["embedding"][words], (p["layers"], jnp.arange(count)))
    return head(p, x, words)


def transformer(layers, *, stacked):
    """Parameters, words and a key."""
    g = np.random.default_rng(0)
    new = lambda *shape: jnp.asarray(g.standard_normal(shape, dtype=np.float32) * 0.05)  # noqa: E731
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    each = [
        {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH), **{n: new(*s) for n, s in shapes.items()}}
        for _ in range(layers)
    ]
    parameters = {
        "embedding": new(WORDS, WIDTH),
        "layers": jax.tree.map(lambda *a: jnp.stack(a), *each) if stacked else each,
    }
    return parameters, jnp.asarray(g.integers(0, WORDS, (BATCH, LENGTH))), jax.random.key(0)


def convolved(x, w):
    """A 3 x 3 convolution, normalised by channel over the batch."""
    x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = x - x.mean((0, 1, 2))
    return x * jax.lax.rsqrt((x * x).mean((0, 1, 2)) + 1e-5)


def block(p, x, key):
    """A residual block of two convolutions."""
    return jax.nn.relu(x + convolved(jax.nn.relu(convolved(x, p[0])), p[1]))


def cnn(layer, p, images, labels):
    """The loss of eight residual blocks and a linear layer."""
    x = convolved(images, p["first"])
    for pair in p["blocks"]:
        x = layer(pair, x, None)
    return -jnp.take_along_axis(jax.nn.log_softmax(x.mean((1, 2)) @ p["last"]), labels[:, None], 1).mean()


def images(blocks=8, channels=16):
    """Parameters, images and labels."""
    g = np.random.default_rng(0)
    new = lambda *shape: jnp.asarray(g.standard_normal(shape, dtype=np.float32) * 0.05)  # noqa: E731
    weights = [(new(3, 3, channels, channels), new(3, 3, channels, channels)) for _ in range(blocks)]
    p = {"first": new(3, 3, 3, channels), "blocks": weights, "last": new(channels, 10)}
    return p, new(32, 32, 32, 3), jnp.asarray(g.integers(0, 10, 32))


def bytes_of(made):
    """Peak of a compiled step: arguments, outputs and temporaries, less what is aliased."""
    m = made.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


def compiled(f, args, options):
    """The compiled gradient, its peak in bytes, GFLOP by XLA, and milliseconds by the cost model of an H200.

    Of several options those that give the lowest peak.
    """
    lowered = jax.jit(jax.value_and_grad(f)).lower(*args)
    quick = {"xla_backend_optimization_level": 0}  # machine code comes after the bytes are known
    peak = lambda o: bytes_of(lowered.compile(compiler_options={**o, **quick}))  # noqa: E731
    made = lowered.compile(compiler_options=min(options, key=peak) if options[1:] else options[0])
    modelled = sum(seconds(e, device("h200")) for e in jax.make_jaxpr(jax.value_and_grad(f))(*args).eqns)
    return made, bytes_of(made), made.cost_analysis()["flops"] / 1e9, 1e3 * modelled


def difference(a, b):
    """The largest difference of a gradient, as a share of its largest magnitude."""
    return max(float(abs(x - y).max() / abs(x).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def by_hand(network, part):
    """What users write: name → function and compiler options, of which the best count: those that our plans try."""
    plain = functools.partial(network, part)
    policies = jax.checkpoint_policies
    saved = {
        "": None,
        ", dots": policies.dots_saveable,
        ", dots without batch": policies.dots_with_no_batch_dims_saveable,
        ", everything": policies.everything_saveable,
    }
    options = SCHEDULERS if network is scanned else BARRIERS
    layers = {n: functools.partial(network, jax.checkpoint(part, policy=p)) for n, p in saved.items()}
    found = {"plain": (plain, SCHEDULERS), "all dots": (jax.checkpoint(plain, policy=policies.dots_saveable), options)}
    found |= {f"per layer{n}": (f, options) for n, f in layers.items()}
    return found | {"per layer, XLA's default options": (layers[""], DEFAULT)}


def ours(plain, args):
    """Our plans within three budgets and at the least peak: name → function and compiler options."""
    start = time.process_time()
    plans = Plans(plain, args)
    planned = time.process_time() - start
    found = {}
    for share in (*SHARES, "least"):
        try:
            least = min(plans.trial(k).peak for k in {*plans.trials, len(plans.candidates)}) if share == "least" else 0
            plan = plans.within(least or share)
            found[f"ours, {share} = {plan.budget / 1e6:.1f} MB"] = plan.apply(plain), (plan.compiler_options,)
            assert plan.peak <= plan.budget
        except BudgetError as error:
            print(f"{share}: {error}")
    count, spent = len(plans.candidates) + len(plans.usual), time.process_time() - start
    print(
        f"planned in {planned:.1f} processor seconds; {len(plans.trials)} of {count + 1} candidates compiled for all "
        f"budgets in {spent - planned:.0f}",
        flush=True,
    )
    return found


def rows(title, network, part, args):
    """One network: the plain function, the usual policies, then ours."""
    print(f"\n{title}")
    steps = by_hand(network, part)
    steps |= ours(steps["plain"][0], args)
    made = {n: compiled(f, args, options) for n, (f, options) in steps.items()}
    taken = {n: [] for n in made}
    results = {}
    for _ in range(3):
        for n, (step, *_rest) in made.items():
            start = time.process_time()
            results[n] = jax.block_until_ready(step(*args))[1]
            taken[n].append(time.process_time() - start)
    print(f"{'':34}{'peak MB':>9}{'GFLOP':>8}{'model ms':>10}{'s/step':>8}{'gradient off by':>17}")
    for n, (_, peak, flops, modelled) in made.items():
        off = difference(results["plain"], results[n])
        print(f"{n:34}{peak / 1e6:9.1f}{flops:8.1f}{modelled:10.3f}{min(taken[n]):8.2f}{off:17.1e}", flush=True)


def main():
    """All networks, or planning alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--only", choices=["unrolled", "scan", "cnn"])
    options = parser.parse_args()
    sizes = f"batch {BATCH} x {LENGTH}, width {WIDTH}"
    print(f"jax {jax.__version__}, {jax.default_backend()}; {options.layers} layers, float32, {sizes}")
    if options.plan_only:
        args = transformer(options.layers, stacked=False)
        start = time.process_time()
        plans = Plans(functools.partial(unrolled, layer), args)
        nodes = len(plans.candidates[0].derived.problem)
        print(f"{nodes:,} nodes planned in {time.process_time() - start:.1f} processor seconds")
        return
    if options.only in (None, "unrolled"):
        rows("transformer, unrolled", unrolled, layer, transformer(options.layers, stacked=False))
    if options.only in (None, "scan"):
        rows("transformer, scan", scanned, layer, transformer(options.layers, stacked=True))
    if options.only in (None, "cnn"):
        rows("CNN, 8 residual blocks", cnn, block, images())


if __name__ == "__main__":
    main()
