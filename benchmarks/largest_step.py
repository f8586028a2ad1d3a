"""One step of the largest LLaMA-like network whose process fits, beside the largest that PyTorch trains.

    python benchmarks/largest_step.py [--limit 20GiB] [--seq 1024] [--torch-python PATH] [--kinds fp32,bf16-pure]

Layers of width 3,072, batch 1, AdamW, each layer a checkpoint, on this CPU.  Ours: the most layers whose step's peak
fits beside 256 MiB of process; the file is written with random weights and a step is run, in processes of their own.
PyTorch (Hugging Face's network with gradient checkpointing and set_to_none): two steps each with 1 and 3 layers;
VmHWM beyond importing grows by so much a layer, and the most layers that fit are told from that, without running them.
Linux only; the disk must hold the float32 weights.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from low_memory import WIDE
from memory_pytorch import torch_environment
from onnx import numpy_helper

import recompute as rc
from recompute.budgets import as_bytes
from recompute.support.memory import resident_bytes

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "bf16-pure": ("bf16-pure", {}),
    "bf16-pure-8bit": ("bf16-pure", {"moments": "8-bit"}),
}
FLOOR = 256 << 20
_PART = 1 << 24
_TORCH = """
import re, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
layers, dtype, seq = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])
high = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
before = high()
torch.set_default_dtype(dtype)
network = LlamaForCausalLM(LlamaConfig(vocab_size=32000, hidden_size=3072, intermediate_size=8192, use_cache=False,
    num_hidden_layers=layers, num_attention_heads=24, num_key_value_heads=24, max_position_embeddings=seq))
network.train()
network.activation_checkpointing_enable()
optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
ids = torch.randint(0, 32000, (1, seq))
for _ in range(2):
    network(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(sum(p.numel() for p in network.parameters()), high() - before)
"""


def compiled(model: Any, kind: str) -> tuple[Any, str, int]:
    """The step of a network, its loss, and how many parameters there are."""
    program = rc.load(model)
    precision, more = KINDS[kind]
    loss = rc.losses.cross_entropy(program["logits"]).name
    step = rc.compile_step(
        program, loss, rc.AdamW(1e-4, **more), checkpoints="layers.*.out", place="cpu", precision=precision
    )
    return step, loss, sum(p.value.size for p in program.parameters)


def network(layers: int, seq: int) -> onnx.ModelProto:
    """The file without contents: each parameter is a ConstantOfShape."""
    return rc.models.build("llama-tiny", batch=1, weights=False, layers=layers, seq=seq, **WIDE)


def write(model: onnx.ModelProto, folder: Path) -> Path:
    """A file without contents, with random ones beside it, of which 64 MiB are in memory at a time."""
    held = {t.name: t for t in model.graph.initializer}
    draw = np.random.default_rng(0).standard_normal(_PART, dtype=np.float32) * np.float32(0.02)
    nodes = []
    with open(folder / "weights.bin", "wb") as file:
        for node in model.graph.node:
            if node.op_type != "ConstantOfShape":
                nodes.append(node)
                continue
            dims = numpy_helper.to_array(held[node.input[0]]).tolist()
            tensor = onnx.TensorProto(name=node.output[0], data_type=1, dims=dims, data_location=1)
            count = int(np.prod(dims))
            for key, value in (("location", "weights.bin"), ("offset", file.tell()), ("length", 4 * count)):
                tensor.external_data.add(key=key, value=str(value))
            contents = np.ones(min(count, _PART), np.float32) if len(dims) == 1 else draw
            for at in range(0, count, _PART):
                contents[: count - at].tofile(file)
            model.graph.initializer.append(tensor)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def run(path: str, kind: str, seq: int) -> None:
    """One step: predicted peak, VmHWM."""
    step, loss, count = compiled(path, kind)
    ids = np.random.default_rng(0).integers(0, 32000, (1, seq))
    found = float(rc.Executor("cpu").run(step.program, {"input_ids": ids, "label": ids}, [loss])[0])
    print(f"{count:>14,} {step.figures.peak_bytes:>15,} {resident_bytes('VmHWM'):>15,} {found:8.4f}")


def ours(kind: str, limit: int, seq: int) -> str:
    """The most layers that fit, trained for a step."""
    layers = 0
    for more in (16, 4, 1):
        while compiled(network(layers + more, seq), kind)[0].figures.peak_bytes + FLOOR <= limit:
            layers += more
    with tempfile.TemporaryDirectory() as folder:
        path = write(network(layers, seq), Path(folder))
        line = child(sys.executable, __file__, "--run", str(path), "--kinds", kind, "--seq", str(seq))
    return f"{kind:16} {layers:>6} {line:>55}"


def theirs(python: str, dtype: str, limit: int, seq: int) -> str:
    """PyTorch's bytes a layer, and the most layers and parameters within the limit."""
    (p1, b1), (p3, b3) = (map(int, child(python, "-c", _TORCH, str(n), dtype, str(seq)).split()) for n in (1, 3))
    layer, grown = (p3 - p1) // 2, (b3 - b1) / 2
    layers = 1 + int((limit - b1) // grown)
    return f"{dtype:16} {layers:>6} {p1 + (layers - 1) * layer:>14,} {b1:>15,} {int(grown):>15,} {grown / layer:8.2f}"


def child(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().splitlines()[-1]


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", default="20GiB")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--torch-python", help="an interpreter with PyTorch and transformers")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.run, args.kinds, args.seq)
        return
    limit = as_bytes(args.limit)
    print(f"within {args.limit}, {args.seq} tokens\n")
    print(f"{'ours':16} {'layers':>6} {'parameters':>14} {'predicted peak':>15} {'VmHWM':>15} {'loss':>8}")
    for kind in filter(None, args.kinds.split(",")):
        print(ours(kind, limit, args.seq), flush=True)
    python = args.torch_python or torch_environment()
    print(f"\n{'PyTorch':16} {'layers':>6} {'parameters':>14} {'1 layer takes':>15} {'each more':>15} {'B/par':>8}")
    for dtype in ("float32", "bfloat16"):
        print(theirs(python, dtype, limit, args.seq), flush=True)


if __name__ == "__main__":
    main()
