"""One page for a run, or for several side by side: tables and pictures in a single file, without scripts or network."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

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
    """Write the page of one run into its folder, or of several beside each other.

    Args:
        folders: Folders of runs.
        path: The page; ``report.html`` in the run's folder, or in the current one for several, if left out.

    Raises:
        UserError: If a folder holds no run.
    """
    runs = [read_run(folder) for folder in folders]
    page = path or (folders[0] / PAGE if len(runs) == 1 else Path(PAGE))
    page.write_text(run_page(runs[0]) if len(runs) == 1 else comparison_page(runs), encoding="utf-8")
    return page


def run_page(run: RunFiles) -> str:
    """The page of one run."""
    sections: Iterable[tuple[str, Callable[[RunFiles], str]]] = (
        ("Plan", plan_section),
        ("What holds the memory", holders_section),
        ("Pictures", pictures_section),
        ("Epochs", epochs_section),
        ("Out-of-memory errors", events_section),
        ("Classes", scores_section),
        ("Confusion matrix", confusion_section),
        ("Configuration", config_section),
        ("Versions", versions_section),
    )
    made = ((title, make(run)) for title, make in sections)
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in made if content)
    return document(f"{described(run)}: {run.name}", cards(run) + body)


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Several runs side by side: a table of what differs and what came of it, and their curves."""
    columns = [facts(run) for run in runs]
    rows = [[name, *(column[place][1] for column in columns)] for place, (name, _) in enumerate(columns[0])]
    known = [row for row in rows if any(text != "–" for text in row[1:])]
    content = f"<h2>Results</h2>{table(['', *(run.name for run in runs)], known, numbers=True)}"
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


def facts(run: RunFiles) -> list[tuple[str, str]]:
    """What one looks at first: results, the plan, memory, speed; a dash where it is not known."""
    plan, probe = run.plan.get("plan") or {}, run.probe
    metrics = [
        (name, f"{value:.4f}" if value is not None else "not finite")
        for name in METRICS
        if name in run.result
        for value in [run.result[name]]
    ]
    named = dict(metrics)
    speed = run.samples_per_second
    memory = f"{format_bytes(probe.peak_bytes)} of {format_bytes(probe.budget_bytes)}" if probe else "–"
    return [
        *((name, named.get(name, "–")) for name in METRICS),
        ("effective batch", str(plan.get("effective_batch_size", "–"))),
        ("micro-batch × factor", f"{plan['micro_batch_size']} × {plan['factor']}" if plan else "–"),
        ("ranks", str(plan.get("world_size", "–"))),
        ("peak of the budget", memory),
        ("samples a second", f"{speed:,.0f}" if speed else "–"),
        ("seconds", f"{run.result['seconds']:,.0f}" if "seconds" in run.result else "–"),
        ("out-of-memory errors", str(run.result.get("oom_events", 0))),
    ]


def cards(run: RunFiles) -> str:
    """The facts as cards."""
    shown = "".join(
        f'<div class="card"><b>{escape(text)}</b><span>{escape(name)}</span></div>'
        for name, text in facts(run)
        if text != "–"
    )
    return f'<div class="cards">{shown}</div>'


def plan_section(run: RunFiles) -> str:
    """The plan's table, as it was printed before the first step."""
    return table([], [[name, text] for name, text in (run.plan.get("told") or {}).items()])


def holders_section(run: RunFiles) -> str:
    """What holds the memory at the peak, where the probe has recorded it."""
    lines = run.plan.get("memory") or []
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


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


def events_section(run: RunFiles) -> str:
    """What was told of out-of-memory errors."""
    return "".join(f"<p>{escape(line)}</p>" for line in run.events)


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


def config_section(run: RunFiles) -> str:
    """The resolved configuration, folded."""
    return f"<details><summary>config.yaml</summary><pre>{escape(run.config_text)}</pre></details>"


def versions_section(run: RunFiles) -> str:
    """What it ran with."""
    return table([], [[name, str(version)] for name, version in run.versions.items()])


def differing(runs: Sequence[RunFiles]) -> str:
    """The keys of the configurations in which runs differ."""
    by_run = [settings(run.config) for run in runs]
    keys = dict.fromkeys(key for content in by_run for key in content if not key.endswith(FOLDERS))
    rows = [[key, *(shown(content.get(key, "–")) for content in by_run)] for key in keys]
    different = [row for row in rows if len({*row[1:]}) > 1]
    return table(["key", *(run.name for run in runs)], different) or "<p>Nothing: the same configuration.</p>"


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


def number(value: Any) -> str:
    """A metric with four digits, or a dash."""
    return "–" if value is None else f"{value:.4f}"
