"""Router of a mixture of experts, in torch operations. Scores are computed in float32, or in float64 for float64."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from torch.nn.functional import pad

_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


class RoutingMapFormat(IntEnum):
    """How the selected experts are returned: one boolean per expert, or one bit, the lowest of a byte first."""

    BYTEMAP = 0
    BITMAP_U8 = 1


def _checked_format(format: RoutingMapFormat | str | int) -> RoutingMapFormat:
    names = {member.name.lower(): member for member in RoutingMapFormat}
    if isinstance(format, str) and format in names:
        return names[format]
    if isinstance(format, int) and format in list(RoutingMapFormat):
        return RoutingMapFormat(format)
    raise ValueError(f"router: routing_map_format is {format!r}, expected one of {', '.join(names)}.")


def _routing_map(chosen: torch.Tensor, num_experts: int, format: RoutingMapFormat) -> torch.Tensor:
    """Returns the map of the chosen experts, given by their indices."""
    mask = torch.zeros(*chosen.shape[:-1], num_experts, dtype=torch.bool, device=chosen.device).scatter(
        -1, chosen, True
    )
    if format == RoutingMapFormat.BYTEMAP:
        return mask
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=chosen.device)
    packed: torch.Tensor = (pad(mask, (0, -num_experts % 8)).unflatten(-1, (-1, 8)) * bits).sum(-1, dtype=torch.uint8)
    return packed


def _to_opmath(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _score(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in _SCORES:
        raise ValueError(f"router: score_function is {name!r}, expected one of {', '.join(_SCORES)}.")
    return _SCORES[name]


def _check_topk(topk: int, experts: int, num_groups: int | None = None, group_topk: int | None = None) -> None:
    if not 1 <= topk <= experts:
        raise ValueError(f"router: topk is {topk}, expected 1 to {experts}, the number of experts.")
    if not (num_groups and group_topk):
        return
    fits = num_groups > 0 and experts % num_groups == 0 and 1 <= group_topk <= min(num_groups, topk)
    if not fits or topk > group_topk * (experts // num_groups):
        raise ValueError(
            f"router: num_groups is {num_groups}, group_topk is {group_topk}, with topk {topk} of {experts} experts; "
            "expected a number of groups that divides the experts, and at most topk of them that have topk experts."
        )


def _topk_experts(scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> torch.Tensor:
    """Returns the indices of the `topk` best experts. With groups, only experts of the `group_topk` best groups; the
    score of a group is the sum of its best topk / group_topk experts."""
    if group_topk and num_groups:
        grouped = scores.unflatten(-1, (num_groups, -1))
        group_scores = grouped.topk(topk // group_topk, -1).values.sum(-1)
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(
            -1, group_scores.topk(group_topk, -1).indices, False
        )
        scores = grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores.topk(topk, -1).indices


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: RoutingMapFormat | str | int = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the top-k experts of each token.

    Args:
        logits: router logits.
        topk: experts per token.
        use_pre_softmax: apply softmax before the selection instead of to the selected experts.
        num_groups, group_topk: restrict the selection to the best groups of experts.
        scaling_factor: multiplies the probabilities.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        expert_bias: added to the scores for the selection only.
        routing_map_format: ``"bytemap"``, a boolean per expert, or ``"bitmap_u8"``, a bit per expert.
        topk_indices: receives the indices of the selected experts, which are then returned instead of their mask.

    Returns:
        A tuple (probabilities, mask of the selected experts or `topk_indices`).

    Shape:
        - logits: ``(*, experts)``.
        - probabilities, mask: same as `logits`; a mask of bits ``(*, ceil(experts / 8))``.
        - topk_indices: ``(*, topk)``, int16, int32 or int64; the best expert first.
    """
    format = _checked_format(routing_map_format)
    score = _score(score_function)
    _check_topk(topk, logits.size(-1), num_groups, group_topk)
    if expert_bias is not None and expert_bias.shape != logits.shape[-1:]:
        raise ValueError(
            f"router: expert_bias has shape {list(expert_bias.shape)}, expected {list(logits.shape[-1:])}, one per "
            "expert."
        )
    opmath = _to_opmath(logits)
    softmax_after_topk = score_function == "softmax" and not use_pre_softmax
    scores = opmath if softmax_after_topk else score(opmath)
    with torch.no_grad():
        chosen = _topk_experts(scores if expert_bias is None else scores + expert_bias, topk, num_groups, group_topk)
    values = scores.gather(-1, chosen)
    if softmax_after_topk:
        values = values.softmax(-1)
    elif score_function != "softmax" and topk > 1:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    if scaling_factor:
        values = values * scaling_factor
    probs = torch.zeros_like(opmath).scatter(-1, chosen, values).to(logits.dtype)
    if topk_indices is None:
        return probs, _routing_map(chosen, logits.size(-1), format)
    if topk_indices.shape != chosen.shape or topk_indices.dtype not in (torch.int16, torch.int32, torch.int64):
        raise ValueError(
            f"router: topk_indices has shape {list(topk_indices.shape)} and dtype {topk_indices.dtype}, expected "
            f"{list(chosen.shape)} and int16, int32 or int64."
        )
    return probs, topk_indices.copy_(chosen)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the scores that the auxiliary loss uses.

    Args:
        logits: router logits.
        topk: experts per token.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        routing_map_format: as in :func:`fused_topk_with_score_function`.

    Returns:
        A tuple (mask of the selected experts, scores of all experts).

    Shape:
        - logits: ``(*, experts)``.
        - mask, scores: same as `logits`; a mask of bits ``(*, ceil(experts / 8))``.
    """
    format = _checked_format(routing_map_format)
    _check_topk(topk, logits.size(-1))
    scores = _score(score_function)(_to_opmath(logits))
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = scores.detach().topk(topk, -1).indices
    return _routing_map(chosen, logits.size(-1), format), scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Load-balancing loss: coeff · experts / (topk · tokens²) · Σ_e tokens_per_expert[e] Σ_t probs[t, e].

    Args:
        probs: probabilities.
        tokens_per_expert: tokens routed to each expert.
        total_num_tokens: number of tokens.
        num_experts: number of experts.
        topk: experts per token.
        coeff: coefficient of the loss.

    Returns:
        A scalar tensor.

    Shape:
        - probs: ``(tokens, experts)``.
        - tokens_per_expert: ``(experts,)``.
    """
    if tokens_per_expert.shape != probs.shape[-1:]:
        raise ValueError(
            f"router: tokens_per_expert has shape {list(tokens_per_expert.shape)}, expected {list(probs.shape[-1:])}, "
            "one per column of probs."
        )
    opmath = _to_opmath(probs)
    total = (opmath.flatten(0, -2).sum(0) * tokens_per_expert.to(opmath.dtype)).sum()
    return (total * (num_experts * coeff / (topk * total_num_tokens**2))).to(probs.dtype)
