"""Take a function to another Python process: the text of a module that defines it.

A process either interprets or compiles Triton kernels, so asking the other question takes a second process. It gets the
function as source text: the definition itself and, recursively, what its body names: ``@triton.jit`` functions (their
source), constants (their value), modules and anything else that can be imported (an import), functions and classes of a
notebook (their source). That serves kernels of modules and of notebook cells alike, and it is what a cache is keyed by.
"""

import ast
import builtins
import importlib.util
import inspect
import symtable
import sys
import textwrap
from types import NoneType


def unwrap(function):
    """The plain Python function under @triton.jit, @triton.autotune, @triton.heuristics; else the argument itself."""
    while not inspect.isfunction(function) and hasattr(function, "fn"):
        function = function.fn
    return function


def jit_function(value):
    """The JITFunction, InterpretedFunction or GluonJITFunction that value is (perhaps under autotune), or None."""
    while not inspect.isfunction(value) and hasattr(value, "fn"):
        if type(value).__name__ in ("JITFunction", "InterpretedFunction", "GluonJITFunction"):
            return value
        value = value.fn
    return None


def is_gluon(value) -> bool:
    """Whether value is a kernel or function of Gluon, the layer under Triton."""
    return type(jit_function(value)).__name__ == "GluonJITFunction"


def module_source(function) -> str:
    """The text of a module in which ``function``, a Triton kernel or a Python function, is defined by its own name.

    Raises ValueError where there is no source (built by ``exec``, typed at a prompt), where two different things go by
    one name, or where a global has no literal form.
    """
    raw = unwrap(function)
    if not inspect.isfunction(raw):
        raise ValueError(f"{function!r} is no Python function")
    collector = _Collector()
    collector.add_definition(raw.__name__, function)
    return collector.text()


class _Collector:
    def __init__(self):
        self.values: dict[str, object] = {}  # name -> what it stands for
        self.imports: list[str] = []
        self.definitions: list[str] = []  # a thing comes after what it refers to

    def text(self) -> str:
        return "\n".join(sorted(self.imports)) + "\n\n\n" + "\n\n".join(self.definitions)

    def add(self, name: str, value, user: str) -> None:
        """Make ``name`` stand for ``value``, for the sake of ``user``."""
        if name in self.values:
            known = self.values[name]
            if known is value or (_literal(value) is not None and _literal(value) == _literal(known)):
                return
            raise ValueError(f"{user} needs two different things that are called {name!r}; rename one of them")
        if inspect.ismodule(value):
            self.values[name] = value
            self.imports.append(f"import {value.__name__} as {name}")
        elif jit_function(value) and not (getattr(unwrap(value), "__module__", None) or "").startswith("triton."):
            self.add_definition(name, value)
        elif (origin := importable_as(value)) is not None:
            self.values[name] = value
            self.imports.append(f"from {origin[0]} import {origin[1]} as {name}")
        elif inspect.isfunction(unwrap(value)) or inspect.isclass(value):
            self.add_definition(name, value)
        elif (text := _literal(value)) is not None:
            for alias, module in (("tl", "triton.language"), ("torch", "torch")):
                if f"{alias}." in text:
                    self.add(alias, sys.modules[module], user)
            self.values[name] = value
            self.definitions.append(f"{name} = {text}\n")
        else:
            raise ValueError(
                f"{user} uses {name!r}, a {type(value).__name__}, which cannot be written out as source; "
                "pass it as an argument, or make it a number, a string or a tl.constexpr"
            )

    def add_definition(self, name: str, value) -> None:
        raw = unwrap(value)
        text, tree = _source(raw, keep_decorators=raw is value)
        self.values[name] = value  # before what it refers to, so that recursion ends
        if raw is not value:
            decorator = f"jit{_jit_arguments(value)}" if jit_function(value) else "constexpr_function"
            module = "triton.experimental.gluon" if is_gluon(value) else "triton"
            language = module.rpartition(".")[2]
            text = f"@{language}.{decorator}\n{text}"
            self.add(language, sys.modules[module], raw.__name__)
        scope = _scope(raw)
        for reference in _names_read(text, tree):
            if reference in scope and reference != raw.__name__:
                self.add(reference, scope[reference], raw.__name__)
        self.definitions.append(text if name == raw.__name__ else f"{text}\n{name} = {raw.__name__}\n")


def _source(raw, keep_decorators: bool) -> tuple[str, ast.AST]:
    """The dedented source of a function or class, as it was written, and its syntax tree."""
    try:
        source = textwrap.dedent(inspect.getsource(raw))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise ValueError(
            f"there is no source for {raw.__name__!r} (typed at a prompt, or built by exec): "
            "write it in a file or in a notebook cell"
        ) from error
    if not isinstance(tree, ast.FunctionDef | ast.ClassDef):
        raise ValueError(f"{raw.__name__!r} is not defined by a plain def (a lambda?): write a def")
    if not keep_decorators:
        tree.decorator_list = []
        source = "\n".join(source.splitlines()[tree.lineno - 1 :])
    return source.rstrip() + "\n", tree


def names_read(text: str) -> set[str]:
    """Global names that a source reads, anywhere in it; annotations included."""
    scopes = [symtable.symtable(text, "source", "exec")]
    names = {symbol.get_name() for symbol in scopes[0].get_symbols() if symbol.is_referenced()}
    while scopes:
        scopes += (scope := scopes.pop()).get_children()
        names |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
    return names


def _names_read(text: str, tree: ast.AST) -> list[str]:
    """Those of a definition in order, without the builtins."""
    names = names_read(text)
    read = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return [name for name in dict.fromkeys(read) if name in names and not hasattr(builtins, name)]


def _scope(raw) -> dict:
    """What the names in a function or class stand for: its module's globals, and the variables it closes over."""
    if inspect.isclass(raw):
        return vars(sys.modules[raw.__module__])
    scope = dict(raw.__globals__)
    for name, cell in zip(raw.__code__.co_freevars, raw.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            scope.pop(name, None)
    return scope


def _jit_arguments(value) -> str:
    """The arguments of @triton.jit that change what is compiled, as text."""
    kernel = jit_function(value)
    given = getattr(kernel, "kwargs", {})  # the interpreted form keeps them there
    found = {}
    for name in ("do_not_specialize", "do_not_specialize_on_alignment", "noinline"):
        if setting := given.get(name, getattr(kernel, name, None)):
            found[name] = list(setting) if name != "noinline" else setting
    return f"({', '.join(f'{name}={setting!r}' for name, setting in found.items())})" if found else ""


def importable_as(value) -> tuple[str, str] | None:
    """(module, name) under which a fresh process finds value, or None."""
    target = unwrap(value)
    module_name = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if not isinstance(module_name, str) or not isinstance(name, str) or module_name == "__main__":
        return None
    if vars(sys.modules.get(module_name, ast)).get(name) is not value:
        return None
    try:
        found = module_name in sys.builtin_module_names or importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError, AttributeError):
        found = False
    return (module_name, name) if found else None


def _literal(value) -> str | None:
    """Python text that evaluates to value: constants, tuples and lists, tl.constexpr, dtypes of triton and torch."""
    if type(value) in (NoneType, bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if abs(value) < float("inf") else f"float('{value}')"
    if type(value) in (tuple, list):
        items = [text for item in value if (text := _literal(item)) is not None]
        if len(items) < len(value):
            return None
        return f"[{', '.join(items)}]" if type(value) is list else f"({''.join(f'{item}, ' for item in items)})"
    module = type(value).__module__.split(".")[0]
    if module == "triton" and type(value).__name__ == "constexpr":
        inner = _literal(value.value)
        return None if inner is None else f"tl.constexpr({inner})"
    if module == "triton" and type(value).__name__ == "dtype":
        return f"tl.dtype({value.name!r})"
    if module == "torch" and type(value).__name__ == "dtype":
        return str(value)
    return None
