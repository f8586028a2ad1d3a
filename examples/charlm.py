"""A language model of characters: a small GPT-2 learns the documentation of Python's standard library, and writes on.

It trains twice, plain and recomputed: the same bits, in less memory.  Perplexity is that of text that it never saw.
"""

import argparse
import collections
import datetime
import decimal
import difflib
import inspect
import json
import logging
import pathlib
import random
import statistics
import textwrap
import unittest

import numpy as np

import recompute as rc

SEQ, BATCH, STEPS = 32, 16, 600


def documentation() -> str:
    """What modules, their functions and classes, and methods say of themselves, each once."""
    modules = [argparse, collections, datetime, decimal, difflib, json, logging, pathlib, random, statistics, textwrap]
    found = {}
    for module in [*modules, unittest]:
        things = [
            thing for _, thing in sorted(vars(module).items()) if inspect.isclass(thing) or inspect.isroutine(thing)
        ]
        methods = [m for c in things if inspect.isclass(c) for _, m in sorted(vars(c).items()) if inspect.isroutine(m)]
        found.update((inspect.getdoc(thing), None) for thing in [module, *things, *methods])
    return "\n\n".join(filter(None, found))


text = documentation()
alphabet = sorted(set(text))
codes = {c: i for i, c in enumerate(alphabet)}
ids = np.array([codes[c] for c in text])
train, held = np.split(ids, [len(ids) * 9 // 10])
print(f"{len(text):,} characters, {len(alphabet)} different ones")


def batch(source: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    """Passages, and for each character the next one."""
    rows = source[starts[:, None] + np.arange(SEQ + 1)]
    return {"input_ids": rows[:, :-1], "label": rows[:, 1:]}


def perplexity(program: rc.Program) -> float:
    """exp of the mean loss over passages that were held out."""
    starts = np.arange(0, len(held) - SEQ - 1, SEQ)[: BATCH * 8]
    parts = [starts[i : i + BATCH] for i in range(0, len(starts) - BATCH + 1, BATCH)]
    losses = [program.evaluate(batch(held, part), [program.loss])[0].item() for part in parts]
    return float(np.exp(np.mean(losses)))


def trained(checkpoints: list[str] | None = None) -> tuple[rc.Program, int]:
    """A trained program, and the most bytes that a step held."""
    options = {"layers": 2, "hidden": 64, "heads": 4, "dropout": 0, "context": SEQ, "seq": SEQ, "vocab": len(alphabet)}
    program = rc.load(rc.models.build("gpt2-tiny", **options), batch=BATCH, seed=1)
    loss = rc.losses.cross_entropy(program["logits"], axis=-1)
    optimizer = rc.AdamW(rc.lr.LinearWarmup(5e-3, 40, 0.0, 5e-3))
    if checkpoints:
        optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(checkpoints)
    optimizer.minimize(loss)
    draws, executor = np.random.default_rng(0), rc.Executor()
    for _ in range(STEPS):
        executor.run(program, batch(train, draws.integers(0, len(train) - SEQ - 1, BATCH)), [loss])
    return program, executor.session(program, [loss.name]).measured_peak_bytes


def written(program: rc.Program, begin: str, length: int, temperature: float = 0.6) -> str:
    """The beginning, continued: each character is drawn by its probability after the last ones."""
    draws = np.random.default_rng(0)
    for _ in range(length):
        last = [codes[c] for c in begin[-SEQ:]]
        window = np.array([last + [0] * (SEQ - len(last))])  # what follows is not seen: attention is causal
        (logits,) = program.evaluate({"input_ids": window}, ["logits"])
        scores = logits[0, len(last) - 1] / temperature
        chances = np.exp(scores - scores.max())
        begin += alphabet[draws.choice(len(alphabet), p=chances / chances.sum())]
    return begin


plain, peak = trained()
print(f"plain      {peak / 2**20:6.2f} MiB, perplexity {perplexity(plain):.3f}")
recomputed, peak = trained(["h.0.out"])
print(f"recomputed {peak / 2**20:6.2f} MiB, perplexity {perplexity(recomputed):.3f}")
same = all(plain.data[p.name].tobytes() == recomputed.data[p.name].tobytes() for p in plain.parameters)
print("the same bits" if same else "different parameters")
print(written(recomputed, "Return ", 200))
