"""The HTML report: one file with data, script and style."""

from __future__ import annotations

import base64
import html
import json
import zlib
from importlib import resources
from typing import Any

#: JSON of more characters than this is stored compressed, so that any report stays well below a megabyte
_MOST_JSON = 600_000


def page(data: dict[str, Any]) -> str:
    """The page for `report_data`'s dictionary."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    encoding, content = "json", text.replace("<", "\\u003c")  # names must not end the script element
    if len(text) > _MOST_JSON:
        encoding, content = "deflate", base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    template = resources.files("recompute.report").joinpath("report.html").read_text(encoding="utf-8")
    head, tail = template.split("__DATA__")
    title = html.escape(f"{data['title'].get('model', 'program')}: memory of one training step")
    return head.replace("__TITLE__", title).replace("__ENCODING__", encoding) + content + tail
