"""The arrows between rooms, and the form of files. A newcomer reads this file to learn who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "src"
PACKAGE = SOURCES / "octavo"

# room -> (rooms of ours that it may import, third-party packages that it may import)
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "core": (set(), set()),
    "testing": ({"core"}, set()),
    "kv_formats": ({"core"}, {"numpy"}),
    "kernels": ({"kv_formats", "core"}, {"numpy"}),
    "models": ({"kernels", "kv_formats", "core"}, {"numpy", "gguf", "huggingface_hub"}),
    "executor": ({"models", "kernels", "kv_formats", "core"}, {"numpy", "safetensors"}),
    "certify": ({"executor", "models", "kernels", "kv_formats", "core"}, {"numpy"}),
    "planner": ({"replay", "models", "kv_formats", "core"}, set()),
    "replay": ({"kv_formats", "core"}, {"numpy"}),
    "engine": ({"core"}, {"tokenizers", "jinja2"}),
    "server": ({"engine", "core"}, {"starlette", "uvicorn", "uvloop", "msgspec", "prometheus_client"}),
}
WIRING = {"cli", "llm.py"}  # the only places that join rooms
SHARED = {"errors"}  # every room may raise
MAX_LINES = {"core": 250}
MAX_LINES_ELSEWHERE = 400
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 6

# A ratchet: what stands here may shrink, never grow. file or file:function -> lines (or parameters) today.
LONGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS: dict[str, int] = {}
MORE_PARAMETERS: dict[str, int] = {}


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_it_may(room: str) -> None:
    ours, theirs = MAY_IMPORT[room]
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imports_of(path):
            top, *rest = name.split(".")
            if top == "octavo":
                assert rest, f"{name_of(path)} imports the whole package"
                assert rest[0] in ours | SHARED | {room}, f"{name_of(path)}: {name}"
            else:
                assert top in sys.stdlib_module_names or top in theirs, f"{name_of(path)}: {name}"


def test_every_room_has_its_arrows() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms == set(MAY_IMPORT) | {"cli"}


def test_inits_are_empty() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            assert path.read_text() == "", f"{name_of(path)} must be empty"


def test_core_is_pure() -> None:
    """No clock, thread, file, environment or log in core."""
    forbidden = {
        "time",
        "threading",
        "os",
        "io",
        "logging",
        "pathlib",
        "asyncio",
        "random",
        "socket",
        "subprocess",
        "datetime",
    }
    for path in (PACKAGE / "core").rglob("*.py"):
        found = {name.split(".")[0] for name in imports_of(path)} & forbidden
        assert not found, f"{name_of(path)} imports {found}"


def test_core_loads_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); import octavo.core.engine_core; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['octavo']"


def functions_of(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name_of(path)}:{node.name}", node


def test_files_are_small() -> None:
    for path in python_files():
        name, lines = name_of(path), len(path.read_text().splitlines())
        most = max(MAX_LINES.get(name.split("/")[0], MAX_LINES_ELSEWHERE), LONGER_FILES.get(name, 0))
        assert lines <= most, f"{name} has {lines} lines, at most {most}: split it by noun"


def test_native_files_are_small() -> None:
    for path in sorted((PACKAGE / "kernels" / "csrc").iterdir()):
        name, lines = name_of(path), len(path.read_text().splitlines())
        most = max(MAX_LINES_ELSEWHERE, LONGER_FILES.get(name, 0))
        assert lines <= most, f"{name} has {lines} lines, at most {most}"


def test_functions_are_small() -> None:
    for path in python_files():
        for name, node in functions_of(path):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            most = max(MAX_FUNCTION_LINES, LONGER_FUNCTIONS.get(name, 0))
            assert lines <= most, f"{name} has {lines} lines, at most {most}"


def test_functions_take_few_parameters() -> None:
    for path in python_files():
        if name_of(path).startswith("cli/"):
            continue  # a command's parameters are its flags
        for name, node in functions_of(path):
            positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
            most = max(MAX_PARAMETERS, MORE_PARAMETERS.get(name, 0))
            assert len(positional) <= most, f"{name} takes {len(positional)} positional parameters, at most {most}"


def test_only_protocols_and_exceptions_are_inherited_from() -> None:
    allowed = {"Protocol", "Exception", "Enum", "IntEnum", "StrEnum", "NamedTuple", "TypedDict", "Struct", "ABC"}
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "?")
                assert name in allowed or name.endswith("Error"), f"{name_of(path)}: class {node.name}({name})"


def test_no_machine_path_and_no_registry_host() -> None:
    """Nothing of the machine that the project was written on, and no package registry's host, is in the tree."""
    words = [
        "/" + "root/",
        "/" + "work/",
        "pypi" + ".org",
        "files.python" + "hosted",
        "registry." + "npmjs",
        "deb." + "debian.org",
    ]
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = REPOSITORY / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".txt", ".cpp", ".hpp", ".json", ".yml", ""}:
            text = path.read_text(errors="replace")
            for word in words:
                assert word not in text, f"{name} holds {word!r}"


def test_the_environment_is_read_in_cli_only() -> None:
    """Elsewhere it may be handed on to another program whole, as `dict(os.environ)`, but nothing is looked up in it."""
    for path in python_files():
        if name_of(path).startswith("cli/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found = ast.unparse(node)
                assert found not in {"os.getenv", "os.environ.get"}, f"{name_of(path)}:{node.lineno} reads {found}"
            if isinstance(node, ast.Subscript):
                assert ast.unparse(node.value) != "os.environ", f"{name_of(path)}:{node.lineno} reads os.environ"


def test_no_pickle() -> None:
    for path in python_files():
        tops = {name.split(".")[0] for name in imports_of(path)}
        assert not tops & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, name_of(path)
