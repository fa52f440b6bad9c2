"""Chat templates that fill the memory, do not end, or are nested too deep."""

DOUBLED = (
    "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set ns.x = {1} %}}{{% endfor %}}{{{{ ns.x }}}}"
)
FILLING = {
    "tilde": DOUBLED.format("'a'", "ns.x ~ ns.x"),
    "plus": DOUBLED.format("'a'", "ns.x + ns.x"),
    "lists": DOUBLED.format("[1]", "ns.x + ns.x"),
    "tuples": DOUBLED.format("(1,)", "ns.x + ns.x"),
    "dicts": DOUBLED.format("'a'", "dict(a=ns.x, b=ns.x) | string"),
    "quoted": DOUBLED.format("'a'", "[ns.x, ns.x] | string"),
    "replace": DOUBLED.format("'a'", "ns.x.replace('a', 'a' * 1000)"),
    "replace filter": DOUBLED.format("'a'", "ns.x | replace('a', 'aaaa')"),
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent stars": "{{ '%*d' % (2000000000, 1) }}{{ '%*d' % (2000000000, 1) }}",
    "percent": "{{ '%2147483647s' | format('a') }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 9999999999) }}",
    "center": "{{ 'a' | center(9999999999) }}",
    "center method": "{{ 'a'.center(9999999999) }}",
    "ljust": "{{ 'a'.ljust(9999999999) | length }}",
    "rjust": "{{ 'a'.rjust(9999999999) | length }}",
    "zfill": "{{ 'a'.zfill(9999999999) | length }}",
    "indent": "{{ ('a\n' * 100000) | indent(1000000) }}",
    "tojson": "{{ [[[[1] * 1000] * 1000] * 100] | tojson(indent=100000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}{{ '\t\t\t'.expandtabs(2000000000) }}",
    "join": "{{ range(99999) | join('a' * 1000000) }}",
    "join method": "{{ ('a' * 1000000).join('b' * 100000) }}",
    "batch": "{{ [1] | batch(999999999, 0) | list }}",
    "slice": "{{ range(9) | slice(999999999) | list }}",
    "wordwrap": "{{ ('a ' * 400000) | wordwrap(1, wrapstring='b' * 1000000) }}",
    "escape": DOUBLED.format("'<'", "(ns.x | escape) ~ ns.x"),
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "bytes": DOUBLED.format("'a'.encode()", "ns.x + ns.x"),
    "power": "{{ 7 ** 99999 ** 2 }}",
    "macro": "{% macro m(n) %}{{ 'a' * 1000000 }}{% if n %}{{ m(n - 1) * 2 }}{% endif %}{% endmacro %}{{ m(60) }}",
    "folded": "{{ 'a' | center(9999999999) | center(99999999999) }}",
    "folded list": "{% set x = [" + "'a'.ljust(999999999)," * 90 + "] %}",
    "cycle": "{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}",
    "text": "{% for i in range(99999) %}" + "a" * 100_000 + "{% endfor %}",
    "sort": "{{ (range(99999) | list * 999) | sort }}{{ range(99999) | list | map('string') | join('a' * 999999) }}",
}
"""Templates that need more memory than there may be."""
ENDLESS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "sum": "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
    "huge range": "{{ range(99999999999999) | sum }}",
    "last of a range": "{{ range(99999999999) | map('string') | last }}",
    "lipsum": "{{ lipsum(n=99999999) | length }}",
    "lipsum words": "{{ lipsum(n=1, min=9999999, max=99999999) | length }}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "in a range": "{{ 0.5 in range(99999999999) }}",
    "count": "{{ ('a' * 999999).count('a' * 4999 ~ 'b') }}" * 1000,
    "digits": "{% for i in range(99999) %}{{ 9 ** 300000 % 7 }}{% endfor %}",
    "round": "{% for i in range(99999) %}{% for j in range(99999) %}{{ (1.5 | round(2)) }}{% endfor %}{% endfor %}",
    "groupby": "{% for i in range(99999) %}{{ range(99999) | list | groupby('a') | length }}{% endfor %}",
    "unique": "{% for i in range(99999) %}{{ range(99999) | unique | list | length }}{% endfor %}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}" * 2,
}
"""Templates that do not end."""
DEEP = {
    "brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "lists": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "filters": "{{ 1" + " | string" * 50_000 + " }}",
    "sums": "{{ 1" + " + 1" * 50_000 + " }}",
    "nots": "{{ " + "not " * 100_000 + "1 }}",
    "attributes": "{{ messages" + ".a" * 50_000 + " }}",
    "own call": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "own list": "{% set x = [] %}{{ x.append(x) }}{{ x | tojson }}",
}
"""Templates that are nested too deep to be read or written."""
