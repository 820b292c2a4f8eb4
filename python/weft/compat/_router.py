"""The router of a mixture of experts, in plain torch. Scores are computed in float32, or in float64 of float64."""

from __future__ import annotations

import torch

_SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


def _to_opmath(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _score(name: str):
    if name not in _SCORES:
        raise ValueError(f"score_function is {name!r}, expected {', '.join(_SCORES)}")
    return _SCORES[name]


def _topk_experts(scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> torch.Tensor:
    """Indices of the `topk` best experts; with groups only those of the `group_topk` best groups, a group being as good
    as the sum of its best topk / group_topk experts."""
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
    """(probabilities, mask of the chosen experts), both [tokens, experts]. `expert_bias` counts in the choice alone."""
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
    """(mask of the chosen experts, scores of all of them)"""
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
    """coeff · experts / (topk · tokens²) · Σ_e tokens_per_expert[e] Σ_t probs[t, e]"""
    opmath = _to_opmath(probs)
    total = (opmath.flatten(0, -2).sum(0) * tokens_per_expert.to(opmath.dtype)).sum()
    return (total * (num_experts * coeff / (topk * total_num_tokens**2))).to(probs.dtype)
