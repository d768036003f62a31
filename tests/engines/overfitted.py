"""Drafters that know a few answers by heart: trained on a small target's own greedy answers in seconds.

1. `small_target` writes a random Llama of five layers, large enough in its weights that every layer matters.
2. It answers the prompts greedily; its states over prompt and answer are captured.
3. The drafter starts from the target's weights and trains on blocks of the answers, all of them packed together.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.decoding.decoder import Completion, Decoder, Request, SamplingConfig
from dspark.decoding.target import Target, hash_weights
from dspark.losses.fused_loss import fused_loss, output_head_of
from dspark.losses.losses import LossConfig
from dspark.losses.micro_batch import Teacher, make_micro_batch
from dspark.models.eagle3 import Eagle3
from dspark.models.starting_weights import build_drafter
from storage.cache.shards import StoredRow

VOCABULARY, LAYERS, MASK = 512, (0, 2, 3), 511
LOSSES = {
    "dspark": LossConfig(),
    "dflash": LossConfig(ce=1, l1=0, confidence=0),
    "eagle3": LossConfig(ce=0, l1=0, confidence=0, soft_ce=1, position_decay=Eagle3.loss["position_decay"]),
}


@torch.no_grad()
def small_target(folder: Path) -> Target:
    """Hidden size 64, two heads of 32, untied head; without a tokenizer."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return Target.open(folder, dtype="float32", device="cpu", target_layer_ids=LAYERS)


def decode(target: Target, drafter: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Completion]:
    """Greedy answers, in the order of the prompts."""
    requests = [
        Request(
            request_id=str(number),
            prompt_ids=list(prompt),
            max_new_tokens=max_tokens,
            stop_token_ids=frozenset(),
            seed=0,
        )
        for number, prompt in enumerate(prompts)
    ]
    decoder = Decoder(target, drafter, sampling=SamplingConfig(temperature=0.0))
    found = {completion.request_id: completion for completion in decoder.generate(requests)}
    return [found[request.request_id] for request in requests]


def samples_of(target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[StoredRow]:
    """What the target thinks over each prompt and answer; the answer is supervised."""
    samples = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([[*prompt, *answer]])
        captured = target.capture(ids)
        samples.append(
            StoredRow(
                sample_id=str(number),
                input_ids=ids[0],
                spans=[(len(prompt), ids.shape[1])],
                hidden_states=captured.hidden_states[0],
                teacher_positions=torch.arange(ids.shape[1]),
                teacher=Teacher(last_hidden_state=captured.last_hidden_state[0]),
            )
        )
    return samples


def overfit(
    target: Target, samples: Sequence[StoredRow], *, steps: int, draft_tokens: torch.Tensor | None = None, **parts: Any
) -> Any:
    """A drafter with these parts (`DrafterConfig.for_target`), trained on the samples' answers."""
    config = DrafterConfig.for_target(
        target.text_config,
        mask_token_id=MASK,
        target_layer_ids=target.layer_ids,
        draft_vocab_size=None if draft_tokens is None else len(draft_tokens),
        **parts,
    )
    drafter = build_drafter(config, target, start="target", draft_token_ids=draft_tokens)
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
    head, loss_config = output_head_of(drafter), LOSSES[config.algorithm]
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        anchors = []
        for sample in samples:
            first, end = sample.spans[0]
            chosen = first + torch.randperm(end - first - 1, generator=generator)[:16]
            anchors.append(chosen.sort().values.numpy())
        batch = make_micro_batch(samples, anchors, drafter.block_size)
        result = fused_loss(drafter, drafter.block_states(batch), batch, loss_config, head=head)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 5, (steps - step) / (steps / 2))
        optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    print(f"{config.algorithm}: loss {result.loss.item():.3f} after {steps} steps", flush=True)
    return drafter.eval()


def contract_of(target: Target, drafter: Any, name: str) -> Contract:
    assert target.folder is not None
    weights = hash_weights(target.folder)
    assert weights is not None
    config = drafter.config
    eagle = config.algorithm == "eagle3"
    return Contract(
        target_name=name,
        target_revision=None,
        thinking="off",
        target_layer_ids=config.target_layer_ids,
        final_norm_applied=True,
        block_layout=None if eagle else config.block_layout,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        weights_sha256=weights,
        tokenizer_sha256="none",
        chat_template_sha256="none",
    )
