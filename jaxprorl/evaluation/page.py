"""The look of self-contained reports: one style sheet and the few elements that they are made of. No scripts, nothing loaded."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

CSS = """
:root { color-scheme: light; --ink: #1f2933; --soft: #52606d; --line: #e4e7eb; --accent: #0b6e99; --mark: #c2410c; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; } h2 { font-size: 20px; margin: 44px 0 12px; }
h3 { font-size: 15px; margin: 0 0 6px; } .card + h3 { margin-top: 20px; }
p { max-width: 74ch; margin: 0 0 12px; } .lead { font-size: 18px; color: var(--soft); } .soft { color: var(--soft); font-size: 14px; }
.card, figure { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 12px; margin: 24px 0 0; }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span { color: var(--soft); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; }
figure svg { display: block; width: 100%; height: auto; } figcaption { color: var(--soft); font-size: 13px; margin: 4px 0 0; }
.card + .soft { margin-top: 8px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 1px solid #9aa5b1; padding: 6px 9px; vertical-align: bottom; }
td { text-align: right; border-bottom: 1px solid var(--line); padding: 7px 9px; white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } tr.all td { font-weight: 650; border-bottom: 0; } td small { color: var(--soft); }
th.words { text-align: left; } td.words { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; }
.good { color: #2b6a30; font-weight: 600; } .mark { color: var(--mark); font-weight: 600; }
.note { border-left: 4px solid #d9a400; background: #fffaeb; padding: 10px 16px; border-radius: 4px; margin: 20px 0 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: 12px 0 0; } summary { cursor: pointer; font-weight: 600; }
pre, code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px; overflow-x: auto; }
@media (max-width: 520px) { .grid { grid-template-columns: 1fr; } }
@media print { body { background: #fff; } figure, .card, tr { break-inside: avoid; } }
"""


def text(value: Any) -> str:
    """A value for a reader, escaped: thousands separated, floats to four digits, containers as JSON."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(str(key))} {text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value))
    return escape(str(value))


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """Names and values; those that are None are left out."""
    rows = "".join(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{text(value)}</dd>" for name, value in pairs if value is not None)
    return f'<div class="card"><dl>{rows}</dl></div>' if rows else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: frozenset[int] = frozenset()) -> str:
    """A table of cells that are HTML already; columns in `words` hold running text."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(f'<{tag} class="words">{v}</{tag}>' if i in words else f"<{tag}>{v}</{tag}>" for i, v in enumerate(values))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="card scroll"><table><thead><tr>{cells("th", headings)}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, body: Sequence[str]) -> str:
    """A whole document; `title` and `body` are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )
