"""TransformerLayer, composed of the other module classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._distributed import dropout
from ._layernorm_mlp import LayerNormMLP
from ._module import reject_unknown_arguments
from ._multihead_attention import MultiheadAttention
from ._norm import LayerNorm, RMSNorm


class DropPath(torch.nn.Module):
    """Stochastic depth: zeroes a residual branch per sample with probability `drop_prob` in training.

    Args:
        drop_prob: probability; kept samples are scaled by 1 / (1 - drop_prob).
        batch: batch dimension.
    """

    def __init__(self, drop_prob: float = 0.0, batch: int = 0) -> None:
        super().__init__()
        self.drop_prob, self.batch = drop_prob, batch

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.drop_prob or not self.training:
            return branch
        shape = [size if i == self.batch else 1 for i, size in enumerate(branch.shape)]
        kept = torch.rand(shape, device=branch.device) >= self.drop_prob
        return branch * kept.to(branch.dtype) / (1 - self.drop_prob)


def _to_autocast_dtype(x: torch.Tensor) -> torch.Tensor:
    """Casts x to the autocast dtype, in which the residual is computed; returns x without autocast."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class TransformerLayer(torch.nn.Module):
    """Transformer layer: h = x + attention(norm(x)); y = h + mlp(norm(h)).

    A decoder layer has cross attention between the two. Submodules: `self_attention`, `inter_attention` (cross
    attention, decoder only), `layernorm_mlp`, and with `output_layernorm` also `layernorm`.

    Args:
        hidden_size: size of the last dimension of input and output.
        ffn_hidden_size: size between the two linears of the MLP, over all ranks.
        num_attention_heads, num_gqa_groups, kv_channels, attention_dropout, fuse_qkv_params, qkv_weight_interleaved,
            rotary_pos_interleaved, qk_norm_type, qk_norm_eps, qk_norm_before_rope, softmax_type: see
            :class:`MultiheadAttention`.
        layernorm_epsilon, normalization, zero_centered_gamma: of the norms.
        hidden_dropout: dropout probability of the residual branches.
        init_method, output_layer_init_method: initialize the weights in place.
        self_attn_mask_type, window_size: of the self attention.
        enc_dec_attn_mask_type, enc_dec_window_size: of the cross attention.
        tp_group, tp_size, set_parallel_mode, sequence_parallel: tensor and sequence parallelism.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``.
        apply_residual_connection_post_layernorm: add the output of the norm, instead of its input, to each branch.
        output_layernorm: normalize the output of the layer instead of the input of the attention.
        parallel_attention_mlp: attention and MLP both read the layer's input, and their sum is added to it; for
            encoder layers.
        layer_type: ``"encoder"`` or ``"decoder"``.
        drop_path_rate: probability of :class:`DropPath`.
        bias: add biases.
        activation, activation_params: of the MLP.
        attn_input_format: layout of the input, ``"sbhd"`` or ``"bshd"``.
        params_dtype, device: of the Parameters.
        seq_length, micro_batch_size: ignored.

    Shape:
        - hidden_states: ``(s, b, hidden_size)``, or ``(b, s, hidden_size)`` with ``attn_input_format="bshd"``.
        - Output: same as `hidden_states`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        **unused: Any,
    ) -> None:
        reject_unknown_arguments(self, unused)
        super().__init__()
        if layer_type not in ("encoder", "decoder"):
            raise ValueError(f"TransformerLayer: layer_type is {layer_type!r}, expected 'encoder' or 'decoder'.")
        if parallel_attention_mlp and layer_type == "decoder":
            raise ValueError(
                "TransformerLayer: parallel_attention_mlp is True with layer_type 'decoder', whose cross attention "
                "reads the output of the self attention. Use layer_type 'encoder'."
            )
        self.layer_type, self.hidden_dropout, self.layer_number = layer_type, hidden_dropout, layer_number
        self.parallel_attention_mlp, self.output_layernorm = parallel_attention_mlp, output_layernorm
        self.self_attn_mask_type, self.window_size = self_attn_mask_type, window_size
        self.enc_dec_attn_mask_type, self.enc_dec_window_size = enc_dec_attn_mask_type, enc_dec_window_size
        self.get_rng_state_tracker = get_rng_state_tracker if sequence_parallel else None
        common = {
            "tp_group": tp_group,
            "tp_size": tp_size,
            "set_parallel_mode": set_parallel_mode,
            "sequence_parallel": sequence_parallel,
            "params_dtype": params_dtype,
            "get_rng_state_tracker": get_rng_state_tracker,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "zero_centered_gamma": zero_centered_gamma,
            "normalization": normalization,
            "bias": bias,
            "device": device,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
        }
        attention = common | {
            "hidden_size": hidden_size,
            "num_attention_heads": num_attention_heads,
            "num_gqa_groups": num_gqa_groups,
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "qkv_format": attn_input_format,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
        }
        mlp = common | {"eps": layernorm_epsilon, "activation": activation, "activation_params": activation_params}
        self._make_submodules(attention, mlp | {"hidden_size": hidden_size, "ffn_hidden_size": ffn_hidden_size})
        self.drop_path = DropPath(drop_path_rate, attn_input_format.index("b")) if drop_path_rate > 0 else None
        if output_layernorm:
            norm = LayerNorm if normalization == "LayerNorm" else RMSNorm
            norm_options = {"sequence_parallel": sequence_parallel, "zero_centered_gamma": zero_centered_gamma}
            self.layernorm = norm(
                hidden_size, eps=layernorm_epsilon, params_dtype=params_dtype, device=device, **norm_options
            )

    def _make_submodules(self, attention: dict[str, Any], mlp: dict[str, Any]) -> None:
        self.self_attention = MultiheadAttention(
            attn_mask_type=self.self_attn_mask_type,
            window_size=self.window_size,
            input_layernorm=not self.output_layernorm,
            **attention,
        )
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                attn_mask_type=self.enc_dec_attn_mask_type, input_layernorm=True, attention_type="cross", **attention
            )
        self.layernorm_mlp = LayerNormMLP(**mlp)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the tensor-parallel process group of the submodules."""
        for child in self.children():
            if (setter := getattr(child, "set_tensor_parallel_group", None)) is not None:
                setter(tp_group)

    def _add_residual(self, result: Any, residual: torch.Tensor) -> torch.Tensor:
        """Returns residual + dropout(branch), with stochastic depth. `result` is the output of the branch, or (output,
        output of its norm), which then replaces `residual`."""
        branch, residual = result if isinstance(result, tuple) else (result, residual)
        branch = dropout(branch, self.hidden_dropout, self.training, self.get_rng_state_tracker)
        branch = branch if self.drop_path is None else self.drop_path(branch)
        return branch + residual

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """See :meth:`DotProductAttention.set_context_parallel_group`. Rotary angles are those of whole sequences."""
        self.self_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        if self.layer_type == "decoder" and self.self_attention.core_attention.context_parallel_ranks()[0] > 1:
            self.self_attention.set_context_parallel_group(None)
            raise NotImplementedError("TransformerLayer: context parallelism needs layer_type 'encoder'.")

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Returns the output of the layer, which has the shape of `hidden_states`.

        Args:
            hidden_states: the input.
            self_attn_mask_type: kind of `attention_mask`.
            encoder_output: input of the cross attention, required in a decoder layer.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size: mask and window of the cross attention.
            core_attention_bias_type, core_attention_bias: of both attentions.

        The other arguments are those of :meth:`MultiheadAttention.forward`.
        """
        if self.layer_type == "decoder" and encoder_output is None:
            raise ValueError(
                "TransformerLayer: layer_type is 'decoder', but encoder_output is not given. Pass the input of the "
                "cross attention."
            )
        hidden_states = _to_autocast_dtype(hidden_states)
        scores = {
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
        }
        attention_output = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type or self.self_attn_mask_type,
            window_size=window_size if window_size is not None else self.window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            **scores,
            **others,
        )
        if self.parallel_attention_mlp:
            return self._apply_output_norm(
                self._parallel_branches(attention_output, hidden_states, is_first_microbatch)
            )
        x = self._add_residual(attention_output, hidden_states)
        if self.layer_type == "decoder":
            cross_attention_output = self.inter_attention(
                x,
                enc_dec_attn_mask,
                encoder_output=encoder_output,
                attn_mask_type=enc_dec_attn_mask_type or self.enc_dec_attn_mask_type,
                window_size=enc_dec_window_size if enc_dec_window_size is not None else self.enc_dec_window_size,
                is_first_microbatch=is_first_microbatch,
                checkpoint_core_attention=checkpoint_core_attention,
                **scores,
            )
            x = self._add_residual(cross_attention_output, x)
        return self._apply_output_norm(
            self._add_residual(self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch), x)
        )

    def _parallel_branches(self, attention_output: Any, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        """Returns x + dropout(attention + MLP), for `parallel_attention_mlp`; both read x."""
        attention_output = attention_output[0] if isinstance(attention_output, tuple) else attention_output
        mlp = self.layernorm_mlp(x, is_first_microbatch=first)
        return self._add_residual(attention_output + (mlp[0] if isinstance(mlp, tuple) else mlp), x)

    def _apply_output_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.layernorm(x) if self.output_layernorm else x
