"""`dspark cache …`: look at target caches, check them, and make new ones from old ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.tools import Commands, JsonOption, print_values
from pipelines.errors import USER_ERRORS, UserError
from pipelines.progress import Reporter

if TYPE_CHECKING:
    from storage.codecs.registry import CodecSpec

PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="A target cache, or the run that holds it.")]
NewArgument = Annotated[str, typer.Argument(metavar="NEW", help="Folder or URL of the new cache.")]
CODEC_HELP = "a codec's name, and settings of it: `int8`, `transform:step=0.5,level=3`"
FeaturesOption = Annotated[str, typer.Option("--features", metavar="CODEC", help=f"Captured states: {CODEC_HELP}.")]
TeacherOption = Annotated[str, typer.Option("--teacher", metavar="CODEC", help=f"Last states: {CODEC_HELP}.")]
ShardOption = Annotated[int | None, typer.Option("--tokens-per-shard", min=1, help="Tokens in a shard.")]
MaxBytesOption = Annotated[int | None, typer.Option("--max-bytes", min=1, help="The shards may not grow beyond it.")]
WorkersOption = Annotated[int, typer.Option("--workers", min=0, help="Processes that read and encode; 0: none beside.")]


class _BuildByDefault(Commands):
    """`dspark cache CONFIG` is `dspark cache build CONFIG`; the other words are tools."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["build", *args]
        return super().parse_args(ctx, args)


cache_app = typer.Typer(
    cls=_BuildByDefault,
    help="Build the target cache (`dspark cache CONFIG`), look at one, check it, or make another from it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@cache_app.command("info")
def info(
    path: PathArgument,
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="COUNT", help="Size of a corpus, e.g. 1.2e9: what it would take.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Rows, tokens, bytes a token by part, codecs with their measured errors, identity; of an unfinished cache too."""
    from storage.cache.target_cache import TargetCache

    cache = TargetCache.open(cache_in(path), partial=True)
    print_values(cache.info(corpus_tokens=_count(tokens, "--tokens") if tokens else None), as_json)


@cache_app.command("verify")
def verify(
    path: PathArgument,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Shards checked at a time.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Read everything, check every checksum, and name what is wrong; exit code 1 if anything is."""
    from storage.cache.commits import COMPLETE
    from storage.cache.target_cache import Problem, is_finished
    from storage.cache.target_cache import verify as verify_cache

    root = cache_in(path)
    problems = verify_cache(root, workers=workers)
    damaged = bool(problems)
    if not is_finished(root):
        problems.append(Problem(COMPLETE, "missing: the cache is not finished; the command that builds it goes on"))
    if as_json:
        print(json.dumps({"path": root, "problems": [vars(problem) for problem in problems]}, indent=2))
    else:
        print("\n".join(map(str, problems)) or f"{root}: nothing wrong")
        if damaged:
            print("`dspark cache CONFIG --repair` builds what is damaged in a run's cache again")
    raise typer.Exit(1 if problems else 0)


@cache_app.command("sample")
def sample(
    path: PathArgument,
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many, evenly spread.")] = 3,
    row: Annotated[str, typer.Option("--id", metavar="SAMPLE", help="The row with this sample id instead.")] = "",
    target: Annotated[
        str, typer.Option("--target", metavar="MODEL", help="The model whose tokenizer shows the text.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show rows: ids, spans, what the states look like, and the text with its supervised part in [[ ]]."""
    from pipelines.cache_samples import describe_rows
    from storage.cache.target_cache import TargetCache

    cache = TargetCache.open(cache_in(path), partial=True)
    shown = describe_rows(cache, count=rows, sample_id=row or None, target=target or None)
    if as_json:
        print(json.dumps(shown, indent=2))
        return
    for number, entry in enumerate(shown):
        if number:
            print()
        print_values(entry, False)


@cache_app.command("recode")
def recode(
    path: PathArgument,
    new: NewArgument,
    hidden_states: FeaturesOption = "",
    teacher: TeacherOption = "",
    codecs_of: Annotated[
        str,
        typer.Option("--codecs-of", metavar="PATH", help="Both codecs as fitted for that cache, to merge both."),
    ] = "",
    target: Annotated[
        str,
        typer.Option(
            "--target", metavar="MODEL", help="The states' target, for --teacher corrected, sparse, recomputed."
        ),
    ] = "",
    pilot: Annotated[
        str,
        typer.Option(
            "--pilot", metavar="RUN", help="A run with a pilot (`dspark pilot CONFIG`), for projected features."
        ),
    ] = "",
    tokens_per_shard: ShardOption = None,
    max_bytes: MaxBytesOption = None,
    workers: WorkersOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Write a cache again with other codecs; what no codec is given for is copied bit by bit. Resumes."""
    from pipelines.recoding import components_of, parts_of
    from storage.cache.rewrite import recode as recode_cache
    from storage.cache.target_cache import TargetCache

    features_codec, teacher_codec = _codec(hidden_states), _codec(teacher)
    cache = TargetCache.open(cache_in(path))
    parts = parts_of(cache, target, teacher_codec) if target and teacher_codec else None
    components = None
    if pilot and features_codec:
        features_codec, components = components_of(cache, pilot, features_codec)
    with _progress(f"recoding {path}", as_json) as on_shard:
        recode_cache(
            cache_in(path),
            new,
            hidden_states=features_codec,
            teacher=teacher_codec,
            codecs_of=cache_in(codecs_of) if codecs_of else None,
            target=parts,
            components=components,
            tokens_per_shard=tokens_per_shard,
            max_bytes=max_bytes,
            workers=0 if parts else workers,
            on_shard=on_shard,
        )
    _print_made(new, as_json)


@cache_app.command("merge")
def merge(
    paths: Annotated[list[str], typer.Argument(metavar="PATH... NEW", help="Caches, and last the new one.")],
    number_ids: Annotated[
        bool, typer.Option("--number-ids", help="Put the number of its cache before each sample id: `0/ID`.")
    ] = False,
    tokens_per_shard: ShardOption = None,
    max_bytes: MaxBytesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join caches of one target that are coded alike; rows are copied bit by bit. Resumes."""
    from storage.cache.rewrite import merge as merge_caches

    *sources, new = paths
    if len(sources) < 2:
        raise UserError("two caches at least and the new one's folder are needed: dspark cache merge PATH PATH NEW")
    with _progress("merging", as_json) as on_shard:
        sources = [cache_in(source) for source in sources]
        merge_caches(
            sources,
            new,
            number_ids=number_ids,
            tokens_per_shard=tokens_per_shard,
            max_bytes=max_bytes,
            on_shard=on_shard,
        )
    _print_made(new, as_json)


@cache_app.command("import-deepspec")
def import_deepspec(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A cache of the reference (version 2).")],
    new: NewArgument,
    hidden_states: FeaturesOption = "bf16",
    teacher: TeacherOption = "bf16",
    all_positions: Annotated[
        bool, typer.Option("--all-positions", help="Keep last states where nothing is supervised, too.")
    ] = False,
    contract: Annotated[
        str, typer.Option("--contract", metavar="JSON", help="What the reference does not record, or a file of it.")
    ] = "",
    tokens_per_shard: ShardOption = None,
    max_bytes: MaxBytesOption = None,
    workers: WorkersOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Import a binary cache of the reference implementation: bit-exact, or coded on the way. Resumes."""
    from storage.cache.deepspec_import import import_deepspec as import_cache
    from storage.cache.plan import DEFAULT_TOKENS_PER_SHARD

    features_codec, teacher_codec = _codec(hidden_states), _codec(teacher)
    with _progress(f"importing {source}", as_json) as on_shard:
        import_cache(
            source,
            new,
            contract=_json_object(contract),
            hidden_states=features_codec,
            teacher=teacher_codec,
            teacher_scope="all" if all_positions else "supervised",
            tokens_per_shard=tokens_per_shard or DEFAULT_TOKENS_PER_SHARD,
            max_bytes=max_bytes,
            workers=workers,
            on_shard=on_shard,
        )
    _print_made(new, as_json)


def cache_in(path: str) -> str:
    """The cache at a path, or the one of the run there."""
    from storage.files.filesystems import Folder

    return Folder(path).location("cache") if Folder(path).exists("run.json") else path


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A line of progress, with each shard's commit record.

    Raises UserError for what the system refuses (a folder that cannot be made or written, a full disk).
    """
    with Reporter(quiet=quiet).task(what, unit="tokens") as task:
        try:
            yield lambda record: task.advance(record["tokens"], bytes_per_token=record["bytes"] / record["tokens"])
        except OSError as error:
            if isinstance(error, USER_ERRORS):
                raise
            raise UserError(
                f"{what}: {error}; mend that, or give another folder, and the same command goes on from here"
            ) from error


def _print_made(path: str, as_json: bool) -> None:
    from storage.cache.target_cache import TargetCache

    print_values(TargetCache.open(path).info(), as_json)


def _codec(text: str) -> CodecSpec | None:
    """`name` or `name:setting=value,setting=value`; nothing is None."""
    from storage.codecs.registry import CodecSpec, codec_class

    if not text:
        return None
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            known = ", ".join(codec_class(name).defaults)
            raise UserError(f"codec {text!r}: {pair!r} is not a setting of {name!r}; it has {known or 'none'}")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return CodecSpec(name=name, settings=settings)


def _count(text: str, option: str) -> int:
    try:
        value = int(float(text.replace("_", "").replace(",", "")))
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise UserError(f"{option} {text!r} is not a count; write 1200000000 or 1.2e9")
    return value


def _json_object(text: str) -> dict[str, Any] | None:
    """A JSON object, written out or in a file."""
    if not text:
        return None
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--contract: neither a JSON object nor a file of one ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"--contract: a JSON object is needed, this is {type(value).__name__}")
    return value
