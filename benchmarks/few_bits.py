"""LoRA on a LLaMA-like file in 4 bits: what the operating system counts for the process, beside the packed weights.

    python benchmarks/few_bits.py [--small] [--folder DIR] [--peft PYTHON] [--losses STEPS]

The file, of 1.1 billion parameters with random contents, is written as ONNX Runtime's tools write theirs: MatMulNBits
and GatherBlockQuantized in blocks of 32 with zero points, GroupQueryAttention, SkipSimplifiedLayerNormalization.  A
process of its own then loads it, adds adapters of rank 8 to queries and values, and takes two steps of Adam on 512
tokens, with the output of each layer as a checkpoint.  Target: VmHWM at most the packed weights and 600 MB, and the
predicted peak is the measured one; exit code 1 where it is missed.  `--small`: 2 layers of 256.  Linux only.

`--peft PYTHON`: instead, the same network in PyTorch with PEFT's LoRA, in float32 and bfloat16, each layer a
checkpoint, by an interpreter that has torch, transformers and peft.

`--losses STEPS`: instead, adapters of rank 8 on every product of a small file, and on those of the same numbers in
float32 (`rc.dequantize`), with the same seed and text: losses of both, every 20th step.  The text is a chain in which
each word has one likely successor and three others.  Sums in another order part two runs of training by and by: the
last column has the floats again, with one number of an adapter moved by its last bit.  Exit code 1 unless means of 20
losses differ by at most 3 % of the float's, and the last one is below half of the first.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

SIZES = {"layers": 22, "hidden": 2048, "inner": 5632, "heads": 32, "groups": 4, "vocab": 32000, "seq": 512}
SMALL = {"layers": 2, "hidden": 256, "inner": 704, "heads": 8, "groups": 2, "vocab": 2000, "seq": 128}
LEARNED = {"layers": 4, "hidden": 128, "inner": 384, "heads": 4, "groups": 2, "vocab": 512, "seq": 64}
BLOCK, DOMAIN = 32, "com.microsoft"
LIMIT = 600_000_000
_PEFT = """
import json, re, resource, sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
s = json.loads(sys.argv[2])
torch.set_default_dtype(getattr(torch, sys.argv[1]))
torch.manual_seed(0)
network = LlamaForCausalLM(LlamaConfig(vocab_size=s["vocab"], hidden_size=s["hidden"], num_hidden_layers=s["layers"],
    intermediate_size=s["inner"], num_attention_heads=s["heads"], num_key_value_heads=s["groups"], use_cache=False,
    max_position_embeddings=s["seq"], tie_word_embeddings=False))
network = get_peft_model(network, LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
network.enable_input_require_grads()
network.activation_checkpointing_enable()
network.train()
trained = [p for p in network.parameters() if p.requires_grad]
optimizer = torch.optim.Adam(trained, 1e-2)
ids, seconds = torch.randint(0, 2000, (1, s["seq"])), []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF)
    network(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
high = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
print(json.dumps([sum(p.numel() for p in trained), int(high[1]) << 10, seconds[-1]]))
"""


class Writer:
    """Writes a model whose contents go to a file beside it, tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path, self.nodes = path, list[onnx.NodeProto]()
        self.tensors: list[onnx.TensorProto] = []
        self.data = path.with_suffix(".data").open("wb")
        self.random = np.random.default_rng(0)
        self.parameters = self.packed = 0

    def tensor(self, name: str, array: np.ndarray) -> str:
        """An initializer."""
        t = onnx.TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
        t.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self.path.with_suffix(".data").name), ("offset", self.data.tell())):
            t.external_data.add(key=key, value=str(value))
        t.external_data.add(key="length", value=str(array.nbytes))
        self.data.write(array.tobytes())
        self.data.write(bytes(-self.data.tell() % 4096))
        self.tensors.append(t)
        self.packed += array.nbytes
        return name

    def weight(self, name: str, rows: int, columns: int, *, table: bool = False) -> list[str]:
        """Codes, scales and zero points of a weight of about 0.02."""
        blocks = columns // BLOCK
        codes = np.frombuffer(self.random.bytes(rows * columns // 2), np.uint8)
        scales = self.random.uniform(0.002, 0.006, (rows, blocks)).astype(np.float32)
        zeros = np.frombuffer(self.random.bytes(rows * blocks // 2), np.uint8)
        self.parameters += rows * columns
        shape = (rows, columns // 2) if table else (rows, blocks, BLOCK // 2)
        return [
            self.tensor(f"{name}.weight_Q4", codes.reshape(shape)),
            self.tensor(f"{name}.weight_scales", scales),
            self.tensor(f"{name}.weight_zero_points", (0x77 + (zeros & 0x11)).reshape(rows, -1)),
        ]

    def node(self, op_type: str, ins: Sequence[str], *outs: str, domain: str = DOMAIN, **given: Any) -> str:
        """A node; its first output."""
        self.nodes.append(helper.make_node(op_type, ins, outs, name=outs[0], domain=domain, **given))
        return outs[0]

    def linear(self, x: str, name: str, sizes: tuple[int, int]) -> str:
        """x Wᵀ."""
        k, n = sizes
        ins = [x, *self.weight(name, n, k)]
        return self.node("MatMulNBits", ins, f"{name}.out", K=k, N=n, bits=4, block_size=BLOCK, accuracy_level=1)

    def finish(self, s: dict[str, int]) -> None:
        """Writes the model."""
        ids = helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", s["seq"]])
        logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", s["seq"], s["vocab"]])
        graph = helper.make_graph(self.nodes, "llama", [ids], [logits], self.tensors)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
        self.data.close()
        self.path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def write(path: Path, s: dict[str, int]) -> Writer:
    """The file."""
    w, d, size = Writer(path), s["hidden"], s["hidden"] // s["heads"]
    keys = s["groups"] * size
    angles = np.outer(np.arange(s["seq"]), 1e4 ** (-np.arange(size // 2) / (size // 2)))
    caches = [w.tensor(n, f(angles).astype(np.float32)) for n, f in (("cos_cache", np.cos), ("sin_cache", np.sin))]
    ends = [w.tensor("seqlens_k", np.array([s["seq"] - 1], np.int32)), w.tensor("total", np.array(s["seq"], np.int32))]
    table = w.weight("embed_tokens", s["vocab"], d, table=True)
    x = w.node("GatherBlockQuantized", [table[0], "input_ids", *table[1:]], "embed.out", block_size=BLOCK, bits=4)
    y = w.node("SimplifiedLayerNormalization", [x, _norm(w, "norm.0", d)], "norm.0.out", domain="", epsilon=1e-5)
    for i in range(s["layers"]):
        at = f"layers.{i}"
        parts = [w.linear(y, f"{at}.{p}_proj", (d, n)) for p, n in (("q", d), ("k", keys), ("v", keys))]
        y = w.node("GroupQueryAttention", [*parts, "", "", *ends, *caches], f"{at}.attention", f"{at}.k", f"{at}.v",
                   num_heads=s["heads"], kv_num_heads=s["groups"], do_rotary=1)  # fmt: skip
        y = w.linear(y, f"{at}.o_proj", (d, d))
        y, x = _skip(w, x, y, f"{at}.post_norm", f"{at}.middle", d)
        gate, up = (w.linear(y, f"{at}.{p}_proj", (d, s["inner"])) for p in ("gate", "up"))
        half = w.node("Sigmoid", [gate], f"{at}.sigmoid", domain="")
        y = w.node("Mul", [gate, half], f"{at}.silu", domain="")
        y = w.linear(w.node("Mul", [y, up], f"{at}.product", domain=""), f"{at}.down_proj", (s["inner"], d))
        y, x = _skip(w, x, y, f"norm.{i + 1}", f"block.{i}", d)
    w.node("Identity", [w.linear(y, "lm_head", (d, s["vocab"]))], "logits", domain="")
    w.finish(s)
    return w


def _norm(w: Writer, name: str, d: int) -> str:
    w.parameters += d
    return w.tensor(f"{name}.weight", np.ones(d, np.float32))


def _skip(w: Writer, x: str, y: str, norm: str, total: str, d: int) -> tuple[str, str]:
    """The norm of x + y, and x + y."""
    w.node("SkipSimplifiedLayerNormalization", [x, y, _norm(w, norm, d)], f"{norm}.out", "", "", total, epsilon=1e-5)
    return f"{norm}.out", total


def train(path: str) -> dict[str, Any]:
    """Two steps; what they took."""
    import recompute as rc

    program = rc.lora(rc.load(path, batch=1), ["*q_proj*", "*v_proj*"], r=8)
    loss = rc.losses.cross_entropy(program["logits"])
    rc.fuse_attention(program)
    rc.RecomputeOptimizer(rc.Adam(1e-2)).set_checkpoints(["block.*"]).minimize(loss)
    ids = np.random.default_rng(1).integers(0, 2000, program["input_ids"].shape)
    feed = {v.name: ids if v.name == "input_ids" else np.roll(ids, -1) for v in program.inputs}
    executor, losses, ends = rc.Executor(), [], []
    for _ in range(2):
        losses.append(float(executor.run(program, feed, [loss])[0]))
        used = resource.getrusage(resource.RUSAGE_SELF)
        ends.append(used.ru_utime + used.ru_stime)
    session = executor.session(program, [loss])
    high = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert high is not None
    return {
        "losses": losses,
        "trained": sum(v.size for v in program.block.parameters),
        "predicted": session.report.peak,
        "measured": session.measured_peak_bytes,
        "high": int(high[1]) << 10,
        "seconds": ends[-1],
        "step": ends[1] - ends[0],
    }


def chain(words: int, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Rows of a text in which each word has four successors: one with probability 0.7, the others with 0.1 each."""
    successors = np.random.default_rng(0).integers(0, words, (words, 4))
    g = np.random.default_rng(seed)
    text = np.empty(shape, np.int64)
    text[:, 0] = g.integers(0, words, shape[0])
    for i in range(1, shape[1]):
        text[:, i] = successors[text[:, i - 1], g.choice(4, shape[0], p=(0.7, 0.1, 0.1, 0.1))]
    return text


def learn(model: str | onnx.ModelProto, steps: int, *, moved: bool = False, batch: int = 8) -> tuple[np.ndarray, int]:
    """Losses of AdamW's steps on adapters of rank 8 beside every product; how many numbers train."""
    import recompute as rc

    program = rc.lora(rc.load(model, batch=batch), ["*_proj*", "lm_head*"], r=8, seed=1)
    loss = rc.losses.cross_entropy(program["logits"])
    rc.AdamW(5e-3).minimize(loss)
    if moved:
        name = "layers.0.q_proj.lora_A.weight"
        first = program.data[name].copy()
        first[0, 0] = np.nextafter(first[0, 0], np.float32(1))
        program.data[name] = first
    executor, losses = rc.Executor(), []
    for step in range(steps):
        text = chain(LEARNED["vocab"], (batch, LEARNED["seq"] + 1), seed=step + 1)
        feed = {v.name: text[:, :-1] if v.name == "input_ids" else text[:, 1:] for v in program.inputs}
        losses.append(float(executor.run(program, feed, [loss])[0]))
    return np.array(losses), sum(v.size for v in program.block.parameters)


def compare(path: Path, steps: int) -> int:
    """Prints losses beside packed weights and beside the same numbers in floats; the exit code."""
    import recompute as rc

    w = write(path, LEARNED)
    floats = rc.dequantize(str(path))
    (mine, trained), (theirs, same), (again, _) = (
        learn(str(path), steps), learn(floats, steps), learn(floats, steps, moved=True),
    )  # fmt: skip
    print(f"{w.parameters:,} parameters, {trained:,} numbers train beside packed weights, {same:,} beside floats")
    print("step   4 bits   floats  floats, one last bit moved")
    for i in sorted({*range(0, steps, 20), steps - 1}):
        print(f"{i + 1:4}  {mine[i]:.5f}  {theirs[i]:.5f}  {again[i]:.5f}")
    means = [np.array([x[i : i + 20].mean() for i in range(0, steps, 20)]) for x in (mine, theirs, again)]
    off, noise = (float((abs(m - means[1]) / means[1]).max()) for m in (means[0], means[2]))
    print(f"largest difference of means of 20 losses: {off:.1%} of the floats', {noise:.1%} by the last bit alone")
    return int(off > 0.03 or trained != same or not means[0][-1] < mine[0] / 2)


def main() -> int:
    """The figures, and the exit code."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--small", action="store_true", help="2 layers of 256")
    p.add_argument("--folder", type=Path, help="where the file is written, and stays (default: a temporary folder)")
    p.add_argument("--peft", metavar="PYTHON", help="PyTorch with PEFT, by this interpreter")
    p.add_argument("--losses", type=int, metavar="STEPS", help="losses beside those of the same numbers in floats")
    p.add_argument("--train", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.losses:
        with tempfile.TemporaryDirectory() as temporary:
            return compare((args.folder or Path(temporary)) / "llama.onnx", args.losses)
    if args.peft:
        for kind in ("float32", "bfloat16"):
            command = [args.peft, "-c", _PEFT, kind, json.dumps(SMALL if args.small else SIZES)]
            trained, high, step = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            print(
                f"PEFT, {kind}: {trained:,} numbers train, VmHWM {high:,} bytes, processor seconds of a step {step:.1f}"
            )
        return 0
    if args.train:
        print(json.dumps(train(args.train)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        path = (args.folder or Path(temporary)) / "llama.onnx"
        w = write(path, SMALL if args.small else SIZES)
        out = subprocess.run([sys.executable, __file__, "--train", str(path)], check=True, capture_output=True).stdout
    found = json.loads(out.splitlines()[-1])
    beyond = found["high"] - w.packed
    print(f"{w.parameters:,} parameters, {w.packed:,} bytes packed ({4 * w.parameters:,} in float32)")
    print(f"adapters: {found['trained']:,} numbers; losses {', '.join(f'{x:.4f}' for x in found['losses'])}")
    print(f"peak of the step: {found['predicted']:,} bytes predicted, {found['measured']:,} measured")
    print(f"VmHWM: {found['high']:,} bytes, {beyond:,} beyond the packed weights (target: {LIMIT:,})")
    print(f"processor seconds: {found['seconds']:.1f} with loading and compiling, {found['step']:.1f} the second step")
    return int(beyond > LIMIT or found["predicted"] != found["measured"] or found["losses"][1] >= found["losses"][0])


if __name__ == "__main__":
    sys.exit(main())
