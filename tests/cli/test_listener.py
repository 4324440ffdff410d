"""The port is taken early, and why it cannot be had is told with the cure."""

from __future__ import annotations

import socket

import pytest

from octavo.cli.listener import bind, url_of
from octavo.errors import ConfigError


def test_any_free_port_is_owned_but_refuses_until_it_listens() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        taken.listen()
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) == 0


def test_a_taken_port_is_named_with_the_cure() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 is taken .* choose another port"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1 is no address of this machine"):
        bind("192.0.2.1", 0)


def test_every_interface_is_reached_on_this_machine() -> None:
    with bind("0.0.0.0", 0) as taken:
        assert url_of(taken) == f"http://127.0.0.1:{taken.getsockname()[1]}"
