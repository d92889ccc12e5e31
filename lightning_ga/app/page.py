"""One page for a run, or for several side by side: tables and pictures in a single file, without scripts or network."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from lightning_ga.app.plots import as_svg, comparison_figure, loss_figure, probe_figure
from lightning_ga.app.run_files import RunFiles, read_run
from lightning_ga.app.values import shown
from lightning_ga.app.walk import settings
from lightning_ga.plan.units import format_bytes

PAGE = "report.html"
METRICS = ("test/acc", "test/loss", "test/perplexity", "val/acc", "val/loss", "train/loss")
FOLDERS = ("output_dir", "default_root_dir", "dirpath", "save_dir")  # keys: every run has its own
MOST_CLASSES = 40  # of a confusion matrix that can be read
STYLE = """
:root{color-scheme:light dark;--line:#8885;--soft:#8881;--accent:#1f77b4}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;max-width:1080px;margin:0 auto;padding:1rem;background:Canvas;color:CanvasText}
h1{font-size:1.5rem;margin:.5rem 0;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem}
p{margin:.3rem 0}.quiet{opacity:.75;font-size:.9rem}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;margin:1rem 0}
.card{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .7rem}
.card b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.card span{font-size:.85rem;opacity:.75}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
td.n,th.n{text-align:right}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
.picture,.pictures>div{max-width:44rem}td.n{white-space:nowrap}
svg{width:100%;height:auto}svg text{fill:currentColor}
pre{background:var(--soft);padding:.7rem;border-radius:.5rem;overflow-x:auto;font-size:.8rem}
table.matrix td{text-align:center;min-width:2.2rem;border:1px solid var(--line)}
summary{cursor:pointer}
"""


def write_page(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page of one run, by default into its folder, or of several, by default into the current one.

    Raises:
        UserError: If a folder holds no run.
    """
    runs = [read_run(folder) for folder in folders]
    page = path or (folders[0] / PAGE if len(runs) == 1 else Path(PAGE))
    page.write_text(run_page(runs[0]) if len(runs) == 1 else comparison_page(runs), encoding="utf-8")
    return page


def run_page(run: RunFiles) -> str:
    """The page of one run."""
    sections = {
        "Plan": names_and_values(run.plan.get("told") or {}),
        "What holds the memory": paragraphs(run.plan.get("memory") or []),
        "Pictures": pictures_section(run),
        "Epochs": epochs_section(run),
        "Out-of-memory errors": paragraphs(run.events),
        "Classes": scores_section(run),
        "Confusion matrix": confusion_section(run),
        "Configuration": f"<details><summary>config.yaml</summary><pre>{escape(run.config_text)}</pre></details>",
        "Versions": names_and_values(run.versions),
    }
    body = "".join(f"<section><h2>{title}</h2>{made}</section>" for title, made in sections.items() if made)
    return document(f"{described(run)}: {run.name}", cards(run) + body)


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Several runs side by side: a table of what differs and what came of it, and their curves."""
    results = beside_each_other([facts(run) for run in runs])
    content = f"<h2>Results</h2>{table(['', *(run.name for run in runs)], results, numbers=True)}"
    content += f"<h2>What differs</h2>{differing(runs)}"
    figure = comparison_figure({run.name: run.curves for run in runs})
    if figure is not None:
        content += f"<h2>Loss</h2><div class='picture'>{as_svg(figure, 'Losses of the runs')}</div>"
    return document(f"{len(runs)} runs side by side", content)


def document(title: str, body: str) -> str:
    """A whole HTML document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def described(run: RunFiles) -> str:
    """Model and data in a few words."""
    model, data = run.config.get("model") or {}, run.config.get("data") or {}
    name = model.get("name") or str(model.get("_target_", "model")).rpartition(".")[2]
    return f"{name} on {str(data.get('_target_', 'data')).rpartition('.')[2]}"


def facts(run: RunFiles) -> dict[str, str]:
    """What one looks at first, as far as it is known: results, the plan, memory, speed."""
    plan, probe, speed = run.plan.get("plan"), run.probe, run.samples_per_second
    found = {name: number(run.result[name], "not finite") for name in METRICS if name in run.result}
    if plan:
        found["effective batch"] = str(plan["effective_batch_size"])
        found["micro-batch × factor"] = f"{plan['micro_batch_size']} × {plan['factor']}"
        found["ranks"] = str(plan["world_size"])
    if probe is not None:
        found["peak of the budget"] = f"{format_bytes(probe.peak_bytes)} of {format_bytes(probe.budget_bytes)}"
    if speed is not None:
        found["samples a second"] = f"{speed:,.0f}"
    if "seconds" in run.result:
        found["seconds"] = f"{run.result['seconds']:,.0f}"
    return {**found, "out-of-memory errors": str(run.result.get("oom_events", 0))}


def cards(run: RunFiles) -> str:
    """The facts as cards."""
    made = "".join(
        f'<div class="card"><b>{escape(text)}</b><span>{escape(name)}</span></div>' for name, text in facts(run).items()
    )
    return f'<div class="cards">{made}</div>'


def pictures_section(run: RunFiles) -> str:
    """The probe's curve and the losses."""
    probe, losses = run.probe, loss_figure(run.curves)
    made = [as_svg(probe_figure(probe), "Memory by micro-batch")] if probe is not None else []
    made += [as_svg(losses, "Losses by optimizer step")] if losses is not None else []
    return f'<div class="pictures">{"".join(f"<div>{picture}</div>" for picture in made)}</div>' if made else ""


def epochs_section(run: RunFiles) -> str:
    """One row an epoch, with samples a second and memory."""
    if not run.epochs:
        return ""
    names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch if "/" in name))
    rows = [
        [
            str(epoch["epoch"]),
            f"{epoch['steps']:,}",
            *(number(epoch.get(name)) for name in names),
            f"{epoch['seconds']:.1f}",
            f"{epoch['samples'] / epoch['seconds']:,.0f}" if epoch["seconds"] else "–",
            format_bytes(epoch.get("peak_bytes", epoch.get("process_bytes", 0))),
        ]
        for epoch in run.epochs
    ]
    memory = "peak memory" if "peak_bytes" in run.epochs[0] else "memory of the process"
    return table(["epoch", "steps", *names, "seconds", "samples a second", memory], rows, numbers=True)


def scores_section(run: RunFiles) -> str:
    """Precision, recall and F1 of every class."""
    rows = [
        [name, *(f"{score[kind]:.4f}" for kind in ("precision", "recall", "f1-score")), f"{score['support']:,.0f}"]
        for name, score in run.scores.items()
        if isinstance(score, dict)  # the accuracy is a number
    ]
    return table(["class", "precision", "recall", "F1", "samples"], rows, numbers=True)


def confusion_section(run: RunFiles) -> str:
    """Counts by class and prediction, the deeper the more of the class's samples."""
    counts: Sequence[Sequence[int]] = run.confusion.get("counts") or []
    if not counts or len(counts) > MOST_CLASSES:
        return ""
    names = run.confusion.get("classes") or [str(label) for label in range(len(counts))]
    head = "".join(f"<th>{escape(str(name))}</th>" for name in names)
    rows = ""
    for name, row in zip(names, counts):
        total = sum(row) or 1
        cells = "".join(
            f'<td style="background:rgba(31,119,180,{count / total:.2f})">{count or ""}</td>' for count in row
        )
        rows += f"<tr><th>{escape(str(name))}</th>{cells}</tr>"
    return (
        '<p class="quiet">Rows are classes, columns are predictions.</p>'
        f'<div class="wide"><table class="matrix"><tr><th></th>{head}</tr>{rows}</table></div>'
    )


def differing(runs: Sequence[RunFiles]) -> str:
    """The keys of the configurations in which runs differ."""
    columns = [
        {key: shown(value) for key, value in settings(run.config).items() if not key.endswith(FOLDERS)} for run in runs
    ]
    rows = [row for row in beside_each_other(columns) if len({*row[1:]}) > 1]
    return table(["key", *(run.name for run in runs)], rows) or "<p>Nothing: the same configuration.</p>"


def beside_each_other(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Rows of a name and its text in every column; a dash where a column lacks it."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "–") for column in columns)] for name in names]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """An HTML table; nothing without rows.

    Args:
        heads: Names of the columns; none for a table of names and values.
        rows: Texts by row.
        numbers: Whether all columns but the first are aligned at the right.
    """
    if not rows:
        return ""
    kinds = ["" if place == 0 or not numbers else ' class="n"' for place in range(len(rows[0]))]
    top = "".join(f"<th{kind}>{escape(head)}</th>" for kind, head in zip(kinds, heads))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(text)}</td>' for kind, text in zip(kinds, row))}</tr>" for row in rows
    )
    return f'<div class="wide"><table>{f"<tr>{top}</tr>" if top else ""}{body}</table></div>'


def names_and_values(pairs: Mapping[str, str]) -> str:
    """A table of two columns."""
    return table([], list(pairs.items()))


def paragraphs(lines: Sequence[str]) -> str:
    """A paragraph a line."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def number(value: float | None, missing: str = "–") -> str:
    """A metric with four digits."""
    return missing if value is None else f"{value:.4f}"
