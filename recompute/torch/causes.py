"""Parts of a module that may make its program differ, found before, or named when they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ModelError

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.nn import Module

#: arguments that functions of onnxscript's torch_lib never read, with the values that mean nothing
#: (benchmarks/pytorch/dropped_arguments.py looks for them)
UNREAD: dict[str, dict[str, Any]] = {
    "aten.embedding_bag": {"scale_grad_by_freq": False, "padding_idx": -1},
    "aten.embedding_bag.padding_idx": {"scale_grad_by_freq": False},
    "aten._embedding_bag": {"scale_grad_by_freq": False},
    "aten._embedding_bag_forward_only": {"scale_grad_by_freq": False},
    "aten.multinomial": {"replacement": False},
    "aten.upsample_bicubic2d": {"scales_h": None, "scales_w": None},
    "aten.upsample_bilinear2d": {"scales_h": None, "scales_w": None},
    "aten.upsample_linear1d": {"scales": None},
    "aten.sort": {"stable": None},
    "aten.allclose": {"equal_nan": False},
}


def dropped_arguments(program: ExportedProgram) -> list[str]:
    """Sentences about arguments of an exported program that PyTorch's ONNX exporter drops."""
    dropped: dict[str, None] = {}
    for node in program.graph.nodes:
        if "scaled_dot_product_attention" in str(node.target) and len(node.args) > 3 and node.args[3] is not None:
            dropped["of a row whose keys are all masked PyTorch's attention makes 0, ONNX's NaN: leave one key"] = None
        unread = UNREAD.get(str(node.target).rpartition(".")[0]) if node.op == "call_function" else None
        if not unread:
            continue
        names = [a.name for a in node.target._schema.arguments]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        for name, none in unread.items():
            if name in arguments and arguments[name] != none:
                dropped[f"PyTorch's ONNX exporter drops the argument {name} of {node.target}"] = None
    return list(dropped)


def hooks(module: Module) -> list[str]:
    """Sentences about hooks that no export contains."""
    listed_hooks = []
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            listed_hooks.append(f"a hook on the gradient of '{name}' is not part of the program")
    for name, m in module.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            listed_hooks.append(
                f"a backward hook of the module '{name or type(module).__name__}' is not part of the program"
            )
    return listed_hooks


def refuse(module: Module, inputs: Iterable[Any] = ()) -> None:
    """ModelError for submodules and tensors that no exported model can be; `inputs`: example tensors."""
    import torch

    examples = ((f"example input {i}", x) for i, x in enumerate(inputs))
    for name, t in (*module.named_parameters(), *module.named_buffers(), *examples):
        if t.layout != torch.strided or t.is_quantized:  # some of these abort PyTorch's exporter, and the process
            kind = "quantised" if t.is_quantized else str(t.layout).removeprefix("torch.")
            raise ModelError(f"'{name}' is a {kind} tensor, which no ONNX model can hold: make it dense first")
    for name, m in module.named_modules():
        norm = isinstance(m, torch.nn.modules.batchnorm._NormBase) and m.training and m.track_running_stats
        if norm and m.momentum is None:
            raise ModelError(
                f"'{name}' has momentum=None: its running statistics are averages over all batches, which the exported "
                "model cannot have; give it a momentum (0.1 is PyTorch's default)"
            )
        if getattr(m, "max_norm", None) is not None and isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise ModelError(
                f"'{name}' has max_norm: its forward pass changes the weights that it trains; leave it out, and divide "
                "the rows that are read by their norm, or use weight decay"
            )


def functions(outputs: Any) -> Iterator[str]:
    """Names of `torch.autograd.Function` classes behind tensors."""
    import torch

    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    names: set[str] = set()
    while waiting:
        node = waiting.pop()
        cls = type(node)
        if issubclass(cls, torch.autograd.function.BackwardCFunction):
            names.add(cls.__name__.removesuffix("Backward"))
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return iter(sorted(names))
