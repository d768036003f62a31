"""Make a run directory around an *untrained* drafter, so that the engine can be tested without a pipeline run.

1. A vanilla DSpark drafter (block 7, two layers, rank 64) whose layers are the target's last two and whose context
   projection passes the last captured layer through; the heads are random, so that every tensor matters.
2. With `--draft-vocab N`, the tokens 0..N-1 only, carried by the reserved Markov column.
3. Plain and speculative greedy decoding of a few demonstration prompts, with the same event log as an evaluation.

    python tests/engines/make_stand_in_run.py TARGET_FOLDER OUT [--draft-vocab N] [--prompts 6] [--tokens 48]
"""

import argparse
import json
from pathlib import Path

import torch

from dspark.config import DrafterConfig
from dspark.decoding.decoder import Completion, Decoder, Request, SamplingConfig
from dspark.decoding.target import Target
from dspark.models.checkpoint import save_drafter
from dspark.models.dspark import DSpark
from pipelines.evaluation.round_log import EventLog, Labels
from pipelines.runs.run import Run
from pipelines.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
DEMONSTRATION = ROOT / "pipelines" / "data" / "demonstration" / "evaluation.jsonl"


@torch.no_grad()
def untrained_drafter(target: Target, draft_vocab: int | None, num_layers: int = 2) -> DSpark:
    """A drafter that means something (the target's layers) in which no tensor is trivial."""
    config = DrafterConfig.for_target(
        target.text_config,
        mask_token_id=target.default_mask_token_id(),
        target_layer_ids=target.layer_ids,
        num_draft_layers=num_layers,
        markov_rank=64,
        draft_vocab_size=draft_vocab,
    )
    drafter = DSpark(config)
    drafter.initialise_random(seed=0)
    drafter.share_target(target.embed_tokens.weight, target.lm_head.weight)
    for layer, source in zip(drafter.layers, target.layers[-num_layers:], strict=True):
        layer.load_state_dict(source.state_dict(), strict=False)
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.normal_(1.5, 0.2)
    width = config.hidden_size
    drafter.fc.weight[:, -width:] += torch.eye(width)
    drafter.norm.load_state_dict(target.final_norm.state_dict())
    assert drafter.markov_head is not None
    drafter.markov_head.markov_w1.weight.normal_(0, 0.3)
    drafter.markov_head.markov_w2.weight.normal_(0, 0.3)
    if draft_vocab is not None:
        drafter.restrict_vocabulary(torch.arange(draft_vocab))
    return drafter.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()

    torch.manual_seed(0)
    target = Target.open(options.target, dtype="float32", device="cpu", target_layer_ids=(1, 8, 14, 21, 27))
    drafter = untrained_drafter(target, options.draft_vocab)
    save_drafter(drafter, options.out / "published", target.text_config)

    rows = [json.loads(line) for line in DEMONSTRATION.read_text().splitlines()]
    rows = rows[:: max(1, len(rows) // options.prompts)][: options.prompts]
    requests = []
    for row in rows:
        prompt_ids = target.tokenizer.apply_chat_template(
            row["conversations"], add_generation_prompt=True, return_dict=False
        )
        requests.append(
            Request(
                request_id=row["id"],
                prompt_ids=prompt_ids,
                max_new_tokens=options.tokens,
                stop_token_ids=target.stop_token_ids,
                seed=0,
            )
        )
    conversations = options.out / "conversations" / "evaluation.jsonl"
    conversations.parent.mkdir(parents=True, exist_ok=True)
    conversations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domains = {row["id"]: row["domain"] for row in rows}

    log = EventLog(options.out / "evaluation")
    for name, used in (("plain", None), ("dspark", drafter)):
        decoder = Decoder(target, used, sampling=SamplingConfig(temperature=0.0), max_rows=4, record_gaps=True)
        for completion in decoder.generate(requests):
            log.append(completion, _labels(completion, domains, name))
            print(name, completion.request_id, len(completion.output_ids), completion.finish_reason, flush=True)
    log.merge()
    _write_settings(options.out, options.target, options.tokens)


def _write_settings(out: Path, target: Path, tokens: int) -> None:
    overrides = [f"run.directory={out.resolve()}", f"target.model={target.resolve()}"]
    settings = load_settings(ROOT / "configs" / "quickstart.yaml", [*overrides, f"evaluate.max_new_tokens={tokens}"])
    Run(settings).write_summary()


def _labels(completion: Completion, domains: dict[str, str], drafter: str) -> Labels:
    return Labels(
        prompt_id=completion.request_id,
        domain=domains[completion.request_id],
        split="evaluation",
        seed=0,
        temperature=0.0,
        drafter=drafter,
        policy="full",
    )


if __name__ == "__main__":
    main()
