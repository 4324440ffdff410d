"""Flags are the fields of the configs: none is missing, none drifts, and what they read becomes the config."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from octavo.cli.chat import OF_SEVERAL_ANSWERS, chat
from octavo.cli.flag_table import FLAGS, NOT_FLAGS, parse_layers
from octavo.cli.flags import config_from, flag_fields, flags_of
from octavo.cli.generate import generate
from octavo.cli.main import octavo, run
from octavo.cli.refused_flags import REFUSED
from octavo.cli.serve import serve
from octavo.core.config import SchedulerConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.executor.config import ExecutorConfig
from octavo.server.config import ServerConfig

CONFIGS = (SchedulerConfig, ExecutorConfig, EngineConfig, ServerConfig)
MODEL_CONFIGS = (SchedulerConfig, ExecutorConfig)
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def options_of(command: click.Command) -> dict[str, click.Option]:
    return {
        parameter.name: parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name
    }


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_field_is_a_flag_of_serve_or_says_why_not(config: Any) -> None:
    found = options_of(serve)
    for field in dataclasses.fields(config):
        if field.name in NOT_FLAGS.get(config.__name__, {}):
            assert field.name not in found
            assert NOT_FLAGS[config.__name__][field.name]
        else:
            assert field.name in found, f"{config.__name__}.{field.name} has no flag"
            assert found[field.name].help


@pytest.mark.parametrize("command", [generate, chat], ids=lambda command: command.name)
def test_model_flags_are_the_same_in_every_command_that_loads_a_model(command: click.Command) -> None:
    ours, serves = options_of(command), options_of(serve)
    for config in MODEL_CONFIGS:
        for field in flag_fields(config):
            assert ours[field.name].opts == serves[field.name].opts
            assert ours[field.name].help == serves[field.name].help
            assert ours[field.name].default == serves[field.name].default


def test_no_flag_is_left_over() -> None:
    configs = (*CONFIGS, SamplingParams)
    assert set(FLAGS) == {field.name for config in configs for field in flag_fields(config)}
    by_name = {config.__name__: {field.name for field in dataclasses.fields(config)} for config in configs}
    for name, fields in NOT_FLAGS.items():
        assert set(fields) <= by_name[name]


@pytest.mark.parametrize("command", [generate, chat], ids=lambda command: command.name)
def test_every_sampling_field_is_a_flag_that_is_none_until_it_is_given(command: click.Command) -> None:
    found = options_of(command)
    for field in flag_fields(SamplingParams):
        if command is chat and field.name in OF_SEVERAL_ANSWERS:
            assert field.name not in found
            continue
        assert found[field.name].default is None or found[field.name].multiple, field.name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_defaults_are_the_fields(config: Any) -> None:
    found = options_of(serve)
    for field in flag_fields(config):
        if field.name != "max_model_len":  # the model's own, which no config can know
            assert found[field.name].default == _default(field), field.name


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def test_every_flag_is_in_the_reference() -> None:
    for name, command in octavo.commands.items():
        text = REFERENCE.read_text()
        assert f"## octavo {name}" in text
        own_page = REFERENCE.with_name(f"{name}.md")
        if own_page.exists():
            text += own_page.read_text()
        for option in options_of(command).values():
            for spelling in [] if option.hidden else [*option.opts, *option.secondary_opts]:
                assert f"`{spelling}" in text, f"{spelling} of `octavo {name}` is not in docs/reference/cli.md"


def test_every_flag_in_the_reference_exists() -> None:
    known = {"--help", "--version", "--debug", *REFUSED}
    for command in octavo.commands.values():
        for option in options_of(command).values():
            known |= {*option.opts, *option.secondary_opts}
    for line in REFERENCE.read_text().splitlines():
        for part in line.split("`")[1::2]:
            if part.startswith("--"):
                assert part.split()[0] in known, f"docs/reference/cli.md speaks of {part}, which no command has"


@dataclasses.dataclass(frozen=True, slots=True)
class Small:
    threads: int = 3
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    enable_kv_cache: bool = True
    api_keys: tuple[str, ...] = ()
    host: str = "here"


def parse(*arguments: str) -> tuple[Small | None, str]:
    made: list[Small] = []

    @click.command()
    @flags_of(Small)
    def command(**values: Any) -> None:
        made.append(config_from(Small, values))

    result = CliRunner().invoke(command, list(arguments))
    return (made[0] if made else None), result.output


def test_values_become_the_config() -> None:
    assert parse() == (Small(), "")
    made, _ = parse(
        "--threads", "7", "--kv-cache-memory", "1.5GiB", "--no-enable-prefix-caching", "--no-kv-cache",
        "--api-key", "a", "--api-key", "b", "--host", "there",
    )  # fmt: skip
    assert made == Small(7, 3 << 29, False, False, ("a", "b"), "there")


def test_a_value_that_cannot_be_read_is_named() -> None:
    made, output = parse("--kv-cache-memory", "much")
    assert made is None
    assert "--kv-cache-memory" in output
    assert "'much' is not a number of bytes; write 512MiB" in output


def test_a_config_that_cannot_be_had_names_the_flag() -> None:
    with pytest.raises(Exception, match=r"^--kv-cache-dtype is 'fp8'; it must be one of auto, f32, bf16"):
        config_from(ExecutorConfig, {"kv_cache_dtype": "fp8"})
    with pytest.raises(Exception, match=r"^--block-size is 24; .* 16 "):
        config_from(ExecutorConfig, {"block_size": 24})


def test_layers_are_numbers_and_ranges() -> None:
    assert parse_layers("0-3,7") == (0, 1, 2, 3, 7)
    assert parse_layers("7, 2,2-3") == (2, 3, 7)
    for wrong in ("", "a", "3-1", "-1", "1-", "0,,2", "1000000"):
        with pytest.raises(ValueError, match="write 0-3,7"):
            parse_layers(wrong)
    made: list[ExecutorConfig] = []

    @click.command()
    @flags_of(ExecutorConfig)
    def command(**values: Any) -> None:
        made.append(config_from(ExecutorConfig, values))

    done = CliRunner().invoke(command, ["--kv-cache-dtype-skip-layers", "0-1,28"])
    assert (done.exit_code, made[0].kv_cache_skip_layers) == (0, (0, 1, 28))
    done = CliRunner().invoke(command, ["--kv-cache-dtype-skip-layers", "first"])
    assert done.exit_code == 2
    assert "'first' is no layer and no range of layers" in done.output


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_flags_of_other_engines_are_refused_by_name(
    name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    takes_value, harmless, cure = REFUSED[name]
    assert run([command, "no-such-model", name, *(["2"] if takes_value else [])]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"octavo: {name}")
    assert cure in told
    assert len(told.splitlines()) == 1
    assert harmless is None or harmless in cure or "leave" in cure or "apart" in cure


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype", "'fp8'", "auto", "f32", "bf16"]),
        (["--weights-dtype", "int3"], ["--weights-dtype", "'int3'", "auto", "f32", "bf16"]),
        (["--block-size", "24"], ["--block-size", "24", "16", "256"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "0", "1"]),
        (["--max-model-len", "1"], ["--max-model-len", "1", "2"]),
        (["--threads", "9999"], ["--threads", "9999", "1024"]),
    ],
)
def test_values_out_of_range_are_refused_by_name_before_the_model_is_looked_for(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("serve", "generate", "chat"):
        assert run([command, "no-such-model", *arguments]) == 1
        told = capsys.readouterr().err
        assert told.startswith("octavo: --")
        assert len(told.splitlines()) == 1
        for word in words:
            assert word in told
