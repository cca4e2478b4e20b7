"""Rules of the house that a reader relies on, checked on the source."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# A module imports from rows above its own only.
LAYERS = [
    {"config", "quant", "safetensors", "text", "assets", "sampling"},
    {"config_json", "tree", "layers", "rope", "chat"},
    {"cache", "sharding"},
    {"compressor", "indexer", "attention", "mhc", "moe", "engram"},
    {"model"},
    {"inference", "release", "prefixes"},
    {"drafts", "checkpoint"},
    {"speculate"},
    {"slots"},
    {"tickets", "memory"},
    {"engine"},
    {"generate", "serving", "training"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
BOTTOM = {"config", "safetensors", "text", "assets"}  # these import nothing of ours
MODEL = sorted(ROOT.glob("v41jax/**/*.py"))
KERNELS = sorted(ROOT.glob("pallas_kernels/**/*.py"))
SCRIPTS = sorted(ROOT.glob("scripts/*.py"))


def parse(path):
    return ast.parse(path.read_text(), str(path))


def imports(path):
    """Dotted names of everything a file imports, inside functions too: `from a import b` gives "a.b"."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ids(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", MODEL, ids=ids(MODEL))
def test_model_files_import_from_above_only(path):
    name = path.relative_to(ROOT / "v41jax").with_suffix("").parts[0]
    for imported in imports(path):
        package, *rest = imported.split(".")
        assert package not in ("tests", "oracle", "scripts"), imported
        if package == "pallas_kernels":
            assert name not in BOTTOM, f"{name} imports {imported}"
        if package != "v41jax" or name == "__init__":
            continue
        assert rest[0] in RANK, f"{imported}: give {rest[0]} a place in LAYERS"
        same_package = rest[0] == name and path.parent != ROOT / "v41jax"
        assert same_package or RANK[rest[0]] < RANK[name], f"{name} imports {imported}"


@pytest.mark.parametrize("path", KERNELS, ids=ids(KERNELS))
def test_kernels_know_no_model(path):
    allowed = {"jax", "numpy", "pallas_kernels", "collections", "dataclasses", "functools", "logging", "math"}
    allowed |= {"contextlib", "threading"}
    assert {imported.split(".")[0] for imported in imports(path)} <= allowed


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("oracle.py")))
def test_the_oracle_imports_neither_package(path):
    assert {imported.split(".")[0] for imported in imports(path)} == {"math", "ml_dtypes", "numpy"}


# ---- widths come from the config

WIDTHS = {8, 16, 32, 64, 128, 512, 1024, 2048, 16384}
PARTS = [
    ROOT / "v41jax" / f"{name}.py"
    for rank in (1, 2, 3, 4, 5)
    for name in sorted(LAYERS[rank] - {"config_json", "release"})
]
PARTS = [path for path in PARTS if path.exists()]
WORD_ARITHMETIC = {("engram.py", "_multiply"), ("engram.py", "_modulo")}  # bits of a 32-bit word and of its halves


def width_literals(path):
    """Bare integers that could be a width, outside UPPERCASE module constants and word arithmetic."""
    for statement in parse(path).body:
        names = [t.id for t in getattr(statement, "targets", []) if isinstance(t, ast.Name)]
        if names and all(name.isupper() for name in names):
            continue
        if (path.name, getattr(statement, "name", None)) in WORD_ARITHMETIC:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value in WIDTHS:
                yield f"{path.name}:{node.lineno}: {node.value}"


@pytest.mark.parametrize("path", PARTS, ids=ids(PARTS))
def test_no_width_is_a_literal(path):
    assert not list(width_literals(path))


def test_word_arithmetic_is_where_the_exception_says():
    for file, function in WORD_ARITHMETIC:
        names = [s.name for s in parse(ROOT / "v41jax" / file).body if isinstance(s, ast.FunctionDef)]
        assert function in names


# ---- small things everywhere

EVERY = [*MODEL, *KERNELS, *SCRIPTS]


@pytest.mark.parametrize("path", EVERY, ids=ids(EVERY))
def test_no_bare_except(path):
    assert not [n.lineno for n in ast.walk(parse(path)) if isinstance(n, ast.ExceptHandler) and n.type is None]


def is_cast(node, to=""):
    """x.astype(...something named `to`...)"""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "astype"
    return called and any(to in ast.unparse(argument) for argument in [*node.args, *(k.value for k in node.keywords)])


@pytest.mark.parametrize("path", EVERY, ids=ids(EVERY))
def test_no_rounding_by_a_pair_of_casts(path):
    # XLA removes the pair on GPU, so nothing would be rounded there.
    for node in ast.walk(parse(path)):
        if is_cast(node) and isinstance(node.func, ast.Attribute):
            assert not any(is_cast(node.func.value, narrow) for narrow in ("float8", "float4")), node.lineno


def test_the_rules_catch_what_they_forbid(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("SIZE = 512\n\ndef f(x, w=128):\n    return x[:2048].astype(jnp.float8_e4m3fn).astype(float)\n")
    assert [line.split(": ")[1] for line in width_literals(bad)] == ["128", "2048"]
    pairs = [n for n in ast.walk(parse(bad)) if is_cast(n) and is_cast(n.func.value, "float8")]
    assert len(pairs) == 1
