"""Runs the notebooks of this folder from top to bottom and keeps what they print and draw.

python examples/notebooks/run.py [NOTEBOOK.ipynb ...]      (the extra dev: nbclient, ipykernel)
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent

for path in map(Path, sys.argv[1:] or sorted(map(str, FOLDER.glob("*.ipynb")))):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False).execute()
    nbformat.write(notebook, path)
    print(path.name)
