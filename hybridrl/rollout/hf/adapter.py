"""The `hf` engine: decodes batches with a transformers model, without tensor parallelism.

Owns the model's parameters (to which the hybrid engine writes), the KV cache and the running rows.
Invariant: running row i uses cache slot i, with positions that begin at 0, and its result does not
depend on other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.contracts.prompts import Content
from hybridrl.errors import ModelError
from hybridrl.models.adapters.rows import only_adapters
from hybridrl.models.adapters.slots import POLICY
from hybridrl.models.family import Family
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.transformers_model import transformers_model
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.weights import RankLayout, hf_layout, hf_shapes
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.common.penalties import TokenHistory, penalized
from hybridrl.rollout.common.sampling import no_logprob, sample_likely, uniforms
from hybridrl.rollout.engine import Holding, QueuedEngine, Request, RunningRequest, unknown_adapter
from hybridrl.rollout.hf.exact import compute_exactly, compute_wide_logits
from hybridrl.rollout.hf.expert_adapters import hold_expert_adapters
from hybridrl.rollout.hf.experts import ChosenExperts
from hybridrl.rollout.hf.images import ImageModel
from hybridrl.rollout.hf.linear_adapters import RowAdapters, hold_linear_adapters
from hybridrl.rollout.hf.slot_cache import LINEAR, SlotCache

# Maximum number of tokens, including padding, in a prefill pass, and of (prompt, position) pairs
# for which the pass computes logits. Both numbers limit the pass's memory and are large enough to
# hide its overhead.
PREFILL_TOKENS = 8192
PREFILL_LOGITS = 1024
# transformers' names of layer types.
FULL, WINDOWED = "full_attention", "sliding_attention"


def build(inputs: EngineInputs) -> HfEngine:
    """Builds this rank's engine, which is a complete replica."""
    return HfEngine(
        inputs.family.for_engines(inputs.hf_config),
        inputs.dtype_name,
        inputs.device,
        inputs.rollout.max_batch,
        inputs.family,
        inputs.records_experts,
        inputs.adapters,
        inputs.directory,
        inputs.is_exact,
    )


class HfEngine(QueuedEngine):
    """Implements `RolloutEngine` and `WeightTarget` with a transformers causal language model.

    Args:
        model_config: HF directory, or the contents of a config.json.
        max_batch: Maximum number of requests decoded together.
        family: Family of the model; by default from config.json, for models with experts.
        adapters: Names of LoRA adapters in addition to the policy's, if the family has adapters.
        directory: Directory with the files of the model's image processor.
        is_exact: Whether results have the bits that the trainer computes (`numerics.match`).
    """

    name = "hf"

    def __init__(
        self,
        model_config: str | Path | Mapping[str, Any],
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        max_batch: int = 256,
        family: Family | None = None,
        records_experts: bool = False,
        adapters: Sequence[str] = (),
        directory: Path | None = None,
        is_exact: bool = False,
    ) -> None:
        super().__init__()
        self._device = torch.device(device)
        if not isinstance(model_config, Mapping):
            model_config = read_config(model_config)
        self._model = transformers_model(model_config, dtype, self._device, "sdpa")
        if is_exact:
            compute_exactly(self._model)
        else:
            compute_wide_logits(self._model)
        text_config = self._model.config.get_text_config()
        _refuse_undecodable(text_config)
        self._masks = _Masks(text_config)
        self._max_batch = max_batch
        self._chosen = ChosenExperts(self._model) if records_experts else None
        self._tensors = checkpoint_tensors(self._model, model_config, family)
        self._adapters: RowAdapters | None = None
        self._of_adapter: dict[str, dict[str, Tensor]] = {}
        if family is not None and family.lora is not None:
            self._adapters = RowAdapters((POLICY, *adapters))
            shape = family.shape(model_config)
            of_experts = hold_expert_adapters(self._model, family, shape, self._adapters)
            sizes = hf_shapes(only_adapters(family), shape)
            linears = {n: size for n, size in sizes.items() if n not in of_experts[POLICY]}
            of_linears = hold_linear_adapters(self._model, linears, self._adapters)
            self._of_adapter = {name: of_linears[name] | of_experts[name] for name in of_linears}
            self._tensors |= self._of_adapter[POLICY]
        self._images: ImageModel | None = None
        vision = None if family is None else family.shape(model_config).vision
        if vision is not None:
            self._images = ImageModel(self._model, vision, directory)
        self._cache = SlotCache(text_config)
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []

    # WeightTarget

    def layout(self) -> RankLayout:
        """Returns a layout of whole HF tensors, without tied output weights."""
        return hf_layout({name: tuple(tensor.shape) for name, tensor in self._tensors.items()})

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def begin_update(self) -> None:
        """Frees the KV cache and stops generation; running requests return to the queue."""
        super().begin_update()
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        self._cache.free()

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the engine's adapters, the policy's first; empty if it has none."""
        return () if self._adapters is None else self._adapters.names

    def adapter_tensors(self, name: str) -> Mapping[str, Tensor]:
        """Returns an adapter's tensors by HF name; KeyError for an unknown name."""
        if name not in self._of_adapter:
            raise KeyError(f"the engine has no adapter {name!r}, only {list(self.adapters)}")
        return self._of_adapter[name]

    # RolloutEngine

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for violation in unknown_adapter(request, self.adapters):
                raise violation
        super().submit(requests)
        self._waiting.extend(self._rows[request.request_id] for request in requests)

    def clear(self) -> None:
        super().clear()
        self._waiting.clear()
        self._running.clear()

    def memory(self) -> dict[str, Holding]:
        """Returns the bytes of the weights; the KV cache grows and shrinks with the requests."""
        size = sum(t.numel() * t.element_size() for t in self.tensors().values())
        return {"weights": Holding(size, stays=True)}

    def close(self) -> None:
        self._cache.free()

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._model
        return model

    @torch.inference_mode()
    def step(self) -> None:
        """Prefills queued requests if enough rows are free, then decodes a token for every row."""
        self._check_weights()
        free = self._max_batch - len(self._running)
        # A forward pass takes nearly the same time for few rows as for many: wait until a quarter
        # of the rows is free.
        if self._waiting and free >= min(len(self._waiting), max(1, self._max_batch // 4)):
            self._prefill([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))])
        if self._running:
            self._decode()

    def _prefill(self, rows: list[RunningRequest]) -> None:
        """Fills the cache for new rows and draws their next token; computes equal contexts once."""
        by_context: dict[_Context, list[RunningRequest]] = {}
        for row in rows:
            request = row.request
            tokens = (*request.prompt, *row.tokens)
            context = _Context(tokens, request.adapter, request.contents)
            by_context.setdefault(context, []).append(row)
        # Recurrent states would include the padding of shorter contexts.
        is_padded = not self._cache.has_states
        by_length = sorted(by_context, key=lambda one: len(one.tokens))
        for chosen in _prefill_chunks(by_length, is_padded):
            contexts = [context.tokens for context in chosen]
            lengths = torch.tensor([len(context) for context in contexts], device=self._device)
            max_length = len(contexts[-1])
            # Causal attention already hides padding on the right from all real positions.
            tokens_BL = torch.tensor(
                [context + (0,) * (max_length - len(context)) for context in contexts],
                device=self._device,
            )
            position_1L = torch.arange(max_length, device=self._device)[None]
            rows_of = [by_context[context] for context in chosen]
            chunk = [row for rows_of_context in rows_of for row in rows_of_context]
            source = [i for i, group in enumerate(rows_of) for _ in group]
            source_B = torch.tensor(source, device=self._device)
            start = len(self._running)
            self._cache.start_prefill(start, source_B, max_length)
            self._use_adapters([context.adapter for context in chosen])
            last_U, where_B = torch.unique(lengths - 1, return_inverse=True)
            mask = self._masks.of(position_1L, max_length)
            if self._images is not None:
                images_B = [context.contents for context in chosen]
                logits_BUV = self._images.prefill(tokens_BL, images_B, mask, self._cache, last_U)
            else:
                logits_BUV = self._model(
                    input_ids=tokens_BL,
                    attention_mask=mask,
                    position_ids=position_1L,
                    past_key_values=self._cache,
                    use_cache=True,
                    logits_to_keep=last_U,
                ).logits
            context_B = torch.arange(len(contexts), device=self._device)
            logits_BV = logits_BUV[context_B, where_B][source_B]
            if self._chosen is not None:
                experts_BLK = self._chosen.take(*tokens_BL.shape)
                for row, number in zip(chunk, source, strict=True):
                    row.record(0, experts_BLK[number, : len(contexts[number])])
            self._running.extend(chunk)
            self._append(start, logits_BV)

    def _decode(self) -> None:
        last = [row.tokens[-1] for row in self._running]
        position = [len(row.request.prompt) + len(row.tokens) - 1 for row in self._running]
        position_B = torch.tensor(position, device=self._device)
        num_keys = max(position) + 1
        self._cache.start_decode(position_B, num_keys)
        self._use_adapters([row.request.adapter for row in self._running])
        tokens_B = torch.tensor(last, device=self._device)
        mask = self._masks.of(position_B[:, None], num_keys)
        if self._images is not None:
            images_B = [row.request.contents for row in self._running]
            logits_BV = self._images.decode(tokens_B, position_B, images_B, mask, self._cache)
        else:
            logits_BV = self._model(
                input_ids=tokens_B[:, None],
                attention_mask=mask,
                position_ids=position_B[:, None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits[:, -1]
        if self._chosen is not None:
            experts_B1K = self._chosen.take(len(last), 1)
            for row, start, experts_1K in zip(self._running, position, experts_B1K, strict=True):
                row.record(start, experts_1K)
        self._append(0, logits_BV)

    def _use_adapters(self, names: Sequence[str | None]) -> None:
        if self._adapters is not None:
            self._adapters.use(names)

    def _append(self, start: int, logits_BV: Tensor) -> None:
        rows = self._running[start:]
        uniform_B = uniforms([r.request.seed for r in rows], [len(r.tokens) for r in rows])
        histories = [TokenHistory(r.request.prompt, r.tokens) for r in rows]
        sampling = [row.request.sampling for row in rows]
        logits_BV = penalized(logits_BV, sampling, histories)
        tokens_B, logp_B, likely = sample_likely(logits_BV, sampling, uniform_B)
        for row, one in zip(rows, likely, strict=False):
            row.record_likely([one])
        # The only sync point of a step: the next input depends on the drawn tokens.
        drawn = zip(rows, tokens_B.tolist(), logp_B.tolist(), strict=True)
        is_done = [False] * start
        for row, token, logp in drawn:
            if not -float("inf") < logp <= 0:
                number = row.request.request_id
                raise no_logprob("hf", logp, number, self._version, self._tensors)
            completion = row.append(token, logp, self._version)
            is_done.append(completion is not None)
            if completion is not None:
                self._finish(completion)
        if any(is_done):
            self._compact(is_done)

    def _compact(self, is_done: list[bool]) -> None:
        """Removes finished rows; surviving rows at the end move into the freed slots."""
        num_left = is_done.count(False)
        holes = [slot for slot in range(num_left) if is_done[slot]]
        movers = [slot for slot in range(num_left, len(is_done)) if not is_done[slot]]
        for hole, mover in zip(holes, movers, strict=True):
            self._running[hole] = self._running[mover]
        del self._running[num_left:]
        if movers:
            self._cache.move(movers, holes)


class _Context(NamedTuple):
    """Tokens of a prefill with images, and the adapter that computes their keys and values."""

    tokens: tuple[int, ...]
    adapter: str | None
    contents: tuple[Content, ...]


def _prefill_chunks(contexts: Sequence[_Context], is_padded: bool) -> Iterator[list[_Context]]:
    """Splits contexts, sorted by length, into passes; without padding, a pass has one length."""
    chunk: list[_Context] = []
    lengths: set[int] = set()
    for context in contexts:
        length = len(context.tokens)
        num, num_lengths = len(chunk) + 1, len(lengths | {length})
        is_full = num * length > PREFILL_TOKENS or num * num_lengths > PREFILL_LOGITS
        if chunk and (is_full or (num_lengths > 1 and not is_padded)):
            yield chunk
            chunk, lengths = [], set()
        chunk.append(context)
        lengths.add(length)
    if chunk:
        yield chunk


class _Masks:
    """Creates attention masks for a model's layer types; ModelError for unsupported types."""

    def __init__(self, config: Any) -> None:
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        others = sorted(kinds - {FULL, WINDOWED, LINEAR})
        if others or (WINDOWED in kinds and window is None):
            raise ModelError(
                "config.json: layer_types",
                ", ".join(others) or f"{WINDOWED} without a sliding_window",
                f"{FULL}, {LINEAR}, or {WINDOWED} with a sliding_window, for rollout.engine=hf",
                "Use another rollout engine, or another model.",
            )
        self._is_mixed = WINDOWED in kinds
        # transformers' eager attention adds its mask to the scores.
        self._is_added = config._attn_implementation == "eager"
        self._dtype: torch.dtype = config.dtype
        self._window: int | None = window if self._is_mixed or not kinds else None

    def of(self, position_BQ: Tensor, num_keys: int) -> Tensor | dict[str, Tensor]:
        """Returns masks (B, 1, Q, K), as a dict by layer type if the model has two types: true or 0
        for keys that are attended to, and false or the type's lowest number for others.
        """
        query_BQ1 = position_BQ[:, :, None]
        key_K = torch.arange(num_keys, device=position_BQ.device)
        full_B1QK = (key_K <= query_BQ1)[:, None]
        if self._window is None:
            return self._mask(full_B1QK)
        near_B1QK = self._mask(full_B1QK & (key_K > query_BQ1 - self._window)[:, None])
        return {FULL: self._mask(full_B1QK), WINDOWED: near_B1QK} if self._is_mixed else near_B1QK

    def _mask(self, is_seen_B1QK: Tensor) -> Tensor:
        if not self._is_added:
            return is_seen_B1QK
        added = torch.zeros_like(is_seen_B1QK, dtype=self._dtype)
        return added.masked_fill_(~is_seen_B1QK, torch.finfo(self._dtype).min)


def _refuse_undecodable(config: Any) -> None:
    """Raises ModelError, naming the key, for models that this engine would decode wrongly."""
    ropes = getattr(config, "rope_parameters", None) or {}
    # These scalings depend on the sequence's length, but all rows in a batch use the same angles.
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        is_settled = rope.get("short_factor", ()) == rope.get("long_factor")
        if rope.get("rope_type") in ("dynamic", "longrope") and not is_settled:
            raise ModelError(
                "config.json: rope_parameters.rope_type",
                rope["rope_type"],
                "a fixed scaling, for rollout.engine=hf",
                "Use another rollout engine, or another model.",
            )
