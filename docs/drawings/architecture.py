"""Draws docs/images/architecture.svg, the layer of docs/method.md: python docs/drawings/architecture.py

One portrait file for light and dark screens, with letters large enough for a phone. Blue is what a precomposed layer
stores, a dashed outline is what it no longer needs, and orange is what is computed for each token.
"""

import re
from pathlib import Path
from xml.sax.saxutils import escape

OUTPUT = Path(__file__).parent.parent / "images" / "architecture.svg"
WIDTH, HEIGHT = 640, 1090
TITLE = "IntBMoE: codes become coefficients, these merge pools into K blocks, a router sends each token to k of them"
SHARED = Path(__file__).parents[2] / "src" / "intbmoe" / "report" / "style.css"
STYLE = """
  text { font: 17px var(--sans); fill: var(--ink); }
  .strong { font-weight: 600; }
  .head { font-size: 20px; font-weight: 650; }
  .soft { fill: var(--soft); }
  .small { font-size: 12.5px; }
  .paper { fill: var(--raised); }
  .box { stroke-width: 1.6; }
  .gone { fill: var(--hover); stroke: var(--soft); stroke-dasharray: 6 4; }
  .kept { fill: var(--pale-blue); stroke: var(--blue); }
  .token { fill: var(--pale-orange); stroke: var(--orange); }
  .frame { fill: none; stroke: var(--orange); }
  .arrow { fill: none; stroke: var(--soft); stroke-width: 2; marker-end: url(#tip); }
  .weights { stroke: var(--blue); }
  #tip path { fill: var(--soft); }
"""


def rich(text: str) -> str:
    """Sets ``W_{b}^{l}`` with a lowered index and a raised exponent, then returns to the base line."""
    parts, height = [], 0
    for piece in re.split(r"([_^]\{[^}]*\})", text):
        index = re.fullmatch(r"([_^])\{([^}]*)\}", piece)
        level = {"_": 5, "^": -7}[index[1]] if index else 0
        if piece:
            words, size = (index[2], ' class="small"') if index else (piece, "")
            parts.append(f'<tspan dy="{level - height}"{size}>{escape(words)}</tspan>')
            height = level
    return "".join(parts)


def write(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{rich(text)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, *lines: str, sheets: int = 0) -> str:
    """Draws a box with centred lines of text, the first one bold, and ``sheets`` more boxes behind it."""
    shape = f'width="{width}" height="{height}" rx="7" class="box {kind}"'
    drawn = [f'<rect x="{x + 7 * n}" y="{y - 7 * n}" {shape}/>' for n in range(sheets, -1, -1)]
    top = y + height / 2 - 12 * (len(lines) - 1) + 6
    texts = [write(x + width / 2, top + 24 * n, line, "" if n else "strong") for n, line in enumerate(lines)]
    return f'<g class="holds">{"".join(drawn + texts)}</g>'


def arrow(*points: tuple[float, float], kind: str = "") -> str:
    return f'<path class="arrow {kind}" d="M{" L".join(f"{x} {y}" for x, y in points)}"/>'


def compose() -> list[str]:
    """The upper half: weights only."""
    return [
        write(20, 34, "From codes to blocks, without tokens", "head", "start"),
        box(20, 62, 162, 86, "gone", "K codes", "c_{1} … c_{K}, learned"),
        arrow((182, 105), (212, 105)),
        box(216, 62, 190, 86, "gone", "hypernetwork", "one for all blocks"),
        arrow((406, 105), (448, 105)),
        box(452, 62, 168, 86, "gone", "coefficients", "α^{v}, α^{g}: K × E"),
        arrow((536, 148), (536, 186), (312, 186), (312, 226)),
        box(20, 226, 176, 104, "gone", "pool of E bases", "W_{1}^{l} … W_{E}^{l}", "for l = 1 … L", sheets=2),
        arrow((210, 278), (234, 278)),
        box(238, 230, 148, 96, "gone", "merge", "(1/√E) Σ_{e} α_{e} W_{e}^{l}", "value and gate"),
        arrow((386, 278), (416, 278)),
        box(420, 226, 186, 104, "kept", "K blocks", "W_{b,v}^{l} and W_{b,g}^{l}", "for l = 1 … L", sheets=2),
        write(20, 362, "every block is made of all E bases", "soft", "start"),
        write(620, 362, "and W_{c} c_{b} + b_{f} (filter)", "soft", "end"),
    ]


def run() -> list[str]:
    """The lower half: what happens to a token."""
    frame = '<rect x="172" y="528" width="300" height="392" rx="9" class="box frame"/>'
    return [
        write(20, 420, "From tokens to blocks", "head", "start"),
        box(262, 442, 120, 40, "token", "token x_{t}"),
        arrow((262, 462), (86, 462), (86, 524)),
        arrow((322, 482), (322, 566)),
        arrow((382, 462), (555, 462), (555, 524)),
        # the router
        box(16, 528, 140, 92, "token", "router", "two layers,", "ReLU"),
        arrow((86, 620), (86, 652)),
        box(16, 656, 140, 70, "token", "softmax", "over all K: π_{t}"),
        arrow((86, 726), (86, 758)),
        box(16, 762, 140, 92, "token", "top-k", "the k highest", "of K blocks"),
        arrow((156, 808), (170, 808)),
        arrow((86, 854), (86, 956)),
        # one block
        frame,
        write(186, 554, "chosen block", "strong", "start"),
        box(186, 570, 272, 66, "token", "filter z^{0}", "x_{t} ⊙ σ(W_{x} x_{t} + W_{c} c_{b} + b_{f})"),
        arrow((240, 636), (240, 668)),
        arrow((382, 636), (382, 668)),
        box(186, 672, 108, 74, "token", "value v", "W_{b,v}^{l} z^{l−1}"),
        box(306, 672, 152, 74, "token", "gate g", "RMS(W_{b,g}^{l} z^{l−1})"),
        arrow((240, 746), (240, 778)),
        arrow((382, 746), (382, 778)),
        box(186, 782, 272, 66, "token", "DPRG: residual gating", "v ⊙ (1 + λ SiLU(g))"),
        write(322, 876, "l = 1 … L, a LayerNorm between", "soft"),
        write(322, 902, "out: F_{b}(x_{t})"),
        arrow((322, 920), (322, 956)),
        # the blocks' weights come from above
        arrow((432, 330), (432, 526), kind="weights"),
        # the shared expert
        box(482, 528, 146, 116, "token", "shared expert", "SwiGLU S(x_{t})", "always on"),
        arrow((555, 644), (555, 956)),
        # both together
        box(16, 960, 612, 62, "token", "y_{t} = Σ_{b chosen} π_{t,b} F_{b}(x_{t}) + S(x_{t})"),
    ]


def legend() -> list[str]:
    """What the three kinds of box mean."""
    kinds = (("kept", 16, "stored when precomposed"), ("gone", 296, "not needed then"), ("token", 496, "per token"))
    parts = []
    for kind, x, words in kinds:
        parts.append(f'<rect x="{x}" y="1044" width="26" height="22" rx="5" class="box {kind}"/>')
        parts.append(write(x + 34, 1061, words, "", "start"))
    return parts


def draw() -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    tip += '<path d="M0 0 L8 4 L0 8 Z"/></marker>'
    start = [
        f'{head} role="img">',
        f"<title>{escape(TITLE)}</title>",
        f"<style>{SHARED.read_text(encoding='utf-8')}{STYLE}</style>",
        f"<defs>{tip}</defs>",
    ]
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" class="paper"/>'
    return "\n".join([*start, paper, *compose(), *run(), *legend(), "</svg>"]) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")
