"""What our transformers models share: the mixtures' start, types, losses, state and precomposition."""

import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from intbmoe.layer import MoELayer, moe_layers
from intbmoe.methods.intbmoe import ComposedMoE
from intbmoe.precision import wide
from intbmoe.precomposition import precompose
from intbmoe.steps import aux_loss


class MixtureModel(PreTrainedModel):
    """A transformers model whose FFNs are mixtures. What a backbone adds is in its own file."""

    collects_aux_loss: ClassVar[bool] = True
    """``forward`` adds the auxiliary losses to the loss: ``intbmoe.connect`` need not."""
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def post_init(self) -> None:
        for _, layer in moe_layers(self):
            # Under a half-precision default type, what decides routing is made in it too.
            for tensor in layer.kept_wide():
                tensor.data = wide(tensor.data)
            shapes = self.config.state_shapes or {}
            layer.fit_state({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, "")
        self._keep_in_fp32_modules_strict = sorted(self._wide_names())
        super().post_init()

    def _wide_names(self) -> set[str]:
        """Names, from the layer's own on, of what decides where tokens go."""
        names = set()
        for path, layer in moe_layers(self):
            kept = {id(tensor) for tensor in layer.kept_wide()}
            own = path.rpartition(".")[2]
            tensors = (*layer.named_parameters(), *layer.named_buffers())
            names |= {f"{own}.{name}" for name, tensor in tensors if id(tensor) in kept}
        return names

    # How weights start, and what a checkpoint brings.

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Children come first, and transformers has written its own start into those it knows. Its rule for code that is
        # not its own would pass over a layer without parameters of its own, such as most mixtures.
        if isinstance(module, MoELayer):
            self._start(module)
        else:
            super()._initialize_weights(module, is_custom_code)

    def _start(self, module: nn.Module) -> None:
        """Give ``module`` its own start, except for what a checkpoint has brought."""
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
        for _, layer in moe_layers(model):  # which load_state_dict would do
            layer.fit_state(layer.state_dict(), "")
        return loaded

    def save_pretrained(self, *arguments: Any, **options: Any) -> Any:
        self.config.state_shapes = self._state_shapes()
        return super().save_pretrained(*arguments, **options)

    def _state_shapes(self) -> dict[str, list[int]] | None:
        """Of buffers whose shapes follow from the length of a run, as MASS's: a layer of the Config has others."""
        shapes = {}
        for _, layer in moe_layers(self):
            with torch.device("meta"):
                fresh = dict(type(layer)(layer.config).named_buffers())
            own = {name: buffer.shape for name, buffer in layer.named_buffers()}
            shapes |= {name: list(shape) for name, shape in own.items() if name in fresh and fresh[name].shape != shape}
        return shapes or None

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: the configuration writes the entries of all classes, and no copy of the source."""

    # Training.

    def collect_losses(self, loss: Tensor, counted: Tensor | None = None, items: Any = None) -> tuple[Tensor, Any]:
        """The loss with the auxiliary losses of this forward, and these alone; None outside training.

        Where a trainer divides the loss by the ``items`` of several micro-batches, of which this one has ``counted``,
        their auxiliary losses are averaged likewise.
        """
        if not (self.training and torch.is_grad_enabled() and any(moe_layers(self))):
            return loss, None
        auxiliary = aux_loss(self)
        share = 1 if items is None or counted is None else counted / items
        return loss + (share * auxiliary).to(loss.device), auxiliary

    # Inference.

    def precompose(self, dtype: torch.dtype | None = None) -> Self:
        """A copy for inference: IntBMoE's blocks composed, E gone. ``save_pretrained`` writes it as any other."""
        served = precompose(self, dtype).eval()
        served.config = copy.deepcopy(self.config)
        served.config.precomposed = True
        for module in served.modules():
            if isinstance(getattr(module, "config", None), type(self.config)):
                module.config = served.config
        return served


def is_precomposed(model: nn.Module) -> bool:
    return any(isinstance(layer, ComposedMoE) for _, layer in moe_layers(model))
