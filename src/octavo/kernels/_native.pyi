"""Types of the compiled module; shapes are in ops.py."""

from octavo.kernels.ops import F32, F64, I32, I64, U8, U64

class Linear:
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def weights_dtype(self) -> str: ...

class KVView: ...
class BatchView: ...

class LayerStack:
    def add(
        self,
        attention_norm: F32,
        eps: float,
        qkv: Linear,
        q_norm: F32 | None,
        k_norm: F32 | None,
        output: Linear,
        post_attention_norm: F32 | None,
        mlp_norm: F32,
        gate_up: Linear,
        down: Linear,
        post_mlp_norm: F32 | None,
        gate: str,
        scale: float,
        window: int,
        softcap: float,
        kv: KVView,
        table: int,
        rope: int,
    ) -> None: ...

class Kernels:
    def __init__(self, num_threads: int, instruction_set: str, spin_pauses: int) -> None: ...
    @property
    def instruction_set(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    def pack_linear(self, weight: F32, bias: F32 | None, weights_dtype: str) -> Linear: ...
    def pack_blocks(self, blocks: U8, bias: F32 | None, kind: str) -> Linear: ...
    def linear(self, x: F32, weight: Linear, out: F32, accumulate: bool) -> None: ...
    def embedding(self, table: Linear, token_ids: I32, out: F32) -> None: ...
    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32, accumulate: bool) -> None: ...
    def silu_mul(self, gate_up: F32, out: F32) -> None: ...
    def layer_norm(self, x: F32, weight: F32, bias: F32 | None, eps: float, out: F32) -> None: ...
    def activation(self, x: F32, kind: str, out: F32) -> None: ...
    def gated_activation(self, gate_up: F32, kind: str, limit: float, out: F32) -> None: ...
    def softmax(self, x: F32, out: F32) -> None: ...
    def soft_cap(self, x: F32, cap: float, out: F32) -> None: ...
    def rotate(self, heads: F32, positions: I32, cos: F32, sin: F32, first: int) -> None: ...
    def rope_write(
        self,
        qkv: F32,
        batch: BatchView,
        cos: F32,
        sin: F32,
        kv: KVView,
        out_q: F32,
        q_norm: F32 | None,
        k_norm: F32 | None,
        norm_eps: float,
    ) -> None: ...
    def attention_input(
        self,
        x: F32,
        norm: F32,
        eps: float,
        qkv: Linear,
        batch: BatchView,
        cos: F32,
        sin: F32,
        kv: KVView,
        out_q: F32,
        q_norm: F32 | None,
        k_norm: F32 | None,
    ) -> None: ...
    def norm_linear(self, x: F32, norm: F32, eps: float, weight: Linear, out: F32) -> None: ...
    def gated_mlp(
        self, hidden: F32, norm: F32, eps: float, gate_up: Linear, down: Linear, gate: str, post_norm: F32 | None
    ) -> None: ...
    def decoder_layers(
        self,
        stack: LayerStack,
        count: int,
        hidden: F32,
        tables: list[BatchView],
        ropes: list[F32],
        heads: F32,
    ) -> None: ...
    def paged_attention(
        self,
        q: F32,
        batch: BatchView,
        kv: KVView,
        scale: float,
        out: F32,
        window: int,
        softcap: float,
        sinks: F32 | None,
    ) -> None: ...
    def attention_mass(
        self, q: F32, batch: BatchView, kv: KVView, scale: float, sequence: int, first_row: int, mass: I64
    ) -> None: ...
    def latent_write(self, latent: F32, batch: BatchView, kv: KVView) -> None: ...
    def latent_attention(self, q: F32, batch: BatchView, kv: KVView, rank: int, scale: float, out: F32) -> None: ...
    def draw(self, logits: F32, rows: I32, settings: F64, must_be_finite: bool, out: I32) -> None: ...
    def copy_blocks(self, pool: U8, block_bytes: int, sources: I32, targets: I32) -> None: ...

def uniform(counters: U64, keys: U64, second_key: int, out: F64) -> None: ...
def supported_instruction_sets() -> list[str]: ...
def make_batch_view(
    query_start: I32, start_slot: I32, start_position: I32, block_table: I32, tail_table: I32 | None
) -> BatchView: ...
def make_kv_view(
    pool: U8,
    block_bytes: int,
    layer_offset: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    kv_format: str,
    kind: str,
    k_scales: F32 | None,
    v_scales: F32 | None,
    k_means: F32 | None,
    is_turned: bool,
    k_feedback: F32 | None,
    tail_offset: int,
) -> KVView: ...
