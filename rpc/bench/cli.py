"""`radixpool bench`: compare eviction policies on traces, and generate workloads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from radixpool.rpc.bench import files, grid, readers, synth, tables
from radixpool.rpc.bench.cost import PrefillModel
from radixpool.rpc.bench.replay import Timing
from radixpool.rpc.bench.tokenizers import load_tokenizer
from radixpool.rpc.bench.trace import Insert, Trace


@click.group(name="bench")
def command() -> None:
    """Measure on traces: which eviction policy, and how much memory?"""


class _Numbers(click.ParamType[tuple[int, ...]]):
    """A list of block counts: "5000,10000"; "20k" and "1M" are taken too."""

    name = "blocks,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self._one(item.strip(), param, ctx) for item in str(value).split(",") if item.strip())

    def _one(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        scale = {"k": 1_000, "K": 1_000, "m": 1_000_000, "M": 1_000_000}.get(text[-1], 1)
        try:
            number = float(text[:-1] if scale > 1 else text) * scale
        except ValueError:
            self.fail(f"{text!r} is not a number of blocks", param, ctx)
        if number < 1 or number != int(number):
            self.fail(f"{text!r} must be a whole number of blocks, at least 1", param, ctx)
        return int(number)


@command.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option(
    "-p",
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[:PARAM=VALUE,...]",
    help="A policy to run; repeat for more. Default: all. A wrong name lists them, a wrong parameter its own.",
)
@click.option(
    "-c",
    "--capacity",
    "capacities",
    type=_Numbers(),
    default=(),
    help="Pool sizes in blocks, e.g. 5k,10k,20k. Default: 1, 2, 5, 10, 20, 50 % of a trace's distinct blocks.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write results.csv, results.json, mrc.png, over_time.png and report.html here.",
)
@click.option("-j", "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option(
    "--timing",
    type=click.Choice(["zero", "timed"]),
    default="zero",
    show_default=True,
    help="zero: requests come one after the other; timed: they arrive, hold their blocks and wait for room.",
)
@click.option(
    "--insert",
    type=click.Choice(["prompt", "prompt+output"]),
    default="prompt",
    show_default=True,
    help="What stays in the cache: prompts, or also what was generated.",
)
@click.option(
    "--warmup",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of the requests, from the start, that is not counted.",
)
@click.option(
    "--references/--no-references",
    default=True,
    show_default=True,
    help="Add the offline optima, an infinite cache, no cache, whole-sequence LRU, running-only sharing.",
)
@click.option("--format", "format_", type=click.Choice(readers.FORMATS), default="auto", show_default=True)
@click.option(
    "--block-size",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Tokens a block. Default: the trace's own; 16 for tokens, text and messages.",
)
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="NAME|PATH",
    help="For text: bytes, a tokenizer.json, or a Hugging Face name.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Read at most N requests a trace.")
@click.option("--strict", is_flag=True, help="Stop at the first damaged line. Default: name it and go on.")
@click.option("--seed", type=int, default=0, show_default=True, help="For policies that draw.")
@click.option("--prefill-tokens-per-s", type=click.FloatRange(0, min_open=True), default=20_000.0, show_default=True)
@click.option("--model-parameters", type=click.FloatRange(0, min_open=True), default=8e9, show_default=True)
@click.option("--model-layers", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--model-hidden", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print results.json instead of tables.")
def policies(traces: tuple[str, ...], **chosen: Any) -> None:
    """Replay TRACEs through the real cache and compare eviction policies.

    A TRACE is a file of JSON lines, plain or packed as .gz, .xz or .zst, or - for stdin: Mooncake and Qwen-Bailian
    traces, lines with tokens, text or messages, recordings of KV-cache events, and radixpool's own operation logs.

    \b
    Examples:
      radixpool bench policies trace.jsonl.xz
      radixpool bench policies trace.jsonl -p lru -p s3fifo:small=0.3 -c 5k,10k,20k -o out/ -j 2
      radixpool bench synth chat | radixpool bench policies - --json
    """
    errors = Console(stderr=True)
    try:
        options = _grid_options(**chosen)
        read = [_read(source, errors, **chosen) for source in traces]
        with _progress(errors) as progress:
            results = grid.run_grid(read, options, progress=progress)
        if chosen["out"]:
            _write(chosen["out"], results, options, errors)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if chosen["as_json"]:
        click.echo(json.dumps(files.to_json(results, options), indent=1))
    else:
        tables.print_results(Console(), results)


def _grid_options(
    *,
    policies: tuple[str, ...],
    capacities: tuple[int, ...],
    timing: str,
    warmup: float,
    references: bool,
    jobs: int,
    seed: int,
    prefill_tokens_per_s: float,
    model_parameters: float,
    model_layers: int,
    model_hidden: int,
    **_: Any,
) -> grid.GridOptions:
    return grid.GridOptions(
        policies=tuple(dict.fromkeys(policies)) or grid.DEFAULT_POLICIES,
        capacities=capacities,
        references=grid.REFERENCES if references else (),
        timing=cast(Timing, timing),
        warmup=warmup,
        jobs=jobs,
        seed=seed,
        model=PrefillModel(model_parameters, model_layers, model_hidden, prefill_tokens_per_s),
    )


def _read(
    source: str,
    errors: Console,
    *,
    format_: str,
    block_size: int | None,
    insert: str,
    limit: int | None,
    strict: bool,
    tokenizer: str,
    **_: Any,
) -> Trace:
    with errors.status(f"reading {source}"):
        return readers.read_trace(
            source,
            readers.ReadOptions(
                format=cast(readers.Format, format_),
                block_size=block_size,
                insert=cast(Insert, insert),
                limit=limit,
                on_damage="stop" if strict else "skip",
                tokenize=load_tokenizer(tokenizer),
            ),
        )


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("replaying", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write(out: Path, results: list[grid.TraceResult], options: grid.GridOptions, errors: Console) -> None:
    out.mkdir(parents=True, exist_ok=True)
    files.write_csv(out / "results.csv", results)
    files.write_json(out / "results.json", results, options)
    try:
        from radixpool.rpc.bench import plots, report

        plots.save(plots.plot_curves(results), out / "mrc.png")
        plots.save(plots.plot_over_time(results), out / "over_time.png")
        (out / "report.html").write_text(report.render_report(results, options))
    except ImportError as error:
        errors.print("[yellow]no plots and no report:[/]", escape(f"{error}; pip install 'radixpool[bench]'"))
    written = ", ".join(sorted(path.name for path in out.iterdir()))
    errors.print(f"wrote {written} to {out}", highlight=False, markup=False)


@command.command(name="synth")
@click.argument("kind", type=click.Choice(list(synth.GENERATORS)))
@click.option("-n", "--requests", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="Requests a second."
)
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, metavar="TOKENS")
@click.option(
    "--prompts",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Shared prompts, agent kinds or documents.",
)
@click.option(
    "--zipf", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Exponent of their popularity."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-o", "--out", type=click.File("w", lazy=True), default="-", help="File to write. Default: stdout.")
def synth_command(
    kind: str, requests: int, rate: float, block_size: int, prompts: int, zipf: float, seed: int, out: Any
) -> None:
    """Generate a workload as a Mooncake trace: the same seed gives the same bytes.

    \b
    shared  shared system prompts with Zipf popularity, a question each
    chat    multi-turn chats whose history grows
    agent   long agent loops with a summary when the context is full
    tree    tree-of-thought search: siblings branch from one path
    rag     a system prompt and documents in rank order
    scan    interactive users against a batch job that loops over long documents
    """
    options = synth.SynthOptions(requests, rate, block_size, prompts, zipf, seed)
    try:
        for request in synth.generate(kind, options):
            out.write(synth.to_line(request, block_size=block_size) + "\n")
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
