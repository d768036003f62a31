"""What is wrong in a settings file, in words that name the place and the nearest valid key or value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pipelines.errors import UserError
from pipelines.settings.yaml import COMMAND_LINE, Document, dotted_name
from storage.files import masking

CONSTANT = (
    "calibrate.bins",
    "calibrate.grid_low",
    "calibrate.grid_high",
    "calibrate.grid_points",
    "evaluate.cost.row_tokens",
    "pilot.min_conversations",
    "pilot.min_steps",
    "pilot.prior",
)
# Keys of earlier versions. A settings file with one is refused, as is the run of an earlier version.
RENAMED = {
    "target.attention": "target.attn_implementation",
    "regenerate.rows": "regenerate.batch_size",
    "regenerate.unit_rows": "regenerate.prompts_per_work_item",
    "regenerate.workers": "regenerate.num_workers",
    "cache.features_codec": "cache.hidden_states_codec",
    "cache.features_options": "cache.hidden_states_options",
    "cache.directions": "cache.components",
    "cache.unit_tokens": "cache.tokens_per_shard",
    "cache.batch_tokens": "cache.max_num_batched_tokens",
    "cache.workers": "cache.num_workers",
    "pilot.epochs": "pilot.num_train_epochs",
    "drafter.ttt_length": "drafter.block_size",
    "drafter.step_loss_decay": "train.loss.position_decay, which is -1/ln of it (4.4814 for 0.8)",
    "train.epochs": "train.num_train_epochs",
    "train.schedule": "train.lr_scheduler_type",
    "train.clip": "train.max_grad_norm",
    "train.ranks": "train.num_workers",
    "train.min_ranks": "train.min_workers",
    "train.pack_budget": "train.max_tokens_per_micro_batch",
    "train.held_out_rows": "train.validation_samples",
    "train.evaluate_every": "train.eval_steps",
    "train.publish": "train.load_best_model_at_end, true for best",
    "train.checkpoint_every": "train.save_steps",
    "train.keep_last": "train.save_total_limit",
    "train.keep_best": "train.validation_samples, with which the best checkpoint is kept",
    "train.log_every": "train.logging_steps",
    "train.loader_workers": "train.dataloader_num_workers",
    "train.compile": "train.torch_compile",
    "calibrate.rows": "calibrate.batch_size",
    "calibrate.workers": "calibrate.num_workers",
    "evaluate.rows": "evaluate.batch_size",
    "evaluate.workers": "evaluate.num_workers",
    "evaluate.plain": "evaluate.without_drafter",
    "evaluate.serving.static_length": "evaluate.static_length",
    "evaluate.serving.threshold": "evaluate.threshold",
    "publish.speculators": "publish.layouts, a list such as [speculators]",
}


def refuse_older_run(values: Mapping[str, Any], source: str) -> None:
    """Raises UserError for the settings of a run that an earlier version made."""
    changes = {old: f"is now {new}" for old, new in RENAMED.items()}
    for old, change in (changes | dict.fromkeys(CONSTANT, "is no setting any more")).items():
        *sections, key = old.split(".")
        holder: Any = values
        for section in sections:
            holder = holder.get(section) if isinstance(holder, Mapping) else None
        if isinstance(holder, Mapping) and key in holder:
            raise UserError(
                f"{source} is of a run by an earlier version ({old} {change}): finish it with that version, set "
                "another run.directory, or remove this folder and run again"
            )


def refuse_secrets(document: Document) -> None:
    """Raises UserError for a password or token in a value: settings are written into records, reports and trackers."""

    def look(value: Any, path: tuple[int | str, ...]) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                look(inner, (*path, str(key)))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                look(inner, (*path, index))
        elif isinstance(value, str) and (found := masking.find(value)) is not None:
            raise UserError(
                f"{masking.mask(document.place_of(path))}: {dotted_name(path)} is {masking.mask(value)!r}, which holds "
                f"{found}; settings are kept in the run's records, so take it out, and {masking.cure(value)}"
            )

    look(document.values, ())


def explain(error: ValidationError, document: Document, model: type[BaseModel]) -> UserError:
    """One UserError with a line for each fault."""
    lines = [_line(fault, document, model) for fault in error.errors(include_url=False)]
    return UserError("\n".join(dict.fromkeys(lines)))


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of the settings, sections included."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        inner = model_in(field.annotation)
        if inner is not None and get_origin(field.annotation) is not tuple:
            keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def _line(fault: Mapping[str, Any], document: Document, model: type[BaseModel]) -> str:
    path = tuple(fault["loc"])
    place, name = document.place_of(path), dotted_name(path)
    match fault["type"]:
        case "extra_forbidden" if name in CONSTANT:
            return f"{place}: `{name}` is no setting any more; leave it out"
        case "extra_forbidden" if name in RENAMED:
            return f"{place}: `{name}` was renamed to {RENAMED[name]}"
        case "extra_forbidden":
            return f"{place}: unknown key `{name}`; {_nearest_key(path, model)}"
        case "missing":
            words = " ".join(f"{key}=VALUE" for key in _required(path, model))
            return f"{place}: `{name}` is missing; set it in the file or as {words} on the command line"
        case "value_error":
            text = str(fault["ctx"]["error"])
            where = [_place_of_cause(path, text, document), *([name] if name else [])]
            return ": ".join([*where, text])
        case "tuple_type" | "list_type":
            return f"{place}: {name} is {_shown(fault['input'])}; expected a list, for example {_example(fault, model)}"
        case "model_type" | "model_attributes_type":
            return f"{place}: `{name}` is {_shown(fault['input'])}; expected a section with keys"
        case "literal_error":
            allowed = _literal_values(_annotation(path, model))
            return f"{place}: {name} is {_shown(fault['input'])}; {_nearest_value(fault['input'], allowed)}"
        case "string_pattern_mismatch" if path == ("target", "device"):
            return f"{place}: {name} is {_shown(fault['input'])}; expected auto, cpu, cuda or cuda:N"
    message = fault["msg"].removeprefix("Input ").replace("should be", "expected")
    return f"{place}: {name} is {_shown(fault['input'])}; {message[0].lower()}{message[1:]}"


def _required(path: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """What has to be set for a missing key: itself, or the keys of its section that have no default."""
    section = _annotation(path, model)
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return [dotted_name(path)]
    return [dotted_name((*path, key)) for key, field in section.model_fields.items() if field.is_required()]


def _place_of_cause(path: tuple[int | str, ...], text: str, document: Document) -> str:
    """Where a fault of a whole section comes from: a word of the command line that set a key the text speaks of."""
    for key, place in document.places.items():
        below = len(key) > len(path) and key[: len(path)] == path
        if below and place.startswith(COMMAND_LINE) and re.search(rf"\b{re.escape(str(key[-1]))}\b", text):
            return place
    return document.place_of(path)


def _example(fault: Mapping[str, Any], model: type[BaseModel]) -> str:
    """A list with what was found as its one item."""
    path, item = tuple(fault["loc"]), fault["input"]
    section = _annotation((*path, 0), model)
    if isinstance(section, type) and issubclass(section, BaseModel) and not isinstance(item, dict):
        first = next(iter(section.model_fields))
        return f"{path[-1]}: [{{{first}: {json.dumps(str(item))}}}]"
    return f"{path[-1]}: {json.dumps([item])}"


def _nearest_key(path: tuple[int | str, ...], model: type[BaseModel]) -> str:
    wrong = str(path[-1])
    section = _annotation(path[:-1], model)
    siblings = list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []
    prefix = dotted_name(path[:-1])
    close = get_close_matches(wrong, siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{prefix + '.' if prefix else ''}{close[0]}`?"
    everywhere = known_keys(model)
    same_word = [key for key in everywhere if key.rpartition(".")[2] == wrong]
    near = same_word or get_close_matches(dotted_name(path), everywhere, n=1, cutoff=0.5)
    if not near:
        by_word = {key.rpartition(".")[2]: key for key in everywhere}
        near = [by_word[word] for word in get_close_matches(wrong, list(by_word), n=1, cutoff=0.6)]
    known = f"{'`' + prefix + '`' if prefix else 'the top level'} knows {', '.join(siblings)}"
    return f"did you mean `{near[0]}`? ({known})" if near else known


def _nearest_value(found: Any, allowed: list[Any]) -> str:
    words = [str(value) for value in allowed]
    close = get_close_matches(str(found), words, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}expected one of {', '.join(words)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _annotation(path: tuple[int | str, ...], model: type[BaseModel]) -> Any:
    """The type declared at a key path; None where there is no such key."""
    here: Any = model
    for part in path:
        inner = model_in(here)
        if isinstance(part, int):
            arguments = [argument for argument in get_args(here) if argument is not Ellipsis]
            here = arguments[0] if arguments else None
        elif inner is not None and part in inner.model_fields:
            here = inner.model_fields[part].annotation
        else:
            return None
    return model_in(here) or here


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The section model that a type is or holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = model_in(argument)
        if found is not None:
            return found
    return None


def _literal_values(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for argument in get_args(annotation) for value in _literal_values(argument)]
