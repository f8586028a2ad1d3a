"""The page beside a step in WebAssembly trains in a browser, and draws as it goes."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from recompute.runtime.cpu.device import jit

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser.py"
#: notes what the page shows and how much is drawn whenever its status changes
PROBE = """<script>
const notes = [], status = document.getElementById("status");
new MutationObserver(() => {
  const c = document.querySelector("canvas"), all = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  notes.push([status.textContent, document.getElementById("tested").textContent, all.filter((x) => x).length]);
  document.body.dataset.notes = JSON.stringify(notes);
}).observe(status, { childList: true });
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(jit.unavailable()) or not all(map(shutil.which, ("clang", "wasm-ld", "chromium"))),
        reason="needs numba, clang, lld and the browser 'chromium'",
    ),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


def visited(folder: Path, page: str, profile: Path) -> tuple[str, list[tuple[str, str, int]]]:
    """How training ended, and what was noted: status, test, parts of the picture that are not empty."""
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
        "--virtual-time-budget=600000", "--dump-dom",
    ]  # fmt: skip
    with served(folder) as address:
        command = ["chromium", *flags, f"{address}/{page}"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    state, notes = (re.search(f'data-{n}="([^"]*)"', out) for n in ("state", "notes"))
    assert state and notes, out[-2000:]
    return state[1], json.loads(notes[1].replace("&quot;", '"').replace("&amp;", "&"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example writes, with the probe in its page."""
    found = tmp_path_factory.mktemp("page")
    subprocess.run([sys.executable, str(EXAMPLE), str(found)], check=True)
    text = (found / "index.html").read_text()
    (found / "probed.html").write_text(text.replace('<script type="module">', PROBE + '<script type="module">', 1))
    return found


def test_lenet_learns_digits_in_a_browser(folder: Path, tmp_path: Path) -> None:
    """97 % of the digits that it has not seen, and a picture that grows."""
    state, notes = visited(folder, "probed.html", tmp_path)
    assert state == "done" and notes[-1][0].startswith("step 440 of 440, loss 0."), notes[-1]
    name, _, accuracy = notes[-1][1].rpartition(": ")
    assert name == "— accuracy on test data" and float(accuracy) >= 0.97
    drawn = [n for _, _, n in notes]
    assert len(notes) >= 10 and drawn == sorted(drawn) and len(set(drawn)) > 5, "drawn as it goes"


def test_data_that_does_not_fit_is_told(folder: Path, tmp_path: Path) -> None:
    data = load_file(folder / "train.safetensors")
    cases = {
        "train.safetensors has no tensor 'label'": {"x": data["x"]},
        "which makes no batches of 25088 elements": {**data, "x": data["x"][:, :, :, :20].copy()},
        "has elements for a Int32Array, not BigInt64Array": {**data, "label": data["label"].astype(np.int32)},
        "is outside the 10 classes": {**data, "label": data["label"] + 10},
        "have to lie beside this page": {},
    }
    for says, columns in cases.items():
        (folder / "train.safetensors").unlink(missing_ok=True)
        if columns:
            save_file(columns, folder / "train.safetensors")
        state, notes = visited(folder, "probed.html?epochs=1", tmp_path)
        assert state == "failed" and says in notes[-1][0], (says, notes[-1])
    save_file(data, folder / "train.safetensors")
