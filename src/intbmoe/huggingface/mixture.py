"""Common to our transformers models: the mixtures' initialisation, types, losses, state and precomposition."""

import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from intbmoe.layer import MoELayer, moe_layers
from intbmoe.precision import wide
from intbmoe.precomposition import precompose, wide_tensors
from intbmoe.steps import aux_loss, moves_state

IGNORED = -100  # the label that the loss ignores


class MixtureModel(PreTrainedModel):
    """A transformers model whose FFNs are mixtures; each backbone has its own file."""

    collects_aux_loss: ClassVar[bool] = True
    """``forward`` adds the auxiliary losses to the loss, so ``intbmoe.connect`` does not."""
    starts_itself: ClassVar[tuple[type[nn.Module], ...]] = (MoELayer,)
    """Modules that initialise themselves, instead of transformers."""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _version = 0  # a parameter's version when the unfinished step began

    def post_init(self) -> None:
        shapes = self.config.state_shapes or {}
        for _, layer in moe_layers(self):
            for tensor in wide_tensors(layer).values():  # a half-precision default type applied to these too
                tensor.data = wide(tensor.data)
            layer.fit_state({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, "")
        # Names of the layer and its part, without the layer's path: from_pretrained finds them in every layer.
        named = ((path.rpartition(".")[2], wide_tensors(layer)) for path, layer in moe_layers(self))
        self._keep_in_fp32_modules_strict = sorted({f"{own}.{name}" for own, tensors in named for name in tensors})
        super().post_init()

    # Initialisation and checkpoints.

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Children come first, and transformers has already initialised those it knows. Its rule for custom code would
        # skip a layer without direct parameters, such as most mixtures.
        if isinstance(module, self.starts_itself):
            self._start(module)
        else:
            super()._initialize_weights(module, is_custom_code)

    def _start(self, module: nn.Module) -> None:
        """Let ``module`` initialise itself, except for tensors loaded from a checkpoint."""
        if getattr(module, "_is_hf_initialized", False):
            return
        tensors = (*module.parameters(), *module.buffers())
        loaded = [(tensor, tensor.clone()) for tensor in tensors if getattr(tensor, "_is_hf_initialized", False)]
        if len(loaded) < len(tensors):
            self._reset(module)
        for tensor, value in loaded:
            tensor.copy_(value)
        module._is_hf_initialized = True

    def _reset(self, module: nn.Module) -> None:
        module.reset_parameters()

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        loaded = super().from_pretrained(*arguments, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for _, layer in moe_layers(model):  # as load_state_dict would do
            layer.fit_state(layer.state_dict(), "")
        return loaded

    def save_pretrained(self, *arguments: Any, **options: Any) -> Any:
        self.config.state_shapes = state_shapes(self)
        return super().save_pretrained(*arguments, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: the configuration writes the entries of all classes, and no copy of the source."""

    # Training.

    def collect_losses(self, loss: Tensor, counted: Tensor | None = None, items: Any = None) -> tuple[Tensor, Any]:
        """Return the loss plus this forward's auxiliary losses, and the latter alone (None outside training).

        If a trainer divides the loss by the ``items`` of several micro-batches, of which this one has ``counted``, the
        auxiliary losses are weighted in the same way.
        """
        if not (self.training and torch.is_grad_enabled() and any(moe_layers(self))):
            return loss, None
        self._require_steps()
        auxiliary = aux_loss(self)
        share = 1 if items is None or counted is None else counted / items
        return loss + (share * auxiliary).to(loss.device), auxiliary

    def _require_steps(self) -> None:
        """Raise if the optimizer has stepped but a method that updates state between steps was not called."""
        if torch.compiler.is_compiling():
            return
        version = next((weight._version for weight in self.parameters() if weight.requires_grad), 0)
        waiting = [layer for _, layer in moe_layers(self) if layer.statistics.pending and moves_state(layer)]
        if waiting and version != self._version:
            raise RuntimeError(
                f"{type(waiting[0]).__name__} updates state between optimizer steps, but missed the last step: train "
                f"with callbacks=[intbmoe.huggingface.MixtureCallback()], or call intbmoe.before_step and after_step"
            )
        if not waiting:
            self._version = version

    # Inference.

    def precompose(self, dtype: torch.dtype | None = None) -> Self:
        """A copy for inference with IntBMoE's blocks composed and no pools; ``save_pretrained`` works as usual."""
        served = precompose(self, dtype).eval()
        served.config = copy.deepcopy(self.config)
        served.config.precomposed = True
        for module in served.modules():
            if isinstance(getattr(module, "config", None), type(self.config)):
                module.config = served.config
        return served


def state_shapes(model: nn.Module) -> dict[str, list[int]] | None:
    """Shapes of buffers that depend on the length of a run, like MASS's, and so differ from a new layer's."""
    shapes = {}
    for _, layer in moe_layers(model):
        with torch.device("meta"):
            fresh = dict(type(layer)(layer.config).named_buffers())
        own = {name: buffer.shape for name, buffer in layer.named_buffers()}
        shapes |= {name: list(shape) for name, shape in own.items() if name in fresh and fresh[name].shape != shape}
    return shapes or None
