"""`dspark decode RUN --prompt TEXT`: one answer, watched while it is drafted and verified, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dspark.decoding.decoder import Decoder, Request, SamplingConfig
from dspark.decoding.rounds import RoundEvent
from dspark.manifest import CheckpointError, require_intact
from dspark.models.checkpoint import load_drafter
from pipelines.data.chat import render_prompt, thinks
from pipelines.drafter_folder import published_config, remade
from pipelines.errors import UserError
from pipelines.evaluation.samples import Decode, piece
from pipelines.runs.run import Run
from pipelines.settings import Settings
from pipelines.target_spec import resolve_target
from pipelines.workers import open_target

READ = ("run", "target", "cluster", "plugins")  # sections of the settings

# How a terminal shows a piece: rich styles.
STYLES = {"accepted": "green", "rejected": "red strike dim", "target": "bold yellow"}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A token's text; `kind` is accepted (drafted), rejected (drafted) or target (the target's own token)."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer, its pieces in order, and how it was reached. `accepted_length` counts the target's own token."""

    text: str
    pieces: tuple[Piece, ...]
    rounds: int
    tokens: int
    accepted_length: float
    finish_reason: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def figures(self) -> str:
        """One line: tokens, rounds, accepted length, time, how it ended."""
        return (
            f"{self.tokens} tokens in {self.rounds} rounds, accepted length {self.accepted_length:.2f}, "
            f"{self.seconds:.1f} s, ended by {self.finish_reason}"
        )

    def marked_text(self) -> str:
        """Runs of accepted drafts in [brackets], the target's own tokens bare, the figures below."""
        shown, inside = "", False
        for one in (found for found in self.pieces if found.kind != "rejected"):
            drafted = one.kind == "accepted"
            shown += ("]" if inside and not drafted else "") + ("[" if drafted and not inside else "") + one.text
            inside = drafted
        shown += "]" if inside else ""
        return f"{shown}\n\n{self.figures()}; [drafted and accepted], bare: the target's own"


def refuse_unread(overrides: Sequence[str]) -> None:
    """Raises UserError for a `key=value` word of a section that one answer does not depend on."""
    for key in (word.split("=")[0] for word in overrides):
        if (section := key.split(".")[0]) in Settings.model_fields and section not in READ:
            raise UserError(
                f"{key} does not apply to `dspark decode`, which reads the sections {', '.join(READ)}: how the drafter "
                "drafts stands in its folder, and --drafter names another one"
            )


def decode_one(
    settings: Settings,
    prompt: str,
    *,
    drafter: str | None,
    temperature: float,
    max_new_tokens: int,
    watch: Callable[[Piece], None] | None = None,
) -> Answer:
    """Answer a prompt with the run's published drafter, or another one. Raises UserError if there is none.

    `watch` gets every piece as soon as its round is over.
    """
    folder = Path(drafter).expanduser() if drafter else Run(settings).directory.path("published")
    if not (folder / "config.json").is_file():
        raise UserError(f"there is no drafter in {folder}; finish the run (`dspark run`), or name one with --drafter")
    if not drafter:
        try:
            require_intact(folder, cure=remade(folder))
        except CheckpointError as error:
            raise UserError(str(error)) from error
    config = published_config(folder, settings, "--drafter" if drafter else str(folder))
    spec = replace(resolve_target(settings), target_layer_ids=config.target_layer_ids)
    target = open_target(settings, spec)
    model = load_drafter(folder, device=target.device, dtype=target.dtype, target=target)
    request = Request(
        request_id="prompt",
        prompt_ids=render_prompt(
            target.tokenizer,
            [{"role": "user", "content": prompt}],
            thinking=thinks(settings.target.thinking, settings.run.seed, "prompt"),
            row="the prompt",
        ),
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset(spec.stop_token_ids),
        seed=settings.run.seed,
    )
    decoder = Decoder(target, model, sampling=SamplingConfig(temperature=temperature), max_rows=1)
    transcript = _Transcript(lambda ids: str(target.tokenizer.decode(ids)), watch)
    (completion,) = decoder.generate([request], on_round=lambda _, event: transcript.add(event))
    if not completion.rounds:
        transcript.token("target", completion.output_ids[0])
    return _answer(completion, transcript)


class _Transcript:
    """The answer's pieces, handed on as they come."""

    def __init__(self, decode: Decode, watch: Callable[[Piece], None] | None) -> None:
        self.decode, self.watch = decode, watch
        self.ids: list[int] = []
        self.pieces: list[Piece] = []

    def token(self, kind: str, token: int, before: Sequence[int] | None = None) -> None:
        """A token after those of the answer, or after `before`, where it does not become part of it."""
        found = Piece(kind=kind, text=piece(self.decode, self.ids if before is None else before, token))
        if before is None:
            self.ids.append(token)
        self.pieces.append(found)
        if self.watch is not None:
            self.watch(found)

    def add(self, event: RoundEvent) -> None:
        """One round: accepted drafts, the first rejected one and what followed it, the target's own token."""
        if not self.ids:
            self.token("target", event.anchor_id)  # from the pass over the prompt
        drafted = event.committed - int(event.bonus)
        for token in event.committed_ids[:drafted]:
            self.token("accepted", token)
        ghost = list(self.ids)
        for token in event.draft_ids[drafted : event.scheduled]:
            self.token("rejected", token, ghost)
            ghost.append(token)
        for token in event.committed_ids[drafted:]:
            self.token("target", token)


def _answer(completion: Any, transcript: _Transcript) -> Answer:
    rounds = len(completion.rounds)
    return Answer(
        text=transcript.decode(completion.output_ids),
        pieces=tuple(transcript.pieces),
        rounds=rounds,
        tokens=len(completion.output_ids),
        accepted_length=sum(event.committed for event in completion.rounds) / max(rounds, 1),
        finish_reason=completion.finish_reason,
        seconds=completion.seconds,
    )
