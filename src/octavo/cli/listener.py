"""Takes the server's port before anything slow is done, so that a port that is taken is told at once.

It does not know what will be served.
"""

from __future__ import annotations

import errno
import socket

from octavo.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the address but does not listen yet: clients are refused until the server is ready.

    Port 0 takes any free one. Raises ConfigError with the cure.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"--host {host} is no address of this machine ({error.strerror}); 127.0.0.1 is this machine alone, 0.0.0.0 "
            f"every interface"
        ) from error
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise ConfigError(_why(host, port, error)) from error
    return taken


def url_of(taken: socket.socket) -> str:
    """Where a client on this machine reaches the server."""
    host, port, *_ = taken.getsockname()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _why(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"--port {port} on {host} is taken by another program; stop it or choose another port (0 takes any free one)"
        case errno.EACCES:
            return f"--port {port} needs privileges that this process has not; choose a port from 1024 to 65535"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is no address of this machine; 127.0.0.1 is this machine alone, 0.0.0.0 every interface"
        case _:
            return f"--host {host} --port {port} cannot be had ({error.strerror}); choose others"
