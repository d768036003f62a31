import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from synthetic_events import conversations, decode, full_inputs, full_report, labels, simulate, training_log

from pipelines.evaluation.round_log import COMPLETION_SCHEMA, EVENT_SCHEMA, completion_table, event_table
from pipelines.evaluation.samples import piece, sample_texts
from pipelines.reporting.markdown import render_markdown
from pipelines.reporting.report import (
    MOST_POINTS,
    SCHEMA,
    ReportInputs,
    build_report,
    cache_sizes,
    conversation_summary,
    render_report,
    training_curves,
    write_report,
)
from pipelines.reporting.terms import TERMS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return full_report()


def test_a_report_is_plain_json(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["schema"] == SCHEMA


def test_the_documentation_names_every_field(report: dict[str, Any]) -> None:
    text = (DOCS / "report.md").read_text()
    for name in report:
        assert f"`{name}`" in text, name
    for section in ("accepted_length", "speed", "positions", "confidence", "outputs", "samples"):
        for name in report[section][0]:
            assert f"`{name}`" in text, (section, name)


def test_terms_have_one_meaning() -> None:
    text = (DOCS / "terms.md").read_text()
    for name, meaning in TERMS.items():
        assert f"**{name}**" in text, name
        assert meaning in text.replace("\n", " "), name


def test_the_same_inputs_give_the_same_bytes(report: dict[str, Any], tmp_path: Path) -> None:
    for name, made in (("a", report), ("b", build_report(full_inputs()))):
        write_report(made, tmp_path / name)
    for name in ("report.json", "index.html", "report.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_page_and_markdown_come_from_the_json_alone(report: dict[str, Any], tmp_path: Path) -> None:
    write_report(report, tmp_path)
    page = (tmp_path / "index.html").read_bytes()
    (tmp_path / "index.html").unlink()
    render_report(tmp_path)
    assert (tmp_path / "index.html").read_bytes() == page


def test_the_three_say_the_same(report: dict[str, Any], tmp_path: Path) -> None:
    write_report(report, tmp_path)
    page, markdown = (tmp_path / "index.html").read_text(), (tmp_path / "report.md").read_text()
    for row in report["accepted_length"]:
        assert f"{row['value']:.3f}" in page
        assert f"{row['value']:.2f}" in markdown


def test_names_from_data_are_shown_as_they_stand(report: dict[str, Any]) -> None:
    """No link, tag, heading or table cell comes of a title, a domain or a recorded command."""
    odd = "x](http://evil) <img src=x> `| **b** |`\n# heading"
    rows = [{**row, "domain": odd} if row["domain"] != "mean" else row for row in report["accepted_length"]]
    provenance = {**report["provenance"], "command": odd}
    flags = [{"level": "warning", "text": odd}]
    changed = {**report, "title": odd, "accepted_length": rows, "provenance": provenance, "flags": flags}
    text = render_markdown(changed)
    assert text.count("evil") >= 4
    for active in ("<img", "](http", "**b**", "\n# heading"):
        assert active not in text.replace("\\]", "")


def test_a_report_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"report\.json"):
        render_report(tmp_path)
    (tmp_path / "report.json").write_text('{"schema": "dspark-report/0"}')
    with pytest.raises(ValueError, match="dspark-report/0"):
        render_report(tmp_path)


def test_nothing_at_all_is_a_report_too(tmp_path: Path) -> None:
    write_report(build_report(ReportInputs()), tmp_path)
    assert "Nothing has been evaluated yet" in (tmp_path / "index.html").read_text()
    assert "Nothing has been evaluated yet" in (tmp_path / "report.md").read_text()


def test_slower_is_called_slower() -> None:
    inputs = full_inputs(
        timings=[
            {"drafter": name, "temperature": temperature, "tokens": 1000, "seconds": seconds, "max_rows": 4}
            for name, seconds in (("dspark", 12.5), ("plain", 10.0))
            for temperature in (0.0, 1.0)
        ]
    )
    made = build_report(inputs)
    assert any("0.80 times the speed of plain decoding (slower)" in sentence for sentence in made["summary"])
    assert any("Slower than plain decoding" in flag["text"] for flag in made["flags"])


def test_a_head_that_does_not_help_is_a_warning() -> None:
    inputs = full_inputs()
    names = {"dspark": "no-sequential-head", "no-sequential-head": "dspark"}
    swapped = []
    for table in (inputs.events, inputs.completions):
        column = pa.array([names.get(name, name) for name in table["drafter"].to_pylist()])
        swapped.append(table.set_column(table.column_names.index("drafter"), "drafter", column).cast(table.schema))
    made = build_report(dataclasses.replace(inputs, events=swapped[0], completions=swapped[1]))
    warnings = [flag["text"] for flag in made["flags"] if flag["level"] == "warning"]
    assert any("does not lengthen" in text for text in warnings)


def _inputs_of(completions: list[Any], **options: Any) -> ReportInputs:
    return ReportInputs(
        events=pa.concat_tables([EVENT_SCHEMA.empty_table(), *(event_table(c, labels()) for c in completions)]),
        completions=pa.concat_tables(
            [COMPLETION_SCHEMA.empty_table(), *(completion_table(c, labels()) for c in completions)]
        ),
        drafter={"block_size": 7},
        decode=decode,
        **options,
    )


def test_looping_filler_is_flagged(tmp_path: Path) -> None:
    """Everything accepted on text that repeats itself: 8 tokens a pass, and two warnings beside it."""
    looping = []
    for index in range(4):
        made = simulate(f"r{index}", rate=0.999999, decay=1.0, tokens=65)
        rounds = [dataclasses.replace(event, committed_ids=[4] * event.committed) for event in made.rounds]
        looping.append(dataclasses.replace(made, output_ids=[4] * len(made.output_ids), rounds=rounds))
    made_report = build_report(_inputs_of(looping))
    texts = " ".join(flag["text"] for flag in made_report["flags"] if flag["level"] == "warning")
    assert "end in a loop" in texts
    assert "Nearly every draft is accepted" in texts
    assert "Only" in texts
    write_report(made_report, tmp_path)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_answers_of_a_token_or_two(tokens: int, tmp_path: Path) -> None:
    write_report(build_report(_inputs_of([simulate("a", rate=0.5, tokens=tokens)])), tmp_path)


def test_completions_without_rounds(tmp_path: Path) -> None:
    ended = dataclasses.replace(simulate("a", rate=0.5, tokens=5), rounds=[], output_ids=[], logit_gaps=[])
    made = build_report(_inputs_of([ended]))
    assert made["accepted_length"] == []
    assert made["outputs"][0]["empty"] == ["a"]
    write_report(made, tmp_path)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>\"'&|\n"
    inputs = dataclasses.replace(
        _inputs_of([simulate("a", rate=0.5)], title=evil, prompts={"a": evil}, target={"name": evil}),
        decode=lambda ids: evil * len(ids),
        provenance={"command": [evil], "settings": {"a": evil * 20}},
        conversations={"excerpt": {"prompt": evil, "answer": evil}, "note": evil},
    )
    write_report(build_report(inputs), tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<img" not in page
    assert page.count("</script>") == 3


def test_samples_tell_every_token(report: dict[str, Any]) -> None:
    """Opening, kept and target's pieces, put together, are the answer."""
    inputs = full_inputs()
    answers = {
        (row["request_id"], row["temperature"]): row["output_ids"]
        for row in inputs.completions.to_pylist()
        if row["drafter"] == "dspark"
    }
    assert len(report["samples"]) == 6
    for sample in report["samples"]:
        text = sample["opening"] + "".join(
            "".join(entry["accepted"]) + (entry["target"] or "") for entry in sample["rounds"]
        )
        whole = decode(answers[sample["request_id"], sample["temperature"]])
        assert whole.startswith(text)
        assert (text == whole) == sample["complete"]
        for entry in sample["rounds"]:
            assert len(entry["accepted"]) + len(entry["dropped"]) == 7
            assert entry["rejected"] == (len(entry["accepted"]) + entry["cut"] < 7)


def test_pieces_of_a_character_in_two_tokens() -> None:
    halves = ["é".encode()[:1], "é".encode()[1:]]
    decode_bytes = lambda ids: b"".join(halves[token] for token in ids).decode(errors="replace")  # noqa: E731
    assert piece(decode_bytes, [], 0) == "�"
    assert piece(decode_bytes, [0], 1) != ""


def test_samples_without_a_tokenizer() -> None:
    table = event_table(simulate("a", rate=0.5), labels())
    (sample,) = sample_texts(table, {}, None)
    assert sample["opening"].startswith("⟨")


def test_long_training_logs_are_thinned() -> None:
    rows = training_log(2000)
    curves = training_curves([*rows, {"step": "x"}, {"loss": 1.0}, {"step": 2001, "loss": math.nan, "note": "end"}])
    assert curves["steps"] == 2000
    points = curves["series"]["loss"]
    assert len(points) <= MOST_POINTS
    assert points[-1] == [2000.0, rows[-1]["loss"]]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert curves["series"]["validation_loss"] == [
        [r["step"], r["validation_loss"]] for r in rows if "validation_loss" in r
    ]


def test_cache_beside_the_reference() -> None:
    made = cache_sizes(full_inputs().cache)
    assert made["reference_bytes_per_token"] == 6 * 576 * 2
    assert made["ratio"] == pytest.approx(6912 / 3134.8)
    assert set(made["parts"]) == {"context", "teacher", "other"}
    assert cache_sizes({}) == {}


def test_who_said_what() -> None:
    rows = conversations()
    made = conversation_summary(rows)
    assert made["conversations"] == 576
    assert made["generator"] == {"SmolLM2-135M-Instruct": 576}
    assert made["finish_reason"] == {"length": 117, "stop": 459}
    assert conversation_summary(reversed(rows))["prompts_sha256"] == made["prompts_sha256"]
    rows[0]["conversations"][0]["content"] += "?"
    assert conversation_summary(rows)["prompts_sha256"] != made["prompts_sha256"]
    del rows[1]["generator"]
    assert conversation_summary(rows)["generator"]["unknown"] == 1
