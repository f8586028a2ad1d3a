"""A page that trains LeNet on scikit-learn's handwritten digits in a browser: a step in WebAssembly (docs/library.md).

python examples/browser.py DIR [--serve PORT]  # needs clang and lld; then open http://localhost:PORT
"""

from __future__ import annotations

import argparse
import functools
import http.server
from pathlib import Path

from safetensors.numpy import save_file

import recompute as rc
from digits import digits


def write(folder: Path) -> None:
    """The step, its page, and digits to train and test it on."""
    rc.build_for("wasm32")
    program = rc.load(rc.models.build("lenet"), batch=32)
    step = rc.compile_step(program, rc.losses.cross_entropy(program).name, rc.Adam(2e-3))
    rc.write_library(step.program, folder, name="lenet")
    for name, columns in zip(("train", "test"), digits(), strict=True):
        save_file(columns, folder / f"{name}.safetensors")
    print(f"wrote {folder / 'index.html'}: a step in {step.figures.peak_bytes:,} bytes")


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve the folder to this machine's browsers")
    args = parser.parse_args()
    write(args.folder)
    if args.serve is not None:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(args.folder))
        print(f"http://localhost:{args.serve}, until Ctrl-C")
        http.server.ThreadingHTTPServer(("localhost", args.serve), handler).serve_forever()


if __name__ == "__main__":
    main()
