"""A talk that goes on is encoded from where it is new, and never from what another tenant has said."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.tokenizer import Tokenizer
from octavo.server.config import ServerConfig
from tests.server.http_case import model_info, run, served

KEYS = ServerConfig(api_keys=("key-one", "key-two"))
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# This one writes the number of messages first, and marks the last one: every turn changes what was there before.
WHOLE_LIST = (
    "<|start|>{{ messages | length }} messages<|end|>"
    "{% for message in messages %}<|start|>{{ message.role }}{{ ' (last)' if loop.last }}\n"
    "{{ message.content }}<|end|>{% endfor %}"
)


def turns(count: int) -> list[dict[str, str]]:
    found = []
    for number in range(count):
        found.append({"role": "user", "content": f"Question {number}: what comes after {number}?"})
        found.append({"role": "assistant", "content": f"After {number} comes {number + 1}."})
    return found


def encoded(tokenizer: Tokenizer) -> int:
    return tokenizer.encoding_counts.encoded_characters


@pytest.mark.parametrize("template", [TEMPLATE, WHOLE_LIST])
def test_each_of_100_turns_encodes_what_is_new(tokenizer: Tokenizer, template: str) -> None:
    compiled = ChatTemplate(template)

    async def work() -> None:
        async with served(tokenizer, info=model_info(chat_template=compiled)) as server:
            for count in range(1, 101):
                talk = [*turns(count), {"role": "user", "content": f"And {count}?"}]
                before = encoded(tokenizer)
                answer = await server.post("/tokenize", {"messages": talk})
                new = encoded(tokenizer) - before
                text = compiled.render(talk)
                assert answer.json()["tokens"] == tokenizer.encode(text, add_special_tokens=False)
                assert new < 250, f"{new} characters of {len(text)} for turn {count}"

    run(work)


def test_a_tenant_and_a_salt_find_their_own_texts_only(tokenizer: Tokenizer) -> None:
    info = model_info(chat_template=ChatTemplate(TEMPLATE))

    async def work() -> None:
        async with served(tokenizer, config=KEYS, info=info) as server:

            async def ask(path: str, key: str, **fields: Any) -> int:
                before = encoded(tokenizer)
                headers = {"authorization": f"Bearer {key}"}
                answer = await server.http.post(path, json={"max_tokens": 1, **fields}, headers=headers)
                assert answer.status_code == 200, answer.text
                return encoded(tokenizer) - before

            chat, plain = "/v1/chat/completions", "/v1/completions"
            talk = [{"role": "user", "content": "A secret of one tenant."}]
            first = await ask(chat, "key-one", messages=talk)
            assert first > 0
            assert await ask(chat, "key-one", messages=talk) == 0
            assert await ask(chat, "key-two", messages=talk) == first
            assert await ask(chat, "key-one", messages=talk, cache_salt="x") == first
            assert await ask(chat, "key-one", messages=talk, cache_salt="x") == 0
            first = await ask(plain, "key-one", prompt="Another secret.")
            assert first > 0
            assert await ask(plain, "key-one", prompt="Another secret.") == 0
            assert await ask(plain, "key-two", prompt="Another secret.") == first

    run(work)


def test_no_text_is_logged(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "octavo")

    async def work() -> None:
        async with served(tokenizer, info=model_info(chat_template=ChatTemplate(TEMPLATE))) as server:
            await server.chat(messages=[{"role": "user", "content": "a hidden word"}], max_tokens=1)
            await server.complete(prompt="a hidden word", max_tokens=1)

    run(work)
    assert "hidden" not in caplog.text
