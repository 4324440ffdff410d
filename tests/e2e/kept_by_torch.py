"""SnapKV and H2O by torch and transformers with eager attention: whole texts under masks, written from the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.keep_policy import KeepPolicy
from octavo.core.snap_kv import SnapKV


class KeptByTorch:
    """Of each drop, `kept` positions [layers, KV heads, kept] and `scores` [layers, KV heads, not recent]."""

    def __init__(self, path: Path, keep: KeepPolicy, num_prompt: int) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._torch: Any = torch
        self._model: Any = load(path, dtype=torch.float32, attn_implementation="eager")
        self._keep, self._num_prompt = keep, num_prompt
        self._layers, self._kv_heads = self._model.config.num_hidden_layers, self._model.config.num_key_value_heads
        self.kept: list[np.ndarray] = []
        self.scores: list[np.ndarray] = []

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """[tokens, vocabulary]; what rows read is chosen on the way."""
        count = len(token_ids)
        reads = self._torch.tril(self._torch.ones(count, count, dtype=self._torch.bool))
        reads = reads.expand(self._layers, self._kv_heads, count, count).clone()
        for drop in self._drops(count):
            if drop >= count:
                break
            self._choose(reads[:, :, :drop, :drop], self._attention(token_ids[:drop], reads[:, :, :drop, :drop]))
            for layer in range(self._layers):
                for head in range(self._kv_heads):
                    gone = self._torch.ones(drop, dtype=self._torch.bool)
                    gone[self.kept[-1][layer, head]] = False
                    reads[layer, head, drop:, :drop] &= ~gone
        found: np.ndarray = self._run(token_ids, reads).logits[0].numpy()
        return found

    def _drops(self, count: int) -> list[int]:
        keep = self._keep
        if isinstance(keep, SnapKV):
            return [self._num_prompt]
        assert isinstance(keep, HeavyHitters)
        return list(range(keep.budget + keep.piece, count, keep.piece))

    def _choose(self, reads: Any, attention: Any) -> None:
        """attention [layers, KV heads, query heads of it, rows, positions]"""
        torch, keep = self._torch, self._keep
        drop = attention.shape[-1]
        if isinstance(keep, SnapKV):
            recent = keep.window
            seen = attention[..., -recent:, :-recent].mean(dim=3)  # [layers, KV heads, query heads, positions]
            flat = torch.nn.functional.avg_pool1d(seen.flatten(0, 2)[:, None], keep.kernel, 1, keep.kernel // 2)
            scores = flat[:, 0].reshape(seen.shape).mean(dim=2)
        else:
            assert isinstance(keep, HeavyHitters)
            recent = keep.recent
            scores = attention.sum(dim=(2, 3))[..., :-recent]
        alive = scores.masked_fill(~reads[:, :, -1, :-recent], -1.0)
        best = alive.topk(keep.budget - recent, dim=-1).indices
        late = torch.arange(drop - recent, drop).expand(*best.shape[:2], recent)
        self.scores.append(scores.numpy())
        self.kept.append(torch.cat([best.sort(dim=-1).values, late], dim=-1).numpy())

    def _attention(self, token_ids: list[int], reads: Any) -> Any:
        found = self._torch.stack(self._run(token_ids, reads).attentions)[:, 0]
        return found.unflatten(1, (self._kv_heads, -1))

    def _run(self, token_ids: list[int], reads: Any) -> Any:
        """A forward pass in which each layer and KV head has a mask of its own."""
        torch = self._torch
        masks = torch.where(reads, 0.0, torch.finfo(torch.float32).min)
        masks = masks.repeat_interleave(self._model.config.num_attention_heads // self._kv_heads, dim=1)

        def give_mask(module: Any, args: Any, options: Any) -> Any:
            return args, {**options, "attention_mask": masks[module.layer_idx][None]}

        handles = [
            layer.self_attn.register_forward_pre_hook(give_mask, with_kwargs=True) for layer in self._model.model.layers
        ]
        try:
            with torch.no_grad():
                return self._model(torch.tensor([token_ids]), output_attentions=True)
        finally:
            for handle in handles:
                handle.remove()
