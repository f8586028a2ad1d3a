"""What children need is loaded before they are forked: modules, and the kernels of the originals."""

from __future__ import annotations

import onnx

from . import seeds, targets


def up() -> None:
    """Imports all that files are given to, and runs the networks once."""
    import safetensors.numpy  # noqa: F401
    from onnx import inliner, reference, shape_inference, version_converter  # noqa: F401

    from recompute.passes.planners.base import import_all

    import_all()
    onnx.checker.check_model(seeds.chain())
    for made in seeds.steps().values():
        program = made.program.clone()
        for number in (0, 1):
            targets.run(program, targets.feeds(program.block, 0), number)
    for name in ("chain", "image", "rows"):
        targets.plain_step(name)
    for number, (_, block) in enumerate(seeds.samples(False)):
        targets.run_block(block, targets.persistent(block, 0), 4 * number)
