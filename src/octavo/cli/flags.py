"""Makes command-line flags out of the fields of config dataclasses, so that none drifts, and configs out of the values.

A field `max_num_seqs: int = 64` becomes `--max-num-seqs INTEGER`, with its default. What cannot be told from a field,
its help text and special spellings, is in `flag_table`. It does not know which config a command needs.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import click

from octavo.cli.flag_table import FLAGS, NOT_FLAGS, OF_THE_FIELD, Flag
from octavo.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound="DataclassInstance")


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def flag_fields(config: type[DataclassInstance]) -> list[dataclasses.Field[Any]]:
    """The fields that are flags, in order."""
    return [field for field in dataclasses.fields(config) if field.name not in NOT_FLAGS.get(config.__name__, {})]


def flags_of(*configs: type[DataclassInstance], unset: bool = False, without: Collection[str] = ()) -> Callable[[F], F]:
    """Decorator of a command: one option for each field of the configs, `without` those that it has no use for.

    With `unset` a flag that is not given is None: then something else may decide before the field's default does.
    """
    made = [
        _option(field, get_type_hints(config)[field.name], unset)
        for config in configs
        for field in flag_fields(config)
        if field.name not in without
    ]

    def decorate(function: F) -> F:
        for option in reversed(made):
            function = option(function)
        return function

    return decorate


def config_from(config: type[C], values: Mapping[str, Any], **more: Any) -> C:
    """The config with the values of its flags; what is not in `values`, or None, keeps its default. `more` goes first.

    An error that names a field is raised again with the flag's spelling, which is what the user wrote.
    """
    names = {field.name for field in dataclasses.fields(config)}
    given = {name: value for name, value in values.items() if name in names and value is not None}
    try:
        return config(**{**given, **more})
    except (ConfigError, InvalidRequestError) as error:
        first, space, rest = str(error).partition(" ")
        if first in names:
            raise type(error)(f"{_spelling(first)}{space}{rest}") from error
        raise


def _spelling(field_name: str) -> str:
    flag = FLAGS.get(field_name, Flag(help=""))
    return flag.spelling or flag_name(field_name)


def _option(field: dataclasses.Field[Any], hint: Any, unset: bool) -> Callable[[F], F]:
    flag = FLAGS[field.name]
    default = _default(field) if flag.default is OF_THE_FIELD else flag.default
    help_text, shown = flag.help, default not in (None, (), "")
    if unset:
        if shown and default is not False:
            advice = "the model's own advice, else " if flag.is_advised else ""
            help_text = f"{flag.help} [default: {advice}{default}]"
        default, shown = None, False
    kind, multiple = _kind(hint)
    multiple = multiple and not flag.is_one_text
    spelling = flag.spelling or flag_name(field.name)
    settings: dict[str, Any] = {"help": help_text, "default": default, "show_default": shown}
    if kind is bool:
        if "/" not in spelling and default is True:
            spelling = f"{spelling}/--no-{spelling[2:]}"
        return click.option(spelling, field.name, is_flag=True, **settings)
    read = _reader(flag.parse) if flag.parse else kind
    return click.option(spelling, field.name, type=read, metavar=flag.metavar, multiple=multiple, **settings)


def bytes_option(spelling: str, *, help: str, default: str | None = None) -> Callable[[F], F]:
    """An option of a command's own that is a number of bytes with a unit."""
    from octavo.cli.units import parse_bytes

    return click.option(spelling, type=_reader(parse_bytes), metavar="BYTES", default=default, help=help)


def _default(field: dataclasses.Field[Any]) -> object:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    assert default is not dataclasses.MISSING, f"{field.name} has no default: it cannot be a flag"
    return default


def _kind(hint: Any) -> tuple[type, bool]:
    """The type of one value, and whether the flag may be repeated."""
    if isinstance(hint, types.UnionType):
        parts = [part for part in get_args(hint) if part is not types.NoneType]
        hint = parts[0] if len(parts) == 1 else object  # of several types: the flag's own reader tells them apart
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True  # tuple[str, ...]
    return hint, False


def _reader(parse: Callable[[str], object]) -> Callable[[object], object]:
    def read(value: object) -> object:
        if not isinstance(value, str):
            return value  # a default, in the field's own type
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read
