"""Router of a mixture of experts, in torch operations. Scores are computed in float32, or in float64 for float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


def _to_opmath(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _score(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in _SCORES:
        raise ValueError(f"router: score_function is {name!r}, expected one of {', '.join(_SCORES)}.")
    return _SCORES[name]


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

    Returns:
        A tuple (probabilities, mask of the selected experts).

    Shape:
        - logits: ``(tokens, experts)``.
        - probabilities, mask: same as `logits`.
    """
    score = _score(score_function)
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
    return probs, torch.zeros_like(opmath, dtype=torch.bool).scatter(-1, chosen, True)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the scores that the auxiliary loss uses.

    Args:
        logits: router logits.
        topk: experts per token.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.

    Returns:
        A tuple (mask of the selected experts, scores of all experts).

    Shape:
        - logits: ``(tokens, experts)``.
        - mask, scores: same as `logits`.
    """
    scores = _score(score_function)(_to_opmath(logits))
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = scores.detach().topk(topk, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True), scores


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
    opmath = _to_opmath(probs)
    total = (opmath.flatten(0, -2).sum(0) * tokens_per_expert.to(opmath.dtype)).sum()
    return (total * (num_experts * coeff / (topk * total_num_tokens**2))).to(probs.dtype)
