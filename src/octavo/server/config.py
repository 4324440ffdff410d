"""What the HTTP server can be told. It does not know the engine's or the model's options."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """With `api_keys` every path but /health asks for one of them, and each key is a tenant with a cache of its own.

    `shutdown_timeout_s` is how long running requests may take to end once the server is told to stop, `body_timeout_s`
    how long the body of a request may take to arrive. The maxima bound what one HTTP request may bring.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    shutdown_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    max_body_bytes: int = 16 * MEBIBYTE
    max_prompts: int = 256
    max_branches: int = 256
    max_messages: int = 4096
    max_json_depth: int = 64
    access_log: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 (any free port) and 65535")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError(
                "an api key is empty or has a space or a character outside printable ASCII; give each key one word"
            )
        if self.shutdown_timeout_s < 0:
            raise ConfigError(f"shutdown_timeout_s is {self.shutdown_timeout_s}; it must be at least 0 seconds")
        if not self.body_timeout_s > 0:
            raise ConfigError(f"body_timeout_s is {self.body_timeout_s}; it must be more than 0 seconds")
        for name in ("max_body_bytes", "max_prompts", "max_branches", "max_messages", "max_json_depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
