"""The structure of dflash_jax: no tests of classes outside the registry, no import cycle between files or folders."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "dflash_jax", ROOT / "convert" / "dflash_convert"
REGISTRY = ROOT / "dflash_jax" / "models" / "registry.py"
# Classes of model code: what a module, a layer or an attention is must be asked of traits, of a plan or of its own attributes.
MODULES = ("Config", "Attend", "Attention", "Layer", "MLP", "MoE", "Decoder", "DFlash", "LatentRows")


def class_tests(source: str) -> list[str]:
    """Comparisons of types and of functions' names, and `isinstance` of configurations and of model code.

    Types of JSON and of other plain values may be compared: `type(value) is int`.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(map(_is_type, (node.left, *node.comparators))):
            found.append(ast.unparse(node))
        sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
        if any(map(_is_name, sides)) and not any(map(_is_error, sides)):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            names = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
            names |= {one.attr for one in ast.walk(node.args[1]) if isinstance(one, ast.Attribute)}
            found += [ast.unparse(node)] if any(name.endswith(MODULES) for name in names) else []
        if isinstance(node, ast.Compare) and _is_type(node.left) and all(map(_is_plain, node.comparators)):
            found.remove(ast.unparse(node))
    return found


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "type" and len(node.args) == 1


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__")


def _is_error(node: ast.expr) -> bool:
    """The name of an exception that cannot be imported."""
    return isinstance(node, ast.Constant) and str(node.value).endswith(("Exception", "Error"))


def _is_plain(node: ast.expr) -> bool:
    names = [node] if isinstance(node, ast.Name) else getattr(node, "elts", [])
    return bool(names) and all(isinstance(one, ast.Name) and hasattr(builtins, one.id) for one in names)


def test_the_check_sees_every_form():
    tests = (
        "type(layer) is MLP", "type(a) in (MLP, MoE)", "type(a) == type(b)", "isinstance(config, models.Qwen3Config)",
        "isinstance(x, int | DFlashConfig)", "issubclass(kind, DFlashConfig)", "function.__name__ == 'loop'",
        "'loop' == f.__name__", "type(x) is not MLP",
    )  # fmt: skip
    assert all(class_tests(one) for one in tests)
    plain = (
        "type(x) is int",
        "type(x) in (tuple, list)",
        "isinstance(x, str)",
        "__name__ == '__main__'",
        "x.name == 'a'",
    )
    assert not any(class_tests(one) for one in plain)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_classes_are_told_apart_by_the_registry_alone(package):
    files = [path for path in package.rglob("*.py") if path != REGISTRY]
    assert files
    found = {str(path.relative_to(ROOT)): tests for path in files if (tests := class_tests(path.read_text()))}
    assert not found


def test_the_registry_is_needed():
    assert class_tests(REGISTRY.read_text()) == ["type(config) is family.config_class"]


def imports(source: str, modules: set[str]) -> set[str]:
    """Modules among `modules` that a file imports when it runs, inside functions too, and not for type checkers alone."""
    found = set[str]()
    for node in _run(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules | ({node.module} if names - modules else set())
    return found & modules


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but for what stands under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from _run(child)


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of nodes of which each reaches every other one."""

    def reached(start: str) -> set[str]:
        seen, todo = set[str](), [start]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    reach = {node: reached(node) for node in graph}
    groups = {frozenset(one for one in reach[node] if node in reach.get(one, ())) for node in graph}
    return sorted((set(group) for group in groups if group), key=sorted)


def files_of(package: Path) -> dict[str, Path]:
    """Paths by module names, of one package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_cycles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert cycles(graph) == [{"b", "c"}, {"e"}]
    modules = {"p", "p.a", "p.b.c", "p.d"}
    source = "from p import a\nfrom p.b import c\nif TYPE_CHECKING:\n    from p.d import X\ndef f():\n    import p\n"
    assert imports(source, modules) == {"p.a", "p.b.c", "p"}
    assert imports("from p import name, a", modules) == {"p", "p.a"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_files_and_folders_import_in_one_direction(package):
    """Folders are those directly below a package. A folder's `__init__` stands for it, and may import what lies in it."""
    files = files_of(package)
    graph = {name: imports(path.read_text(), set(files)) - {name} for name, path in files.items()}
    inner = {name: {one for one in to if not name.startswith(f"{one}.")} for name, to in graph.items()}
    assert cycles(inner) == []
    folders: dict[str, set[str]] = {}
    for name, to in graph.items():
        folders.setdefault(_folder(name), set()).update(_folder(one) for one in to)
    apart = {name: to - {name, package.name} for name, to in folders.items() if name != package.name}
    assert cycles(apart) == []


def _folder(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_the_top_of_the_package_is_seen_at_once():
    """Files and folders of `dflash_jax`, without `py.typed`, files that Python looks for by name, and what it leaves there."""
    top = {path.name for path in PACKAGES[0].iterdir()} - {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    assert len(top) <= 24, f"find a room for one of them: {', '.join(sorted(top))}"
