"""Claim 16: the verdicts tell sick runs from healthy ones, before the loss does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._health import Thresholds
from ..._health.numbers import Spoken
from .._experiment import Runs
from .._figures import Array, Figures, table
from .._plot import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Spec, axis, guide, line, picture
from .._tasks import HELD_OUT, TASKS
from .._threads import in_a_process, side_by_side

if TYPE_CHECKING:
    from .._outcomes import Ending, HealthyPath
    from .._sweep import Setting

CLAIM = 16
VERSION = 7
TRACES = 1  # recorded once; rules are tuned on them
TITLE = "The verdicts tell sick runs from healthy ones, before the loss does"
SAID = """
Ours: what a watch says of attention while a model trains separates runs that will fail, because of
their attention, from runs that will end well, and it does so before the loss shows it.
"""
DONE = """
{runs} small transformers were trained for {steps} steps on {tasks} tasks (looking up, copying,
language, translation, classification, sorting, counting, arithmetic, noise that nothing can learn),
with LayerNorm before, after, beside or both, or as in Llama, PaLM, BLOOM, Swin v2, CaiT, DeepNet,
T5 or ReZero, three optimisers, learning rates over a factor of 50, warm-up, schedules, four scale
rules, QK-norm, dropout, and faults that begin in the middle. Outcome alone says how a run ended:
its final loss against the median of sound runs of the same task; a run that is behind by more than
{failed:.0%} of what they gained has failed, unless it gets there in {longer} times the steps, which
makes it slow.
A failure counts as attention's if the same run with the right scale or with QK-norm ends well. The
rules were tuned on runs of these tasks, most of those counted here among them; {held_out} runs are
of {held_tasks} other tasks and two architectures that no rule was tuned on. They were looked at
when the rules were fixed, and then had a say in two choices: more patience at the start was given
up, as it costs lead, and a stricter reading of fading gradients was not taken up, as it is late on
tasks of looking up. An alarm is a warning or worse, raised with the loss logged and every step
recorded, as a watch does if it is not told otherwise.
"""
FOUND = """
On the held-out tasks and architectures {held_false} of {held_well} runs that ended well raised an
alarm ({held_false_rate:.1%}; 95 % interval {held_false_low:.0%} to {held_false_high:.0%}), and
{held_caught} of {held_sick} runs that failed because of attention did ({held_recall:.0%}; interval
{held_recall_low:.0%} to {held_recall_high:.0%}), half of them at least {held_lead:.0f} steps before
the loss left the healthy path (quartiles {held_lead_low:.0f} and {held_lead_high:.0f}). On the
tasks that were tuned on it is {tuned_false} of {tuned_well}, {tuned_caught} of {tuned_sick}, and
{tuned_lead:.0f} steps. That is {per_steps:.1f} false alarms in 10,000 steps. Of
{other} failures with another cause {other_alarmed} raised an alarm. {baselines}
"""
LIMITS = """
These are models of one to three layers and some hundred steps, in float32 on a CPU. Noise, where
nothing can be learned and a sharp head harms nothing, accounts for {noise} of the false alarms, and
injected faults that did no harm within the run for {harmless}. Sudden faults give no lead: the loss
jumps with them. Many models without a scale learn in the end, and some raise an alarm before they
do; models that are flat because their scale is too small are told only after {flat:.0f} steps, as
many recover. What a threshold of this study is worth for a model of a billion parameters, nobody
has measured.
"""
KEY = {
    "false alarms, held out": "{held_false} of {held_well} ({held_false_rate:.1%})",
    "failing runs caught, held out": "{held_caught} of {held_sick} ({held_recall:.0%})",
    "steps before the loss, median": "{held_lead:.0f}",
    "false alarms on the tasks tuned on": "{tuned_false} of {tuned_well}",
    "caught on the tasks tuned on": "{tuned_caught} of {tuned_sick}",
}
NEEDS = ("torch",)
SHOW = ("summary", "baselines")
SEEDS = {"tiny": 1, "quick": 1, "full": 1}
SECONDS = {"tiny": 3.0, "quick": 18.0, "full": 5500.0}

TUNED = (
    *("recall", "copy", "stories", "match", "noise"),
    *("reverse", "majority", "markov", "sort", "pointer"),
    *("needle", "brackets", "masked", "induction", "count", "picture", "agreement"),
)
TUNED_LATER = (  # held out at first
    *("latest", "cipher", "largest", "sum", "chain", "lottery"),
    *("echo", "colour", "trigram", "topic", "mislabelled", "since"),
    *("address", "interleave", "prose", "order", "habit", "depth"),
    *("twin", "rotate", "skip", "mirror", "dice", "variety"),
    *("dictionary", "stutter", "sentences", "winner", "clock", "nth"),
)
TUNED_LAST = ("pairs", "chorus", "progression", "heaviest", "walk", "overlap")  # likewise
EARLY_NORMS = ("pre", "post", "parallel", "sandwich")
LATER_NORMS = (*EARLY_NORMS, "rms", "palm", "alibi", "swin", "cait")
NORMS = (*LATER_NORMS, "deepnet")
NEW_NORMS, ON = ("t5", "rezero"), ("recall", "match")  # the architectures that are held out
# Part of the study, its tasks, how many runs of each, their first seed, and architectures: those
# that the rules were tuned on, and new ones.
Group = tuple[str, tuple[str, ...], int, int, tuple[str, ...]]
GROUPS: dict[str, tuple[Group, ...]] = {
    size: (
        ("tuned", ("copy",), count, 45_000, EARLY_NORMS),
        ("held out", HELD_OUT[:1], count, 46_000, (*NORMS, *NEW_NORMS)),
    )
    for size, count in (("tiny", 9), ("quick", 10))
}
GROUPS["full"] = (
    ("tuned", TUNED, 12, 45_000, EARLY_NORMS),
    ("tuned", TUNED_LATER, 12, 45_000, LATER_NORMS),
    ("tuned", TUNED_LAST, 40, 46_000, NORMS),
    ("tuned", ON, 12, 45_500, LATER_NORMS[-2:]),
    ("tuned", ON, 24, 46_500, NORMS[-1:] * 2),
    ("held out", HELD_OUT[:6], 40, 47_000, (*NORMS, *NEW_NORMS[:1])),
    ("held out", HELD_OUT[6:], 40, 48_000, (*NORMS, *NEW_NORMS)),
    ("held out", ON, 24, 47_500, NEW_NORMS[:1] * 2),
    ("held out", ON, 24, 48_500, NEW_NORMS[1:] * 2),
)
STEPS = {"tiny": 12, "quick": 60, "full": 400}
# How many trainings a full run makes: all settings, and those that find causes.
PIECES = {"full": sum(len(tasks) * count for _, tasks, count, *_ in GROUPS["full"]) + 500}
EVERY, RARER = 1, (10, 50)  # steps between records: what a watch does by itself, and others
COMPARED = 10  # the same, where alarms of several kinds are compared
FALSE, RECALL, LEAD = 0.05, 0.9, 30  # what the claim means
LIMITS_OF = {
    "largest_score": (20.0, 50.0, 100.0, 300.0, 1000.0),
    "entropy_ratio": (0.05, 0.1, 0.2, 0.3, 0.5),
    "gradient_norm": (2.0, 3.0, 5.0, 10.0, 30.0),
}
NAMES = {
    "verdicts": "these verdicts",
    "head": "fixed thresholds for a head",
    "largest_score": "largest score",
    "entropy_ratio": "mean entropy",
    "gradient_norm": "gradient norm",
}
COLOURS = dict(zip(NAMES, (BLUE, PURPLE, RED, ORANGE, GREEN), strict=True))
SHARP = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5)  # of the typical entropy ratio, for the curve
Alarms = dict[str, int | str | None]


def train(setting: Setting, recorded: bool = True) -> dict[str, Any]:
    """One training; without a record only its loss is kept."""
    from .._outcomes import trained  # noqa: PLC0415 - imports PyTorch

    kept: dict[str, Any] = in_a_process(trained, setting, recorded)
    return kept


def settings(size: str, seed: int) -> list[tuple[str, list[Setting]]]:
    """Part ("tuned" or "held out") and the settings of a task, sound ones first."""
    from .. import _sweep  # noqa: PLC0415

    return [
        (part, _sweep.settings(task, count, first + 1000 * seed, steps=STEPS[size], norms=norms))
        for part, tasks, count, first, norms in GROUPS[size]
        for task in tasks
    ]


def trainings(
    size: str, seed: int
) -> Iterator[tuple[str, Setting, dict[str, Any], HealthyPath, Ending, Alarms]]:
    """Train and judge: part, setting, trace, the healthy path of its task, the end, the alarms."""
    from .._outcomes import ending, path_of  # noqa: PLC0415

    def again(setting: Setting) -> dict[str, Any]:
        return train(setting, recorded=False)

    def followed(run: tuple[str, Setting, dict[str, Any], HealthyPath]) -> tuple[Ending, Alarms]:
        _, setting, kept, path = run
        how = ending(setting, kept["loss"], path, again)
        return how, in_a_process(alarms, setting, kept)

    groups, runs = settings(size, seed), []
    with side_by_side(1 if size == "tiny" else None) as each_of:
        recorded = iter(each_of(train, [setting for _, chosen in groups for setting in chosen]))
        for part, chosen in groups:
            kept = list(islice(recorded, len(chosen)))
            path = path_of([each["loss"] for each in kept])
            runs += [(part, *pair, path) for pair in zip(chosen, kept, strict=True)]
        for run, found in zip(runs, each_of(followed, runs), strict=True):
            yield *run, *found


def measure(size: str, seed: int) -> Figures:
    """How each training ended, why, and who raised an alarm."""
    from .._outcomes import described  # noqa: PLC0415

    rows: list[dict[str, Any]] = []
    curves = []
    for part, setting, kept, path, (ended, cause), raised in trainings(size, seed):
        left = path.left_at(kept["loss"]) if ended == "failed" else None
        rows.append(
            {
                **{"part": part, "task": setting.task, "setting": described(setting)},
                **{"fault": setting.fault, "ended": ended, "cause": cause, "left": left},
                **{"behind": path.behind(kept["loss"])},
                **raised,
            }
        )
        curves.append((setting, kept, path.median))
    runs = table(rows)
    return {
        **{"runs": runs, "summary": table(_summaries(runs)), "baselines": table(_baselines(runs))},
        **{"examples": table(_examples(rows, curves)), "steps": STEPS[size]},
    }


def alarms(setting: Setting, kept: dict[str, Any]) -> Alarms:
    """When a watch raises its first alarm, and its name; and when the baselines would."""
    from .._outcomes import (  # noqa: PLC0415
        by_course,
        by_gradient_norm,
        by_head,
        by_statistic,
        scale_of,
    )

    scale = scale_of(setting)
    alarm, name = by_course(kept, scale, EVERY)
    found: Alarms = {"alarm": alarm, "alarm_name": name}
    found |= {f"alarm_every_{n}": by_course(kept, scale, n)[0] for n in RARER}
    found["head"] = by_head(kept, COMPARED)[0]
    for name, limits in LIMITS_OF.items():
        alarms = (
            by_gradient_norm(kept, limits)
            if name == "gradient_norm"
            else by_statistic(kept, COMPARED, name, limits)
        )
        found |= {f"{name} {at:g}": step for at, (step, _) in zip(limits, alarms, strict=True)}
    for sharp in SHARP:
        changed = replace(Thresholds(), sharp_typical=sharp)
        found[f"verdicts {sharp:g}"] = by_course(kept, scale, COMPARED, changed)[0]
    return found


# ---------------------------------------------------------------- counting


def _score(runs: dict[str, Any], alarm: str, part: str = "") -> dict[str, Any]:
    """False alarms, recall and lead of one kind of alarm."""
    ended, cause = np.array(runs["ended"]), np.array(runs["cause"])
    raised = np.array([step is not None for step in runs[alarm]])
    here = np.array(runs["part"]) == part if part else np.full(len(ended), True)
    well = here & np.isin(ended, ("healthy", "slow"))
    sick = here & (cause == "attention")
    lead = [
        left - step
        for left, step, one in zip(runs["left"], runs[alarm], sick, strict=True)
        if one and left is not None and step is not None
    ]
    quartiles = np.quantile(lead, (0.25, 0.5, 0.75)) if lead else np.full(3, np.nan)
    return {
        **{"well": int(well.sum()), "false": int((well & raised).sum())},
        **{"sick": int(sick.sum()), "caught": int((sick & raised).sum())},
        **{"lead_low": quartiles[0], "lead": quartiles[1], "lead_high": quartiles[2]},
    }


def _summaries(runs: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"part": part or "all", "recorded_every": every} | _score(runs, alarm, part)
        for part in ("tuned", "held out", "")
        for every, alarm in ((EVERY, "alarm"), *((n, f"alarm_every_{n}") for n in RARER))
    ]


def _baselines(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """False alarms against recall, by kind of alarm and limit, on all runs."""
    kinds = [("verdicts", f"verdicts {at:g}", at) for at in SHARP]
    kinds.append(("head", "head", 0.0))
    kinds += [(name, f"{name} {at:g}", at) for name, limits in LIMITS_OF.items() for at in limits]
    return [{"alarm": kind, "limit": at} | _score(runs, column) for kind, column, at in kinds]


def _examples(
    rows: Sequence[dict[str, Any]], curves: Sequence[tuple[Any, dict[str, Any], Array]]
) -> list[dict[str, Any]]:
    """The course of a run that was caught early, of a false alarm and of a miss."""
    from .._outcomes import moments, smoothed  # noqa: PLC0415

    def lead(place: int) -> float:
        row = rows[place]
        known = row["left"] is not None and row["alarm"] is not None
        return float(row["left"] - row["alarm"]) if known else -np.inf

    sick = [at for at, row in enumerate(rows) if row["cause"] == "attention"]
    well = [at for at, row in enumerate(rows) if row["ended"] in ("healthy", "slow")]
    caught = sorted((at for at in sick if rows[at]["alarm"] is not None), key=lead)
    chosen = {
        "caught early": caught[3 * len(caught) // 4 :][:1],
        "false alarm": [at for at in well if rows[at]["alarm"] is not None][:1],
        "missed": [at for at in sick if rows[at]["alarm"] is None][:1],
    }
    found = []
    for kind, places in chosen.items():
        for place in places:
            _, kept, median = curves[place]
            loss = smoothed(kept["loss"])
            for step, evidence, _ in moments(kept, COMPARED):
                entropy = [part.entropy_ratio for part in evidence.health.values()]
                found.append(
                    {
                        **{"kind": kind, "run": place, "step": step, "loss": float(loss[step])},
                        "healthy_loss": float(median[step]),
                        "entropy": float(np.nanmedian(np.concatenate(entropy))),
                    }
                )
    return found or [
        {"kind": "", "run": 0, "step": 0, "loss": 0.0, "healthy_loss": 0.0, "entropy": 0.0}
    ]


def interval(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> [round(x, 3) for x in interval(1, 50)]
    [0.004, 0.105]
    """
    if not of:
        return 0.0, 1.0
    z, share = 1.96, hits / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * np.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return float(max(middle - half, 0.0)), float(min(middle + half, 1.0))


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    from .._outcomes import FAILED, PATIENCE  # noqa: PLC0415

    all_runs, steps = runs[0]["runs"], runs[0]["steps"]
    ended, faults = np.array(all_runs["ended"]), np.array(all_runs["fault"])
    raised = np.array([step is not None for step in all_runs["alarm"]])
    false = np.isin(ended, ("healthy", "slow")) & raised
    noise = np.array([TASKS[task].kind == "noise" for task in all_runs["task"]])
    other = np.array(all_runs["cause"]) == "other"
    found: dict[str, Any] = {
        **{"runs": len(ended), "steps": steps, "tasks": len(set(all_runs["task"]))},
        **{"failed": FAILED, "longer": PATIENCE + 1},
        "held_out": sum(part == "held out" for part in all_runs["part"]),
        **{"held_tasks": len(HELD_OUT), "flat": Thresholds().flat_patience},
        **{"noise": int((false & noise).sum()), "other": int(other.sum())},
        "harmless": int((false & ~noise & (faults != "")).sum()),
        "other_alarmed": int((other & raised).sum()),
        "per_steps": 1e4 * false.sum() / max(np.isin(ended, ("healthy", "slow")).sum() * steps, 1),
        "baselines": _against(runs[0]["baselines"]),
    }
    for short, part in (("held", "held out"), ("tuned", "tuned")):
        score = _score(all_runs, "alarm", part)
        found |= {f"{short}_{name}": Spoken(value) for name, value in score.items()}
        for name, hits, of in (("false_rate", "false", "well"), ("recall", "caught", "sick")):
            low, high = interval(score[hits], score[of])
            found[f"{short}_{name}"] = score[hits] / max(score[of], 1)
            stem = name.removesuffix("_rate")
            found |= {f"{short}_{stem}_low": low, f"{short}_{stem}_high": high}
    return found


def _against(baselines: dict[str, Any]) -> str:
    """Each baseline at the limit that does best, in words."""
    rows = [dict(zip(baselines, row, strict=True)) for row in zip(*baselines.values(), strict=True)]
    said = []
    for kind, name in NAMES.items():
        mine = [row for row in rows if row["alarm"] == kind]
        if kind == "verdicts" or not mine:
            continue

        def merit(row: dict[str, Any]) -> float:
            caught, false = row["caught"] / max(row["sick"], 1), row["false"] / max(row["well"], 1)
            return float(caught - false)

        best = max(mine, key=merit)
        limit = "" if kind == "head" else f" at {best['limit']:g}"
        said.append(
            f"{name}{limit} raises {best['false'] / max(best['well'], 1):.0%} false alarms and "
            f"catches {best['caught'] / max(best['sick'], 1):.0%}"
        )
    compared = f"On all runs, recorded every {COMPARED} steps, each at its best limit: "
    return compared + "; ".join(said) + "."


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if the held-out runs reach all three bars; partly true if they reach one of them."""
    found = numbers(runs)
    if not found["held_well"] or not found["held_sick"]:
        return "does not hold", "no held-out run ended well, or none failed because of attention."
    reached = (
        found["held_false_rate"] <= FALSE,
        found["held_recall"] >= RECALL,
        bool(found["held_lead"] >= LEAD),
    )
    why = (
        f"{found['held_false_rate']:.1%} false alarms (at most {FALSE:.0%}), "
        f"{found['held_recall']:.0%} of failing runs caught (at least {RECALL:.0%}), "
        f"{found['held_lead']:.0f} steps early (at least {LEAD}). That is on held-out "
        f"tasks and architectures: {found['held_well']} runs that ended well and "
        f"{found['held_sick']} that attention made fail. Steps are the median of those caught, "
        f"before the loss left the healthy path."
    )
    return ("holds" if all(reached) else "holds partly" if any(reached) else "does not hold"), why


# ---------------------------------------------------------------- pictures


def plot(runs: Runs) -> list[Spec]:
    """False alarms against recall; lead times; three runs."""
    return [_roc(runs[0]["baselines"]), _leads(runs[0]["runs"]), *_courses(runs[0])]


def _roc(baselines: dict[str, Any]) -> Spec:
    columns = {name: np.array(column) for name, column in baselines.items()}
    lines = []
    for kind, name in NAMES.items():
        mine = columns["alarm"] == kind
        false = columns["false"][mine] / np.maximum(columns["well"][mine], 1)
        caught = columns["caught"][mine] / np.maximum(columns["sick"][mine], 1)
        order = np.argsort(false)
        text = [f"{name}, limit {limit:g}" for limit in columns["limit"][mine][order]]
        lines.append(line(name, false[order], caught[order], COLOURS[kind], text=text))
    share: dict[str, Any] = {"tickformat": ".0%", "range": [-0.02, 1.02]}
    return picture(
        "False alarms against runs caught",
        lines,
        axis(f"runs that ended well, with an alarm; recorded every {COMPARED} steps", **share),
        axis("runs that failed, caught", **share),
    )


def _leads(runs: dict[str, Any]) -> Spec:
    leads = [
        left - alarm
        for left, alarm, cause in zip(runs["left"], runs["alarm"], runs["cause"], strict=True)
        if cause == "attention" and left is not None and alarm is not None
    ]
    bars = {
        **{"type": "histogram", "x": leads, "marker": {"color": BLUE}, "name": "runs"},
        "xbins": {"start": -100, "end": 400, "size": 25},
    }
    return picture(
        "How long before the loss the alarm came", [bars], axis("steps of lead"), axis("runs")
    )


def _courses(figures: Figures) -> list[Spec]:
    examples = {name: np.array(column) for name, column in figures["examples"].items()}
    charts = []
    for kind in ("caught early", "false alarm", "missed"):
        mine = examples["kind"] == kind
        if not mine.any():
            continue
        run, steps = int(examples["run"][mine][0]), examples["step"][mine]
        of = {name: column[run] for name, column in figures["runs"].items()}
        loss, healthy = examples["loss"][mine], examples["healthy_loss"][mine]
        data = [
            line("loss", steps, loss, RED, mode="lines"),
            guide("healthy runs", steps, healthy),
            line("entropy ratio", steps, examples["entropy"][mine], BLUE, mode="lines", yaxis="y2"),
        ]
        top = float(max(loss.max(), healthy.max()))
        for name, colour, step in (
            ("alarm", ORANGE, of["alarm"]),
            ("loss leaves", GREY, of["left"]),
        ):
            if step is not None:
                data.append(
                    line(
                        name,
                        [step, step],
                        np.array([0.0, top]),
                        colour,
                        mode="lines",
                        line={"dash": "dash"},
                    )
                )
        charts.append(
            picture(
                f"{kind.capitalize()}: {of['task']}, {of['setting']}",
                data,
                axis("step"),
                axis("loss", rangemode="tozero"),
                yaxis2={
                    "overlaying": "y",
                    "side": "right",
                    "range": [0, 1.02],
                    "tickmode": "array",
                    "tickvals": [0, 0.25, 0.5, 0.75, 1],
                    "showgrid": False,
                    "title": {"text": "entropy ratio"},
                },
            )
        )
    return charts
