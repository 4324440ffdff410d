"""Chat messages to the text that a model was trained on, by the model's own Jinja template.

Renders as transformers' apply_chat_template does, with the same names in reach: messages, tools, documents,
add_generation_prompt, the special tokens by name, raise_exception, strftime_now. It does not know token ids or HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError

from octavo.engine.template_sandbox import Sandbox, WorkLimitError
from octavo.errors import InvalidRequestError, ModelError

CURE = "give another one with --chat-template FILE"
# What the operations of a template raise by themselves, on messages that it was not written for.
OPERATION_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, AssertionError)
MAX_TIME_FORM = 100
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


class RefusedMessagesError(TemplateError):
    """The template itself says that it does not take these messages."""


class ChatTemplate:
    """One compiled template. Several threads may render at once.

    Raises ModelError when there is no template or it is broken.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if source is None or not source.strip():
            raise ModelError(f"this model has no chat template; {CURE}")
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._now = now
        try:
            self._template = Sandbox().compile(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template is broken at line {error.lineno}: {error.message}; {CURE}") from error
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be used: {error}; {CURE}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt's text.

        messages: with role and content (text, or a list of text parts), and what else the template reads.
        add_generation_prompt: end with the beginning of an answer. `variables` reach the template by name.
        Raises InvalidRequestError for messages the template does not take, ModelError for a template past its bounds.
        """
        taken = OWN_NAMES & variables.keys()
        if taken:
            raise InvalidRequestError(f"the chat template's {min(taken)} cannot be set", param="chat_template_kwargs")
        plain = [self._plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
        names: dict[str, Any] = {
            **self._special_tokens,
            **variables,
            "messages": plain,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }
        try:
            return self._template.render(names)
        except RefusedMessagesError as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except WorkLimitError as error:
            raise ModelError(f"the chat template was stopped: {error}; send fewer messages, or {CURE}") from error
        except SecurityError as error:
            raise ModelError(f"the chat template does what is not allowed: {error}; {CURE}") from error
        except (UndefinedError, TemplateError, *OPERATION_ERRORS) as error:
            what = "it calls itself without end" if isinstance(error, RecursionError) else str(error)
            raise InvalidRequestError(
                f"the chat template cannot take these messages: {what}; check their roles and fields, or {CURE}",
                param="messages",
            ) from error

    def _plain(self, message: Mapping[str, object], at: str) -> dict[str, object]:
        """The message as a plain dict; text parts as they are where the template reads parts, else as one text."""
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{at} has no role; give one such as user", param="messages")
        content = message.get("content")
        if not isinstance(content, list):
            return dict(message)
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InvalidRequestError(
                    f"{at}.content[{index}] is of type {kind!r}; only parts of type 'text', with a text, are known",
                    param="messages",
                )
        return (
            dict(message) if self._template.reads_parts else {**message, "content": "".join(p["text"] for p in content)}
        )

    def _strftime_now(self, form: str) -> str:
        if len(form) > MAX_TIME_FORM or re.search(r"%\W*\d", form):  # a width would make a long text of a short one
            raise WorkLimitError(f"it asks for the time as {form[:MAX_TIME_FORM]!r}; give a short form without widths")
        return self._now().strftime(form)


def _raise_exception(message: str) -> None:
    raise RefusedMessagesError(str(message))
