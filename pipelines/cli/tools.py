"""Commands that look at things: plans, reports, single answers, this machine, settings."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pipelines.progress import Reporter, flatten
from pipelines.reporting.looks import name_of

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="A settings file, e.g. configs/quickstart.yaml.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
]


class Commands(TyperGroup):
    """A group whose help shows each command's first line whole, wrapped where it is long, instead of cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, (found.help or "").split("\n\n")[0]) for name, found in shown if found and not found.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands on the main command."""
    for command in (plan, report, decode, compare, settings, doctor):
        app.command()(command)


def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option("--rows", min=2, help="Prompts that it is measured on; fewer are faster.")] = 24,
    as_json: JsonOption = False,
) -> None:
    """What a run will cost before it starts: tokens, bytes a token by codec, storage in all."""
    from pipelines.runs.plan import make_plan, plan_text
    from pipelines.settings import load_settings

    estimate = make_plan(load_settings(config, overrides or []), Reporter(), rows=rows)
    print(json.dumps(estimate, indent=2) if as_json else plan_text(estimate))


def report(
    directory: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")], as_json: JsonOption = False
) -> None:
    """Make a run's report again from its recorded events, and say where it is."""
    from pipelines.runs.run import open_run

    run = open_run(directory)
    with run.directory.lock():
        run.require("evaluate", needed_by="the report")
        run.prepare("report", redo=True)
        result = run.stages["report"].load().execute(run.settings, run, Reporter(quiet=as_json)) or {}
        run.finish("report", seconds=0.0, result=result)
        evaluated = run.result("evaluate")
    if as_json:
        print((run.directory.folder.read("report/report.json")).decode())
    else:
        print(f"{accepted_lengths_text(evaluated)}\n\nReport: {run.location('report')}/index.html")


def accepted_lengths_text(evaluated: dict[str, Any]) -> str:
    """The accepted lengths that an evaluation left, one a line."""
    lines = []
    for place, value in evaluated["accepted_length"].items():
        drafter, comma, rest = place.partition(",")
        if value is not None:
            lines.append(f"  {name_of(drafter) + comma + rest:<58} {value:.2f}")
    return "\n".join(["Accepted length (draft tokens kept in a round, plus the target's own token):", *lines])


def decode(
    config: Annotated[str, typer.Argument(metavar="RUN|CONFIG", help="A run directory, or a settings file.")],
    overrides: OverridesArgument = None,
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask the target.")] = "",
    drafter: Annotated[str, typer.Option("--drafter", help="A drafter's folder; the run's own by default.")] = "",
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt by speculative decoding, and show what was drafted and what was accepted."""
    from pipelines.decode import STYLES, Piece, decode_one, refuse_unread
    from pipelines.errors import UserError
    from pipelines.runs.run import settings_of

    refuse_unread(overrides or [])
    resolved = settings_of(config, overrides or [])
    if not prompt:
        raise UserError("there is no prompt; add --prompt 'your question'")
    from rich.console import Console
    from rich.text import Text

    screen = Console(highlight=False)
    watched = screen.is_terminal and not as_json

    def show(piece: Piece) -> None:
        text = piece.text.replace("\n", "⏎") if piece.kind == "rejected" else piece.text
        screen.print(Text(text, STYLES[piece.kind]), end="", soft_wrap=True)

    answer = decode_one(
        resolved,
        prompt,
        drafter=drafter or None,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        watch=show if watched else None,
    )
    if watched:
        key = Text.assemble(*[(f" {kind} ", style) for kind, style in STYLES.items()])
        screen.print("\n\n" + answer.figures())
        screen.print(key)
    else:
        print(json.dumps(answer.to_dict(), indent=2) if as_json else answer.marked_text())


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|FOLDER|NAME=FOLDER... [KEY=VALUE]...",
            help="Run directories and drafters' folders of one target; settings that replace the file's.",
        ),
    ],
    config: Annotated[
        str, typer.Option("--config", help="Settings that name target and prompts; the first run's by default.")
    ] = "",
    baseline: Annotated[
        str, typer.Option("--baseline", help="The drafter that others are held against; the first by default.")
    ] = "",
    output: Annotated[str, typer.Option("--output", help="Where rounds are kept and the page goes.")] = "runs/compare",
    temperatures: Annotated[str, typer.Option("--temperatures", help="For example 0,1.")] = "",
    seeds: Annotated[str, typer.Option("--seeds", help="Of sampling, above temperature 0: for example 0,1.")] = "",
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1)] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="So many of the evaluation prompts, evenly spaced.")
    ] = None,
    costs: Annotated[bool, typer.Option("--costs/--no-costs", help="Measure what a round costs by batch size.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Decode the same prompts with several drafters of one target, and say which is ahead, with intervals."""
    from pipelines import compare as comparing
    from pipelines.errors import for_the_user
    from pipelines.reporting.comparison import comparison_text

    places, overrides = comparing.split_words(words)
    given = {"temperatures": temperatures and f"[{temperatures}]", "seeds": seeds and f"[{seeds}]"}
    given["max_new_tokens"] = "" if max_new_tokens is None else str(max_new_tokens)
    overrides += [f"evaluate.{name}={value}" for name, value in given.items() if value]
    with for_the_user(output):
        contenders = comparing.find_contenders(places)
        resolved = comparing.comparison_settings(contenders, config or None, overrides, output)
        found = comparing.compare(
            contenders,
            resolved,
            Reporter(quiet=as_json),
            baseline=baseline or None,
            prompts=prompts,
            costs=costs,
        )
    print(json.dumps(found, indent=2) if as_json else f"{comparison_text(found)}\n\nPage: {output}/compare.html")
    if found["errors"]:
        raise typer.Exit(1)


def settings(config: ConfigArgument, overrides: OverridesArgument = None, as_json: JsonOption = False) -> None:
    """Print the settings as resolved, every default written out."""
    from pipelines.settings import load_settings

    resolved = load_settings(config, overrides or [])
    print(json.dumps(resolved.to_dict(), indent=2) if as_json else resolved.to_yaml(), end="\n" if as_json else "")


def doctor(as_json: JsonOption = False) -> None:
    """What this machine has, and what that allows."""
    from pipelines.doctor import examine, findings_text

    findings = examine()
    print(json.dumps(findings, indent=2) if as_json else findings_text(findings))


def print_values(values: dict[str, Any], as_json: bool) -> None:
    """A mapping as JSON or as aligned lines."""
    if as_json:
        print(json.dumps(values, indent=2, default=str))
        return
    for name, value in flatten(values, "."):
        print(
            f"{name:<36} {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{name:<36} {value}"
        )
