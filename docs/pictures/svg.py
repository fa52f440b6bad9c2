"""Drawing of SVG as text: boxes, words and arrows on a card that is legible on light and on dark pages."""

from html import escape
from typing import Self

HUES = 4
"""Colours of ranks, `h0` to `h3`; `whole` is what every rank has, `ghost` what a rank does not have."""
STYLE = """
  svg { --card: #ffffff; --ink: #1f2430; --soft: #5b6472; --line: #8a93a3; --whole: #d9dde5; --sent: #d1495b;
        --h0: #a9c7ee; --h1: #f2b3a0; --h2: #aedbb0; --h3: #ecd58b; }
  @media (prefers-color-scheme: dark) {
    svg { --card: #20242e; --ink: #eef0f5; --soft: #b3bac7; --line: #7f8898; --whole: #4a5160; --sent: #ff8896;
          --h0: #2f5f9e; --h1: #a34a33; --h2: #2f7a3d; --h3: #85690f; } }
  text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
  .soft { fill: var(--soft); } .sent-text { fill: var(--sent); }
  .card { fill: var(--card); } .whole { fill: var(--whole); }
  .ghost { fill: none; stroke-dasharray: 3 3; }
  .h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); }
  .sent { stroke: var(--sent); fill: none; } .sent-fill { fill: var(--sent); }
  .line { stroke: var(--line); fill: none; } .line-fill { fill: var(--line); }
  rect.box { stroke: var(--line); }
"""
HEAD = 6.0  # length of an arrow's head


class Drawing:
    """Picture of a width and a height, to which shapes are added; `text` is the file."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "whole", label: str = "") -> Self:
        """A rectangle of a kind, with a label in its middle."""
        at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._shapes.append(f'<rect class="box {kind}" {at} rx="2"/>')
        return self.words(x + width / 2, y + height / 2 + 4, label, anchor="middle") if label else self

    def words(
        self, x: float, y: float, text: str, *, kind: str = "", size: float = 12, anchor: str = "start", turn: float = 0
    ) -> Self:
        """Words whose baseline is at y; `anchor` says which part of them is at x, `turn` turns them by degrees."""
        turned = f' transform="rotate({turn:g} {x:g} {y:g})"' if turn else ""
        style = f'class="{kind}" ' if kind else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self._shapes.append(f"<text {style}{place}{turned}>{escape(text, quote=False)}</text>")
        return self

    def line(self, *points: tuple[float, float], kind: str = "line") -> Self:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline class="{kind}" stroke-width="1.5" points="{path}"/>')
        return self

    def arrow(self, start: tuple[float, float], end: tuple[float, float], *, kind: str = "sent") -> Self:
        """A line with a head at its end."""
        (x, y), (a, b) = start, end
        length = ((a - x) ** 2 + (b - y) ** 2) ** 0.5
        u, v = (a - x) / length * HEAD, (b - y) / length * HEAD
        corners = [(a, b), (a - u - v / 2, b - v + u / 2), (a - u + v / 2, b - v - u / 2)]
        head = " ".join(f"{p:.1f},{q:.1f}" for p, q in corners)
        self._shapes.append(f'<polygon class="{kind}-fill" points="{head}"/>')
        return self.line(start, (round(a - u, 1), round(b - v, 1)), kind=kind)

    def brace(self, start: tuple[float, float], end: tuple[float, float], depth: float) -> Self:
        """A bracket from start to end, level or upright, open towards them; `depth` is signed."""
        (x, y), (a, b) = start, end
        if y == b:
            return self.line((x, y), (x, y + depth), (a, y + depth), (a, y))
        return self.line((x, y), (x + depth, y), (x + depth, b), (x, b))

    @property
    def text(self) -> str:
        """The file."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        card = f'<rect class="card" width="{self.width:g}" height="{self.height:g}" rx="8"/>'
        lines = "\n".join([f"<title>{escape(self.title, quote=False)}</title>", card, *self._shapes])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{lines}\n</svg>\n'
