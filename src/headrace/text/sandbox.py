"""The Jinja environment that chat templates run in: an immutable sandbox in which everything is charged to a Meter.

Owns what a template can reach and where its costs are counted. Refuses to know messages and tokens (chat.py).

Jinja's sandbox bars a template from the interpreter's insides, not from its resources. So each rendering has a Meter:
every pass through a body (loop, macro, call block) and every call, filter and output is a step; every value that
an operation takes or that a variable keeps is weighed; operations whose result can outgrow their operands
(repetition, powers, padding, replacing, joining, formatting) are checked before they run. Whatever else an expression
does is linear in values that have been weighed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, TypeVar, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.text.meter import (
    LimitError,
    Meter,
    check_brace_format,
    check_percent_format,
    check_power,
    check_product,
    check_width,
)

MAX_JSON_SPACING = 16  # characters of tojson's separators and of a level of its indentation

# No chat template known uses these; each makes much out of little or searches with regular expressions
REFUSED_FILTERS = frozenset(
    {"filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr", "forceescape"}
)
REFUSED_GLOBALS = frozenset({"cycler", "joiner", "lipsum"})
REFUSED_METHODS = frozenset(
    {"encode", "expandtabs", "format_map", "from_bytes", "maketrans", "to_bytes", "translate", "fromhex"}
)

# Names of our own filters. No template can write them
_STEP, _KEEP, _CONCATENATE = "(step)", "(keep)", "(concatenate)"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """What Hugging Face's apply_chat_template offers, within limits. May be shared by threads."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._meter: ContextVar[Meter] = ContextVar("meter")
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants would be folded, and thus computed, while compiling: with no meter
            finalize=self._weigh,
            extensions=[loopcontrols, _GenerationTag],
        )
        for name in REFUSED_GLOBALS:
            del self.globals[name]
        self.globals |= {
            "dict": _Dict(),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now(now),
        }
        known = {name: filter_ for name, filter_ in self.filters.items() if name not in REFUSED_FILTERS}
        self.filters = {name: self._metered(name, filter_) for name, filter_ in known.items()}
        self.filters |= {
            "tojson": self._to_json,
            _STEP: self._step,
            _KEEP: self._weigh,
            _CONCATENATE: self._concatenate,
        }

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], clock: Callable[[], float]) -> str:
        """The template's text. Raises LimitError, or whatever the template provokes."""
        token = self._meter.set(Meter(variables.values(), clock))
        try:
            return "".join(template.root_render_func(template.new_context(dict(variables))))
        finally:
            self._meter.reset(token)

    # What Jinja calls ---------------------------------------------------------------------------------------------

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Jinja's hook between parsing and code generation."""
        return super()._generate(_Instrumentation().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = self._meter.get()
        match operator:
            case "+":
                meter.weigh(left, right)
            case "*":
                check_product(left, right, meter)
            case "**":
                check_power(left, right)
            case "%" if isinstance(left, str):
                check_percent_format(left)
                meter.weigh(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as Jinja spells it
        meter = __self._meter.get()
        meter.weigh(args, kwargs)
        receiver = getattr(__obj, "__self__", None)
        if isinstance(receiver, str):
            args = _check_text_method(__obj.__name__, receiver, args, meter)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (wrapped := super().wrap_str_format(value)) is None:
            return None

        def format_checked(*args: Any, **kwargs: Any) -> str:
            check_brace_format(value.__self__)
            return wrapped(*args, **kwargs)

        return format_checked

    # Filters ------------------------------------------------------------------------------------------------------

    def _metered(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        """`filter_` with its operands weighed first."""
        passed = getattr(filter_, "jinja_pass_arg", None)
        kind = passed.name if passed is not None else None

        @jinja2.pass_context
        def metered(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            meter = self._meter.get()
            if name == "join" and not isinstance(value, str):
                value = list(value)
            meter.weigh(value, args, kwargs)
            _check_filter(name, value, (args, kwargs), meter)
            leading = {"context": context, "eval_context": context.eval_ctx, "environment": self}
            return filter_(leading[kind], value, *args, **kwargs) if kind else filter_(value, *args, **kwargs)

        return metered

    @jinja2.pass_context
    def _step(self, context: Any, chars: int) -> None:
        self._meter.get().step(chars)

    @jinja2.pass_context
    def _weigh(self, context: Any, value: Any) -> Any:
        self._meter.get().weigh(value)
        return value

    @jinja2.pass_context
    def _concatenate(self, context: Any, values: list[Any]) -> str:
        self._meter.get().weigh(values)
        return "".join(map(str, values))

    @jinja2.pass_context
    def _to_json(
        self,
        context: Any,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers does it: no HTML escapes, unlike Jinja's own."""
        meter = self._meter.get()
        meter.weigh(value)
        if indent is None and separators is None:
            return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
        if max((indent or 0), *map(len, separators or ("",))) > MAX_JSON_SPACING:
            raise LimitError(f"it indents or separates JSON by more than {MAX_JSON_SPACING} characters")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces = []
        for piece in encoder.iterencode(value):  # deep structures are indented by more than they hold
            meter.step(len(piece))
            pieces.append(piece)
        return "".join(pieces)


def _check_text_method(name: str, text: str, args: tuple[Any, ...], meter: Meter) -> tuple[Any, ...]:
    """Check a call of a method of `text` and return its arguments, an iterator among them made a list."""
    meter.weigh(text)
    match name, args:
        case "replace", (str() as old, str() as new, *_):
            meter.check_size(text.count(old) * len(new))
        case "join", (items,) if not isinstance(items, str):
            items = list(items)
            meter.check_size(meter.weigh(items) + len(text) * len(items))
            return (items,)
        case "join", (str() as items,):
            meter.check_size(len(text) * len(items))
        case (("center" | "ljust" | "rjust" | "zfill"), (width, *_)):
            check_width(width)
    return args


def _check_filter(name: str, value: Any, operands: tuple[tuple[Any, ...], dict[str, Any]], meter: Meter) -> None:
    """Check a filter whose result may be larger than its operands. `value` and `operands` have been weighed."""
    args, kwargs = operands
    first = next(iter([*args, *kwargs.values()]), None)
    match name:
        case "join":
            separator = kwargs.get("d", args[0] if args else "")
            meter.check_size(len(str(separator)) * len(value))
        case "replace":
            old, new = (str(part) for part in [*args, kwargs.get("old"), kwargs.get("new")] if part is not None)
            meter.check_size(str(value).count(old) * len(new))
        case "indent":
            check_width(*args, *kwargs.values())
            width = kwargs.get("width", args[0] if args else 4)
            meter.check_size(str(value).count("\n") * (len(width) if isinstance(width, str) else width))
        case "center" | "batch" | "slice":
            check_width(first)
        case "format":
            check_percent_format(str(value))
        case "sum":
            if not isinstance(kwargs.get("start", args[1] if len(args) > 1 else 0), int | float):
                raise LimitError("it sums something other than numbers")


# What templates call ------------------------------------------------------------------------------------------


class _Namespace(Namespace):
    """Jinja's own, but for its text: namespaces can hold each other, and the text would grow without bound."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Dict:
    """`dict` as a function: the type itself would offer methods that change what they are given."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(pattern: str) -> str:
        check_percent_format(pattern)
        return now().strftime(pattern)

    return strftime_now


# How templates are changed before they are compiled -----------------------------------------------------------


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what the model wrote. Here it is a scope of its own and no more."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_Body = TypeVar("_Body", nodes.For, nodes.Macro, nodes.CallBlock)


class _Instrumentation(NodeTransformer):
    """Puts the meter where Jinja has no hook: bodies that can run many times, values that are kept, and `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        return self._count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802
        return self._count(node)

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:  # noqa: N802
        self.generic_visit(node)
        node.node = _filtered(node.node, _KEEP)
        return node

    def visit_With(self, node: nodes.With) -> nodes.With:  # noqa: N802
        self.generic_visit(node)
        node.values = [_filtered(value, _KEEP) for value in node.values]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes).set_lineno(node.lineno), _CONCATENATE)

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> NoReturn:  # noqa: N802
        raise jinja2.TemplateSyntaxError("autoescape is not supported", node.lineno)

    def _count(self, node: _Body) -> _Body:
        self.generic_visit(node)
        chars = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        step = nodes.ExprStmt(_filtered(nodes.Const(chars).set_lineno(node.lineno), _STEP))
        node.body.insert(0, step.set_lineno(node.lineno))
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    filtered = nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None)
    filtered.set_lineno(node.lineno)
    return filtered
