"""From the `messages` of a chat to the model's own text and token ids. It does not know sampling or answers."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.engine.async_engine import AsyncEngine
from octavo.errors import ModelError
from octavo.server.api_error import invalid
from octavo.server.served_model import ServedModel

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_EMPTY_WHERE_UNSUPPORTED = ("tool_calls", "function_call", "refusal", "audio", "tool_call_id")


async def read_messages(
    messages: list[dict[str, object]] | None, engine: AsyncEngine, model: ServedModel, max_messages: int, namespace: str
) -> list[int]:
    """The prompt's token ids; of a talk that goes on, only what is new is encoded.

    Raises ApiError 400 naming the message and the part of it that is wrong.
    """
    template = model.chat_template
    if template is None:
        why = model.chat_error or "this model has no chat template; start the server with --chat-template FILE"
        raise invalid(f"{why}, or use /v1/completions", "messages")
    if not messages:
        raise invalid("messages is missing or empty; send at least one message", "messages", "missing_field")
    if len(messages) > max_messages:
        raise invalid(f"messages has {len(messages)} messages; this server takes at most {max_messages}", "messages")
    plain = [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    num_characters = sum(len(message["content"]) for message in plain)

    def encode() -> list[int]:
        try:
            text = template.render(plain)
        except ModelError as error:  # the template cannot take them: too much text for its bounds, or it is broken
            raise invalid(str(error), "messages") from error
        return engine.tokenizer.encode(text, add_special_tokens=False, namespace=namespace)

    token_ids = await engine.with_text(num_characters, encode)
    if not token_ids:
        raise invalid("messages give an empty prompt: the chat template wrote nothing", "messages")
    return token_ids


def _plain_message(message: Mapping[str, object], at: str) -> dict[str, str]:
    role = message.get("role")
    if role in ("tool", "function"):
        raise invalid(
            f"{at}.role {role!r} is not supported by this version of octavo: tools are not", at, "unsupported_parameter"
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{at}.role must be one of {', '.join(_ROLES)}", at)
    for field, value in message.items():
        if field in ("role", "content", "name"):
            continue
        if field not in _EMPTY_WHERE_UNSUPPORTED:
            raise invalid(f"{at} has the unknown field {field[:100]!r}", at, "unknown_parameter")
        if value is not None and value != []:
            reason = "is not supported by this version of octavo; leave it out"
            raise invalid(f"{at}.{field} {reason}", at, "unsupported_parameter")
    plain = {"role": _ROLES[role], "content": _text(message.get("content"), f"{at}.content", at)}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise invalid(f"{at}.name must be a string", at)
        plain["name"] = name
    return plain


def _text(content: object, at: str, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"{at} must be a string, or a list of parts of type text", param)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind[:100] if isinstance(kind, str) else kind
            raise invalid(f"{at}[{index}] has type {shown!r}; only text is supported", param, "unsupported_parameter")
        text = part.get("text")
        if not isinstance(text, str) or len(part) != 2:
            raise invalid(f"{at}[{index}] must have exactly the fields type and text, and text must be a string", param)
        texts.append(text)
    return "".join(texts)
