"""The process of a server: its socket, uvicorn, and signals, of which the first drains and the second ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import cast

import uvicorn

from smcjax.server.access import is_loopback
from smcjax.server.app import make_app
from smcjax.server.connections import Connection, bound_unread
from smcjax.server.state import Served

LAST_WRITES = 2.0  # seconds that readers have, at the end, for what is answered already
LAST_STEPS = 4.0  # seconds behind the deadline of a drain after which the process ends, whatever is under way


def check_address(host: str, keys: tuple[str, ...]) -> None:
    """Raises ValueError for an address that others can reach, of a server without keys."""
    if not keys and not is_loopback(host):
        raise ValueError(
            f"--host is {host}, which other machines can reach, and there is no key; add --api-key-file, or use "
            "--host 127.0.0.1."
        )


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there, port 0 being any free one. Raises RuntimeError in one sentence where it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)  # it listens, or two that start together would both have it
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RuntimeError(f"port {port} of {host} is in use; choose another by --port.") from None
        raise RuntimeError(f"--host {host} --port {port} cannot be listened at ({error.strerror}).") from None


def address_of(listening: socket.socket) -> str:
    """The URL of a server behind this socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_config(served: Served) -> uvicorn.Config:
    """How uvicorn is to serve."""
    return uvicorn.Config(
        make_app(served),
        loop="uvloop",
        http=Connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(LAST_WRITES),
    )


class Server(uvicorn.Server):
    """A server that a first SIGTERM or SIGINT drains, and a second one ends at once.

    While it drains it still listens: /health says 503, and so do further requests. What has not ended by the deadline
    is cut.
    """

    def __init__(self, served: Served) -> None:
        super().__init__(uvicorn_config(served))
        self._served = served
        self._deadline = math.inf  # of the drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        if self._served.draining:
            os._exit(128 + sig)
        self._served.draining = True
        seconds = self._served.settings.drain_seconds
        self._deadline = time.monotonic() + seconds
        last = threading.Timer(seconds + LAST_STEPS, _end_anyway)  # even amid a compilation
        last.daemon = True
        last.start()
        print(f"smcjax: draining, for {seconds:g} s at most; a second signal ends at once", file=sys.stderr)

    async def on_tick(self, counter: int) -> bool:
        """Looks after the connections, and says, ten times a second, whether it is over."""
        over = await super().on_tick(counter)
        now, connections = time.monotonic(), cast(set[Connection], self.server_state.connections)
        for connection in list(connections):
            connection.check(now)
        bound_unread(connections)
        if not self._served.draining or not self._served.in_flight:
            return over or self._served.draining
        if now > self._deadline:
            seconds = self._served.settings.drain_seconds
            print(f"smcjax: {self._served.in_flight} requests were cut after {seconds:g} s", file=sys.stderr)
            for connection in [one for one in connections if not one.idle]:
                connection.cut()
            return True
        return over


def _end_anyway() -> None:
    """Ends the process in order, without what cannot be ended."""
    print("smcjax: what still ran on the device or in threads was cut", file=sys.stderr, flush=True)
    os._exit(0)


def keep_what_is_loaded() -> None:
    """Leaves what has been loaded out of collections of garbage from now on: all threads stand still for these."""
    gc.collect()
    gc.freeze()


def serve(served: Served, listening: socket.socket) -> None:
    """Serves until a signal has drained it, and closes the models. Call it in the main thread."""
    signal.set_wakeup_fd(-1)  # `smcjax.cli.process` ends others at a Ctrl-C
    keep_what_is_loaded()
    print(f"smcjax: serving {', '.join(served.models.names)} at {address_of(listening)}/v1", file=sys.stderr)
    print(f"smcjax: open {address_of(listening)} in a browser", file=sys.stderr)
    Server(served).run(sockets=[listening])
    served.close()
    asyncio.run(served.models.close())
