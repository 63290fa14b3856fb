"""Rules of the house for `dflash_kernels` that its imports show, those inside functions included.

1. Only `mosaic_gpu/` imports internals of JAX and of Mosaic, or MLIR: a new JAX release then means one folder to port. In the other
   packages only `dflash_jax/compile` may patch JAX or rebuild its executables.
2. No files and no folders import each other in a circle.
3. No op imports another op's kernel: what kernels share lies in `mosaic_gpu/`, which itself imports nothing but `core/`.
4. No kernel asks whether Pallas' interpreter runs it: functions of `mosaic_gpu/` have their interpreted form inside. One file plans
   for it.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "dflash_kernels"
INTERNALS = ("jax._src", "jaxlib.mlir", "jax.experimental.mosaic")
PATCHES = {"dflash_jax/compile/jax_patches.py"}
PLANS_FOR_INTERPRETER = {"attention/paged/launch"}  # which has neither clusters nor hints of copies
KERNEL_FILES = ("mosaic_gpu", "triton")  # what the names of an op's kernel files begin with


def names_in(source: str) -> set[str]:
    """Dotted names that a file imports, `from a import b` as `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def modules() -> dict[str, Path]:
    """Files of `dflash_kernels` by dotted name, without its public face."""
    found = {}
    for path in sorted(KERNELS.rglob("*.py")):
        parts = path.relative_to(KERNELS.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found["dflash_kernels"]
    return found


def arrows() -> dict[str, set[str]]:
    """What each file of `dflash_kernels` imports of the others."""
    known = modules()
    found = {}
    for name, path in known.items():
        imported = names_in(path.read_text())
        found[name] = {full if full in known else full.rpartition(".")[0] for full in imported} & known.keys() - {name}
    return found


def folder_of(name: str) -> str:
    return name.rpartition(".")[0]


def short(name: str) -> str:
    """A file of `dflash_kernels` as the lists have it."""
    return name.removeprefix("dflash_kernels.").replace(".", "/")


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of names each of which leads to all others of its group."""

    def reached(start: str) -> set[str]:
        found, left = set(), list(graph.get(start, ()))
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += graph.get(name, ())
        return found

    ways = {name: reached(name) for name in graph}
    groups = {frozenset({name, *(other for other in ways[name] if name in ways.get(other, ()))}) for name in graph}
    return [set(group) for group in groups if len(group) > 1 or next(iter(group)) in ways[next(iter(group))]]


def test_circles_are_found():
    found = circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}})
    assert sorted(map(sorted, found)) == [["b", "c"], ["d"]]


def test_imports_are_seen():
    source = "import a.b\nfrom c import d\ndef f():\n    from e.f import g\n"
    assert names_in(source) == {"a.b", "c.d", "e.f.g"}
    assert inside("jax._src.core", INTERNALS)
    assert not inside("jax.experimental.pallas.mosaic_gpu", INTERNALS)


def test_only_the_toolkit_touches_internals():
    found = set()
    for package in ("kernels", "dflash_jax", "convert"):
        for path in (ROOT / package).rglob("*.py"):
            file = str(path.relative_to(ROOT))
            touches = any(inside(name, INTERNALS) for name in names_in(path.read_text()))
            if touches and path.parent != KERNELS / "mosaic_gpu" and file not in PATCHES:
                found.add(file)
    assert not found


def test_no_files_import_each_other():
    found = [sorted(map(short, group)) for group in circles(arrows())]
    assert not found


def test_no_folders_import_each_other():
    graph: dict[str, set[str]] = {}
    for name, imported in arrows().items():
        graph.setdefault(folder_of(name), set()).update({folder_of(other) for other in imported} - {folder_of(name)})
    found = [sorted(map(short, group)) for group in circles(graph)]
    assert not found


def test_no_op_imports_the_kernel_of_another():
    known, found = modules(), set()
    ops = {folder_of(name) for name in known if name.endswith(".api")}
    for name, imported in arrows().items():
        for other in imported:
            elsewhere = folder_of(other) in ops and folder_of(other) != folder_of(name)
            if elsewhere and other.rpartition(".")[2].startswith(KERNEL_FILES):
                found.add(short(name))
    assert not found


def test_the_toolkit_knows_no_op():
    allowed = ("dflash_kernels.core", "dflash_kernels.mosaic_gpu")
    for name, imported in arrows().items():
        if inside(name, ("dflash_kernels.mosaic_gpu",)):
            assert not [other for other in imported if not inside(other, allowed)], name
        if inside(name, ("dflash_kernels.core",)):
            assert not [other for other in imported if not inside(other, ("dflash_kernels.core",))], name


def asks_for_interpreter(source: str) -> bool:
    """Whether code depends on `interpret`, as a call passes it on, or on `interpreting()`."""
    tree = ast.parse(source)
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.BoolOp)]
    tests += [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While)]
    named = {name.id for test in tests for name in ast.walk(test) if isinstance(name, ast.Name)}
    called = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}
    return "interpret" in named or "interpreting" in called


def test_the_check_sees_every_way_to_ask_for_the_interpreter():
    for source in (
        "if interpret: a()",
        "b = 1 if interpret is None else 2",
        "c = not interpreting()",
        "d = interpret or e",
    ):
        assert asks_for_interpreter(source)
    assert not asks_for_interpreter("def f(interpret=None):\n    return kernel(body, interpret=interpret)")


def test_no_kernel_asks_for_the_interpreter():
    outside = {
        short(name): path for name, path in modules().items() if not name.startswith("dflash_kernels.mosaic_gpu")
    }
    found = {name.replace(".", "/") for name, path in outside.items() if asks_for_interpreter(path.read_text())}
    assert found == PLANS_FOR_INTERPRETER
