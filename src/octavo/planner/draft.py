"""Collects the tensors and KV groups of one model while its family describes them, and the parts that families share.

A part adds what one kind of layer is made of. It does not know which family uses which part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.errors import ModelError
from octavo.planner.fields import MAX_LAYERS, Fields
from octavo.planner.geometry import EMBEDDING, KVGroup, Tensor

MAX_HEAD_DIM = 1 << 16


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of some layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    kind: str = "full"


class Draft:
    """What is known so far. Layers are given as sequences of their indices."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.num_layers = fields.integer("num_hidden_layers")
        if self.num_layers > MAX_LAYERS:
            raise ModelError(
                f"{fields.name}: num_hidden_layers is {self.num_layers}; it must be at most {MAX_LAYERS}: the config "
                "is damaged"
            )
        self.hidden = fields.integer("hidden_size")
        self.vocab = fields.integer("vocab_size")
        self.layers: tuple[int, ...] = tuple(range(self.num_layers))
        self.tensors: list[Tensor] = []
        self.groups: list[KVGroup] = []
        self.notes: list[str] = []
        self.exact = True
        self.prefix = "model.layers.{}."
        self.score_dim = 0
        self.mix_dim = 0

    # -- tensors

    def matrix(self, name: str, rows: int, columns: int, layers: Sequence[int] = (), *, bias: bool = False) -> None:
        """A matrix of a layer (of these layers), or outside of all."""
        self._add(Tensor(self._name(name, layers) + ".weight", (rows, columns), tuple(layers)))
        if bias:
            self.vector(name + ".bias", rows, layers)

    def experts(self, name: str, rows: int, columns: int, layers: Sequence[int], copies: tuple[int, int]) -> None:
        """A matrix of each of `copies[0]` experts, of which a token takes `copies[1]`."""
        self._add(Tensor(self._name(name, layers) + ".weight", (rows, columns), tuple(layers), *copies))

    def vector(self, name: str, length: int, layers: Sequence[int] = ()) -> None:
        self._add(Tensor(self._name(name, layers), (length,), tuple(layers), role="vector"))

    def lookup(self, name: str, rows: int, columns: int) -> None:
        """A table of which each token reads one row."""
        self._add(Tensor(name + ".weight", (rows, columns), role="lookup"))

    def _name(self, name: str, layers: Sequence[int]) -> str:
        return self.prefix + name if layers else name

    def _add(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)

    def resize_embedding(self, rows: int) -> None:
        """Give the embedding other rows than the vocabulary has."""
        self.tensors = [
            replace(each, shape=(rows, self.hidden)) if each.name == EMBEDDING else each for each in self.tensors
        ]

    # -- parts

    def ends(self, *, tied: bool, norm_bias: bool = False, norm: bool = True, head_bias: bool = False) -> None:
        """Embedding, last norm and head. A head that is tied is read by every token, so it is a matrix."""
        tied = self.fields.flag("tie_word_embeddings", tied)
        self.lookup(EMBEDDING.removesuffix(".weight"), self.vocab, self.hidden)
        if norm:
            self.norms(["model.norm"], (), bias=norm_bias)
        if not tied:
            self.matrix("lm_head", self.vocab, self.hidden, bias=head_bias)

    def norms(self, names: Iterable[str], layers: Sequence[int], *, bias: bool = False, width: int = 0) -> None:
        for name in names:
            self.vector(name + ".weight", width or self.hidden, layers)
            if bias:
                self.vector(name + ".bias", width or self.hidden, layers)

    def heads(self) -> Heads:
        """The attention that the usual keys say."""
        num_heads = self.fields.integer("num_attention_heads")
        kv = self.fields.integer("num_key_value_heads", num_heads)
        head_dim = self.head_dim(num_heads)
        return self.checked(Heads(num_heads, kv, head_dim, head_dim))

    def head_dim(self, num_heads: int) -> int:
        given = self.fields.get("head_dim")
        if given is None and self.hidden % num_heads:
            raise ModelError(
                f"{self.fields.name}: hidden_size {self.hidden} is not a multiple of {num_heads} heads, and there is "
                "no head_dim: the config is damaged"
            )
        return self.fields.integer("head_dim", max(1, self.hidden // num_heads))

    def checked(self, heads: Heads) -> Heads:
        if heads.num_heads % heads.num_kv_heads and heads.num_kv_heads != 1:
            raise ModelError(
                f"{self.fields.name}: {heads.num_heads} attention heads are not a multiple of {heads.num_kv_heads} KV "
                "heads: the config is damaged"
            )
        if heads.head_dim > MAX_HEAD_DIM:
            raise ModelError(f"{self.fields.name}: head_dim is {heads.head_dim}; it must be at most {MAX_HEAD_DIM}")
        return heads

    def attention(
        self,
        heads: Heads,
        layers: Sequence[int],
        *,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: str = "",
        gated: bool = False,
        name: str = "self_attn",
    ) -> None:
        """q, k, v and o; `qk_norm` is "head" (one norm for all heads) or "all" (over all heads together)."""
        if not layers:
            return
        width = heads.num_heads * heads.head_dim
        self.matrix(f"{name}.q_proj", width * (2 if gated else 1), self.hidden, layers, bias=bias)
        self.matrix(f"{name}.k_proj", heads.num_kv_heads * heads.head_dim, self.hidden, layers, bias=bias)
        if heads.v_head_dim:
            self.matrix(f"{name}.v_proj", heads.num_kv_heads * heads.v_head_dim, self.hidden, layers, bias=bias)
        out = heads.num_heads * (heads.v_head_dim or heads.head_dim)
        self.matrix(f"{name}.o_proj", self.hidden, out, layers, bias=out_bias)
        if qk_norm:
            of_all = qk_norm == "all"
            self.norms([f"{name}.q_norm"], layers, width=width if of_all else heads.head_dim)
            self.norms(
                [f"{name}.k_norm"], layers, width=heads.num_kv_heads * heads.head_dim if of_all else heads.head_dim
            )
        self.keep(heads, layers)

    def keep(self, heads: Heads, layers: Sequence[int], *, v_head_dim: int | None = None) -> None:
        """The KV group of such layers; nothing where there are none."""
        if not layers:
            return
        self.score_dim = max(self.score_dim, heads.head_dim)
        self.mix_dim = max(self.mix_dim, heads.v_head_dim or heads.head_dim)
        self.groups.append(
            KVGroup(
                name=heads.kind if heads.window is None else f"{heads.kind}-{heads.window}",
                kind=heads.kind,
                layer_indices=tuple(layers),
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                v_head_dim=heads.v_head_dim if v_head_dim is None else v_head_dim,
                window=heads.window,
            )
        )

    def mlp(
        self,
        width: int,
        layers: Sequence[int],
        *,
        gated: bool = True,
        bias: bool = False,
        name: str = "mlp",
    ) -> None:
        """gate, up and down, or without a gate up and down."""
        if not layers:
            return
        if gated:
            self.matrix(f"{name}.gate_proj", width, self.hidden, layers, bias=bias)
        self.matrix(f"{name}.up_proj", width, self.hidden, layers, bias=bias)
        self.matrix(f"{name}.down_proj", self.hidden, width, layers, bias=bias)

    def moe(
        self,
        width: int,
        layers: Sequence[int],
        *,
        shared: int = 0,
        name: str = "mlp",
        gated: bool = True,
        hidden: int = 0,
    ) -> None:
        """A router, experts of this width, and shared experts of the width `shared` in all; on `hidden` numbers."""
        if not layers:
            return
        number = self.fields.integer("num_experts")
        used = min(number, self.fields.integer("num_experts_per_tok"))
        hidden = hidden or self.hidden
        self.matrix(f"{name}.gate", number, self.hidden, layers)
        for each in ("gate_proj", "up_proj") if gated else ("up_proj",):
            self.experts(f"{name}.experts.*.{each}", width, hidden, layers, (number, used))
        self.experts(f"{name}.experts.*.down_proj", hidden, width, layers, (number, used))
        if shared:
            self.mlp(shared, layers, gated=gated, name=f"{name}.shared_experts")
