"""Mutants of layers 0 to 4 of mfun: what may be changed, which are taken, how one is planted.

Arithmetic and comparison operators are swapped, integers are one more or less, conditions negated,
`and` is `or`, `break` is `continue`, a result is dropped. Left alone, as `EXCLUDED` says, is what
no test on a CPU could or should notice. `tests/mutation_run.py` runs them.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.machinery
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import mfun

ROOT = Path(mfun.__file__).parent
EXCLUDED = (
    "docstrings, texts and what stands inside f-strings; types; decorators; assertions "
    "and zip's strict=; what is raised or warned; branches that ask for CUDA; comm/memory.py"
)
APART = {"comm/memory.py"}
"""Files that only real processes run (tests/test_host_memory.py), which import mfun themselves."""

_SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitXor: (ast.BitAnd,),
    ast.Lt: (ast.LtE,),
    ast.LtE: (ast.Lt,),
    ast.Gt: (ast.GtE,),
    ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Break: (ast.Continue,),
    ast.Continue: (ast.Break,),
}
_SEQUENCES = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
_LEFT_ALONE = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)


class Mutant(NamedTuple):
    """One change of one file: `holder.name`, or its element `index`, becomes `new`."""

    file: str  # relative to mfun
    line: int
    name: str  # file, function, text before and after: no line, so that it lasts
    lines: tuple[int, int]  # of the statement it is in, or of the header
    inside: bool  # a function, rather than what runs on import
    tree: ast.Module
    edit: tuple[ast.AST, str, int | None, Any]

    def code(self) -> CodeType:
        """The file's code with the change."""
        with _edited(self.edit):
            return _compiled(self)


class _Place(NamedTuple):
    """Where the walk is: enclosing functions and classes, the statement, the expressions."""

    scope: tuple[str, ...] = ()
    inside: bool = False
    lines: tuple[int, int] = (0, 0)
    parents: tuple[ast.AST, ...] = ()


def mutants(file: Path) -> list[Mutant]:
    """Every mutant of a file, in the order of its text."""
    return mutants_of(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix())


def mutants_of(source: str, short: str) -> list[Mutant]:
    """Every mutant of a text."""
    tree = ast.parse(source)
    seen: Counter[str] = Counter()
    found = []
    for place, node, edit in _walk(tree, _Place()):
        shown = _shown((*place.parents, node))
        before = ast.unparse(shown)
        with _edited(edit):
            after = ast.unparse(edit[3] if shown is node and edit[2] != -1 else shown)
        if before == after:
            continue
        name = f"{short} {'.'.join(place.scope) or 'module'}: {before} -> {after}"
        seen[name] += 1
        name += f" ({seen[name]})" * (seen[name] > 1)
        line = getattr(node, "lineno", place.lines[0])
        found.append(Mutant(short, line, name, place.lines, place.inside, tree, edit))
    return found


def sample(file: Path, every: int = 40, least: int = 4, most: int = 10) -> list[Mutant]:
    """One mutant for so many lines of the file, by the hash of their names.

    A mutant's place in the order depends on its own text only, so that an edit elsewhere in the
    file leaves most of the sample as it was.
    """
    count = min(max(file.read_text(encoding="utf-8").count("\n") // every, least), most)
    return sorted(mutants(file), key=lambda m: hashlib.blake2b(m.name.encode()).digest())[:count]


def _walk(node: ast.AST, place: _Place) -> Iterator[tuple[_Place, ast.AST, Any]]:
    """Each change below a node, with where it is."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _left_alone(node, name, child):
                continue
            at = _inside(child, place, node)
            for new in _changes(child, node, name):
                yield at, child, (node, name, index if isinstance(value, list) else None, new)
            yield from _walk(child, at)


def _left_alone(parent: ast.AST, name: str, node: ast.AST) -> bool:
    """Whether to change nothing in here."""
    if isinstance(parent, ast.If | ast.IfExp) and name != "orelse":
        asked = ast.unparse(parent.test)
        if "cuda" in asked or "TYPE_CHECKING" in asked:
            return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion
        return True
    return isinstance(node, _LEFT_ALONE) or (
        isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn")
    )


def _inside(node: ast.AST, place: _Place, parent: ast.AST) -> _Place:
    """The place of a node whose parent is at another."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        place = place._replace(scope=(*place.scope, node.name))
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
        place = place._replace(lines=(node.lineno, end), parents=())
    body_of = isinstance(parent, ast.FunctionDef) and node in parent.body
    if body_of or (isinstance(parent, ast.Lambda) and node is parent.body):
        place = place._replace(inside=True)
    return place if isinstance(node, ast.stmt) else place._replace(parents=(*place.parents, parent))


def _shown(path: tuple[ast.AST, ...]) -> ast.AST:
    """The smallest expression around a node that tells a reader where it is, or the node."""
    node = path[-1]
    for above in reversed(path[:-1]):
        small = not isinstance(node, ast.expr | ast.stmt | ast.keyword) or (
            not isinstance(node, ast.keyword) and len(ast.unparse(node)) < 12
        )
        if not small or not isinstance(above, ast.expr | ast.keyword | ast.Return | ast.AugAssign):
            break
        node = above
    return node


def _changes(node: ast.AST, parent: ast.AST, name: str) -> list[ast.AST]:
    """What may stand instead of a node."""
    match node:
        case ast.Constant(value=bool(value)):
            new: list[ast.AST] = [ast.Constant(not value)]
        case ast.Constant(value=int(value) | float(value)):
            new = [ast.Constant(value + 1), *([ast.Constant(value - 1)] if value else [])]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            new = [operand]
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            new = [ast.Return(None)]
        case _:
            new = [swap() for swap in _SWAPS.get(type(node), ())]
            if isinstance(node, ast.Add) and isinstance(parent, ast.BinOp):
                if any(_is_sequence(side) for side in (parent.left, parent.right)):
                    new = []
    if (name == "test" and isinstance(parent, ast.If | ast.IfExp)) or name == "ifs":
        if not isinstance(node, ast.UnaryOp | ast.Constant) and isinstance(node, ast.expr):
            new.append(ast.UnaryOp(ast.Not(), node))
    return [ast.copy_location(one, node if hasattr(node, "lineno") else parent) for one in new]


def _is_sequence(node: ast.AST) -> bool:
    return isinstance(node, _SEQUENCES) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@contextmanager
def _edited(edit: tuple[ast.AST, str, int | None, Any]) -> Iterator[None]:
    """The tree with a change, while it is used."""
    holder, name, index, new = edit
    field = getattr(holder, name)
    setattr(holder, name, new if index is None else [*field[:index], new, *field[index + 1 :]])
    yield
    setattr(holder, name, field)


def _compiled(mutant: Mutant) -> CodeType:
    tree = ast.fix_missing_locations(mutant.tree)
    return compile(tree, str(ROOT / mutant.file), "exec", dont_inherit=True)


def _nested(code: CodeType) -> list[CodeType]:
    """The code of every function of a file, outer ones first."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [found for one in inner for found in (one, *_nested(one))]


def functions_by_file() -> dict[str, list[FunctionType]]:
    """Every function there is, decorated or stored away, by the file of mfun it came from."""
    found: dict[str, list[FunctionType]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(str(ROOT)):
            found.setdefault(_short(one.__code__.co_filename), []).append(one)
    return found


def _short(name: str) -> str:
    return Path(name).relative_to(ROOT).as_posix()


def plant(mutant: Mutant, functions: Iterable[FunctionType]) -> list[tuple[FunctionType, CodeType]]:
    """Give each function that differs its mutated code; returns what they had, to undo it.

    Nothing where there is no such function, or its closure would be another: then `reload_with`.
    """
    old, new = _nested(_compiled(mutant)), _nested(mutant.code())
    if len(old) != len(new):
        return []
    if any(a.co_freevars != b.co_freevars for a, b in zip(old, new, strict=True)):
        return []
    instead = {_known_by(a): b for a, b in zip(old, new, strict=True) if a != b}
    changed = [(fn, fn.__code__) for fn in functions if _known_by(fn.__code__) in instead]
    for fn, code in changed:
        fn.__code__ = instead[_known_by(code)]
    return changed


def _known_by(code: CodeType) -> tuple[Any, ...]:
    """What tells a function of a file from the others, two lambdas in a line too.

    Not the columns of its instructions, which are others when a tree is compiled.
    """
    values = tuple(repr(one) for one in code.co_consts if not isinstance(one, CodeType))
    return code.co_qualname, code.co_firstlineno, code.co_code, code.co_names, values


def reload_with(mutant: Mutant) -> None:
    """Forget the project's modules, and import the file with its change from now on."""
    mutated, get_code = mutant.code(), importlib.machinery.SourceFileLoader.get_code
    file = str(ROOT / mutant.file)

    def changed(self: Any, fullname: str) -> CodeType | None:
        return mutated if self.path == file else get_code(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = changed  # type: ignore[method-assign]
    project = str(ROOT.parent)
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or ""
        if where.startswith(project) and "site-packages" not in where and name != "__main__":
            del sys.modules[name]
