"""The front of the HTML report: totals, the stories, the heat maps and a table of the recipes."""

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from probe.gate.cases import Outcome
from probe.report.gate.assets import SCRIPT, STYLE
from probe.report.gate.heat import heat_html, heat_maps
from probe.report.gate.recipes import Run, runs, totals
from probe.report.gate.story import heading, story
from probe.report.gate.tables import text_html
from probe.report.numbers import number, short, value
from probe.running.environment import differences

#: The stories that are open when the report is; the others are a click away.
OPEN_STORIES = 1


def front(
    outcomes: Sequence[Outcome],
    *,
    environment: Mapping[str, str],
    baseline_environment: Mapping[str, str] | None,
) -> str:
    """HTML for `prefix` of pytest_html_results_summary. Nothing in it is loaded from elsewhere."""
    found = runs(outcomes)
    changed = differences(baseline_environment, environment)
    parts = [
        _totals(outcomes),
        _note(changed) if changed and any(run.failing for run in found) else "",
        _stories(found, changed),
        f"<h3>Error by mode and layer</h3>{heat_html(heat_maps(outcomes))}" if found else "",
        f"<h3>Recipes <small>the worst figure of all layers</small></h3>{_recipes(found)}" if found else "",
        _environment(environment, baseline_environment),
    ]
    return f"<style>{STYLE}</style><div class=probe>{''.join(parts)}</div><script>{SCRIPT}</script>"


def _totals(outcomes: Iterable[Outcome]) -> str:
    counts = totals(outcomes)
    if not counts:
        return "<p>No case was judged.</p>"
    quiet = ("passed", "updated", "skipped")
    chips = (
        f'<span class="probe-chip {name if name in quiet else "failed"}">{count} {name}</span>'
        for name, count in counts.items()
    )
    return f"<p>{''.join(chips)}</p>"


def _note(changed: Sequence[str]) -> str:
    text = "; ".join(changed)
    return f"<p class=probe-note>The environment is not that of the baselines: {text_html(text)}.</p>"


def _stories(found: Sequence[Run], changed: Sequence[str]) -> str:
    """One element per recipe, whose id is the anchor; it holds the stories of all its models and devices."""
    told: dict[str, list[Run]] = {}
    for run in found:
        if run.failing:
            told.setdefault(run.recipe, []).append(run)
    parts = []
    for place, (recipe, same) in enumerate(told.items()):
        failing = [outcome for run in same for outcome in run.failing]
        count = sum(len(run.outcomes) for run in same)
        texts = [story(run.outcomes, report=None, environment=changed) for run in same]
        parts.append(
            f'<details class=probe-story id="{text_html(recipe)}"{" open" * (place < OPEN_STORIES)}>'
            f"<summary>{text_html(heading(failing[0]))}<small>{len(failing)} of {count} cases failed</small></summary>"
            + "".join(f"<pre>{chr(10).join(map(text_html, lines[len(texts) == 1 :]))}</pre>" for lines in texts)
            + "</details>"
        )
    return f"<h3>What failed</h3><div class=probe-stories>{''.join(parts)}</div>" if parts else ""


def _recipes(found: Sequence[Run]) -> str:
    models = len({run.model for run in found}) > 1
    devices = len({run.device for run in found}) > 1
    relative = any("injected.relative_mse" in o.figures for run in found for o in run.layers)
    names = ["recipe", *["model"] * models, *["device"] * devices, "passed", "failed"]
    names += ["injected relative mse" if relative else "injected mse", "propagated mse", "correlation"]
    names += ["KL of logits", "change in bits per byte", "verdict"]
    rows = []
    for run in sorted(found, key=lambda run: not run.failing):
        name = text_html(run.recipe)
        title = f'<a href="#{quote(run.recipe)}">{name}</a>' if run.failing else name
        failed = f"<span class=probe-bad>{len(run.failing)}</span>" if run.failing else "0"
        verdicts = totals(run.failing)
        cells = [
            title,
            *[text_html(run.model)] * models,
            *[text_html(run.device)] * devices,
            str(sum(outcome.status == "passed" for outcome in run.outcomes)),
            failed,
            *_worst(run, "injected.relative_mse" if relative else "injected.mse"),
            ", ".join(text_html(verdict) for verdict in verdicts) or run.outcomes[0].status,
        ]
        body = "".join(f"<td class=n>{cell}" for cell in cells)
        rows.append(f"<tr{' class=failed' if run.failing else ''}>{body}")
    head = "".join(f"<th>{name}" for name in names)
    return f"<div class=probe-tall><table class=probe-recipes><tr>{head}{''.join(rows)}</table></div>"


def _worst(run: Run, injected_name: str) -> list[str]:
    """The worst figures over the layers, with their labels, and those of the whole model."""
    from probe.metrics import label_correlation, label_mse  # which loads torch; where a model ran, it is loaded

    injected = [value(o.figures, injected_name) for o in run.layers]
    mse = [value(o.figures, "propagated.mse", "injected.mse") for o in run.layers]
    correlation = [value(o.figures, "propagated.correlation", "injected.correlation") for o in run.layers]
    errors = [max((x for x in found if x is not None), default=None) for found in (injected, mse)]
    lowest = min((x for x in correlation if x is not None), default=None)
    whole = run.whole.figures if run.whole else {}
    kl, bits = value(whole, "logits.kl"), value(whole, "logits.change_in_bits_per_byte", "logits.change_in_bits")
    return [
        "" if errors[0] is None else short(errors[0]),
        "" if errors[1] is None else f"{short(errors[1])}<small>{label_mse(errors[1])}</small>",
        "" if lowest is None else f"{number(lowest)}<small>{label_correlation(lowest)}</small>",
        "" if kl is None else number(kl),
        "" if bits is None else number(bits),
    ]


def _environment(environment: Mapping[str, str], baseline: Mapping[str, str] | None) -> str:
    names = dict.fromkeys([*environment, *(baseline or {})])
    rows = []
    for name in names:
        now, then = environment.get(name, ""), (baseline or {}).get(name, "")
        moved = " class=moved" if baseline is not None and now != then else ""
        rows.append(f"<tr{moved}><td>{text_html(name)}<td>{text_html(now)}<td>{text_html(then)}")
    head = "<tr><th><th>this run<th>baselines"
    return (
        f"<details><summary>Environment</summary><table class=probe-environment>{head}{''.join(rows)}</table></details>"
    )
