"""What each codec keeps of a target's real states, what it costs and how fast it is: all of them in one run.

Steps:
1. Read a run's recorded conversations and capture their states from its target (kept in --states).
2. Fit every codec on every other sequence; measure on the rest. Components of the projected codec come from a trained
   pilot (--pilot, a published drafter's folder).
3. Print for features and teacher bytes a token, signal-to-noise by layer, how far acceptance rates move, and speeds;
   then whole caches: bytes by part and the time of a random row; then what capturing and encoding cost on top of the
   target's forward pass. With --output everything as JSON too.

The reference's raw layout is bf16; fp8 stands beside it. Speeds are bf16-equivalent MB/s (2 bytes for each captured
value) of CPU time on one core, the best of several: on a shared machine the clock on the wall measures the neighbours.

    python benchmarks/cache.py SETTINGS.yaml --pilot DRAFTER [--states STATES.safetensors] [--output OUT.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspark.decoding.target_tail import TargetTail
from dspark.models.checkpoint import load_drafter
from pipelines.data.answers import generated_sample
from pipelines.settings import Settings, load_settings
from pipelines.stages.capture import CaptureWorker, Conversation, teacher_row
from pipelines.stages.pilot_candidates import FeatureComparison
from pipelines.stages.regenerate import read_conversations
from pipelines.target_spec import TargetSpec, resolve_target
from pipelines.workers import open_target
from storage.cache.target_cache import CachePlan, CacheRow, Codecs, TargetCache, create_or_resume, finish, write_shard
from storage.codecs.base import Codec, TargetParts, TeacherRow
from storage.codecs.components import leading_components
from storage.codecs.fitting import fit_codec, fit_teacher
from storage.codecs.measure import measure
from storage.codecs.registry import CodecSpec
from storage.files.filesystems import Folder

ROW = 512
FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("fp8", {}),
    ("bf16-planes", {}),
    ("int8", {}),
    ("transform", {"step": 0.25, "decorrelate": "none"}),
    ("transform", {"step": 0.5, "decorrelate": "layer"}),
    ("transform", {"step": 0.25}),
    ("transform", {"step": 0.5}),
    ("transform", {"step": 0.5, "output": "coordinates"}),
    ("transform", {"step": 1.0, "output": "coordinates"}),
    ("projected", {"width": 2.0}),
    ("projected", {"width": 1.5}),
    ("projected", {"width": 1.0}),
    ("projected", {"width": 0.5, "step": 0.25}),
]
TEACHER: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("fp8", {}),
    ("bf16-planes", {}),
    ("int8", {}),
    ("transform", {"step": 0.0625}),
    ("transform", {"step": 0.125}),
    ("corrected", {"step": 0.03}),
    ("corrected", {}),
    ("corrected", {"step": 0.0625, "top": 8}),
    ("recomputed", {}),
    ("sparse", {"top": 16}),
    ("sparse", {"top": 128}),
]
# Codecs of a whole cache: hidden states and teacher.
CACHES: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "raw (bf16)": (("bf16", {}), ("bf16", {})),
    "fp8": (("fp8", {}), ("fp8", {})),
    "int8": (("int8", {}), ("int8", {})),
    "any drafter": (("transform", {"step": 0.5, "output": "coordinates"}), ("corrected", {})),
    "default": (("projected", {"width": 1.5}), ("corrected", {})),
    "small": (("projected", {"width": 1.0}), ("corrected", {"step": 0.0625, "top": 8})),
}


class Bench:
    """States, target and pilot that everything is measured on."""

    def __init__(self, settings: Settings, states: Path | None, pilot: Path, rows: int) -> None:
        self.settings: Settings = settings
        self.spec: TargetSpec = resolve_target(settings)
        self.target = open_target(settings, self.spec)
        self.layers, self.hidden = len(self.spec.target_layer_ids), self.spec.hidden_size
        self.drafter = load_drafter(pilot, dtype="float32")
        self.conversations = self._conversations(rows)
        self.rows = self._states(states)
        self.fitting, self.judged = self.rows[::2], self.rows[1::2]
        self.parts = TargetParts(
            head=self.target.lm_head.weight.detach(),
            soft_cap=self.target.final_logit_softcapping,
            finish=TargetTail(self.target),
        )
        sample = [(row.hidden_states.float(), True) for row in self.fitting]
        projection, shares = leading_components([self.drafter.fc.weight.detach()], sample, 2 * self.hidden)
        self.components = {"projection": projection, "shares": shares}
        self.long_row = torch.cat([row.hidden_states[1:] for row in self.judged])[:ROW].contiguous()

    def _conversations(self, count: int) -> list[Conversation]:
        found = []
        recorded = list(read_conversations(Folder(f"{self.settings.run.directory}/conversations")))
        for row in recorded[:: max(1, len(recorded) // count)]:
            limit = self.settings.cache.max_length
            ids, spans = generated_sample(row["prompt_ids"], row["response_ids"], limit, spans=row.get("spans"))
            found.append(Conversation(sample_id=str(row["id"]), input_ids=ids, spans=spans, extra={}))
        return found

    def _states(self, path: Path | None) -> list[TeacherRow]:
        """Captured rows; from the file where it holds them."""
        worker = object.__new__(CaptureWorker)
        worker.settings, worker.target = self.settings, self.target
        if path is None or not path.exists():
            rows = {row.sample_id: row for row in worker.capture(self.conversations)}
            tensors = {}
            for row in rows.values():
                tensors[f"features/{row.sample_id}"], tensors[f"last/{row.sample_id}"] = (
                    row.hidden_states,
                    row.last_hidden_state,
                )
            if path is None:
                return [teacher_row(rows[c.sample_id]) for c in self.conversations]
            save_file(tensors, path)
        tensors = load_file(path)
        return [teacher_row(self.cache_row(c, tensors)) for c in self.conversations]

    @staticmethod
    def cache_row(conversation: Conversation, tensors: dict[str, torch.Tensor]) -> CacheRow:
        return CacheRow(
            sample_id=conversation.sample_id,
            input_ids=conversation.input_ids,
            spans=conversation.spans,
            hidden_states=tensors[f"features/{conversation.sample_id}"],
            last_hidden_state=tensors[f"last/{conversation.sample_id}"],
        )

    def fit_features(self, name: str, options: dict[str, Any]) -> Codec:
        tensors, settings = None, dict(options)
        if name == "projected":
            settings["directions"] = round(settings.pop("width") * self.hidden)
            tensors = self.components
        return fit_codec(
            CodecSpec(name=name, settings=settings),
            [(row.hidden_states, True) for row in self.fitting],
            width=self.layers * self.hidden,
            layers=self.layers,
            tensors=tensors,
        )

    def fit_teacher(self, name: str, options: dict[str, Any]) -> Codec:
        return fit_teacher(
            CodecSpec(name=name, settings=options), self.rows, width=self.hidden, target=self.parts, temperature=1.0
        )


def cpu_seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds, the best of several."""
    function()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return max(min(times), 1e-9)


def label(name: str, options: dict[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def hidden_states(bench: Bench, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """One record a codec of the captured layers."""
    judge = comparison_of(bench)
    megabytes, found = 2 * bench.long_row.numel() / 1e6, []
    for name, options in chosen(FEATURES, names):
        codec = bench.fit_features(name, options)
        measured = measure(codec, [(row.hidden_states, True) for row in bench.judged], layers=bench.layers)
        payload = codec.encode(bench.long_row)
        record = {
            "codec": label(name, options),
            "bytes_per_token": measured["bytes_per_token"],
            "times_smaller": 2 * bench.layers * bench.hidden / measured["bytes_per_token"],
            "snr_db": measured.get("snr_db_by_layer") or [measured["snr_db"]],
            **judge.error(codec),
            "encode_mb_s": megabytes / cpu_seconds(lambda c=codec: c.encode(bench.long_row), 3),
            "decode_mb_s": megabytes / cpu_seconds(lambda c=codec, p=payload: c.decode(p, ROW)),
        }
        found.append(record)
        snr = " ".join("exact" if value is None else f"{value:.1f}" for value in record["snr_db"])
        numbers = f"{record['bytes_per_token']:.0f} | {record['times_smaller']:.1f} | {snr} | {record['error']:.4f}"
        print(
            f"| {record['codec']} | {numbers} | {record['encode_mb_s']:.0f} | {record['decode_mb_s']:.0f} |", flush=True
        )
    return found


def comparison_of(bench: Bench) -> FeatureComparison:
    """The pilot reading coded features of the judged conversations."""
    worker = object.__new__(CaptureWorker)
    worker.settings, worker.target = bench.settings, bench.target
    return FeatureComparison(worker, bench.conversations[1::2], bench.judged, {"pilot": bench.drafter})


def teachers(bench: Bench, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """One record a codec of the teacher."""
    row = max(bench.judged, key=lambda row: len(row.positions))
    megabytes, found = 2 * len(row.positions) * bench.hidden / 1e6, []
    for name, options in chosen(TEACHER, names):
        codec = bench.fit_teacher(name, options)
        payload = codec.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions)
        error = codec.measured["acceptance"]
        record = {
            "codec": label(name, options),
            "bytes_per_token": codec.measured["bytes_per_token"],
            "times_smaller": 2 * bench.hidden / codec.measured["bytes_per_token"],
            **error,
            "encode_mb_s": megabytes
            / cpu_seconds(lambda c=codec: c.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions), 3),
            "decode_mb_s": megabytes / cpu_seconds(lambda c=codec, p=payload: c.decode_teacher(p, row.positions)),
        }
        found.append(record)
        numbers = f"{record['bytes_per_token']:.0f} | {record['times_smaller']:.1f} | {error['bound']:.4f}"
        numbers += f" | {error['bound_p99']:.4f} | {error['error']:.4f} | {record['encode_mb_s']:.0f}"
        print(f"| {record['codec']} | {numbers} | {record['decode_mb_s']:.0f} |", flush=True)
    return found


def chosen(codecs: Sequence[tuple[str, Any]], names: Sequence[str] | None) -> list[tuple[str, Any]]:
    return [(name, options) for name, options in codecs if names is None or name in names]


def whole_caches(bench: Bench, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Rows of 512 tokens with a teacher at every token, written as caches and read back in random order."""
    joined = [torch.cat([getattr(row, part) for row in bench.rows]) for part in ("hidden_states", "last_hidden_state")]
    count, found = len(joined[0]) // ROW, []
    rows = [
        CacheRow(
            sample_id=f"row-{index}",
            input_ids=[index] * ROW,
            spans=[(1, ROW)],
            hidden_states=joined[0][index * ROW : (index + 1) * ROW],
            last_hidden_state=joined[1][index * ROW : (index + 1) * ROW],
        )
        for index in range(count)
    ]
    for name, (of_features, of_teacher) in chosen(list(CACHES.items()), names):
        codecs = Codecs(hidden_states=bench.fit_features(*of_features), teacher=bench.fit_teacher(*of_teacher))
        plan = CachePlan(
            contract={},
            num_layers=bench.layers,
            hidden_size=bench.hidden,
            samples=[(row.sample_id, ROW) for row in rows],
            hidden_states=CodecSpec(name=codecs.hidden_states.name, settings=codecs.hidden_states.settings),
            teacher=CodecSpec(name=of_teacher[0], settings=of_teacher[1]),
            teacher_scope="all",
        )
        with tempfile.TemporaryDirectory() as folder:
            create_or_resume(folder, plan, codecs)
            for shard, (start, stop) in enumerate(plan.shards):
                write_shard(folder, shard, rows[start:stop], codecs)
            finish(folder)
            cache = TargetCache.open(folder)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
            cpu, wall = [], []
            for _ in range(3):
                fresh = TargetCache.open(folder)  # every row is read for the first time: its checksum is verified
                for index in order:
                    began, clock = time.process_time(), time.perf_counter()
                    fresh.row(index)
                    cpu.append(time.process_time() - began)
                    wall.append(time.perf_counter() - clock)
            columns = [cache.raw_row(index) for index in order[:8]]
            seconds = cpu_seconds(lambda c=cache, some=columns: [c.decode(row) for row in some])
            info = cache.info()
        per, raw = info["bytes_per_token"], info["raw_bytes_per_token"]
        record = {
            "cache": name,
            "bytes_per_token": per,
            "times_smaller": raw / per["all"],
            "row_cpu_ms": 1e3 * sorted(cpu)[len(cpu) // 2],
            "row_median_ms": 1e3 * sorted(wall)[len(wall) // 2],
            "decode_mb_s": 2e-6 * (bench.layers + 1) * bench.hidden * ROW * len(columns) / seconds,
        }
        found.append(record)
        numbers = " | ".join(f"{per[part]:.0f}" for part in ("context", "teacher", "other", "all"))
        latency = f"{record['row_cpu_ms']:.1f} | {record['row_median_ms']:.1f} | {record['decode_mb_s']:.0f}"
        print(f"| {name} | {numbers} | {record['times_smaller']:.1f} | {latency} |", flush=True)
    return found


def overhead(bench: Bench) -> dict[str, float]:
    """CPU time of the forward pass, of capturing on top of it, and of encoding with the default codecs; a token."""
    of_features, of_teacher = CACHES["default"]
    codecs = Codecs(hidden_states=bench.fit_features(*of_features), teacher=bench.fit_teacher(*of_teacher))
    some = bench.conversations[:8]
    tokens = sum(len(conversation.input_ids) for conversation in some)
    supervised = sum(b - a for conversation in some for a, b in conversation.spans)
    ids = [torch.tensor([conversation.input_ids]) for conversation in some]
    rows = bench.rows[:8]

    @torch.no_grad()
    def forward() -> None:
        for row in ids:
            bench.target.model(input_ids=row, use_cache=False)

    @torch.no_grad()
    def decoder() -> None:
        for row in ids:
            bench.target.decoder(input_ids=row, use_cache=False)

    def capture() -> None:
        for row in ids:
            bench.target.capture(row)

    def encode() -> None:
        assert codecs.teacher is not None
        for row in rows:
            codecs.hidden_states.encode(row.hidden_states, first=True)
            codecs.teacher.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions)

    seconds = {f.__name__: cpu_seconds(f, 3) for f in (forward, decoder, capture, encode)}
    found = {f"{name}_us_per_token": 1e6 * value / tokens for name, value in seconds.items()}
    found["supervised_share"] = supervised / tokens
    found["over_the_forward_pass"] = (seconds["capture"] + seconds["encode"]) / seconds["forward"] - 1
    found["over_the_layers_alone"] = (seconds["capture"] + seconds["encode"]) / seconds["decoder"] - 1
    for name, value in found.items():
        print(f"{name}: {value:.3f}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the target cache's codecs on real states.")
    parser.add_argument("settings", help="of a run whose conversations are recorded")
    parser.add_argument("--pilot", type=Path, required=True, help="folder of a trained drafter")
    parser.add_argument("--states", type=Path, help="keep captured states here, and take them from there if it exists")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    parser.add_argument("--rows", type=int, default=96, help="conversations")
    parser.add_argument("--features", nargs="*", help="codecs of the captured layers, by name; default: all")
    parser.add_argument("--teachers", nargs="*", help="codecs of the teacher; default: all")
    parser.add_argument("--caches", nargs="*", choices=list(CACHES), help="whole caches; default: all")
    options = parser.parse_args(arguments)
    bench = Bench(load_settings(options.settings), options.states, options.pilot, options.rows)
    torch.set_num_threads(1)
    tokens = sum(len(row.last_hidden_state) for row in bench.rows)
    found: dict[str, Any] = {"tokens": tokens, "raw_features": 2 * bench.layers * bench.hidden}
    print(f"{len(bench.rows)} conversations, {tokens} tokens; every other one to fit, the rest to judge; one core\n")
    print(
        "| features | bytes/token | times smaller | SNR dB (by layer) | acceptance moves | encode MB/s | decode MB/s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    found["features"] = hidden_states(bench, options.features)
    print("\n| teacher | bytes/state | times smaller | bound | bound p99 | error | encode MB/s | decode MB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    found["teacher"] = teachers(bench, options.teachers)
    print(
        "\n| cache, teacher everywhere | context | teacher | other | all | times smaller | row CPU ms | row ms "
        "| decode MB/s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    found["caches"] = whole_caches(bench, options.caches)
    print()
    found["overhead"] = overhead(bench)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
