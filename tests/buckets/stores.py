"""Object stores that run here: Google's and Amazon's protocols, in threads."""

import logging
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, NamedTuple

import fsspec
import pytest
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server
from gcp_storage_emulator.storage import Storage
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    create_backend_app,
)
from werkzeug.serving import make_server

from tests.buckets.faults import Fault, Proxy, proxy
from tests.training.processes import free_port

BUCKET = "memjax-tests"


class Store(NamedTuple):
    """A store that answers.

    Attributes:
        scheme: of its URLs.
        environment: by which programs find it.
        proxy: in front of its server.
    """

    scheme: str
    environment: dict[str, str]
    proxy: Proxy

    def url(self, name: str) -> str:
        """Of a folder in its bucket."""
        return f"{self.scheme}://{BUCKET}/{name}"

    @contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """In the `with` block it answers with these faults."""
        self.proxy.set(faults)
        try:
            yield
        finally:
            self.proxy.set(())


@contextmanager
def google() -> Iterator[Store]:
    """Google Cloud Storage: the emulator, with the preconditions that it lacks."""
    port = free_port()
    # Names a request, with all of its data, in the log.
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    with pytest.MonkeyPatch.context() as patch, proxy(port) as front:
        environment = {
            "STORAGE_EMULATOR_HOST": front.address,
            "TENSORSTORE_GCS_HTTP_URL": front.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            # It asks another service for the kind of the bucket.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        _complete(patch)
        server.start()
        try:
            with _environment(environment):
                yield Store("gs", environment, front)
        finally:
            server.stop()


def _complete(patch: pytest.MonkeyPatch) -> None:
    """Adds to the emulator what Google's service has: generations and preconditions.

    tensorstore writes only what nobody else has written since it was read.
    """
    lock = threading.Lock()

    def generation(storage: Any, bucket: str, name: str) -> str:
        try:
            return storage.get_file_obj(bucket, name)["generation"]
        except NotFound:
            return "0"

    def guarded(upload: Callable[..., None]) -> Callable[..., None]:
        def write(request: Any, response: Any, storage: Any) -> None:
            bucket, query = request.params["bucket_name"], request.query
            name = query["name"][0] if "name" in query else request.data["meta"]["name"]
            asked = query.get("ifGenerationMatch")
            with lock:
                if asked and asked[0] != generation(storage, bucket, name):
                    response.status = HTTPStatus.PRECONDITION_FAILED
                else:
                    upload(request, response, storage)

        return write

    download = objects.download

    def with_generation(request: Any, response: Any, storage: Any) -> None:
        bucket, name = request.params["bucket_name"], request.params["object_id"]
        with lock:
            response["x-goog-generation"] = generation(storage, bucket, name)
            download(request, response, storage)

    patch.setattr(objects, "download", with_generation)
    # After each write it writes an index of all objects, which nobody reads here.
    patch.setattr(Storage, "_write_config_to_file", lambda storage: None)
    # It prints the connections that clients close.
    patch.setattr(socketserver.BaseServer, "handle_error", lambda *_: None)
    for upload in ("_media_upload", "_multipart_upload", "_create_resumable_upload"):
        patch.setattr(objects, upload, guarded(getattr(objects, upload)))


@contextmanager
def amazon() -> Iterator[Store]:
    """S3."""
    port = free_port()
    application = DomainDispatcherApplication(create_backend_app)
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = make_server("127.0.0.1", port, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with proxy(port) as front:
            environment = {
                "AWS_ENDPOINT_URL": front.address,
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            with _environment(environment):
                fsspec.filesystem("s3").makedirs(BUCKET, exist_ok=True)
                yield Store("s3", environment, front)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield
