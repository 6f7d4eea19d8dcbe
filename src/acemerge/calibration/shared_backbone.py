"""All experts' models on one backbone, theta_0 + sum_t lambda_t tau_t, each with its own head, to learn coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from acemerge.calibration.inputs import Batch
from acemerge.calibration.run import DataRun, ExpertModel
from acemerge.errors import InputError
from acemerge.methods import Context
from acemerge.methods.ties import TiesStatistics
from acemerge.numerics.linalg import row_blocks
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.merging import merge_tensor


@dataclass(frozen=True)
class SharedBackbone:
    """Memory: one backbone, its gradient, every head, and a few entries of the task vectors at a time."""

    run: DataRun
    models: Sequence[ExpertModel]
    tensors: dict[str, Tensor]
    """The one copy of each of the base's tensors that any model uses."""
    elected: TiesStatistics | None = None
    """What chooses the entries of the task vectors that take part; all do without it."""

    @staticmethod
    def open(run: DataRun, elected: TiesStatistics | None = None) -> SharedBackbone:
        """Load the experts one after the other; each gives up its own backbone for the common one."""
        models: list[ExpertModel] = []
        shared: dict[str, Tensor] = {}
        for expert in range(len(run.experts)):
            model = run.load(expert)
            for planned in run.plan.tensors:  # what is not learnt is as it will be in the merged model
                if planned.action in ("averaged", "kept") and planned.name in model.owners:
                    model.install(planned.name, merge_tensor(run.plan, planned, run.device).value)
            for planned in run.tensors:
                if planned.name in model.owners:
                    tensor = shared.setdefault(planned.name, model.tensor(planned.name))
                    for module, attribute in model.owners[planned.name]:
                        setattr(module, attribute, tensor)
            models.append(model)
        for tensor in shared.values():
            if isinstance(tensor, nn.Parameter):  # a buffer, such as a running mean, has no gradient
                tensor.requires_grad_()
        return SharedBackbone(run, models, shared, elected)

    @torch.no_grad()
    def set_coefficients(self, coefficients: Float[Tensor, "task tensor"]) -> None:
        """theta^j = theta_0^j + sum_t lambda_{t,j} tau_t^j, for every tensor j."""
        for column, planned in zip(coefficients.T.tolist(), self.run.tensors, strict=True):
            if planned.name in self.tensors:
                shared = self.tensors[planned.name]
                theta = torch.empty(shared.numel(), dtype=shared.dtype, device=shared.device)
                for block, start, task_vectors in self._blocks(planned, shared):
                    for expert, task_vector in task_vectors:
                        start = torch.add(start, task_vector, alpha=column[expert])
                    theta[block] = start
                shared.copy_(theta.view(shared.shape))

    def entropy(self, batches: Sequence[Batch]) -> float:
        """sum_t mean_x H(softmax f_t(x; theta)); its gradient is left in the backbone."""
        total = 0.0
        for tensor in self.tensors.values():
            tensor.grad = None
        for expert, (model, batch) in enumerate(zip(self.models, batches, strict=True)):
            logits = self.run.logits(expert, model, batch)
            if logits.shape[1] == 1:
                raise InputError(
                    f"expert {self.run.experts[expert].where}: its head gives one number, not classes, so its answers have no "
                    "entropy to make small; leave it out, or use regmean"
                )
            log_p = logits.log_softmax(1)
            loss = -(log_p.exp() * log_p).sum(1).mean()
            loss.backward()
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def slopes(self) -> Float[Tensor, "task tensor"]:
        """dL / dlambda_{t,j} = <dL / dtheta^j, tau_t^j>, by the chain rule."""
        found = torch.zeros(len(self.models), len(self.run.tensors), dtype=torch.float64)
        for column, planned in enumerate(self.run.tensors):
            gradient = self.tensors[planned.name].grad if planned.name in self.tensors else None
            if gradient is not None:
                flat = gradient.reshape(-1)
                for block, _, task_vectors in self._blocks(planned, gradient):
                    for expert, task_vector in task_vectors:
                        found[expert, column] += float(flat[block] @ task_vector)
        return found

    def _blocks(self, planned: PlannedTensor, like: Tensor) -> Iterator[tuple[slice, Tensor, list[tuple[int, Tensor]]]]:
        """theta_0 and the tau_t of one tensor as it is stored, a few entries at a time, so that memory stays small."""
        base = self.run.plan.base.read(planned.name).reshape(-1)
        experts = [(s.expert, self.run.experts[s.expert].read(s.name).reshape(-1)) for s in planned.experts if s.name]
        context = Context(planned.name, tuple(self.run.experts[expert].name for expert, _ in experts))
        for block in row_blocks(base.numel(), 1):
            start = base[block].to(like)
            task_vectors = [own[block].to(like) - start for _, own in experts]
            if self.elected and task_vectors:
                task_vectors = list(self.elected.elect(torch.stack(task_vectors), context))
            yield block, start, [(expert, own) for (expert, _), own in zip(experts, task_vectors, strict=True)]
