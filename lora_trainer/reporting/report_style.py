"""The style sheet of the report: two colour schemes, from phone to desk, no request, no script.

`CHARTS` is the part that charts.py needs, on whatever page: everything in it is inside of `.chart`.
The page has the colours --page, --quiet, --rule, --train, --validation, --base, --good, --warn.
"""

from __future__ import annotations

from lora_trainer.reporting.charts import Html

CHARTS = Html("""
.chart { margin: 0.6rem 0 0; }
.chart figcaption {
  display: flex; flex-wrap: wrap; gap: 0.1rem 1.6rem; align-items: baseline;
  margin-bottom: 0.3rem;
}
.chart figcaption b { font-weight: 600; }
.chart .legend {
  display: flex; flex-wrap: wrap; gap: 0 1.2rem; color: var(--quiet); font-size: 0.82rem;
}
.chart .key {
  display: inline-block; width: 1.1rem; height: 0; margin-right: 0.4rem;
  border-top: 2px solid var(--train); vertical-align: 0.25rem;
}
.chart .key.raw { opacity: 0.4; }
.chart .key.validation { border-color: var(--validation); }
.chart .key.base { border-color: var(--base); border-top-style: dashed; }
.chart svg { display: block; width: 100%; height: auto; }
.chart .narrow { display: none; }
.chart text { fill: var(--quiet); font-size: 11.5px; font-family: inherit; }
.chart .end { text-anchor: end; }
.chart .middle { text-anchor: middle; }
.chart .rule { stroke: var(--rule); stroke-width: 1; }
.chart .axis { stroke: var(--base); stroke-width: 1; }
.chart .line {
  fill: none; stroke: var(--train); stroke-width: 1.8;
  stroke-linejoin: round; stroke-linecap: round;
}
.chart .line.raw { stroke-width: 1; opacity: 0.32; }
.chart .line.validation { stroke: var(--validation); }
.chart .line.base { stroke: var(--base); stroke-dasharray: 5 4; stroke-width: 1.4; }
.chart circle { fill: var(--train); stroke: var(--page); stroke-width: 1.2; }
.chart circle.validation { fill: var(--validation); }
.chart circle.base { fill: var(--base); }
.chart .mark { fill: var(--quiet); }
.chart .mark.saved { fill: var(--good); }
.chart line.mark { stroke: var(--quiet); stroke-dasharray: 2 3; }
.chart line.mark.memory { stroke: var(--warn); stroke-dasharray: 6 3; stroke-width: 1.4; }
.chart line.mark.resumed { stroke: var(--good); }
.chart .strip { fill: transparent; }
.chart .strip:hover { fill: var(--rule); fill-opacity: 0.7; }
@media (max-width: 40rem) {
  .chart .wide { display: none; }
  .chart .narrow { display: block; }
}
""")

STYLE = Html("""
:root {
  color-scheme: light dark;
  --page: #fdfdfc; --panel: #f2f2ee; --ink: #1b1d1f; --quiet: #63676b; --rule: #e2e2dd;
  --train: #2f6690; --validation: #c2571a; --base: #7d7f82;
  --good: #2c7a4b; --bad: #b3261e; --warn: #8a5f06;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181a; --panel: #24282b; --ink: #e4e6e7; --quiet: #9aa0a5; --rule: #31353a;
    --train: #7fb3dc; --validation: #f0935a; --base: #8d9297;
    --good: #6cc28f; --bad: #f2857c; --warn: #dcb35c;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 68rem;
  background: var(--page); color: var(--ink);
  font: 0.94rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}

h1 { margin: 0 0 0.3rem; font-size: 1rem; font-weight: 600; color: var(--quiet); }
h2 {
  margin: 2.6rem 0 0.8rem; padding-top: 0.9rem; border-top: 1px solid var(--rule);
  font-size: 1.06rem;
}
h3 { margin: 1.4rem 0 0.4rem; font-size: 0.94rem; }
p { margin: 0.4rem 0; max-width: 46rem; }
.verdict {
  margin: 0; max-width: none; font-size: 1.7rem; line-height: 1.25; font-weight: 600;
  letter-spacing: -0.015em; text-wrap: balance;
}
.verdict.failed { color: var(--bad); }
.verdict.stopped, .verdict.unfinished { color: var(--warn); }
.advice { margin: 0.5rem 0 0; }
.about { margin: 0.6rem 0 0; max-width: none; color: var(--quiet); }
.quiet, .note { color: var(--quiet); }
.note { font-size: 0.86rem; }
code { font: 0.86em ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
pre {
  margin: 0.9rem 0 0; padding: 0.7rem 0.9rem; background: var(--panel); border-radius: 6px;
  white-space: pre-wrap;
}
footer { margin-top: 3rem; color: var(--quiet); font-size: 0.82rem; }

.figures {
  display: grid; grid-template-columns: repeat(5, 1fr) 1.6fr; gap: 1.2rem 1.4rem;
  margin: 1.9rem 0 0;
}
.figures dt { color: var(--quiet); font-size: 0.82rem; }
.figures dd { margin: 0; font-size: 1.22rem; font-weight: 600; line-height: 1.4; }
.figures dd + dd { font-size: 0.82rem; font-weight: 400; color: var(--quiet); }
.figures .file dd:first-of-type { font-size: 0.98rem; line-height: 1.75; }

.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th {
  text-align: left; font-weight: 500; font-size: 0.82rem; color: var(--quiet);
  white-space: nowrap;
}
th, td {
  padding: 0.36rem 1.1rem 0.36rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top;
}
th:last-child, td:last-child { padding-right: 0; }
td:first-child, .settings td:nth-child(3) { white-space: nowrap; overflow-wrap: normal; }
td:not(:first-child) { min-width: 6rem; }
.settings td:nth-child(2) { max-width: 26rem; }
.numbers, .facts { width: auto; }
.numbers td:nth-child(2), .numbers th:nth-child(2) { text-align: right; white-space: nowrap; }
.numbers td:not(:first-child) { min-width: 0; }
.columns { display: grid; grid-template-columns: 1fr 1fr; gap: 0 2.6rem; align-items: start; }
.warning { color: var(--warn); }
.error { color: var(--bad); }
.bar {
  display: inline-block; width: 7rem; height: 0.5rem; background: var(--panel);
  border-radius: 2px; overflow: hidden; vertical-align: 0.08rem;
}
.bar i { display: block; height: 100%; background: var(--train); }
details { margin-top: 0.9rem; }
summary { cursor: pointer; color: var(--quiet); margin-bottom: 0.5rem; }

.samples {
  display: grid; gap: 0.55rem 0.6rem; align-items: start; justify-content: start;
  grid-template-columns: minmax(9rem, 15rem) repeat(var(--steps), minmax(6rem, var(--cell)));
  overflow-x: auto;
}
.samples [role=row] { display: contents; }
.samples [role=columnheader] { color: var(--quiet); font-size: 0.82rem; }
.samples [role=rowheader] { font-size: 0.88rem; padding-right: 1rem; line-height: 1.4; }
.samples small { display: block; color: var(--quiet); font-size: 0.78rem; }
.samples img, .samples .missing {
  display: block; max-width: 100%; height: auto; border-radius: 3px; background: var(--panel);
}
.samples .missing {
  width: 128px; min-height: 96px; padding: 0.5rem; color: var(--quiet); font-size: 0.78rem;
}
.pixels { image-rendering: pixelated; }

figure { margin: 0; }
.columns .chart { margin-top: 1.6rem; }

@media (max-width: 40rem) {
  body { padding: 1.4rem 1rem 3rem; }
  .verdict { font-size: 1.35rem; }
  .figures { grid-template-columns: 1fr 1fr; }
  .columns { grid-template-columns: minmax(0, 1fr); }
  .records thead, .records td:empty { display: none; }
  .records tr { display: block; padding: 0.5rem 0; border-bottom: 1px solid var(--rule); }
  .records td { display: block; padding: 0.05rem 0; border: 0; }
  .records td:nth-child(n + 3) { color: var(--quiet); }
  .samples { grid-template-columns: repeat(var(--steps), var(--cell)); }
  .samples img { max-width: none; }
  .samples .corner { display: none; }
  .samples [role=rowheader] {
    grid-column: 1 / -1; position: sticky; left: 0; width: calc(100vw - 2rem);
    margin-top: 0.5rem;
  }
}
@media print {
  body { max-width: none; }
  .scroll, .samples { overflow: visible; }
}
""")
