"""The target model: opened once, read through hooks, never changed.

B batch, S sequence, d hidden size, m captured layers, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.config import SettingError, default_layer_ids
from dspark.decoding.target_checks import (
    TargetError,
    check_target,
    opening_error,
    output_head,
    require_device,
    require_whole_weights,
    text_decoder,
    unknown_token,
)
from dspark.families import MASK_TOKEN_IDS

__all__ = ["Captured", "Target", "TargetError", "default_layer_ids"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Captured:
    """What one forward pass of the target leaves behind."""

    hidden_states: Tensor  # [B, S, m*d], outputs of the captured layers in id order, the last hidden state as the last
    last_hidden_state: Tensor  # [B, S, d], after the final norm
    logits: Tensor | None  # [B, S, V]


class Target:
    """A causal language model with hooks on the captured layers, its tokenizer and its identity."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        target_layer_ids: Iterable[int] | None = None,
        name: str = "",
        revision: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name, self.revision, self.folder = name or type(model).__name__, revision, folder
        self.text_config = self.model.config.get_text_config()
        self.decoder = text_decoder(self.model)
        self.layers: Any = self.decoder.layers
        self.final_norm: Any = self.decoder.norm
        self.embed_tokens: nn.Embedding = self.decoder.embed_tokens
        self.lm_head: nn.Linear = output_head(self.model)
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.text_config.hidden_size
        self.vocab_size: int = self.lm_head.weight.shape[0]
        values = self.text_config.to_dict()
        self.context_length, self.rotary_limit = context_length(values), rotary_limit(values)
        self.input_vocab_size = min(self.vocab_size, tokenizer_length(tokenizer) or self.vocab_size)
        self.final_logit_softcapping = getattr(self.text_config, "final_logit_softcapping", None)
        ids = default_layer_ids(self.num_layers) if target_layer_ids is None else tuple(target_layer_ids)
        for layer in ids:
            if not -1 <= layer <= self.num_layers:
                raise SettingError(
                    f"target_layer_ids has {layer}; {self.name} has layers -1 (the embedding output) "
                    f"to {self.num_layers - 1}, and {self.num_layers} is its last hidden state "
                    "(option `drafter.target_layer_ids`)"
                )
        self.layer_ids: tuple[int, ...] = ids
        self._sink: dict[int, Tensor] | None = None
        self._hook_layers()

    @classmethod
    def open(
        cls,
        path_or_id: str | Path,
        *,
        revision: str | None = None,
        dtype: str = "bfloat16",
        device: str = "auto",
        target_layer_ids: Iterable[int] | None = None,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        check: bool = True,
    ) -> Target:
        """Open a local folder or a hub id. `device` "auto" takes the GPU when there is one.

        check: compare how it is read here with its own forward pass (`check_target`); False where that has been done.
        Raises TargetError when the folder holds no model, or one that is not read as it computes.
        """
        from transformers import AutoModelForCausalLM

        if dtype not in DTYPES:
            raise SettingError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)} (option `target.dtype`)")
        require_device(device)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = Path(path_or_id) if Path(path_or_id).is_dir() else None
        hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        if folder is not None:
            require_whole_weights(folder)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(path_or_id), dtype=DTYPES[dtype], attn_implementation=attn_implementation, **hub
            )
        except (ImportError, OSError, ValueError) as error:
            raise opening_error(str(path_or_id), attn_implementation, error) from error
        target = cls(
            model.to(device),
            open_tokenizer(path_or_id, **hub),
            target_layer_ids=target_layer_ids,
            name=str(path_or_id),
            revision=revision,
            folder=folder,
        )
        if check:
            check_target(target)
        return target

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every token that ends an answer: of the generation config, the text config and the tokenizer."""
        return stop_tokens(getattr(self.model, "generation_config", None), self.text_config, self.tokenizer)

    @torch.no_grad()
    def capture(self, input_ids: Tensor, attention_mask: Tensor | None = None, logits: bool = False) -> Captured:
        """One forward pass over input_ids [B, S], padded on the right where attention_mask [B, S] is 0.

        States at padding are meaningless.
        Raises TargetError for ids of no token, and for more tokens than the target's rotary factors are constant for.
        """
        if (unknown := unknown_token(self, input_ids.unique().tolist())) is not None:
            raise TargetError(f"{self.name}: {unknown}")
        if self.rotary_limit is not None and input_ids.shape[1] > self.rotary_limit:
            raise TargetError(
                f"{self.name}: {input_ids.shape[1]} tokens; its rotary factors change after {self.rotary_limit}, by "
                "the longest row of a batch, so that longer texts are not read (shorten them, `cache.max_length`)"
            )
        input_ids = input_ids.to(self.device)
        mask = None if attention_mask is None else attention_mask.to(self.device)
        position_ids = None
        # Causal attention alone keeps right padding out of the real tokens, and is the faster kernel.
        if mask is not None and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            mask = None
        elif mask is not None:
            position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)
        with self.capturing() as sink:
            output = self.decoder(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False)
            hidden_states = self.hidden_states_of(sink)
        last = output.last_hidden_state
        return Captured(hidden_states, last, self.logits(last) if logits else None)

    @contextmanager
    def capturing(self) -> Iterator[dict[int, Tensor]]:
        """Collect layer outputs {layer id: [B, S, d]} of whatever runs inside."""
        self._sink = {}
        try:
            yield self._sink
        finally:
            self._sink = None

    def hidden_states_of(self, sink: dict[int, Tensor]) -> Tensor:
        """Concatenate collected outputs in the order of `layer_ids`: [B, S, m*d]."""
        return torch.cat([sink[layer] for layer in self.layer_ids], dim=-1)

    def logits(self, last: Tensor) -> Tensor:
        """[..., d] last states to [..., V] logits: the head and the final soft cap, nothing in between."""
        out = self.lm_head(last.to(self.dtype))
        cap = self.final_logit_softcapping
        return out if cap is None else torch.tanh(out / cap) * cap

    def hashes(self) -> dict[str, str]:
        """weights_sha256, tokenizer_sha256 and chat_template_sha256, as the contract records them."""
        weights = hash_weights(self.folder) if self.folder else None
        return {"weights_sha256": weights or self._state_sha256(), **hash_tokenizer(self.tokenizer)}

    def default_mask_token_id(self) -> int:
        """See `default_mask_token_id`."""
        return default_mask_token_id(self.text_config, self.tokenizer, vocab_size=self.vocab_size)

    def _hook_layers(self) -> None:
        def keep(layer: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                if self._sink is not None:
                    self._sink[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        def keep_embedding(_module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._sink is not None:
                self._sink[-1] = inputs[0] if inputs else kwargs["hidden_states"]

        for layer in self.layer_ids:
            if layer == -1:
                self.layers[0].register_forward_pre_hook(keep_embedding, with_kwargs=True)
            else:
                module = self.final_norm if layer == self.num_layers else self.layers[layer]
                module.register_forward_hook(keep(layer))

    def _state_sha256(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def rotary_limit(text_config: Mapping[str, Any]) -> int | None:
    """Up to how many tokens rotary factors are those of a short text: LongRoPE and dynamic ones change after it.

    They change for all rows of a batch at once, so that a row's states would depend on its neighbours.
    """
    rules = text_config.get("rope_parameters") or {}
    each = [rule for rule in rules.values() if isinstance(rule, Mapping)] or [rules]
    changing = [rule for rule in each if "dynamic" in (kind := rule.get("rope_type") or "") or kind == "longrope"]
    own = text_config.get("original_max_position_embeddings") or text_config.get("max_position_embeddings")
    return min((int(rule.get("original_max_position_embeddings") or own or 0) for rule in changing), default=None)


def context_length(text_config: Mapping[str, Any]) -> int | None:
    """How many tokens the target may be given, answer included; None when its config does not say."""
    limits = (text_config.get("max_position_embeddings"), rotary_limit(text_config))
    return min((int(limit) for limit in limits if limit), default=None)


def tokenizer_length(tokenizer: Any) -> int | None:
    """One more than the last id that the tokenizer gives; None without one."""
    return (
        None if tokenizer is None else max([len(tokenizer), *(token + 1 for token in tokenizer.added_tokens_decoder)])
    )


def stop_tokens(*sources: Any) -> frozenset[int]:
    """The `eos_token_id`s, one or several each, of the configs and the tokenizer given."""
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(int(token) for token in found)


def hash_weights(folder: Path) -> str | None:
    """SHA-256 over the folder's safetensors files, names included; None when it has none."""
    files = sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest() if files else None


def hash_tokenizer(tokenizer: Any) -> dict[str, str]:
    """tokenizer_sha256 and chat_template_sha256, as the contract records them."""
    template = getattr(tokenizer, "chat_template", None) if tokenizer is not None else None
    if isinstance(template, dict | list):
        template = json.dumps(template, sort_keys=True)
    return {
        "tokenizer_sha256": hashlib.sha256(_tokenizer_bytes(tokenizer)).hexdigest(),
        "chat_template_sha256": hashlib.sha256((template or "").encode()).hexdigest(),
    }


def default_mask_token_id(text_config: Any, tokenizer: Any, *, vocab_size: int | None = None) -> int:
    """A row of the embedding that never stands in text: the paper's for Qwen3 and Gemma-4, else found here.

    A row beyond the tokenizer, else the last special token that neither the chat template nor padding uses.
    """
    rows = int(vocab_size or text_config.vocab_size)
    papers = MASK_TOKEN_IDS.get(text_config.model_type, rows)
    if papers < rows:
        return papers
    if tokenizer is None or len(tokenizer) < rows:
        return rows - 1
    template = str(getattr(tokenizer, "chat_template", None) or "")
    in_use = set(tokenizer.all_special_ids) | stop_tokens(text_config, tokenizer)
    special = [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in in_use and token.content not in template
    ]
    if not special:
        raise TargetError("the tokenizer has no unused token to serve as mask; name one in `drafter.mask_token_id`")
    return max(special)


def open_tokenizer(path_or_id: str | Path, **hub: Any) -> Any:
    """The tokenizer, or None for a local folder that has none (a bare model, as in tests)."""
    from transformers import AutoTokenizer

    folder = Path(path_or_id)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(str(path_or_id), **hub)


def _tokenizer_bytes(tokenizer: Any) -> bytes:
    if tokenizer is None:
        return b""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.to_str().encode()
    return json.dumps(sorted(tokenizer.get_vocab().items())).encode()
