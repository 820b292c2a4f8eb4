"""MultiheadAttention: projections and attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from .. import ops
from ._attention import DotProductAttention
from ._attention_checks import checked_groups
from ._linear import LayerNormLinear, Linear
from ._module import reject_unknown_arguments
from ._norm import LayerNorm, RMSNorm
from ._rotary import apply_rotary_pos_emb


class MultiheadAttention(torch.nn.Module):
    """Multi-head attention with input and output projections.

    Submodules of self attention: `layernorm_qkv` (with `input_layernorm`) or `qkv`; of cross attention:
    `layernorm_query` or `query_layer`, and `key_value`; then `core_attention` and `proj`. Without `fuse_qkv_params` a
    projection has Parameters `query_weight`, `key_weight`, `value_weight` and their biases.

    Args:
        hidden_size: size of the last dimension of input and output.
        num_attention_heads: number of query heads, over all ranks.
        kv_channels: channels per head; None: ``hidden_size // num_attention_heads``.
        attention_dropout, attn_mask_type, window_size, qkv_format, softmax_type: see :class:`DotProductAttention`.
        layernorm_epsilon, normalization, zero_centered_gamma: of the norm before the projections.
        init_method, output_layer_init_method: initialize the weights of the projections in place.
        tp_group, tp_size: tensor-parallel group, or the number of ranks.
        num_gqa_groups: number of key and value heads; None: `num_attention_heads`.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``.
        sequence_parallel: input and output are sharded by their first dimension.
        return_bias: also return the bias of the output projection instead of adding it.
        return_layernorm_output: also return the output of the norm.
        input_layernorm: normalize the input.
        attention_type: ``"self"`` or ``"cross"``.
        set_parallel_mode: shard the projections over the ranks.
        fuse_qkv_params: one weight for query, key and value.
        qkv_weight_interleaved: rows of a fused weight are ordered by group.
        bias: add biases.
        rotary_pos_interleaved: channel pairs of rotary embeddings are adjacent.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope: norm of queries and keys per head.

    Shape:
        - hidden_states: ``(s, b, hidden_size)``, or ``(b, s, hidden_size)`` with ``qkv_format="bshd"``.
        - Output: same as `hidden_states`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        rotary_pos_interleaved: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        **unused: Any,
    ) -> None:
        reject_unknown_arguments(self, unused)
        super().__init__()
        self.attention_type, self.input_layernorm, self.qkv_format = attention_type, input_layernorm, qkv_format
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.channels = kv_channels or hidden_size // num_attention_heads
        groups = checked_groups("MultiheadAttention", num_attention_heads, num_gqa_groups)
        self.heads_of_group = num_attention_heads // groups
        tensor_parallel: dict[str, Any] = {
            "tp_group": tp_group if set_parallel_mode else None,
            "tp_size": tp_size if set_parallel_mode else 1,
        }
        common: dict[str, Any] = tensor_parallel | {
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "params_dtype": params_dtype,
            "device": device,
            "bias": bias,
        }
        norm = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        column = common | {"parallel_mode": "column" if set_parallel_mode else None, "init_method": init_method}
        inner, narrow = num_attention_heads * self.channels, groups * self.channels
        self._make_projections(hidden_size, inner, narrow, fuse_qkv_params, column, norm)
        self.qk_norm_before_rope = qk_norm_before_rope
        self.q_norm, self.k_norm = self._qk_norms(qk_norm_type, qk_norm_eps, params_dtype, device)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.channels,
            num_gqa_groups=groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_type=softmax_type,
            **tensor_parallel,
        )
        row: dict[str, Any] = {"parallel_mode": "row" if set_parallel_mode else None, "return_bias": return_bias}
        self.proj = Linear(inner, hidden_size, init_method=output_layer_init_method, **common, **row)

    def _make_projections(
        self, hidden: int, inner: int, narrow: int, fused: bool, column: dict[str, Any], norm: dict[str, Any]
    ) -> None:
        keys = {"key": narrow, "value": narrow}
        if self.attention_type == "self":
            split = None if fused else {"query": inner} | keys
            size = inner + 2 * narrow
            if self.input_layernorm:
                self.layernorm_qkv = LayerNormLinear(hidden, size, parameters_split=split, **column, **norm)
            else:
                self.qkv = Linear(hidden, size, parameters_split=split, **column)
            return
        if self.attention_type != "cross":
            raise ValueError(
                f"MultiheadAttention: attention_type is {self.attention_type!r}, expected 'self' or 'cross'."
            )
        if self.input_layernorm:
            names = None if fused else ("query",)
            self.layernorm_query = LayerNormLinear(hidden, inner, parameters_split=names, **column, **norm)
        else:
            self.query_layer = Linear(hidden, inner, **column)
        self.key_value = Linear(hidden, 2 * narrow, parameters_split=None if fused else keys, **column)

    def _qk_norms(self, kind: str | None, eps: float, dtype: torch.dtype | None, device: Any) -> tuple[Any, Any]:
        """Makes the norms of each head's query and key."""
        if kind is None:
            return None, None
        if kind == "L2Normalization":
            return ops.L2Normalization(eps=eps, te_keys=True), ops.L2Normalization(eps=eps, te_keys=True)
        norms = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if kind not in norms:
            known = ", ".join(("L2Normalization", *norms))
            raise ValueError(f"MultiheadAttention: qk_norm_type is {kind!r}, expected one of {known}.")
        query, key = (norms[kind](self.channels, eps=eps, params_dtype=dtype, device=device) for _ in range(2))
        return query, key

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is None:
            return query, key
        return self.q_norm(query.contiguous()), self.k_norm(key.contiguous())

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the tensor-parallel process group of the submodules."""
        for child in self.children():
            if (setter := getattr(child, "set_tensor_parallel_group", None)) is not None:
                setter(tp_group)

    def _heads(self, mixed: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Splits [.., features] into tensors [.., heads, channels]. `counts` has the heads per group of each tensor."""
        total = sum(counts)
        if self.qkv_weight_interleaved:  # ordered by group
            parts = mixed.unflatten(-1, (-1, total, self.channels)).split(counts, -2)
            return [part.flatten(-3, -2) for part in parts]
        groups = mixed.size(-1) // (total * self.channels)
        parts = mixed.unflatten(-1, (-1, self.channels)).split([count * groups for count in counts], -2)
        return list(parts)

    def _project(
        self, x: torch.Tensor, encoder_output: torch.Tensor | None, first: bool | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns (query, key, value, output of the norm or None)."""
        normed = None
        own = self._own_projection()
        mixed = own(x, is_first_microbatch=first)
        if self.input_layernorm and self.return_layernorm_output:
            mixed, normed = mixed
        if self.attention_type == "self":
            query, key, value = self._heads(mixed, [self.heads_of_group, 1, 1])
            return query, key, value, normed
        query = mixed.unflatten(-1, (-1, self.channels))
        key, value = self._heads(self.key_value(encoder_output, is_first_microbatch=first), [1, 1])
        return query, key, value, normed

    def _own_projection(self) -> Linear | LayerNormLinear:
        names = ("layernorm_qkv", "qkv") if self.attention_type == "self" else ("layernorm_query", "query_layer")
        return cast("Linear | LayerNormLinear", getattr(self, names[0] if self.input_layernorm else names[1]))

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """See :meth:`DotProductAttention.set_context_parallel_group`. Rotary angles are those of whole sequences."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Returns the output, with `return_bias` also the bias, with `return_layernorm_output` also the norm's output.

        Args:
            hidden_states: the input.
            encoder_output: input of key and value, required in cross attention.
            is_first_microbatch: as in :meth:`Linear.forward`.
            rotary_pos_emb: rotary angles, or a pair of those of query and key.

        The other arguments are those of :meth:`DotProductAttention.forward`.
        """
        if self.attention_type == "cross" and encoder_output is None:
            raise ValueError(
                "MultiheadAttention: attention_type is 'cross', but encoder_output is not given. Pass the input of "
                "keys and values."
            )
        query, key, value, normed = self._project(hidden_states, encoder_output, is_first_microbatch)
        if self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            cp_size, cp_rank = self.core_attention.context_parallel_ranks()
            turn = partial(
                apply_rotary_pos_emb,
                tensor_format=self.qkv_format,
                interleaved=self.rotary_pos_interleaved,
                cp_size=cp_size,
                cp_rank=cp_rank,
            )
            query = turn(query, angles[0], cu_seqlens=others.get("cu_seqlens_q"))
            key = turn(key, angles[1], cu_seqlens=others.get("cu_seqlens_kv"))
        if not self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        context = self.core_attention(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            inference_params=inference_params,
            **others,
        )
        output = self.proj(context, is_first_microbatch=is_first_microbatch)
        results = output if self.return_bias else (output,)
        if self.input_layernorm and self.return_layernorm_output:
            results = (*results, normed)
        return results if len(results) > 1 else results[0]
