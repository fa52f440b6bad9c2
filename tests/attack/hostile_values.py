"""Odd values and marks of hostile files, which all kinds share.

A pickle or a config that runs code leaves CANARY in the input's folder; no word that is written may have PASSWORD.
"""

import json
import random
from typing import Any

CANARY, PASSWORD = "canary", "pw-kept-out-of-logs"
DEEP = 100_000
JSON_VALUES = (
    *("null", "true", "-1", "0", "1.5", "1e999", "NaN", "Infinity", "9" * 4000, "9" * 5000, "[]", "{}", '""', "-0.0"),
    *('"\\ud800"', '"\\u0000"', '"a\\nb"', "[[[]]]", '{"a": {}}', "2147483648", "9223372036854775808", "[null]"),
    *("[" * DEEP, "[" * 900 + "]" * 900, '{"a":' * DEEP, '"' + "x" * 3_000_000 + '"', "1e-320", '"\\u001b[2J"'),
    *("[" + "1," * 300_000 + "1]", "{" + ",".join(f'"k{i}":1' for i in range(60_000)) + "}", '"' + "9" * 5000 + '"'),
    *('"../../etc/passwd"', '"/dev/zero"', '"a\\u0000b"', '"{0.__class__}"', '"%n%s"', "[1, [2, [3]], {}]"),
)
"""Values of JSON that no file should have there."""


def path_in(value: Any, numbers: random.Random) -> list[Any]:
    """Keys that lead to some value inside of a JSON value."""
    path = []
    while isinstance(value, dict | list) and value and (not path or numbers.random() < 0.75):
        path.append(
            numbers.choice(sorted(value, key=str)) if isinstance(value, dict) else numbers.randrange(len(value))
        )
        value = value[path[-1]]
    return path


def with_odd_value(text: str, numbers: random.Random) -> tuple[str, str]:
    """A JSON text with an odd value, or an odd key, in one place; and what it is."""
    content = json.loads(text)
    path, odd = path_in(content, numbers), numbers.choice(JSON_VALUES)
    if not path or numbers.random() < 0.1:
        return odd, f"all is {odd[:30]}"
    place = content
    for key in path[:-1]:
        place = place[key]
    if isinstance(place, dict) and numbers.random() < 0.1:
        place[numbers.choice(("", "\0", "a" * 100_000, "__class__", "a.b", "\n[plugins]\n#"))] = "ODD VALUE"
    else:
        place[path[-1]] = "ODD VALUE"
    return json.dumps(content).replace('"ODD VALUE"', odd, 1), f"{path} is {odd[:30]}"
