"""A proxy between a store and its clients, which spoils some answers."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, cast

#: Requests that write.
WRITES = "PUT|POST"
#: Headers of one connection.
_OWN = ("connection", "transfer-encoding", "keep-alive")


class Fault(NamedTuple):
    """A fault of requests.

    Attributes:
        answer: HTTP status and error code, as "503 SlowDown"; "cut" closes the
            connection halfway, "slow" sends in pieces, "silent" never answers.
        methods: of the requests, as `WRITES`; a regular expression.
        path: part of their path; a regular expression.
        times: number of these requests; None is all.
    """

    answer: str
    methods: str = ".*"
    path: str = ""
    times: int | None = None


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server at a port, but for those with a fault.

    Attributes:
        address: URL for clients.
        met: requests with a fault since `set`.
    """

    daemon_threads = True

    def __init__(self, backend: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend, self.closed = backend, threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self._lock = threading.Lock()
        self.set(())

    def set(self, faults: Iterable[Fault]) -> None:
        """Sets the faults of the requests to come."""
        self._left, self.met = [(fault, [fault.times]) for fault in faults], 0

    def fault_of(self, method: str, path: str) -> str:
        """The fault of the next request; "" without one."""
        with self._lock:
            for fault, left in self._left:
                fits = re.fullmatch(fault.methods, method)
                if left[0] == 0 or not fits or not re.search(fault.path, path):
                    continue
                left[0] = None if left[0] is None else left[0] - 1
                self.met += 1
                return fault.answer
        return ""

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients close connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # With it, the content waits for the client's late acknowledgement of the headers,
    # 40 ms a request.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        proxy = cast(Proxy, self.server)
        fault = proxy.fault_of(self.command, self.path)
        cuts_upload = fault == "cut" and self.command in WRITES.split("|")
        body = self._body(half=cuts_upload)
        if fault == "silent":
            proxy.closed.wait()
        if fault == "silent" or cuts_upload:
            self._hang_up()
        elif fault in ("", "slow", "cut"):
            self._pass_on(proxy.backend, body, fault)
        else:
            self._refuse(*fault.split())

    def _body(self, half: bool) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            size = int(self.headers.get("Content-Length", 0))
            return self.rfile.read(size // 2 if half else size)
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _refuse(self, status: str, code: str) -> None:
        of_amazon = "AWS4" in self.headers.get("Authorization", "")
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        if not of_amazon:
            text = json.dumps({"error": {"code": int(status), "message": code}})
        self.send_response(int(status), code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    def _pass_on(self, port: int, body: bytes, fault: str) -> None:
        connection = HTTPConnection("127.0.0.1", port)
        sent = {n: v for n, v in self.headers.items() if n.lower() not in _OWN}
        if body:
            sent["Content-Length"] = str(len(body))
        connection.request(self.command, self.path, body or None, sent)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.send_response_only(answer.status, answer.reason)
        headers = {n: v for n, v in answer.getheaders() if n.lower() not in _OWN}
        if answer.status not in (204, 304) and "content-length" not in map(
            str.lower, headers
        ):
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            self.wfile.write(content[: len(content) // 2])
            self._hang_up()
        elif fault == "slow":
            piece = max(1, len(content) // 20)
            for begin in range(0, len(content), piece):
                self.wfile.write(content[begin : begin + piece])
                time.sleep(0.1)
        else:
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(backend: int) -> Iterator[Proxy]:
    """A proxy of the server at that port, in a thread."""
    server = Proxy(backend)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closed.set()
        server.shutdown()
        server.server_close()
