"""The viewer as one HTML file that opens from the disk, and as a live page on loopback."""

import base64
import contextlib
import hashlib
import json
from collections.abc import Sequence
from functools import partial
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from plotly.offline import get_plotlyjs

from ragen_mega.report.glossary import GLOSSARY
from ragen_mega.report.viewer import MOST_MEGABYTES, MOST_NUMBERS
from ragen_mega.report.viewer.data import read_shown, trace_bytes, trace_size
from ragen_mega.storage.integrity import write_whole

_HERE = files(__package__)
_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; connect-src 'self';"
    " img-src data: blob:; style-src 'unsafe-inline'; script-src "
)
"""Content security policy of the page, without the hashes of its scripts."""
_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names under which a live page is asked for; another one is a foreign page's, by its own DNS."""


def write_page(
    runs: Sequence[Path],
    target: Path,
    *,
    most_megabytes: float = MOST_MEGABYTES,
    keep: str | None = None,
) -> int:
    """Write the page of finished or unfinished runs to `target`. Returns how many traces had to be
    left out, evenly over the steps, to keep it below `most_megabytes`; never `keep`, a trace of the
    first run.

    Raises ValueError for a directory that holds no run, OSError if the file cannot be written.
    """
    data = _read(runs)
    timelines = [
        (index, "timeline", trace_bytes(runs[index], "timeline"))
        for index, run in enumerate(data)
        if run["timeline"]
    ]
    room = most_megabytes * 1e6 - len(_page(data, timelines))
    sizes = [
        (index, name := trace["id"], len(_script(index, name, bytes(trace_size(run, name)))))
        for index, run in enumerate(runs)
        for trace in data[index]["traces"]
    ]
    stride = 1
    thinned = partial(_thinned, sizes, keep)
    while sum(size for _, _, size in thinned(stride)) > max(room, 0) and stride < 2**20:
        stride *= 2
    chosen = {(index, trace) for index, trace, _ in thinned(stride)}
    for index, run in enumerate(data):
        run["traces"] = [trace for trace in run["traces"] if (index, trace["id"]) in chosen]
    bodies = [(index, trace, trace_bytes(runs[index], trace)) for index, trace in sorted(chosen)]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, _page(data, [*timelines, *bodies]).encode())  # a link there is not followed
    return len(sizes) - len(chosen)


def _read(runs: Sequence[Path]) -> list[dict[str, Any]]:
    return [read_shown(run, MOST_NUMBERS // len(runs)) for run in runs]


def _thinned(
    sizes: Sequence[tuple[int, str, int]], keep: str | None, stride: int
) -> list[tuple[int, str, int]]:
    """Select every `stride`-th trace; always the last one, and `keep` of the first run."""
    last = len(sizes) - 1
    return [
        size for at, size in enumerate(sizes) if (last - at) % stride == 0 or size[:2] == (0, keep)
    ]


def _page(runs: Sequence[dict[str, Any]] | None, bodies: Sequence[tuple[int, str, bytes]]) -> str:
    """Return the whole page; without `runs` it asks its server for them."""
    parts = {
        "STYLE": _HERE.joinpath("viewer.css").read_text(),
        "PLOTLY": get_plotlyjs(),
        "GLOSSARY": _json(GLOSSARY),
        "RUNS": _json(runs),
        "TRACES": "\n".join(_script(*body) for body in bodies),
        "SCRIPT": _HERE.joinpath("viewer.js").read_text(),
    }
    parts["POLICY"] = _POLICY + " ".join(_hash(parts[name]) for name in ("PLOTLY", "SCRIPT"))
    before, *pieces = _HERE.joinpath("viewer.html").read_text().split("{{")
    return before + "".join(
        parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces)
    )


def _script(index: int, trace: str, body: bytes) -> str:
    """Hold a trace of the run `index` as text that no browser executes."""
    text = base64.b64encode(body).decode()
    return f'<script type="text/plain" id="trace-{index}-{escape(trace)}">{text}</script>'


def _hash(script: str) -> str:
    """Hash a script for the page's policy, so that no other script is executed."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _json(value: Any) -> str:
    """JSON that is safe inside a <script>."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def make_server(runs: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Return a server of the page on 127.0.0.1, which reads at every request what has changed of
    the runs. Raises ValueError for a directory that holds no run, and for a port that cannot be
    had.
    """
    _read(runs)
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, list(runs)))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "ports go from 0 to 65535"
        raise ValueError(f"port {port} cannot be had ({why}); give another --port") from None


class _Handler(BaseHTTPRequestHandler):
    """`/` is the page, `/runs` its data, `/trace/INDEX/NAME` one trace."""

    timeout = 30.0  # seconds of silence, after which the thread of a connection ends

    def __init__(self, runs: list[Path], *arguments: Any) -> None:
        self._runs = runs
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer one request; anything unknown is a 404 with the reason."""
        with contextlib.suppress(ConnectionError):  # a browser may leave before it is answered
            try:
                if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in _HOSTS:
                    raise ValueError("this page is served to 127.0.0.1 and localhost alone")
                answer = self._answer()
            except (ValueError, OSError) as error:
                self.send_error(HTTPStatus.NOT_FOUND, explain=str(error))  # any text, as HTML
            else:
                self._send(*answer)

    def _answer(self) -> tuple[bytes, str]:
        """Return the requested content and its type."""
        match unquote(urlsplit(self.path).path).strip("/").split("/"):
            case [""]:
                return _page(None, []).encode(), "text/html; charset=utf-8"
            case ["runs"]:
                return json.dumps(_read(self._runs)).encode(), "application/json"
            case ["trace", index, trace] if index.isdecimal() and int(index) < len(self._runs):
                return trace_bytes(self._runs[int(index)], trace), "application/octet-stream"
        raise ValueError(f"no page {self.path}")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing: requests are not worth a line each."""
