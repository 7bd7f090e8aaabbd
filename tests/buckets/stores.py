"""Object stores that run here: Google's and Amazon's protocols, in threads."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import fsspec
from gcp_storage_emulator.server import create_server
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.training.processes import free_port

BUCKET = "memjax-tests"


class Store(NamedTuple):
    """A store that answers.

    Attributes:
        scheme: of its URLs.
        environment: by which programs find it.
        refuse: makes it answer every write with this status and code; None for none.
    """

    scheme: str
    environment: dict[str, str]
    refuse: Callable[[tuple[str, str] | None], None]

    def url(self, name: str) -> str:
        """Of a folder in its bucket."""
        return f"{self.scheme}://{BUCKET}/{name}"


@contextmanager
def google() -> Iterator[Store]:
    """Google Cloud Storage, as the emulator has it: without preconditions."""
    port = free_port()
    # Names a request, with all of its data, in the log.
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    address = f"http://127.0.0.1:{port}"
    environment = {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        # It asks another service for the kind of the bucket.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }

    def refuse(answer: tuple[str, str] | None) -> None:
        raise NotImplementedError

    try:
        with _environment(environment):
            yield Store("gs", environment, refuse)
    finally:
        server.stop()


@contextmanager
def amazon() -> Iterator[Store]:
    """S3."""
    port, refusal = free_port(), []
    backend = DomainDispatcherApplication(create_backend_app)

    def application(request: dict[str, Any], start: Callable[..., Any]) -> Any:
        if refusal and request["REQUEST_METHOD"] in ("PUT", "POST"):
            status, code = refusal[0]
            start(status, [("Content-Type", "application/xml")])
            return [
                f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            ]
        return backend(request, start)

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = make_server("127.0.0.1", port, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }

    def refuse(answer: tuple[str, str] | None) -> None:
        refusal[:] = [] if answer is None else [answer]

    try:
        with _environment(environment):
            fsspec.filesystem("s3").makedirs(BUCKET, exist_ok=True)
            yield Store("s3", environment, refuse)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    # Connections know the address from when they were opened.
    _forget()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _forget()


def _forget() -> None:
    for scheme in ("gs", "s3"):
        fsspec.get_filesystem_class(scheme).clear_instance_cache()
