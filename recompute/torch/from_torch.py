"""`from_torch`: a PyTorch module as a program that trains as the module would.

PyTorch is the user's own, and imported only in this folder.
"""

from __future__ import annotations

import glob
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx

from ..errors import ModelError, ModelWarning, UsageError
from ..importer.load import load
from ..language.program import Program
from ..support.memory import give_back
from . import need_torch
from .call import INNER, Call, arguments, elements, input_names, tensors_of, with_loss
from .causes import hooks, refuse
from .check_import import listed
from .compare import Result, compare_with_module, in_float64
from .names import initializers, mark_training, without_prefix

if TYPE_CHECKING:
    from torch.nn import Module

    from .export import Exported

__all__ = ["from_torch"]

_EXPORTERS = ("auto", "dynamo", "torchscript")
_CHECKS = (True, False, "warn")


def from_torch(
    module: Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    trainable: Sequence[str] | None = None,
    exporter: str = "auto",
    dynamic_batch: bool = True,
    check: bool | str = True,
    share: bool = False,
    **options: Any,
) -> Program:
    """A PyTorch module as a program that trains as the module would.

    `example_inputs`: a tensor, a tuple of them, or a dict by the names of `forward`'s arguments; their shapes are the
    program's.  `loss`: a function `loss(output, *targets)` of PyTorch, whose value becomes the output "loss";
    `targets`: examples of what it takes.  `trainable`: names or globs (default: the parameters that require
    gradients).  Every submodule trains or not as its `training` says: dropout and batch normalisation of those in eval
    mode stay off.  Values that are detached, or computed under `torch.no_grad()`, pass no gradient on.

    `check`: one forward and backward pass of the module is compared with the program's (docs/pytorch.md).  A difference
    is a ModelError that names the tensors and what may be the cause; `"warn"`: a ModelWarning; False: nothing is
    compared, and a warning says so.  The module is as before afterwards.

    `share`: the program trains the module's own tensors, which are then held once, and `write_back` copies nothing; a
    ModelWarning names those of which it needs copies (on a device, of 16 bits).  False: the module stays as it is until
    `write_back`.

    `dynamic_batch`: the exported model takes any batch, where PyTorch can trace it so: `program.evaluate` and
    `rc.export_trained` need it for other batches than the example's (of more than one sample).
    `exporter`: "dynamo" (without optimisation, which would rename parameters), "torchscript", or "auto": the first that
    can.  `options`: those of `rc.load`.

    The program's parameters have the module's names, and aliases for tied ones; `program.source` is the exported model.
    ModelError where the module cannot be exported, with PyTorch's reason.
    """
    _usable(module, exporter, check)
    args, kwargs = arguments(example_inputs)
    call = Call(module, args, kwargs, input_names(module, args, kwargs, targets), None, dynamic_batch, share)
    if loss is not None:
        whole = with_loss(module, loss, len(args), list(kwargs))
        call = Call(whole, (*args, *kwargs.values(), *targets), {}, call.inputs, ["loss"], dynamic_batch, share)
    refuse(module, call.tensors())
    program, found = _first(call, exporter, module, trainable, options)
    _check(program, found, module, call, exporter, trainable, options, check)
    give_back()
    if share:
        _share(program, module)
    return program


def _share(program: Program, module: Module) -> None:
    """Makes the module's tensors the program's arrays; warns of those that cannot be."""
    apart = []
    for name, tensor in tensors_of(module).items():
        alias = program.aliases.get(name, name)
        if alias not in program.data:
            continue
        array, there = elements(tensor), program.data[alias]
        if array is None or (array.shape, array.dtype) != (there.shape, there.dtype):
            apart.append(name)
        else:
            program.data[alias] = array
    if apart:
        text = (
            f"share=True: the program has copies of {', '.join(listed(apart))}, which write_back copies to the module"
        )
        warnings.warn(text, ModelWarning, stacklevel=3)


def _usable(module: Module, exporter: str, check: bool | str) -> None:
    """UsageError for what is no module or no option, MissingExtraError without PyTorch."""
    need_torch("from_torch")
    import torch

    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"from_torch takes a torch.nn.Module, not {type(module).__name__}")
    if exporter not in _EXPORTERS:
        raise UsageError(f"exporter must be one of {', '.join(map(repr, _EXPORTERS))}, not {exporter!r}")
    if check not in _CHECKS:
        raise UsageError(f'check must be True, False or "warn", not {check!r}')


def _first(
    call: Call, exporter: str, module: Module, trainable: Sequence[str] | None, options: dict[str, Any]
) -> tuple[Program, Exported]:
    """The first of the exported models that can be loaded, as a program."""
    from .export import exported

    error: ModelError | None = None
    for candidate in exported(call, exporter):
        if call.module is not module:
            without_prefix(candidate.proto, f"{INNER}.")
        try:
            return _loaded(candidate.proto, module, call, trainable, options), candidate
        except ModelError as e:  # of any batch there may be shapes that are computed from data
            error = error or e
    assert error is not None
    raise error


def _loaded(
    proto: onnx.ModelProto, module: Module, call: Call, trainable: Sequence[str] | None, options: dict[str, Any]
) -> Program:
    """The program of an exported model."""
    mark_training(proto)
    names = initializers(module, proto)
    if trainable is None:
        trainable = [glob.escape(names[n]) for n, p in module.named_parameters() if p.requires_grad and n in names]
    program = load(proto, batch=call.batch(), trainable=trainable, mode="file", **options)
    program.aliases.update({other: n for other, n in names.items() if other != n and n in program.data})
    return program


def _check(
    program: Program,
    found: Exported,
    module: Module,
    call: Call,
    exporter: str,
    trainable: Sequence[str] | None,
    options: dict[str, Any],
    check: bool | str,
) -> None:
    """Compares program and module, and says what the export cannot have."""
    unseen = hooks(module)
    if check is False:
        lost = _missing(program, module, trainable)
        said = [f"parameters are not in the exported model and do not train: {', '.join(lost)}"] if lost else []
        told = "; ".join(["from_torch(check=False): the program is not compared with its module", *said, *unseen])
        warnings.warn(told, ModelWarning, stacklevel=3)
        return
    result = _compared(program, found, module, call, trainable, options)
    if result.rounding and _same_in_float64(module, call, exporter, trainable, options):
        result = Result()
    causes = [*unseen, *found.causes, *result.causes]
    if result.different:
        more = f"\nwhat may be the cause: {'; '.join(causes)}" if causes else ""
        text = (
            "the program does not train as the module does. On the example inputs:\n  "
            + "\n  ".join(result.different)
            + more
            + '\nwrite that part with plain PyTorch operators, or train all the same with check="warn"'
        )
        if check == "warn":
            warnings.warn(text, ModelWarning, stacklevel=3)
        else:
            raise ModelError(text)
    elif unseen or result.skipped:
        warnings.warn("; ".join([*unseen, *result.skipped]), ModelWarning, stacklevel=3)


def _compared(
    program: Program,
    found: Exported,
    module: Module,
    call: Call,
    trainable: Sequence[str] | None,
    options: dict[str, Any],
) -> Result:
    """The comparison of program and module, with dropout switched off in both."""
    plain = found.without_dropout()
    other = program if plain is None else _loaded(plain, module, call, trainable, options)
    return compare_with_module(other, module, call, trainable is None)


def _same_in_float64(
    module: Module, call: Call, exporter: str, trainable: Sequence[str] | None, options: dict[str, Any]
) -> bool:
    """Whether a copy of the module in float64, exported and loaded anew, trains as it should."""
    double = in_float64(module, call)
    if double is None:
        return False
    module, call = double
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program, found = _first(call, exporter, module, trainable, options)
            result = _compared(program, found, module, call, trainable, options)
        except ModelError:
            return False
    return not (result.different or result.skipped)


def _missing(program: Program, module: Module, trainable: Sequence[str] | None) -> list[str]:
    """Parameters that require gradients and are not in the program."""
    if trainable is not None:
        return []
    there = {v.name for v in program.block.parameters}
    wanted = [n for n, p in module.named_parameters() if p.requires_grad]
    return [n for n in wanted if program.aliases.get(n, n) not in there]
