"""Training steps on a CUDA place (the emulated one here, the device with -m gpu): the processor's numbers, the same
bits with and without recomputation, the predicted peak, and arrays that the host may look at and change."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
from zoo_cases import network

import recompute as rc
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.errors import JobError
from recompute.language.types import TensorType
from recompute.runtime import EmulatedCUDAPlace
from recompute.runtime.cuda.device.emulator import compiler
from recompute.runtime.cuda.device.kernel import Await, Buffer, Transfer
from recompute.runtime.cuda.session import Step, _joined
from recompute.testing import in_float64

#: networks that are small enough for the emulated device
SMALL = ("mlp", "lenet", "lstm", "bert-tiny", "gpt2-tiny", "resnet18", "mobilenet_v2")


@cache
def wide(name: str) -> tuple[rc.Program, str, dict[str, Any]]:
    """The network in float64, where nothing is ill-conditioned."""
    program, loss, feed = network(name)
    cast = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feed.items()}
    return in_float64(program), loss, cast


def step_of(
    given: tuple[rc.Program, str, dict[str, Any]], place: Any, checkpoints: list[str] | None = None
) -> tuple[CompiledStep, str, dict[str, Any]]:
    program, loss, feed = given
    made = compile_step(program, loss, rc.Momentum(learning_rate=0.01), checkpoints=checkpoints, place=place)
    return made, loss, feed


def two_steps(step: CompiledStep, loss: str, feed: dict[str, Any], place: Any) -> tuple[list[Any], rc.Program]:
    program, executor = step.program.clone(), rc.Executor(place)
    losses = [executor.run(program, feed, [loss])[0] for _ in range(2)]
    assert executor.session(program, [loss]).measured_peak_bytes == step.figures.peak_bytes
    assert executor.session(program, [loss]).on_host == []
    return losses, program


@pytest.mark.parametrize("name", SMALL)
def test_a_step_has_the_processors_numbers(name: str, cuda: Any) -> None:
    losses, after = two_steps(*step_of(wide(name), cuda), cuda)
    program, loss, feed = wide(name)
    step = compile_step(program, loss, rc.Momentum(learning_rate=0.01), providers=("numpy",)).program
    executor = rc.Executor(providers=("numpy",))
    wanted = [executor.run(step, feed, [loss])[0] for _ in range(2)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-10)
    for key, array in after.data.items():
        scale = float(np.abs(step.data[key]).max(initial=0))
        np.testing.assert_allclose(array, step.data[key], rtol=1e-7, atol=1e-8 * scale + 1e-13, err_msg=key)


@pytest.mark.parametrize("name", SMALL)
def test_recomputation_changes_no_bit(name: str, cuda: Any) -> None:
    losses, after = two_steps(*step_of(network(name), cuda), cuda)
    proposed = [c for c in rc.models.info(name).checkpoints if c in network(name)[0]]
    losses_again, after_again = two_steps(*step_of(network(name), cuda, proposed), cuda)
    assert [x.tobytes() for x in losses_again] == [x.tobytes() for x in losses]
    for key, array in after.data.items():
        assert after_again.data[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("name", ["mlp", "lenet", "bert-tiny"])
def test_the_order_of_threads_changes_no_bit(name: str) -> None:
    if not compiler():
        pytest.skip("the emulated device needs a C++ compiler")
    found = []
    for place in (EmulatedCUDAPlace(), EmulatedCUDAPlace(backwards=True)):
        losses, after = two_steps(*step_of(network(name), place), place)
        found.append([x.tobytes() for x in losses] + [a.tobytes() for a in after.data.values()])
    assert found[0] == found[1]


def test_the_host_sees_and_changes_what_the_device_holds(cuda: Any) -> None:
    step, loss, feed = step_of(network("mlp"), cuda)
    program, executor = step.program, rc.Executor(cuda)
    name = program.parameters[0].name
    before = program.data[name].copy()
    executor.run(program, feed, [loss])
    moved = program.data[name].copy()
    assert (moved != before).any()
    first = executor.run(program, feed, [loss])[0]
    program.data[name][...] = moved  # back to where the second step began, for one parameter
    for other in program.data:
        program.data[other][...] = program.data[other]
    second = executor.run(program, feed, [loss])[0]
    assert first.tobytes() != second.tobytes()
    executor.run(program, feed, [loss])
    on_processor = rc.Executor().run(program, feed, [loss])[0]  # the newest arrays come back to the host
    assert np.isfinite(on_processor).all()
    step_again = executor.run(program, feed, [loss])[0]  # and what the processor wrote goes to the device again
    assert float(step_again) != float(on_processor)


def test_a_device_that_is_not_there_is_named() -> None:
    from recompute.runtime.cuda.device.device import unavailable

    if not unavailable():
        pytest.skip("there is a device")
    with pytest.raises(rc.RecomputeError, match=r"CUDAPlace\(0\): .*CuPy|CUDAPlace\(0\): .*device"):
        rc.Executor(rc.CUDAPlace(0))


@pytest.mark.parametrize("name", ["lenet", "bert-tiny"])
def test_values_wait_in_host_memory_with_the_same_bits(name: str, cuda: Any) -> None:
    program, loss, feed = network(name)
    kept = [c for c in rc.models.info(name).checkpoints if c in program] or ["relu1"]
    found = []
    for offload in (False, True):
        step = compile_step(program, loss, rc.Momentum(0.01), checkpoints=kept, place=cuda, offload=offload)
        losses, after = two_steps(step, loss, feed, cuda)
        found.append([x.tobytes() for x in losses] + [a.tobytes() for a in after.data.values()])
    assert step.figures.host_bytes > 0
    assert found[0] == found[1]


def test_copies_may_be_as_late_as_they_are_awaited() -> None:
    if not compiler():
        pytest.skip("the emulated device needs a C++ compiler")
    program, loss, feed = network("bert-tiny")
    kept = [c for c in rc.models.info("bert-tiny").checkpoints if c in program]
    found = []
    for place in (EmulatedCUDAPlace(), EmulatedCUDAPlace(backwards=True)):
        step = compile_step(program, loss, rc.Momentum(0.01), checkpoints=kept, place=place, offload=True)
        found.append([x.tobytes() for x in two_steps(step, loss, feed, place)[0]])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["lenet", "bert-tiny"])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_lower_precision_stays_near(name: str, precision: str, cuda: Any) -> None:
    program, loss, feed = network(name)
    losses = []
    for chosen in ("fp32", precision):
        step = compile_step(program, loss, rc.Momentum(0.01), place=cuda, precision=chosen)
        losses.append([float(x) for x in two_steps(step, loss, feed, cuda)[0]])
    count = 1 if precision == "fp16" else 2  # at the first scale gradients overflow, and the step is skipped
    np.testing.assert_allclose(
        losses[1][:count], losses[0][:count], rtol={"tf32": 2e-3, "bf16": 3e-2, "fp16": 5e-3}[precision]
    )


def test_memory_goes_with_the_program() -> None:
    """Without the garbage collector: the next program may need all of the device."""
    if not compiler():
        pytest.skip("no C++ compiler")
    program, loss, feed = network("mlp")
    step = compile_step(program, loss, rc.Momentum(0.01), place=EmulatedCUDAPlace())
    trained, executor = step.program.clone(), rc.Executor(EmulatedCUDAPlace())
    executor.run(trained, feed, [loss])
    session = weakref.ref(executor.session(trained, [loss]))
    gc.disable()
    try:
        del trained
        assert session() is None
    finally:
        gc.enable()


def test_graphs_take_whole_copies_only() -> None:
    here, there = Buffer(256, TensorType("f32", (4,))), Buffer(512, TensorType("f32", (4,), host=True))
    begun, awaited = (Step(None, (c,), ()) for c in (Transfer(there, here), Await(there)))  # type: ignore[arg-type]
    assert _joined([]) and _joined([begun, awaited])
    assert not _joined([begun]) and not _joined([awaited]) and not _joined([awaited, begun])


def test_a_refused_label_leaves_everything_as_it_was(cuda: Any) -> None:
    """In one graph: updates ask what was reported; the error comes with what is asked for next."""
    program, loss, feed = network("mlp")
    made = rc.compile_step(program, loss, rc.Adam(0.1), place=cuda)
    trained, executor = made.program.clone(), rc.Executor(cuda)
    session = executor.session(trained, [loss])
    assert session.guarded and session._parts[0] == []
    executor.run(trained, feed, [loss])
    before = {n: trained.data[n].copy() for n in trained.data}
    labels = next(n for n, a in feed.items() if a.dtype.kind == "i")
    wrong = {**feed, labels: np.full_like(feed[labels], 99)}
    for _ in range(3):
        with pytest.raises(JobError, match="99"):
            executor.run(trained, wrong, [loss])
    assert all(np.array_equal(trained.data[n], a) for n, a in before.items())
    for name, a in wrong.items():
        session.feed(name, a)
    session.run()
    with pytest.raises(JobError, match="99"):
        trained.data["fc1.weight"] if "fc1.weight" in trained.data else next(iter(trained.data.values()))
    for name, a in wrong.items():
        session.feed(name, a)
    session.run()
    with pytest.raises(JobError, match="99"):
        session.run()
    assert all(np.array_equal(trained.data[n], a) for n, a in before.items())
    for name, x in wrong.items():
        session.feed(name, x)
    session.run_timed()
    with pytest.raises(JobError, match="99"):
        session.fetch(loss)
    executor.run(trained, feed, [loss])
    assert not all(np.array_equal(trained.data[n], a) for n, a in before.items())
