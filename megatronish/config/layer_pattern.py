"""Patterns over the layers of a model, in Megatron-LM's notation: a number N, or a list such as "[1]*3+[0]"."""

import ast

from megatronish.core.errors import UserError

LONGEST = 100_000
NOTATION = 'a number N for every N-th layer, or a list of 0 and 1 such as "[1]*3+[0]"'


def marked_layers(text: str, *, num_layers: int, every_nth: bool) -> tuple[bool, ...]:
    """Layers that a pattern marks, first layer first; ValueError for a text that is no pattern of so many layers.

    A list marks with 1. A number N marks every N-th layer, or, with `every_nth` false, all layers but those.
    """
    try:
        found = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"is no pattern; it must be {NOTATION}") from error
    if isinstance(found, int):
        if found < 1:
            raise ValueError("must be at least 1")
        return tuple((number % found == 0) == every_nth for number in range(1, num_layers + 1))
    if any(mark not in (0, 1) for mark in found):
        raise ValueError("must be a list of 0 and 1")
    if len(found) != num_layers:
        raise ValueError(f"is a list of {len(found)}, and must have one number for each of num_layers={num_layers}")
    return tuple(map(bool, found))


def canonical(marks: tuple[bool, ...]) -> str:
    """The list of a pattern, written out."""
    return str([int(mark) for mark in marks])


def read_marks(name: str, text: str, *, num_layers: int, every_nth: bool) -> tuple[bool, ...]:
    """`marked_layers` of the field `name`; UserError for a text that is no pattern."""
    try:
        return marked_layers(text, num_layers=num_layers, every_nth=every_nth)
    except ValueError as error:
        raise UserError(f"{name}={text} {error}") from error


def _evaluated(node: ast.expr) -> int | list[int]:
    """Value of an expression of whole numbers, lists, + and *."""
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return value
        case ast.List(items) | ast.Tuple(items):
            values = [_evaluated(item) for item in items]
            if all(isinstance(value, int) for value in values):
                return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left, ast.Add(), right):
            first, second = _evaluated(left), _evaluated(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left, ast.Mult(), right):
            first, second = _evaluated(left), _evaluated(right)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int):
                if len(first) * second > LONGEST:
                    raise ValueError(f"is a list of more than {LONGEST}")
                return first * second
    raise ValueError(f"is no pattern; it must be {NOTATION}")
