"""The Jinja environment for templates that nobody has vetted: Jinja's own sandbox, and bounds on work and memory.

A chat template comes with a model file, so it may be written to harm. Jinja's sandbox keeps it away from Python; this
file keeps it from running or growing without end: loops, calls and filters cost steps, text that is made costs
characters, and what makes large text from small numbers is left out. It knows no messages and no models.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_STEPS = 500_000
STEPS_OF_CALL = 4  # a call takes about as long as four turns of a loop
MAX_TEXT_CHARACTERS = 1 << 24  # of one text, the rendered prompt among them
MAX_TOTAL_CHARACTERS = 1 << 28  # of all text made on the way
MAX_RANGE = 10_000
MAX_JSON_INDENT = 16

# Filters that make much from little (widths and counts), or tell about the process.
LEFT_OUT_FILTERS = ("batch", "center", "filesizeformat", "pprint", "random", "slice", "wordwrap", "xmlattr")
LEFT_OUT_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "translate", "zfill"})
WIDTH_IN_FORM = re.compile(r"%(\([^)]*\))?[-+ #.]*[0-9*]")
GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class WorkLimitError(TemplateError):
    """The template did more work, or made more text, than any chat needs."""


class Budget:
    """What one rendering may still use. Nothing of it has a name that a template may use."""

    __slots__ = ("_characters", "_steps")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_TOTAL_CHARACTERS

    def _step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0:
            raise WorkLimitError(f"it takes more than {MAX_STEPS} steps")

    def _make(self, characters: int) -> None:
        self._characters -= characters
        if characters > MAX_TEXT_CHARACTERS or self._characters < 0:
            raise WorkLimitError(
                f"it makes a text of more than {MAX_TEXT_CHARACTERS} characters, or more than "
                f"{MAX_TOTAL_CHARACTERS} in all"
            )


class Sandbox:
    """Compiles templates and renders them within the bounds. Several threads may render at once."""

    def __init__(self) -> None:
        self._running = threading.local()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._bound_text(environment)
        self._bound_filters(environment)
        self._bound_calls(environment)
        self.environment = environment

    def compile(self, source: str) -> CompiledTemplate:
        """Raises TemplateError: a syntax error with its line, or WorkLimitError for a size without sense."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise WorkLimitError(f"it has {len(source)} characters, at most {MAX_TEMPLATE_CHARACTERS} are allowed")
        # The tag marks what a model said, for training; the text is the same without it.
        source = GENERATION_TAG.sub(lambda tag: f"{{%{tag[1]} {'endwith' if tag[2] else 'with'} {tag[3]}%}}", source)
        tree = self.environment.parse(source)
        reads_parts = any(_names_content(loop.iter) for loop in tree.find_all(nodes.For))
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "bounded_loop", [], [], None, None, lineno=loop.lineno)
        tree = _replace_concat(tree)
        template = self.environment.from_string(tree)
        return CompiledTemplate(template.generate, self._running, reads_parts)

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._running.budget
        return budget

    def _bound_text(self, environment: ImmutableSandboxedEnvironment) -> None:
        """Joining, adding, repeating: each pays for what it makes before it makes it."""
        plain = dict(environment.binop_table)

        def join(parts: Iterable[str]) -> str:
            parts = list(parts)
            self._budget._make(sum(map(len, parts)))
            return "".join(parts)

        def add(left: Any, right: Any) -> Any:
            self._budget._make(_size(left) + _size(right))
            return plain["+"](left, right)

        def multiply(left: Any, right: Any) -> Any:
            for text, count in ((left, right), (right, left)):
                if isinstance(count, int) and _size(text):
                    self._budget._make(_size(text) * max(count, 0))
            return _bounded_number("*", plain["*"], left, right)

        def power(left: Any, right: Any) -> Any:
            if isinstance(right, int | float) and abs(right) > 64:
                raise WorkLimitError(f"it takes a power of {right}; at most 64 is allowed")
            return _bounded_number("**", plain["**"], left, right)

        def modulo(left: Any, right: Any) -> Any:
            return self._percent(left, right) if isinstance(left, str) else plain["%"](left, right)

        environment.concat = join  # type: ignore[method-assign]
        environment.binop_table.update({"+": add, "*": multiply, "**": power, "%": modulo})
        environment.intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _bound_filters(self, environment: ImmutableSandboxedEnvironment) -> None:
        for name in LEFT_OUT_FILTERS:
            environment.filters.pop(name, None)
        for name, function in list(environment.filters.items()):
            environment.filters[name] = self._paid(function)
        environment.filters["tojson"] = self._paid(to_json)
        environment.filters["indent"] = self._indent
        environment.filters["format"] = self._format
        environment.filters["join"] = self._join
        environment.filters["replace"] = self._replace
        environment.filters["bounded_loop"] = self._loop
        environment.filters["bounded_concat"] = self._concat

    def _bound_calls(self, environment: ImmutableSandboxedEnvironment) -> None:
        call, is_safe, wrap_format = environment.call, environment.is_safe_attribute, environment.wrap_str_format

        def bounded_call(context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
            self._budget._step(STEPS_OF_CALL)
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            if isinstance(owner, str) and name == "join":
                return self._join(args[0], owner) if len(args) == 1 else call(context, function, *args, **named)
            if isinstance(owner, str) and name == "replace":
                return self._replace(owner, *args, **named)
            if isinstance(owner, str | list | tuple | dict):
                self._budget._make(_size(owner))
            return call(context, function, *args, **named)

        def bounded_is_safe(value: Any, attribute: str, found: Any) -> bool:
            if isinstance(value, str) and attribute in LEFT_OUT_METHODS:
                return False
            return is_safe(value, attribute, found)

        def bounded_format(method: Any) -> Any:
            wrapped = wrap_format(method)
            if wrapped is None:
                return None

            @functools.wraps(wrapped)
            def paid(*args: Any, **named: Any) -> str:
                if ":" in method.__self__:
                    raise SecurityError("format() with a width or a form is not allowed")
                self._pay_for_form(method.__self__, method.__self__.count("{"), (*args, *named.values()))
                return wrapped(*args, **named)

            return paid

        environment.wrap_str_format = bounded_format  # type: ignore[method-assign, assignment]
        environment.call = bounded_call  # type: ignore[method-assign]
        environment.is_safe_attribute = bounded_is_safe  # type: ignore[method-assign, assignment]
        environment.globals.pop("lipsum", None)
        environment.globals["range"] = self._range

    def _paid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for the length of what it reads. `wraps` keeps Jinja's marks on the function."""

        @functools.wraps(function)
        def paid(*args: Any, **named: Any) -> Any:
            self._budget._step(1 + sum(len(arg) for arg in args if isinstance(arg, list | tuple | dict | range)))
            self._budget._make(sum(len(arg) for arg in args if isinstance(arg, str)))
            return function(*args, **named)

        return paid

    def _loop(self, values: Iterable[Any]) -> Iterator[Any]:
        if isinstance(values, str | list | tuple | dict | range):
            self._budget._step(len(values))
            return values  # type: ignore[return-value]  # keeps what Jinja's loop can say about its length
        return self._stepped(values)

    def _stepped(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._budget._step()
            yield value

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        if len(numbers) > MAX_RANGE:
            raise WorkLimitError(f"it asks for a range of {len(numbers)} numbers; at most {MAX_RANGE} are allowed")
        self._budget._step(len(numbers))
        return numbers

    def _join(self, values: Iterable[Any], d: Any = "", attribute: str | None = None) -> str:
        separator, parts = str(d), list[str]()
        for value in values:
            self._budget._step()
            if attribute is not None:
                value = self.environment.getitem(value, attribute)
            part = str(value)
            self._budget._make(len(part) + len(separator))
            parts.append(part)
        self._budget._make(sum(map(len, parts)) + len(separator) * max(len(parts) - 1, 0))
        return separator.join(parts)

    def _replace(self, text: Any, old: str, new: str, count: int | None = -1) -> str:
        whole, old, new = str(text), str(old), str(new)
        self._budget._make(len(whole))
        found = whole.count(old)
        limit = found if count is None or count < 0 else min(count, found)
        self._budget._make(len(whole) + limit * max(len(new) - len(old), 0))
        return whole.replace(old, new, limit)

    def _indent(self, text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
        space = width if isinstance(width, str) else " " * min(int(width), MAX_TEXT_CHARACTERS)
        self._budget._make(len(str(text)) + (1 + str(text).count("\n")) * len(space))
        return do_indent(str(text), space, first, blank)

    def _percent(self, form: str, values: Any) -> str:
        if WIDTH_IN_FORM.search(form):
            raise SecurityError("formatting with a width is not allowed")
        self._pay_for_form(form, form.count("%"), values if isinstance(values, tuple) else (values,))
        return str(form % values)

    def _format(self, form: Any, *values: Any, **named: Any) -> str:
        return self._percent(str(form), named or values)

    def _pay_for_form(self, form: str, num_places: int, values: tuple[Any, ...]) -> None:
        longest = max((len(str(value)) for value in values), default=0)
        self._budget._make(len(form) + num_places * longest)

    def _concat(self, *values: Any) -> str:
        parts = [str(value) for value in values]
        self._budget._make(sum(map(len, parts)))
        return "".join(parts)


class CompiledTemplate:
    """A template that is ready to be rendered; `reads_parts`: it takes content as a list of parts by itself."""

    __slots__ = ("_generate", "_running", "reads_parts")

    def __init__(self, generate: Callable[..., Iterator[str]], running: threading.local, reads_parts: bool) -> None:
        self._generate = generate
        self._running = running
        self.reads_parts = reads_parts

    def render(self, variables: dict[str, Any]) -> str:
        """Raises what Jinja raises, WorkLimitError past a bound, and whatever the template's own operations raise."""
        self._running.budget = budget = Budget()
        parts: list[str] = []
        length = 0
        for part in self._generate(variables):
            budget._step()
            length += len(part)
            if length > MAX_TEXT_CHARACTERS:
                raise WorkLimitError(f"it writes more than {MAX_TEXT_CHARACTERS} characters")
            parts.append(part)
        return "".join(parts)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: no HTML escapes, letters of every language as they are."""
    if indent is not None and (not isinstance(indent, int) or not 0 <= indent <= MAX_JSON_INDENT):
        raise WorkLimitError(f"it asks tojson for an indent of {indent!r}; 0 to {MAX_JSON_INDENT} is allowed")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _bounded_number(sign: str, operate: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    for value in (left, right):
        if isinstance(value, int) and value.bit_length() > 1024:
            raise WorkLimitError(f"it computes {sign} with a number of {value.bit_length()} bits")
    return operate(left, right)


def _names_content(node: nodes.Node) -> bool:
    """Whether a loop runs over a message's content: `message.content`, `message['content']` or `content`."""
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _replace_concat(node: Any) -> Any:
    """`a ~ b` is compiled past every hook, so it becomes a filter that pays."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _replace_concat(value))
        elif isinstance(value, list):
            setattr(node, field, [_replace_concat(v) if isinstance(v, nodes.Node) else v for v in value])
    if isinstance(node, nodes.Concat):
        first, *rest = node.nodes
        return nodes.Filter(
            first, "bounded_concat", rest, [], None, None, lineno=node.lineno, environment=node.environment
        )
    return node
