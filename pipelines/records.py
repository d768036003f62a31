"""The JSON files that stages leave for one another: read as what they should be, or refused in one message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipelines.errors import UserError
from pipelines.json_files import parse_row, write_jsonl
from storage.files.filesystems import Folder

Finite = Annotated[float, Field(allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
SHA256 = "sha256"  # of a row: the hash of all else in it
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Record(BaseModel):
    """What only people read may stand beside the fields."""

    model_config = ConfigDict(extra="allow", strict=True)


Read = TypeVar("Read", bound=Record)


def read_record(folder: Folder, name: str, kind: type[Read], cure: str) -> Read:
    """The record in a JSON file of a stage. Raises UserError naming the file, the place in it and the cure."""
    try:
        return kind.model_validate_json(folder.read(name))
    except ValidationError as error:
        raise UserError(f"{folder.describe(name)}: {_first_fault(error)}: {cure}") from None
    except OSError as error:
        raise UserError(f"{folder.describe(name)} cannot be read ({error}): {cure}") from error


def write_rows(folder: Folder, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file of a stage, each row with a hash of its own, which `read_rows` compares."""
    write_jsonl(folder, name, ({**row, SHA256: _row_sha256(row)} for row in rows))


def _row_sha256(row: Mapping[str, Any]) -> str:
    content = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_rows(folder: Folder, name: str, kind: type[Record], cure: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file of a stage, without their hashes.

    Raises UserError at a line that is no record, or is not as it was written. A row without a hash is taken as it is.
    """
    file = folder.describe(name)
    for number, line in enumerate(folder.read(name).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_row(line, file, number)
            if row.pop(SHA256, None) not in (None, _row_sha256(row)):
                raise UserError(f"{file}:{number}: the row has been changed since it was written")
            kind.model_validate(row)
        except ValidationError as error:
            raise UserError(f"{file}:{number}: {_first_fault(error)}; {cure}") from None
        except UserError as error:
            raise UserError(f"{error}; {cure}") from None
        yield row


def _first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


class RunRecord(Record):
    """`run.json`."""

    uid: str
    settings: dict[str, Any]
    stages: dict[str, Any]
    invocations: list[dict[str, Any]]


class StageRecord(Record):
    """`stages/NAME.json`: what a stage's output is, and what it depends on."""

    stage: str
    identity: str
    complete: bool
    seconds: float
    result: dict[str, Any]
    fields: dict[str, Any]


class Message(Record):
    role: str
    content: str | None
    tool_calls: Any = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without content and tool calls")
        return self


class ConversationRow(Record):
    """A row of `train.jsonl`: a conversation up to the target's last answer."""

    id: str
    domain: str
    conversations: list[Message]
    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    thinking: Any
    finish_reason: Any
    spans: Annotated[list[Annotated[list[int], Field(min_length=2, max_length=2)]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _spans_are_of_the_tokens(self) -> ConversationRow:
        edges, tokens = [edge for span in self.spans or () for edge in span], len(self.prompt_ids + self.response_ids)
        if edges != sorted(edges) or any(start == end for start, end in self.spans or ()):
            raise ValueError("spans are not in rising order")
        if edges and (edges[0] < 0 or edges[-1] > tokens):
            raise ValueError(f"spans leave the row's {tokens} tokens")
        return self


class AnswerRow(ConversationRow):
    """A row of a file in `answers/`."""

    key: str


class Affine(Record):
    temperatures: list[Above0]
    shifts: list[Finite]


class CalibrationTable(Record):
    """What was fitted at one decoding temperature; every list has an entry a slot."""

    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    temperatures: list[Above0]
    affine: Affine


class Calibration(Record):
    """`temperatures.json`; `temperatures` are the highest decoding temperature's, which engines read."""

    method: str
    temperatures: list[Above0]
    tables: list[CalibrationTable]

    def slots(self) -> set[int]:
        """For how many slots its lists are; one number where they fit together."""
        found = {len(self.temperatures)}
        for table in self.tables:
            found |= {len(table.temperatures), len(table.affine.temperatures), len(table.affine.shifts)}
        return found


class Timing(Record):
    """A stopwatch record: what one drafter decoded at one temperature."""

    drafter: str
    temperature: Finite
    tokens: int
    seconds: Finite
    max_rows: int


class DecodedItem(Timing):
    """The stopwatch record of one work item, and the prompts that it left out, with the reason."""

    skipped: dict[str, str]


class Timings(Record):
    """`timings.json`."""

    timings: list[Timing]
    skipped: dict[str, str]
