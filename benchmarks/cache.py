"""What each codec keeps of a target's real states, what it costs and how fast it is. Prints tables, judges nothing.

Steps:
1. Tokenise the text files into sequences and capture their states from the target (or read them from --states).
2. Fit every codec on the first half of the sequences; measure on the second half.
3. Print, for features: bytes a token, SNR by layer, encode and decode speed, the time of a 512-token row;
   for the teacher: bytes a token, total variation against the exact teacher, speeds.

Speeds are bf16-equivalent MB/s (2 bytes for each captured value) of one core.
Run: python benchmarks/cache.py --target MODEL_FOLDER --text FILE [FILE ...] [--states STATES.pt]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from storage.codecs import Codec, CodecSpec, fit_codec
from storage.codecs.measure import acceptance_error, snr_db
from storage.codecs.transform import head_metric

ROW = 512
FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("bf16-planes", {}),
    ("fp8", {}),
    ("int8", {}),
    ("transform", {"step": 0.25, "decorrelate": "none"}),
    ("transform", {"step": 0.5, "decorrelate": "none"}),
    ("transform", {"step": 0.5, "decorrelate": "layer"}),
    ("transform", {"step": 0.25, "decorrelate": "joint"}),
    ("transform", {"step": 0.5, "decorrelate": "joint"}),
    ("transform", {"step": 0.5, "decorrelate": "joint", "output": "coordinates"}),
    ("transform", {"step": 1.0, "decorrelate": "joint"}),
    ("transform", {"step": 0.5, "decorrelate": "joint", "metric": "raw"}),
    ("transform", {"step": 1.0, "decorrelate": "joint", "metric": "raw"}),
    ("projected", {"step": 0.5}),
]
TEACHER: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("fp8", {}),
    ("int8", {}),
    ("transform", {"step": 0.0625, "decorrelate": "none"}),
    ("transform", {"step": 0.125, "decorrelate": "none"}),
    ("transform", {"step": 0.125, "decorrelate": "joint"}),
    ("transform", {"step": 0.0625, "decorrelate": "joint"}),
    ("transform", {"step": 0.01, "decorrelate": "joint", "metric": "given"}),
    ("transform", {"step": 0.02, "decorrelate": "joint", "metric": "given"}),
    ("transform", {"step": 0.04, "decorrelate": "joint", "metric": "given"}),
]


def capture(target_path: str, files: Sequence[str], *, tokens: int, length: int) -> dict[str, Any]:
    """States of the first `tokens` tokens of the files, in sequences of `length`."""
    from dspark.target import Target

    target = Target.open(target_path)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    ids = [i for file in files for i in target.tokenizer(Path(file).read_text())["input_ids"]][:tokens]
    with torch.no_grad():
        for start in range(0, len(ids) - 1, length - 1):
            row = torch.tensor([[target.tokenizer.bos_token_id or ids[0], *ids[start : start + length - 1]]])
            captured = target.capture(row)
            found.append((captured.features[0].bfloat16(), captured.last[0].bfloat16()))
    layers = found[0][0].shape[1] // found[0][1].shape[1]
    return {"sequences": found, "head": target.lm_head.weight.detach().bfloat16(), "layers": layers}


def best_time(function: Callable[[], object], repeats: int = 5) -> float:
    """Seconds, the best of several."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def label(name: str, settings: dict[str, Any]) -> str:
    return " ".join([name, *(str(value) for value in settings.values())])


def speeds(codec: Codec, values: torch.Tensor) -> tuple[float, float, float]:
    """Encode and decode MB/s, and decode milliseconds, of a row of ROW tokens."""
    row = values[1:].repeat(-(-ROW // (len(values) - 1)), 1)[:ROW]
    megabytes = 2 * row.numel() / 1e6
    payload = codec.encode(row)
    decode = best_time(lambda: codec.decode(payload, ROW))
    return megabytes / best_time(lambda: codec.encode(row), 3), megabytes / decode, 1e3 * decode


def coded(codec: Codec, rows: Sequence[torch.Tensor], *, first: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Exact and decoded coordinates without first tokens, and bytes a token with them."""
    size, exact, back = 0, [], []
    for values in rows:
        payload = codec.encode(values, first=first)
        size += len(payload)
        exact.append(codec.coordinates(values)[int(first) :])
        back.append(codec.decode(payload, len(values), dtype=torch.float32)[int(first) :])
    return torch.cat(exact), torch.cat(back), size / sum(map(len, rows))


def print_features(fitting: Sequence[torch.Tensor], judged: Sequence[torch.Tensor], layers: int) -> None:
    width = judged[0].shape[1]
    sample = [(values, True) for values in fitting]
    states = torch.cat([values[1:].float() for values in fitting])
    _, _, directions = torch.linalg.svd((states - states.mean(0))[:4096], full_matrices=False)
    print(f"features: raw {2 * width} bytes a token; 'projected' here keeps the {width // layers} principal directions")
    print("| codec | bytes/token | times smaller | SNR dB by layer | encode MB/s | decode MB/s | 512 tokens, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, settings in FEATURES:
        tensors = {"projection": directions[: width // layers]} if name == "projected" else None
        codec = fit_codec(CodecSpec(name=name, settings=settings), sample, width=width, layers=layers, tensors=tensors)
        exact, back, size = coded(codec, judged, first=True)
        parts = layers if codec.out_width == width and settings.get("output") != "coordinates" else 1
        snr = " ".join(f"{snr_db(a, b):.1f}" for a, b in zip(exact.chunk(parts, 1), back.chunk(parts, 1), strict=True))
        encode, decode, latency = speeds(codec, judged[0])
        numbers = f"{size:.0f} | {2 * width / size:.2f} | {snr} | {encode:.0f} | {decode:.0f} | {latency:.2f}"
        print(f"| {label(name, settings)} | {numbers} |", flush=True)


def print_teacher(fitting: Sequence[torch.Tensor], judged: Sequence[torch.Tensor], head: torch.Tensor) -> None:
    width = judged[0].shape[1]
    sample = [(values[1:], False) for values in fitting]
    metric = head_metric(head, torch.cat([values for values, _ in sample])[:2048])
    print(f"\nteacher at temperature 1: raw {2 * width} bytes a token")
    print("| codec | bytes/token | times smaller | TV mean | TV p99 | encode MB/s | decode MB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, settings in TEACHER:
        given = {"metric": metric} if settings.get("metric") == "given" else None
        codec = fit_codec(CodecSpec(name=name, settings=settings), sample, width=width, tensors=given)
        exact, back, size = coded(codec, [values[1:] for values in judged], first=False)
        chosen = torch.linspace(0, len(exact) - 1, min(1024, len(exact))).long()
        error = acceptance_error(head, exact[chosen], back[chosen])
        encode, decode, _ = speeds(codec, judged[0])
        numbers = f"{size:.0f} | {2 * width / size:.2f} | {error['mean']:.4f} | {error['p99']:.4f}"
        print(f"| {label(name, settings)} | {numbers} | {encode:.0f} | {decode:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the target cache's codecs on real states.")
    parser.add_argument("--target", help="folder or hub id of the target model")
    parser.add_argument("--text", nargs="*", default=[], help="text files to capture states on")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--states", help="keep captured states here, and read them instead of capturing if it exists")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.states and Path(options.states).exists():
        data = torch.load(options.states, weights_only=True)
    elif options.target and options.text:
        data = capture(options.target, options.text, tokens=options.tokens, length=options.length)
        if options.states:
            torch.save(data, options.states)
    else:
        parser.error("give --target and --text, or --states with states captured before")
    sequences = [pair for pair in data["sequences"] if len(pair[0]) > 2]
    half = len(sequences) // 2
    fitting, judged = sequences[:half], sequences[half:]
    print(f"{sum(len(f) for f, _ in fitting)} tokens to fit, {sum(len(f) for f, _ in judged)} to judge; one core\n")
    print_features([f for f, _ in fitting], [f for f, _ in judged], data["layers"])
    print_teacher([last for _, last in fitting], [last for _, last in judged], data["head"])


if __name__ == "__main__":
    main()
