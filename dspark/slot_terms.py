"""The loss terms of a chunk of slots and their gradients with respect to the draft logits, in closed form.

Shapes: c slots of a chunk, D draft vocabulary, K tokens of a sparse teacher.

With p the draft's and q the teacher's distribution, a = sum min(p, q) the acceptance, l1 = sum |p - q| = 2 (1 - a)
counting the teacher mass outside the draft vocabulary, and v = p where p < q, else 0, the gradients are

    ce                        p - onehot(label)
    l1                        2 (p sum(v) - v)
    kl                        p - q / sum(q)                  teacher renormalised on the draft vocabulary
    soft_ce                   p sum(q) - q
    negative_log_acceptance   d l1 / (2 a)                    -log a
    lk_hybrid                 x d kl + (1 - x) d l1 / 2       x = exp(-decay a), held constant

(the last two: arXiv 2602.23881). A sparse teacher is compared on its K tokens, and on all others as one bucket: its l1
is a lower bound, off by at most twice the smaller of the two tail masses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.output_head import TeacherRows
from dspark.packing import SparseTeacher

TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class TermWeights:
    """Factors of the loss terms; a term at zero costs nothing."""

    ce: float = 0.0
    l1: float = 0.0
    kl: float = 0.0
    soft_ce: float = 0.0
    negative_log_acceptance: float = 0.0
    lk_hybrid: float = 0.0
    lk_hybrid_decay: float = 3.0
    confidence: float = 0.0

    @property
    def needs_teacher(self) -> bool:
        return self.divergence or any((self.l1, self.negative_log_acceptance, self.confidence))

    @property
    def divergence(self) -> bool:
        """Whether a term needs the draft's log-probabilities averaged under the teacher."""
        return any((self.kl, self.soft_ce, self.lk_hybrid))

    @property
    def needs_entropy(self) -> bool:
        return any((self.kl, self.lk_hybrid))


class SlotValues(NamedTuple):
    """Unweighted values of every slot [M], without gradients; zeros for a term that nothing asks for."""

    ce: Tensor  # 0 for a label outside the draft vocabulary
    l1: Tensor
    kl: Tensor
    soft_ce: Tensor
    confidence: Tensor  # binary cross-entropy of the confidence head
    acceptance: Tensor  # 1 - l1 / 2, the confidence head's label


class Chunk:
    """One chunk on its way from logits to the logits' gradient, all in the memory of `logits` and `scratch`.

    Call one of the `against_…` methods, read `values`, then call `gradient_` once if it is needed.
    """

    def __init__(self, logits: Tensor, scratch: Tensor, *, terms: TermWeights, weights: Tensor, labels: Tensor) -> None:
        """`logits` and `scratch` [c, D] are overwritten; `labels` [c] are columns, -1 outside the draft vocabulary."""
        self._work = logits.sub_(logits.amax(-1, keepdim=True))
        self._scratch = scratch
        self._terms, self._weights = terms, weights
        self._label_known = (labels >= 0).to(logits.dtype)
        self._label_column = labels.clamp(min=0)[:, None]
        self._label_logit = self._work.gather(1, self._label_column)[:, 0]
        zeros = torch.zeros_like(self._label_logit)
        self.values = SlotValues(zeros, zeros, zeros, zeros, zeros, zeros)

    def against_label_alone(self) -> None:
        self._exponentiate()
        self._finish(l1=None, overlap=None, cross=None, negative_entropy=None, mass=None)

    def against_dense(self, rows: TeacherRows, row_of_slot: Tensor) -> None:
        """`row_of_slot` [c] indexes `rows`, whose probabilities must last until `gradient_`."""
        q = torch.index_select(rows.probs, 0, row_of_slot, out=self._scratch)
        cross = torch.linalg.vecdot(q, self._work) if self._terms.divergence else None
        self._exponentiate()
        scale = self._inverse_sum[:, None]
        overlap = None
        if self._terms.negative_log_acceptance:
            overlap = torch.minimum(self._work * scale, q).sum(-1)
        # Both distributions sum to 1, so what p lacks of q (outside the draft vocabulary too) is half of their l1.
        q.addcmul_(self._work, scale, value=-1).clamp_(min=0)
        lacking = q.sum(-1)
        mass = None
        if rows.mass is not None:
            mass = rows.mass[row_of_slot]
            lacking += (1 - mass).clamp_(min=0)
        self._below = _keep_where_positive_(self._work, q)  # v times the sum that p lacks
        self._below_sum = self._below.sum(-1).mul_(self._inverse_sum)
        self._dense_rows = (rows.probs, row_of_slot)
        negative_entropy = None if rows.negative_entropy is None else rows.negative_entropy[row_of_slot]
        self._finish(l1=2 * lacking, overlap=overlap, cross=cross, negative_entropy=negative_entropy, mass=mass)

    def against_sparse(self, teacher: SparseTeacher, draft_index: Tensor | None) -> None:
        """`teacher` has a row for each slot; `draft_index` [V] maps token ids to columns."""
        columns = teacher.token_ids if draft_index is None else draft_index[teacher.token_ids]
        inside = (columns >= 0).to(self._work.dtype)
        columns = columns.clamp(min=0)
        q = teacher.log_probs.to(self._work.dtype).exp()
        tail = teacher.tail_mass.to(self._work.dtype)
        logits = self._work.gather(1, columns)
        self._work.exp_()
        top = self._work.gather(1, columns) * inside
        # Taken out of the row, so that what remains is the bucket of all other tokens, without cancellation.
        self._work.scatter_add_(1, columns, -top)
        rest = self._work.sum(-1).clamp_(min=0)
        self._normalise_by(rest + top.sum(-1))
        p, rest = top * self._inverse_sum[:, None], rest * self._inverse_sum
        l1 = (p - q).abs().sum(-1) + (rest - tail).abs()
        overlap = torch.minimum(p, q).sum(-1) + torch.minimum(rest, tail)
        q = q * inside
        mass = q.sum(-1) + tail
        log_rest = rest.clamp(min=TINY).log()
        cross = (q * logits).sum(-1) + tail * (log_rest + self._log_sum)
        negative_entropy = torch.xlogy(q, q).sum(-1) + torch.xlogy(tail, tail)
        self._sparse_columns = (columns, p, q, inside, rest, tail)
        self._finish(l1=l1, overlap=overlap, cross=cross, negative_entropy=negative_entropy, mass=mass)

    def gradient_(self) -> Tensor:
        """Weighted gradient of all terms but the confidence's, with respect to the logits [c, D]; reuses `logits`."""
        terms, work, scale = self._terms, self._work, self._weights * self._inverse_sum
        label_factor = terms.ce * self._label_known
        if hasattr(self, "_dense_rows"):
            factor = label_factor + self._kl_factor + terms.soft_ce * self._mass + 2 * self._l1_factor * self._below_sum
            work.mul_((factor * scale)[:, None])
            work.addcmul_(self._below, (-2 * self._l1_factor * scale)[:, None])
            if terms.divergence:
                probs, row_of_slot = self._dense_rows
                pull = (self._kl_factor / self._mass + terms.soft_ce) * self._weights
                q = torch.index_select(probs, 0, row_of_slot, out=self._scratch)
                work.addcmul_(q, pull[:, None], value=-1)
        elif hasattr(self, "_sparse_columns"):
            self._sparse_gradient_(label_factor)
        else:
            work.mul_((label_factor * scale)[:, None])
        return work.scatter_add_(1, self._label_column, -(label_factor * self._weights)[:, None])

    def _sparse_gradient_(self, label_factor: Tensor) -> None:
        columns, p, q, inside, rest, tail = self._sparse_columns
        sign, rest_sign = (p - q).sign(), (rest - tail).sign()
        mean_sign = (p * sign).sum(-1) + rest * rest_sign
        ratio = tail / rest.clamp(min=TINY)
        common = label_factor + self._kl_factor + self._terms.soft_ce * self._mass - self._l1_factor * mean_sign
        pull = self._kl_factor / self._mass + self._terms.soft_ce
        rest_factor = common + self._l1_factor * rest_sign - pull * ratio
        self._work.mul_((rest_factor * self._weights * self._inverse_sum)[:, None])
        top = p * (common[:, None] + self._l1_factor[:, None] * sign) - pull[:, None] * q
        self._work.scatter_add_(1, columns, top * inside * self._weights[:, None])

    def _exponentiate(self) -> None:
        self._work.exp_()
        self._normalise_by(self._work.sum(-1))

    def _normalise_by(self, total: Tensor) -> None:
        self._inverse_sum, self._log_sum = total.reciprocal(), total.log()

    def _finish(
        self,
        *,
        l1: Tensor | None,
        overlap: Tensor | None,
        cross: Tensor | None,
        negative_entropy: Tensor | None,
        mass: Tensor | None,
    ) -> None:
        """Values, and the factors of d l1 and d kl in the gradient.

        `cross` is the sum of q times (shifted logit); `overlap` the acceptance where 1 - l1/2 would lose digits.
        """
        terms, zeros = self._terms, torch.zeros_like(self._label_logit)
        self._mass = torch.ones_like(zeros) if mass is None else mass.clamp(min=TINY)
        ce = (self._log_sum - self._label_logit) * self._label_known
        l1 = zeros if l1 is None else l1
        acceptance = 1 - l1 / 2 if overlap is None else overlap
        soft_ce = zeros if cross is None else self._mass * self._log_sum - cross
        kl = zeros if negative_entropy is None else (soft_ce + negative_entropy) / self._mass - self._mass.log()
        self._l1_factor = torch.full_like(zeros, terms.l1)
        self._kl_factor = torch.full_like(zeros, terms.kl)
        if terms.negative_log_acceptance:
            self._l1_factor += terms.negative_log_acceptance / (2 * acceptance.clamp(min=TINY))
        if terms.lk_hybrid:
            share = terms.lk_hybrid * torch.exp(-terms.lk_hybrid_decay * acceptance)
            self._kl_factor += share
            self._l1_factor += (terms.lk_hybrid - share) / 2
        self.values = SlotValues(ce, l1, kl, soft_ce, zeros, acceptance)


def _keep_where_positive_(values: Tensor, gate: Tensor) -> Tensor:
    """`values` where `gate` > 0, else 0, in the memory of `gate`: one pass, no mask in between."""
    torch.ops.aten.threshold_backward.grad_input(values, gate, 0, grad_input=gate)
    return gate
