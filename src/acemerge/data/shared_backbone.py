"""All experts' models on one backbone, theta_0 + sum_t lambda_t tau_t, each with its own head, to learn coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from acemerge.data.inputs import Batch
from acemerge.data.run import DataRun, ExpertModel
from acemerge.errors import InputError
from acemerge.plan import PlannedTensor
from acemerge.task_vectors import load_task_vectors


@dataclass(frozen=True)
class SharedBackbone:
    """Memory: one backbone, its gradient, every head, and one tensor's task vectors at a time."""

    run: DataRun
    models: Sequence[ExpertModel]
    tensors: dict[str, Tensor]
    """The one copy of each of the base's tensors that any model uses."""

    @staticmethod
    def open(run: DataRun) -> SharedBackbone:
        """Load the experts one after the other; each gives up its own backbone for the common one."""
        models: list[ExpertModel] = []
        shared: dict[str, Tensor] = {}
        for expert in range(len(run.experts)):
            model = run.load(expert)
            for planned in run.tensors:
                if planned.name in model.owners:
                    tensor = shared.setdefault(planned.name, model.tensor(planned.name))
                    for module, attribute in model.owners[planned.name]:
                        setattr(module, attribute, tensor)
            models.append(model)
        for tensor in shared.values():
            if isinstance(tensor, nn.Parameter):  # a buffer, such as a running mean, has no gradient
                tensor.requires_grad_()
        return SharedBackbone(run, models, shared)

    @torch.no_grad()
    def set_coefficients(self, coefficients: Float[Tensor, "task tensor"]) -> None:
        """theta^j = theta_0^j + sum_t lambda_{t,j} tau_t^j, for every tensor j."""
        for column, planned in zip(coefficients.T, self.run.tensors, strict=True):
            if planned.name in self.tensors:
                theta = self.run.plan.base.read(planned.name).to(self.run.device, self.tensors[planned.name].dtype, copy=True)
                for source, task_vector in zip(planned.experts, self._task_vectors(planned), strict=True):
                    theta.add_(task_vector, alpha=float(column[source.expert]))
                self.tensors[planned.name].copy_(theta)

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
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def slopes(self) -> Float[Tensor, "task tensor"]:
        """dL / dlambda_{t,j} = <dL / dtheta^j, tau_t^j>, by the chain rule."""
        found = torch.zeros(len(self.models), len(self.run.tensors), dtype=torch.float64)
        for column, planned in enumerate(self.run.tensors):
            gradient = self.tensors[planned.name].grad if planned.name in self.tensors else None
            if gradient is not None:
                for source, task_vector in zip(planned.experts, self._task_vectors(planned), strict=True):
                    found[source.expert, column] = float((gradient * task_vector).sum(dtype=torch.float64))
        return found

    def _task_vectors(self, planned: PlannedTensor) -> Float[Tensor, "task *shape"]:
        """As the models hold them."""
        task_vectors, _ = load_task_vectors(self.run.plan, planned, self.run.device)
        return task_vectors.transpose(1, 2) if planned.transposed else task_vectors
