"""`dspark decode CONFIG --prompt TEXT`: one answer, with what was drafted and what the target accepted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.data.chat import render_prompt, thinks
from pipelines.errors import UserError
from pipelines.run import Run
from pipelines.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some of an answer's text; `kind` is accepted (drafted), rejected (drafted) or target (the target's own token)."""

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

    def marked_text(self) -> str:
        """Accepted drafts in [brackets], the target's own tokens bare, the figures below."""
        shown = "".join(f"[{piece.text}]" if piece.kind == "accepted" else piece.text for piece in self._kept())
        return (
            f"{shown}\n\n{self.tokens} tokens in {self.rounds} rounds, accepted length {self.accepted_length:.2f}, "
            f"{self.seconds:.1f} s, ended by {self.finish_reason}; [drafted and accepted], bare: the target's own"
        )

    def _kept(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.kind != "rejected"]


def decode_one(
    settings: Settings, prompt: str, *, drafter: str | None, temperature: float, max_new_tokens: int
) -> Answer:
    """Answer a prompt with the run's published drafter, or another one. Raises UserError if there is none."""
    from dspark.decoding import Decoder, Request, SamplingConfig
    from dspark.drafter import load_drafter
    from pipelines.stages.workers import open_target
    from pipelines.target_facts import examine_target

    folder = Path(drafter).expanduser() if drafter else Run(settings).directory.path("published")
    if not (folder / "config.json").is_file():
        raise UserError(f"there is no drafter in {folder}; finish the run (`dspark run`), or name one with --drafter")
    facts = examine_target(settings)
    target = open_target(settings, facts)
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
        stop_token_ids=frozenset(facts.stop_token_ids),
        seed=settings.run.seed,
    )
    sampling = SamplingConfig(temperature=temperature)
    decoder = Decoder(target, model, sampling=sampling, max_rows=1)
    (completion,) = decoder.generate([request])
    return _answer(completion, target.tokenizer)


def _answer(completion: Any, tokenizer: Any) -> Answer:
    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    first = completion.output_ids[: completion.rounds[0].position if completion.rounds else None]
    pieces = [Piece(kind="target", text=text(first))]
    for event in completion.rounds:
        drafted = event.committed - int(event.bonus)
        pieces.append(Piece(kind="accepted", text=text(event.committed_ids[:drafted])))
        pieces.append(Piece(kind="rejected", text=text(event.draft_ids[drafted : event.scheduled])))
        pieces.append(Piece(kind="target", text=text(event.committed_ids[drafted:])))
    rounds = len(completion.rounds)
    return Answer(
        text=text(completion.output_ids),
        pieces=tuple(piece for piece in pieces if piece.text),
        rounds=rounds,
        tokens=len(completion.output_ids),
        accepted_length=sum(event.committed for event in completion.rounds) / max(rounds, 1),
        finish_reason=completion.finish_reason,
        seconds=completion.seconds,
    )
