"""Calls of the public functions that work, each made anew, for tests that give them one wrong argument."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

import recompute as rc
from recompute.planning.step import target_of

MLP = Path(rc.models.__file__).parent / "mlp.onnx"
#: a call that works: the function, and its arguments
Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Callable[[], Call]] = {}
#: options that functions take as **options
TARGET = ("place", "cost", "precision", "providers", "schedule", "rebuild", "fuse_attention", "fuse_head")
PLANNING = (
    "strategy",
    "strategy_options",
    "plan",
    "offload",
    "slicing",
    "effort",
    "seconds",
    "progress",
    "approximations",
)
RANKS = ("mesh", "zero", "micro_batches", "network")
MODEL = ("loss", "options", "input_shapes", "trainable")


def call(function: Callable[[], Call]) -> Callable[[], Call]:
    """Registers a call by the name of the function that makes it."""
    CALLS[function.__name__.strip("_").replace("__", ".")] = function
    return function


def simple(name: str, /, **arguments: Callable[[], Any]) -> None:
    """Registers the call of a public function by its path; arguments are functions that make them."""

    def made() -> Call:
        thing: Any = rc
        for part in name.split("."):
            thing = getattr(thing, part)
        return thing, {k: make() for k, make in arguments.items()}

    CALLS[name] = made


def with_options(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The function, whose signature has the options of these names."""
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in names]
    found = lambda **arguments: function(**arguments)  # noqa: E731 - a function of its own, for its signature
    found.__signature__ = signature.replace(parameters=[*given, *added])  # type: ignore[attr-defined]
    return found


def then(function: Callable[..., Any], after: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function, and what is done with its result."""
    found = lambda **arguments: after(function(**arguments))  # noqa: E731
    found.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return found


def folder() -> Path:
    return Path(tempfile.mkdtemp())


def forward() -> rc.Program:
    return rc.load(MLP, batch=2)


def sequence() -> rc.Program:
    """Scores [N, T, C] of a batch of 2."""
    made = rc.Program(rc.Block("net", inputs=(rc.Value("x", rc.TensorType("f32", (2, 6, 4))),)))
    b = made.builder()
    made.append(b, outputs=[b.Relu(made["x"].value).name])
    return made


def with_loss() -> rc.Program:
    program = forward()
    rc.losses.cross_entropy(program)
    return program


def loss() -> rc.Variable:
    return with_loss()["loss"]


def step() -> rc.Program:
    program = with_loss()
    rc.Adam().minimize(program["loss"])
    return program


def averaged() -> rc.Program:
    program = with_loss()
    rc.EMA(rc.Adam()).minimize(program["loss"])
    return program


def planned() -> rc.Block:
    return rc.Executor().planned(forward())


def model() -> onnx.ModelProto:
    return onnx.load(MLP)


def mean() -> onnx.ModelProto:
    """A model whose only output is a number."""
    text = "<ir_version: 9, opset_import: ['' : 18]> g (float[2, 3] x) => (float y) { y = ReduceMean<keepdims = 0>(x) }"
    return onnx.parser.parse_model(text.replace("'", '"'))


def adapted() -> onnx.ModelProto:
    return rc.lora(model(), "fc_1.weight")


def coded() -> onnx.ModelProto:
    return rc.quantize_frozen(model())


def value(x: Any) -> Callable[[], Any]:
    return lambda: x


def feed() -> dict[str, np.ndarray]:
    return rc.data.synthetic_batch(forward())


def adapter() -> Path:
    at = folder()
    rc.save_adapter(adapted(), at)
    return at


def state_file() -> Path:
    path = folder() / "state"
    rc.save_state(step(), path)
    return path


def step_file() -> Path:
    path = folder() / "step.onnx"
    rc.save_step(step(), path)
    return path


adam = rc.Adam
minimized: Callable[[Any], Any] = lambda optimizer: optimizer.minimize(loss())  # noqa: E731

# -- places, programs and steps
simple("Executor")
simple("CUDAPlace")
simple("Mesh")
simple("Mesh.parse", text=value("dp=2"))
simple("Target")
simple("load", model=value(str(MLP)), batch=value(2))
simple("check_import", model=mean, reference=value({"x": np.ones((2, 3), np.float32)}))
simple("export_step", program=step)
simple("save_step", program=step, path=lambda: folder() / "s.onnx")
simple("export_trained", program=step)
simple("save_state", program=step, path=lambda: folder() / "s")
simple("load_state", program=step, path=state_file)
simple("load_compiled", model=step_file)
simple("save_model", model=model, path=lambda: folder() / "m.onnx")
simple("stop_on_nan", loss=loss)
simple("shard", value=forward, names=value("fc_1"))
simple("prepare_qat", program=forward)
simple("fuse_attention", program=forward)
simple("fuse_head", program=with_loss)
simple("verify", block=lambda: forward().block)
simple("prove", before=step, after=step)
simple("prove_ranks", whole=step, ranks=lambda: [step()], mesh=value("dp=1"))
simple("show", block=lambda: forward().block)
simple("parse", text=lambda: str(forward()))
simple("Saving", folder=folder)
simple("EarlyStopping")
simple("state.state_dict", program=step)
simple("state.set_state_dict", program=step, state=lambda: rc.state.state_dict(step()))
simple("averages.averages_of", program=averaged)
simple("amp.with_precision", optimizer=adam, precision=value("bf16"))
simple("fleet.init")
simple("fleet.distributed_optimizer", optimizer=adam)
simple("RecomputeOptimizer", optimizer=adam)
# -- passes and costs
simple("run_passes", block=lambda: forward().block, passes=lambda: rc.pipeline("dead-code"))
simple("pipeline", text=value("dead-code"))
simple("passes.cleaned", block=lambda: step().block, target=lambda: target_of(None))
simple("passes.plan_memory", block=lambda: step().block, target=lambda: target_of(None))
simple("passes.step_passes", target=lambda: target_of(None))
simple("passes.memory_report", block=planned)
simple("passes.live_profile", block=planned)
simple("passes.offloaded", block=planned)
simple("passes.plan_from_checkpoints", block=lambda: step().block, checkpoints=value(["fc_1"]))
simple("cost.device", name=value("h200"))
simple("cost.as_cost", cost=value("h200"))
simple("cost.costs_of", place=value("cpu"))
simple("cost.priced", target=rc.Target)
simple("cost.step_seconds", block=lambda: forward().block, cost=value("h200"))
# -- models, data, metrics, edits
simple("models.build", name=value("mlp"))
simple("models.info", name=value("mlp"))
simple("models.parameters", model=model)
simple("data.dataset", source=feed)
simple("data.synthetic_batch", program=forward)
simple("data.limits_of", block=lambda: forward().block)
simple("metrics.named", name=value("accuracy"))
simple("lora", model=model, patterns=value("fc_1.weight"))
simple("merge_adapters", model=adapted)
simple("save_adapter", model=adapted, folder=folder)
simple("save_onnx_adapter", model=adapted, folder=folder)
simple("load_adapter", model=model, folder=adapter)
simple("quantize_frozen", model=adapted)
simple("dequantize", model=coded)
simple("requantize", model=lambda: rc.dequantize(coded()), original=coded)
simple("edit.cut", model=model, at=value("fc_1"))
simple("edit.linear", model=model, out_features=value(4))
simple("edit.replace_head", model=model, out_features=value(4))
simple("tuning.training", program=forward)
simple("tuning.savings", program=forward)
simple("losses.natural_loss", program=forward)
for _name in rc.losses.NAMES:
    simple(f"losses.{_name}", output=sequence if _name == "ctc" else forward)


@call
def Executor__run() -> Call:
    return rc.Executor().run, {"program": forward(), "feed": feed()}


for _name in ("planned", "bound", "session"):
    CALLS[f"Executor.{_name}"] = lambda name=_name: (getattr(rc.Executor(), name), {"program": forward()})
for _name in ("SGD", "Momentum", "Nesterov", "Adagrad", "RMSProp", "Adam", "AdamW", "Lamb", "Lars"):
    CALLS[_name] = lambda name=_name: (then(getattr(rc, name), minimized), {})
for _name in ("minimize", "backward"):
    CALLS[f"Adam.{_name}"] = lambda name=_name: (getattr(rc.Adam(), name), {"loss": loss()})


@call
def Adam__apply_gradients() -> Call:
    optimizer = rc.Adam()
    return optimizer.apply_gradients, {"params_grads": optimizer.backward(loss())}


@call
def Adam__apply_optimize() -> Call:
    optimizer, variable = rc.Adam(), loss()
    given = {"loss": variable, "startup_program": None, "params_grads": optimizer.backward(variable)}
    return optimizer.apply_optimize, given


#: what is set on a RecomputeOptimizer that has checkpoints, or none
_SET = {
    "set_checkpoints": ({"checkpoints": "fc_1"}, False),
    "set_budget": ({"budget": "120%"}, False),
    "set_strategy": ({"strategy": "chen"}, False),
    "set_plan": ({"plan": rc.passes.RecomputePlan()}, False),
    "set_slices": ({"slices": "all:0:2"}, True),
    "set_approximations": ({"approximations": ()}, True),
    "set_offload": ({"value": True}, True),
}


def _setting(name: str) -> Call:
    arguments, kept = _SET[name]
    optimizer = rc.RecomputeOptimizer(rc.Adam())
    method = getattr(optimizer.set_checkpoints("fc_1") if kept else optimizer, name)
    return then(method, minimized), dict(arguments)


for _name in _SET:
    CALLS[f"RecomputeOptimizer.{_name}"] = lambda name=_name: _setting(name)


@call
def RecomputeOptimizer__minimize() -> Call:
    return rc.RecomputeOptimizer(rc.Adam()).set_checkpoints("fc_1").minimize, {"loss": loss()}


@call
def DataParallel() -> Call:
    return then(rc.DataParallel, minimized), {"optimizer": rc.Adam(), "mesh": "dp=2"}


@call
def GradientMerge() -> Call:
    return then(rc.GradientMerge, minimized), {"inner_optimizer": rc.Adam()}


@call
def EMA() -> Call:
    return then(rc.EMA, minimized), {"optimizer": rc.Adam()}


@call
def MixedPrecision() -> Call:
    return then(rc.MixedPrecision, minimized), {"optimizer": rc.Adam()}


@call
def amp__decorate() -> Call:
    return then(rc.amp.decorate, minimized), {"optimizer": rc.Adam()}


@call
def averages__applied() -> Call:
    return then(rc.averages.applied, lambda inside: inside.__enter__()), {"program": averaged()}


@call
def compile_step() -> Call:
    function = with_options(rc.compile_step, *TARGET, *PLANNING)
    return function, {"program": with_loss(), "loss": "loss", "optimizer": rc.Adam()}


@call
def estimate() -> Call:
    return with_options(rc.estimate, *TARGET, *RANKS, "dims"), {"model": "mlp", "batch": 4}


@call
def look() -> Call:
    return rc.look, {"model": MLP, "batch": 2, "dims": {}, "set": {}}


@call
def max_batch() -> Call:
    given = {"model": "mlp", "budget": "200KiB", "slicing": False, "effort": 0.1}
    return with_options(rc.max_batch, *TARGET, *RANKS, "slicing", "dims"), given


@call
def estimate_stages() -> Call:
    optimizer = rc.DataParallel(rc.Adam(), "pp=2", batch=4, micro_batches=2)
    return with_options(rc.estimate_stages, *MODEL), {"model": "mlp", "optimizer": optimizer}


@call
def find_mesh() -> Call:
    target = rc.Target(cost="h100")
    given = {"model": "mlp", "ranks": 2, "batch": 4, "network": "node=2,nvlink=450GB/s", "target": target}
    return with_options(rc.find_mesh, *MODEL), given


@call
def Trainer() -> Call:
    return rc.Trainer, {"program": forward(), "optimizer": rc.Adam(), "quiet": True}


def _trainer() -> tuple[rc.Trainer, dict[str, np.ndarray]]:
    trainer = rc.Trainer(forward(), rc.Adam(), quiet=True)
    return trainer, rc.data.synthetic_batch(trainer.program)


@call
def Trainer__fit() -> Call:
    trainer, data = _trainer()
    return trainer.fit, {"data": data}


@call
def Trainer__evaluate() -> Call:
    trainer, data = _trainer()
    return trainer.evaluate, {"data": data}


@call
def Trainer__predict() -> Call:
    trainer, data = _trainer()
    return trainer.predict, {"data": data, "outputs": ["pred"]}


@call
def Program__for_test() -> Call:
    return forward().for_test, {}


@call
def Program__evaluate() -> Call:
    return forward().evaluate, {"feed": feed()}


@call
def Program__freeze() -> Call:
    return forward().freeze, {"patterns": "fc_1.weight"}


@call
def Program__getitem() -> Call:
    return forward().__getitem__, {"name": "pred"}
