"""docs/reference/http-api.md names every endpoint, field, error code and metric that there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from octavo.engine.tokenizer import Tokenizer
from octavo.server import app
from octavo.server.fields import ChatFields, CommonFields, CompletionFields
from tests.server.http_case import run, served

REPOSITORY = Path(__file__).parents[2]
REFERENCE = (REPOSITORY / "docs" / "reference" / "http-api.md").read_text()
SERVER = REPOSITORY / "src" / "octavo" / "server"


def test_every_endpoint_is_there() -> None:
    for method, path, _ in app._ROUTES:
        assert f"`{method} {path.replace(':path', '')}`" in REFERENCE


@pytest.mark.parametrize("fields", [CommonFields, ChatFields, CompletionFields])
def test_every_field_is_there(fields: type) -> None:
    for field in dataclasses.fields(fields):
        assert f"`{field.name}`" in REFERENCE


def test_every_error_code_is_there() -> None:
    source = "".join(path.read_text() for path in SERVER.glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', source)) | set(re.findall(r', "(\w+_(?:field|parameter|json))"', source))
    assert len(codes) >= 10
    for code in codes:
        assert f"`{code}`" in REFERENCE, code


def test_every_metric_of_a_known_name_is_there(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            text = (await server.http.get("/metrics")).text
            names = re.findall(r"^# TYPE (vllm:\w+) ", text, re.MULTILINE)
            assert len(names) >= 13
            for name in names:
                assert f"`{name}`" in REFERENCE, name

    run(work)
