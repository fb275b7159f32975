"""The model's own source files as one flat folder that loads where `mol` is not installed.

transformers copies and imports the files of a model's folder that others there import as
`from .name import ...`, so `mol.ops.attention` becomes `ops_attention.py` and imports are rewritten
to match. Nothing is written twice by hand: what an export runs is the code that trained it.
"""

import ast
import functools
import hashlib
import sys
from pathlib import Path

import mol

ENTRY = "mol.export.modeling_mol"
INSTALLED = {"pydantic", "safetensors", "torch", "transformers"}  # wherever an export is loaded
# Files, locks and disks concern nobody who loads a model, and need Unix.
REDUCED = {"mol.base"}


def flat_name(module: str) -> str:
    """`mol.ops.attention` -> `ops_attention`; of this package the bare name."""
    return module.removeprefix("mol.").removeprefix("export.").replace(".", "_")


def _path(module: str) -> Path | None:
    base = Path(mol.__file__).parent.joinpath(*module.split(".")[1:])
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def _imports(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _ours(node: ast.Import | ast.ImportFrom) -> bool:
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    ours = any(name.split(".")[0] == "mol" for name in names)
    form = isinstance(node, ast.ImportFrom) and not node.level
    assert form or not ours, f"line {node.lineno}: write it as `from mol.x import y`"
    return ours


def _targets(node: ast.ImportFrom) -> dict[str, list[ast.alias]]:
    """Module -> what is imported of it; a module's own name gives an empty list."""
    found: dict[str, list[ast.alias]] = {}
    for alias in node.names:
        module = f"{node.module}.{alias.name}"
        if _path(module):
            found[module] = []
        else:
            found.setdefault(node.module, []).append(alias)
    return found


def closure(entry: str = ENTRY) -> dict[str, set[str]]:
    """Every module that `entry` imports, now or when a call needs it, with the names imported."""
    found: dict[str, set[str]] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found[module] = set()
        for node in filter(_ours, _imports(ast.parse(_path(module).read_text("utf-8")))):
            waiting += _targets(node)
    for module in found:
        for node in filter(_ours, _imports(ast.parse(_path(module).read_text("utf-8")))):
            for target, aliases in _targets(node).items():
                found[target] |= {alias.name for alias in aliases}
    return found


def _reduced(source: str, wanted: set[str]) -> str:
    """The definitions in `source` that `wanted` needs, and their imports."""
    tree = ast.parse(source)
    lines = source.splitlines()
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        else:
            names = [getattr(node, "name", "")]
        defined |= dict.fromkeys(names, node)
    kept: dict[int, str] = {}
    waiting = sorted(wanted)
    while waiting:
        node = defined.get(waiting.pop())
        if node is None or node.lineno in kept:
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        kept[node.lineno] = "\n".join(lines[first - 1 : node.end_lineno])
        waiting += {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return "\n\n".join(kept[line] for line in sorted(kept)) + "\n"


def _relative(node: ast.ImportFrom) -> list[str]:
    """The statement for the flat folder. A module itself comes as the name it goes by, since
    transformers does not follow `from . import name`."""
    lines = []
    for module, aliases in _targets(node).items():
        file = flat_name(module)
        if aliases:
            lines.append(f"from .{file} import {', '.join(map(ast.unparse, aliases))}")
        else:
            (alias,) = (a for a in node.names if f"{node.module}.{a.name}" == module)
            lines.append(f"from .{file} import __name__ as _{file}")
            lines.append(f'{alias.asname or alias.name} = __import__("sys").modules[_{file}]')
    return lines


def _optional(node: ast.Import | ast.ImportFrom) -> bool:
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    known = INSTALLED | sys.stdlib_module_names | {"mol"}
    return any(name.split(".")[0] not in known for name in names)


def _rewritten(module: str, source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        named = isinstance(node, ast.Constant) and isinstance(node.value, str)
        assert not (named and node.value.startswith("mol.") and _path(node.value)), (
            f"{module}: line {node.lineno} imports by a string, which an export cannot follow"
        )
    lines = source.splitlines()
    for node in sorted(_imports(tree), key=lambda node: -node.lineno):
        if _ours(node):
            new = _relative(node)
        elif _optional(node):
            # Kernels run on CUDA alone. A library that is imported under `try` is none that
            # transformers asks for before it loads the file.
            held = lines[node.lineno - 1 : node.end_lineno]
            new = ["try:", *(f"    {line[node.col_offset :]}" for line in held)]
            new += ["except ImportError:", "    raise"]
        else:
            continue
        lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in new]
    origin = _path(module).relative_to(Path(mol.__file__).parents[1]).as_posix()
    return "\n".join([f"# From {origin} by `mol export`; change it there.", *lines]) + "\n"


@functools.cache
def flat_sources() -> dict[str, str]:
    """File name -> content. Operators that the kernels register get a namespace of their own, so
    that exports of several versions, and `mol` itself, can be loaded side by side."""
    files, modules = {}, closure()
    for module, names in modules.items():
        source = _path(module).read_text("utf-8")
        source = _reduced(source, names) if module in REDUCED else source
        files[f"{flat_name(module)}.py"] = _rewritten(module, source)
    assert len(files) == len(modules), "two modules have one flat name"
    state = hashlib.sha256("".join(files[name] for name in sorted(files)).encode())
    space = f"mol_{state.hexdigest()[:8]}"
    return {
        name: text.replace('"mol::', f'"{space}::').replace("torch.ops.mol.", f"torch.ops.{space}.")
        for name, text in sorted(files.items())
    }
