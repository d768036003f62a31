"""The JSON files that stages leave for one another: read as what they should be, or refused in one message."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipelines.errors import UserError
from storage.files.filesystems import Folder

Finite = Annotated[float, Field(allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Record(BaseModel):
    """What only people read may stand beside the fields."""

    model_config = ConfigDict(extra="allow", strict=True)


Read = TypeVar("Read", bound=Record)


def read_record(folder: Folder, name: str, kind: type[Read], cure: str) -> Read:
    """The record in a JSON file of a stage. Raises UserError naming the file, the place in it and the cure."""
    try:
        return kind.model_validate_json(folder.read(name))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
        raise UserError(f"{folder.describe(name)}: {place}{first['msg']}: {cure}") from None
    except OSError as error:
        raise UserError(f"{folder.describe(name)} cannot be read ({error}): {cure}") from error


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
