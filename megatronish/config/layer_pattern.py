"""Patterns over layers in Megatron-LM's notation: a number N, or a list such as "[1]*3+[0]"."""

import ast
from functools import lru_cache

from megatronish.core.errors import UserError

LONGEST = 100_000
NOTATION = 'a number N for every N-th layer, or a list of 0 and 1 such as "[1]*3+[0]"'


@lru_cache(maxsize=10_000)  # a search of layouts asks a hundred thousand times
def has_experts(frequency: str, layer: int) -> bool:
    """Whether the layer has experts by --moe-layer-freq; ValueError for text that is neither a number nor a list.

    A list that is too short, which the rules refuse, has none in the layers after it.
    """
    pattern = parse_frequency(frequency)
    return layer % pattern == 0 if isinstance(pattern, int) else layer < len(pattern) and bool(pattern[layer])


def parse_frequency(text: str) -> int | list[int]:
    """ "2" -> 2, "([0]*1+[1]*3)" -> [0, 1, 1, 1]: numbers, lists, + and * alone; ValueError for anything else."""
    try:
        return _pattern(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is neither a number nor a list such as ([0]*3+[1]*58)") from error


def marked_layers(text: str, *, num_layers: int, every_nth: bool) -> tuple[bool, ...]:
    """Layers that a pattern marks, first layer first; ValueError for a text that is no pattern of so many layers.

    A list marks with 1. A number N marks every N-th layer, or, with `every_nth` false, all layers but those.
    """
    pattern = _pattern(text)
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError("must be at least 1")
        return tuple((number % pattern == 0) == every_nth for number in range(1, num_layers + 1))
    if any(mark not in (0, 1) for mark in pattern):
        raise ValueError("must be a list of 0 and 1")
    if len(pattern) != num_layers:
        raise ValueError(f"is a list of {len(pattern)}, and must have one number for each of num_layers={num_layers}")
    return tuple(map(bool, pattern))


def canonical(marks: tuple[bool, ...]) -> str:
    """The list of a pattern, written out."""
    return str([int(mark) for mark in marks])


def read_marks(name: str, text: str, *, num_layers: int, every_nth: bool) -> tuple[bool, ...]:
    """`marked_layers` of the field `name`; UserError for a text that is no pattern."""
    try:
        return marked_layers(text, num_layers=num_layers, every_nth=every_nth)
    except ValueError as error:
        raise UserError(f"{name}={text} {error}") from error


def _pattern(text: str) -> int | list[int]:
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"is no pattern; it must be {NOTATION}") from error


def _value(node: ast.expr) -> int | list[int]:
    """Value of an expression of whole numbers, lists, + and *."""
    match node:
        case ast.Constant(int(number)) if not isinstance(number, bool):
            return number
        case ast.List(items) | ast.Tuple(items):
            values = [_value(item) for item in items]
            if all(isinstance(value, int) for value in values):
                return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left, ast.Add() | ast.Mult() as operator, right):
            match _value(left), operator, _value(right):
                case (list(first), ast.Add(), list(second)):
                    return first + second
                case (int(first), ast.Add(), int(second)):
                    return first + second
                case (int(first), ast.Mult(), int(second)):
                    return first * second
                case (list(marks), ast.Mult(), int(times)) | (int(times), ast.Mult(), list(marks)):
                    # Measured before it is made: a product of lists could fill the memory.
                    if len(marks) * times > LONGEST:
                        raise ValueError(f"is a list of more than {LONGEST}")
                    return marks * times
    raise ValueError(f"is no pattern; it must be {NOTATION}")
