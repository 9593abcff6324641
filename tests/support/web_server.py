"""Web servers in a thread of the test, which answer as a class of the test says."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Request(BaseHTTPRequestHandler):
    """One request, whose body is read before `answer` is called; nothing is logged."""

    body: bytes

    def answer(self) -> None:
        raise NotImplementedError

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        """Send bytes, or anything else as JSON, and `headers` with - for _."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def log_message(self, *arguments: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, *connection: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that hangs up is no error
            super().handle_error(*connection)


@contextmanager
def serving(handler: type[Request]) -> Iterator[str]:
    """Serve on a free port for the block, which gets host:port."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
