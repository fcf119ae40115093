"""The server's address, its gate, and its end."""

import re
import socket

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import UsageError
from inference.server.replies import ApiError, json_response
from inference.worker import Worker


class Gate:
    """Refuses requests that are too large, and requests to a name that is not in `hosts`.

    A page on the web could otherwise let its own name lead to this machine (DNS rebinding) and read
    what is said here.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, hosts: tuple[str, ...]):
        self.app, self.max_bytes, self.hosts = app, max_bytes, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "")).strip("[]").lower()
        if self.hosts and host not in self.hosts:
            known = f"it is {' or '.join(self.hosts)}, unless --host is another"
            error = ApiError(403, f"this server is not called {host!r}: {known}")
            return await json_response(error.body, error.status_code)(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise ApiError(413, f"a request may have {self.max_bytes:,} bytes at most")
            return message

        await self.app(scope, counted, send)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket on which connections wait. Raises UsageError: nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: {error}") from error


class Server(uvicorn.Server):
    """Answers until SIGINT or SIGTERM; answers that are being written then end with an error."""

    def __init__(self, app: ASGIApp, worker: Worker):
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, for which uvicorn would wait."""
        self._worker.close()
        await super().shutdown(sockets)
