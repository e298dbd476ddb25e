from paceline.tensors import Array, FloatArray, IntArray

def levels() -> list[str]: ...
def decode(encoding: str, data: Array, out: FloatArray) -> None: ...
def linear_form(encoding: str, quantization: str) -> str: ...
def kv_block_bytes(num_layers: int, num_kv: int, head_dim: int, block_size: int) -> int: ...

class Linear:
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def form(self) -> str: ...
    @property
    def nbytes(self) -> int: ...

class Embedding:
    def __init__(self, encoding: str, rows: int, width: int, table: Array) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class KvStore:
    def __init__(self, num_layers: int, num_kv: int, head_dim: int, num_blocks: int, block_size: int) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def memory(self) -> Array: ...

class Cpu:
    def __init__(self, num_threads: int, isa: str) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def pack_linear(
        self, parts: list[tuple[str, int, Array]], inputs: int, bias: FloatArray, quantization: str
    ) -> Linear: ...
    def linear(self, x: FloatArray, weight: Linear, out: FloatArray) -> None: ...
    def embed(self, ids: IntArray, table: Embedding, scale: float, out: FloatArray) -> None: ...
    def rms_norm(self, x: FloatArray, weight: FloatArray, eps: float, out: FloatArray) -> None: ...
    def add_rms_norm(
        self, residual: FloatArray, update: FloatArray, weight: FloatArray, eps: float, out: FloatArray
    ) -> None: ...
    def qk_norm(
        self, qkv: FloatArray, heads: tuple[int, int, int], q_weight: FloatArray, k_weight: FloatArray, eps: float
    ) -> None: ...
    def rope(
        self,
        qkv: FloatArray,
        heads: tuple[int, int, int],
        positions: IntArray,
        cos: FloatArray,
        sin: FloatArray,
        neighbours: bool,
    ) -> None: ...
    def gated_activation(self, gate_up: FloatArray, gelu: bool, out: FloatArray) -> None: ...
    def softcap(self, x: FloatArray, cap: float) -> None: ...
    def take_rows(self, x: FloatArray, rows: IntArray, out: FloatArray) -> None: ...
    def write_kv(
        self, qkv: FloatArray, heads: tuple[int, int, int], kv: KvStore, layer: int, kv_rows: IntArray
    ) -> None: ...
    def attention(
        self,
        qkv: FloatArray,
        heads: tuple[int, int, int],
        kv: KvStore,
        layer: int,
        span_starts: IntArray,
        context_lens: IntArray,
        block_tables: IntArray,
        scale: float,
        window: int,
        softcap: float,
        out: FloatArray,
    ) -> None: ...
    def edit_logits(
        self,
        logits: FloatArray,
        vocab_size: int,
        allowed_rows: IntArray,
        allowed_bits: Array,
        bias_starts: IntArray,
        bias_ids: IntArray,
        bias_values: FloatArray,
        seen_starts: IntArray,
        seen_ids: IntArray,
        seen_counts: IntArray,
        repetition: FloatArray,
        frequency: FloatArray,
        presence: FloatArray,
        banned_starts: IntArray,
        banned_ids: IntArray,
    ) -> None: ...
    def choose(
        self,
        logits: FloatArray,
        temperature: FloatArray,
        top_k: IntArray,
        top_p: FloatArray,
        min_p: FloatArray,
        seeds: Array,
        positions: IntArray,
        chosen: IntArray,
    ) -> None: ...
    def top_logprobs(
        self,
        logits: FloatArray,
        chosen: IntArray,
        chosen_values: FloatArray,
        ranks: IntArray,
        top_ids: IntArray,
        top_values: FloatArray,
    ) -> None: ...
