"""A function of tensors, recorded once, that runs again without Python's part in it.

Where a GPU waits for Python, what Python does is the same at every call: it chooses tiles, checks shapes, allocates,
looks up compiled kernels, and makes an autograd node for every operation. A ``Program`` keeps only the steps that reach
the device (``recording.py``) and repeats them on other inputs of the same kind. Kernels are launched by address, and
memory that only kernels use is cut out of one allocation. With gradients it is one autograd node, whose backward has
been recorded too.

The kernels, their arguments and their order are the function's own, so results are the same bit for bit.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from intbmoe.ops.recording import Recorder, Step, View
from intbmoe.ops.section import Section, roots_of
from intbmoe.precision import autocast_off

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Program:
    """``function(inputs)`` for inputs of the same shapes, strides, types and needs of gradients as ``inputs``.

    The function returns tensors, of which only the first has a gradient, and depends on nothing but its inputs. It runs
    once here. Raises ``CannotRecordError`` if it does what cannot be repeated. Inputs must start at multiples of 16
    bytes.
    """

    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        self._differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        recorder = Recorder()
        # Leaves of their own: hooks of the given ones are run by each backward, and must not become part of it.
        leaves = [_leaf(tensor) for tensor in inputs]
        for leaf in leaves:
            recorder.add_input(leaf)
        with torch.set_grad_enabled(self._differentiable), recorder:
            outputs = function(leaves)
        results = [recorder.view(output) for output in outputs]
        steps, gradients = list(recorder.steps), []
        if self._differentiable:
            grad = torch.zeros_like(outputs[0], memory_format=torch.contiguous_format)
            recorder.add_input(grad)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            with autocast_off(grad), recorder:
                found = iter(torch.autograd.grad(outputs[0], wanted, grad, allow_unused=True))
            gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
            gradients = [None if gradient is None else recorder.view(gradient) for gradient in gradients]
        self._plan(recorder, steps, results, gradients)

    def _plan(self, recorder: Recorder, steps: list[Step], results: list[View], gradients: list[View | None]) -> None:
        *inputs, grad = recorder.inputs if self._differentiable else (*recorder.inputs, None)
        later = recorder.steps[len(steps) :]
        needed = {*roots_of(later), *(view.root for view in gradients if view is not None)}
        kept = {root for root in (*roots_of(steps), *(view.root for view in results)) if root in needed}
        self._forward = Section(steps, [{root: 0} for root in inputs], kept.difference(inputs), results)
        self._saved = [root.input for root in inputs if root in needed]
        if self._differentiable:
            given = [{inputs[index]: 0} for index in self._saved]
            self._backward = Section(later, [*given, *self._forward.kept, {grad: 0}], set(), gradients)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """With autocast off, as types have been recorded."""
        if self._differentiable:
            return _apply(self, *inputs)
        return self._forward.run(inputs)[0]

    def forward(self, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The results, and what ``backward`` needs besides the gradient."""
        results, kept = self._forward.run(inputs)
        return results, [*(inputs[index] for index in self._saved), *kept]

    def backward(self, grad: Tensor, needed: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs."""
        grad = grad.contiguous()
        grad = grad if grad.data_ptr() % 16 == 0 else grad.clone()
        with autocast_off(grad):
            return self._backward.run([*needed, grad])[0]


def _leaf(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):  # some functions ask for the type
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, program, *inputs):
        results, needed = program.forward(inputs)
        ctx.program = program
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*needed)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx, grad, *_):
        needed = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *ctx.program.backward(grad, needed)
        with torch.no_grad():
            gradients = ctx.program.backward(grad, needed)
        there = [gradient for gradient in gradients if gradient is not None]
        refusing = iter(_NoSecondDerivative.apply(len(there), *there, grad, *needed))
        return None, *(None if gradient is None else next(refusing) for gradient in gradients)


_apply = super(torch.autograd.Function, _Node).apply  # without a search for torch.func's wrappers: programs know none


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "this layer's kernels have no second derivative: use plain torch, layer.backend = 'grouped' or the "
            "environment variable INTBMOE_TRITON=0"
        )
