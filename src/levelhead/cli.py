"""The command line: each command is a few lines, the work is done elsewhere.

Exit codes: 0 fine, 1 the answer is no, 2 the call is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import __version__
from ._files import OutputError, check_output, write_whole
from ._health.verdicts import failable
from ._hints import did_you_mean
from ._progress import progress
from .checkup import TargetError, examine, is_sentence, load
from .explore import write_explorer
from .lab import Finished, LabError, progress_bar, verdict_words
from .lab import experiments as list_experiments
from .lab import run as run_lab
from .live import LiveError
from .live import live as follow
from .report import (
    CompareError,
    checkup_json,
    checkup_page,
    checkup_text,
    compare_checkups,
    compare_page,
    compare_runs,
    comparison_json,
    comparison_text,
    failing,
    run_list,
    write_run_page,
)
from .store import StoreError, list_runs, read_run

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Attention that reports its own health.",
)
_PLAIN = (TargetError, OutputError, StoreError, LabError, LiveError, CompareError)
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")]


def main() -> None:
    """The entry point."""
    app()


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Attention that reports its own health."""
    if version:
        print(f"levelhead {__version__}")
        raise typer.Exit


@app.command()
def checkup(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="module:function, a model folder or a name on the Hugging Face hub; "
            "the demo model by default.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="A sentence to read, a file of them, one per line, or - for stdin."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="PAGE", help="Write a page.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all numbers.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="VERDICT",
            help="Exit with 1 if a head is that bad or worse.",
            autocompletion=failable,
        ),
    ] = None,
    scale_factor: Annotated[
        list[float] | None,
        typer.Option(metavar="F", min=0, help="Also compare with F times the scale in use."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Compare with another model, such as its base."),
    ] = None,
    open_it: Annotated[
        bool,
        typer.Option("--open/--no-open", help="Show the page (checkup.html without --html)."),
    ] = False,
    debug: Debug = False,
) -> None:
    """The attention health of a model, head by head."""
    with plain_errors(debug):
        if fail_on is not None and fail_on not in failable():
            raise TargetError(_unknown("--fail-on", fail_on, failable()))
        if open_it and html is None:
            html = Path("checkup.html")
        if text == "-" and against is not None:
            text = f"{sys.stdin.read()}\n"  # once, for both models
        _check_outputs(html, json, keep=None if text is None or is_sentence(text) else Path(text))
        with progress() as tell:
            tell(f"Loading {target or 'the demo model'}")
            subject = load(target, text)
            result = examine(
                subject,
                pictures=html is not None,
                factors=scale_factor or (),
                on_input=lambda done, total: tell("Reading the inputs", done=done, total=total),
            )
            comparison = None
            if against is not None:
                tell(f"Examining {against}")
                comparison = compare_checkups(examine(load(against, text)), result)
                result["against"] = comparison_json(comparison)
            tell("Writing")
            if json is not None:
                write_whole(json, checkup_json(result))
            if html is not None:
                write_whole(html, compare_page(comparison) if comparison else checkup_page(result))
        console = _console()
        console.print(checkup_text(result, console.width))
        if comparison is not None:
            print(f"\nAgainst {against}\n{comparison_text(comparison)}")
        for path in filter(None, (html, json)):
            _say(f"wrote {path}")
        if open_it and html is not None:
            _show(html)
        if fail_on is not None and (why := failing(result, fail_on)):
            _say(why)
            raise typer.Exit(1)


@app.command()
def report(
    run_db: Annotated[Path, typer.Argument(metavar="RUN.db", help="The store of a watch.")],
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Where to; RUN.html by default.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="N", help="The run's number or name; the latest by default."),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Two runs side by side: numbers, names or other stores."),
    ] = None,
    open_it: Open = False,
    list_them: Annotated[
        bool, typer.Option("--list", help="Print which runs there are, and write no page.")
    ] = False,
    debug: Debug = False,
) -> None:
    """The page of a watched run, finished or still running."""
    with plain_errors(debug):
        if list_them:
            print(run_list(list_runs(run_db)))
            return
        _check_outputs(html)
        with progress() as tell:
            tell(f"Reading {run_db}")
            if compare is not None:
                page = html or run_db.with_name(f"{run_db.stem}-compare.html")
                comparison = compare_runs(run_db, *compare)
                _check_outputs(page, keep=run_db)
                write_whole(page, compare_page(comparison))
            else:
                chosen = read_run(run_db, int(run) if run and run.isdecimal() else run)
                page = html or run_db.with_suffix(".html")
                _check_outputs(page, keep=run_db)
                part = f"Writing {page}"
                write_run_page(page, chosen, lambda done, of: tell(part, done=done, total=of))
        if compare is not None:
            print(comparison_text(comparison))
        _say(f"wrote {page}")
        if open_it:
            _show(page)


@app.command()
def live(
    run_db: Annotated[Path, typer.Argument(metavar="RUN.db", help="The store of a watch.")],
    port: Annotated[int, typer.Option(help="By default any that is free.", min=0, max=65535)] = 0,
    open_it: Open = True,
    debug: Debug = False,
) -> None:
    """A local page that follows a run while it is written. Prints its address; Ctrl-C ends it."""
    with plain_errors(debug):
        follow(run_db, port=port, open_it=open_it)


@app.command()
def lab(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or claim numbers; all by default.",
            autocompletion=list_experiments,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes instead of hours.")] = False,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the page and the numbers go.")
    ] = Path("lab"),
    again: Annotated[bool, typer.Option("--again", help="Measure everything again.")] = False,
    debug: Debug = False,
) -> None:
    """What people say about √d_k, measured: which claims hold, and where."""
    told = set[str]()

    def tell(claim: int, name: str, verdict: str, seconds: float = 0.0) -> None:
        took = f", {seconds:.1f} s" if seconds else ""
        print(f"{claim:>2}  {name:<16} {verdict_words(verdict)}{took}", flush=True)
        told.add(name)

    def finished(one: Finished) -> None:
        """In a file, a line as soon as there is something to say; on a terminal the bar moves."""
        if not sys.stdout.isatty():
            tell(one.claim, one.experiment, one.verdict, one.seconds)

    with plain_errors(debug):
        with progress_bar() as show:
            done = run_lab(
                experiments or None,
                out=out,
                quick=quick,
                again=again,
                progress=show,
                finished=finished,
            )
        for result in done.results:
            if result["experiment"] not in told:
                tell(result["claim"], result["experiment"], result["verdict"])
        for name, why in done.not_run.items():
            _say(f"{name} was not run: {why}")
        _say(f"wrote {done.page}")


@app.command()
def explore(
    out: Annotated[Path, typer.Option(metavar="PAGE", help="Where to.")] = Path("explore.html"),
    open_it: Open = True,
    debug: Debug = False,
) -> None:
    """√d_k to play with: one page that needs no network."""
    with plain_errors(debug):
        _check_outputs(out)
        write_explorer(out)
        _say(f"wrote {out}")
        if open_it:
            _show(out)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """The benchmark against the peers that are installed; from a checkout. Takes its options."""
    with plain_errors(debug=False):
        if not Path("benchmarks/__main__.py").is_file():
            raise TargetError(
                "the benchmark is part of the source, not of the package: "
                "get a checkout of levelhead and run 'levelhead bench' in its folder"
            )
        command = [sys.executable, "-m", "benchmarks", *context.args]
        raise typer.Exit(subprocess.run(command, check=False).returncode)


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Errors as a sentence on stderr and an exit code; with `debug` the traceback too."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):  # typer knows both
        raise
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(130) from None
    except _PLAIN as error:
        if debug:
            traceback.print_exc()
        _say(str(error))
        raise typer.Exit(2) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        _say(f"this should not happen ({type(error).__name__}: {error}); --debug shows where")
        raise typer.Exit(2) from None


def _check_outputs(*paths: Path | None, keep: Path | None = None) -> None:
    """Before any work: every place can be written, and none is another's or that of an input."""
    given = [path for path in paths if path is not None]
    for path in given:
        check_output(path)
        if keep is not None and path.resolve() == keep.resolve():
            raise OutputError(f"{path} is what is read; name another file to write to")
    if len({path.resolve() for path in given}) < len(given):
        raise OutputError(f"{given[0]} is named twice; the page and the JSON need a file each")


def _show(page: Path) -> None:
    """In the browser, if there is one."""
    if not webbrowser.open(page.resolve().as_uri()):
        _say(f"found no browser to show it in; open {page} in yours")


def _unknown(option: str, given: str, known: tuple[str, ...]) -> str:
    meant = did_you_mean(given, known, "did you mean {}? ")
    return f"{option} {given} is unknown; {meant}there are: {', '.join(known)}"


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


def _say(text: str) -> None:
    print(f"levelhead: {text}", file=sys.stderr)
