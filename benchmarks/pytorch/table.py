"""The table that the scripts of this folder print: a row for each network, and its file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def rows(
    networks: Mapping[str, Any],
    description: str | None,
    line: str,
    row: Callable[[str, Any], dict[str, Any]],
    head: str = "",
) -> list[dict[str, Any]]:
    """The rows of the networks that the command line asks for, printed by the format `line` as they are done."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="networks whose names contain this")
    p.add_argument("--json", metavar="FILE", help="also write the rows to a file")
    asked = p.parse_args()
    if head:
        print(head)
    found = []
    for name, make in networks.items():
        if asked.only.lower() in name.lower():
            found.append(row(name, make))
            print(line.format(**found[-1]), flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=1))
    return found
