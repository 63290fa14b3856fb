"""The structure of dflash_jax: no tests of classes outside the registry."""

import ast
import builtins
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
        "isinstance(x, int | DFlashConfig)", "issubclass(kind, DFlashConfig)", "function.__name__ == 'loop'", "'loop' == f.__name__", "type(x) is not MLP",
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
