"""Where the server listens, and how it is stopped."""

import socket

import uvicorn
from fastapi import FastAPI

from common.errors import UsageError
from inference.worker import Worker


def bind(host: str, port: int) -> socket.socket:
    """A socket at which connections wait to be accepted. Raises UsageError: nobody can listen
    there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: {error}") from error


def serve(app: FastAPI, worker: Worker, bound: socket.socket) -> None:
    """Answer until SIGINT or SIGTERM; answers that are being written then end with an error."""
    config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
    _Server(config, worker).run(sockets=[bound])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, worker: Worker):
        super().__init__(config)
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn waits for answers to end: have them end."""
        self._worker.close()
        await super().shutdown(sockets)
