"""How training images are varied, as a recipe says it."""

from dataclasses import dataclass
from typing import Literal

from intbmoe.checks import require, require_finite, require_positive_int

KINDS = ("none", "light", "deit")


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What training images go through; evaluation sees them unchanged. The defaults change nothing."""

    kind: Literal["none", "light", "deit"] = "none"
    """One image at a time: nothing; a shift and a flip; or DeiT's crop, flip, RandAugment and erasing."""
    flip: float = 0.5
    """light, deit: probability of mirroring left and right."""
    pad: int = 4
    """light: largest shift in pixels, each way; what comes in from outside is black."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """deit: share of the image's area that the random crop keeps."""
    crop_ratio: tuple[float, float] = (0.75, 1.33)
    """deit: width over height of the random crop."""
    rand_augment: str = "rand-m9-n2-mstd0.5-inc1"
    """deit: magnitude 9, two operations, magnitude noise 0.5, each operation stronger with magnitude; timm's words."""
    erasing: float = 0.25
    """deit: probability that one rectangle is replaced by noise."""
    mixup: float = 0.0
    """α of mixup's Beta(α, α), for a whole batch; 0 for no mixup."""
    cutmix: float = 0.0
    """α of CutMix's Beta(α, α), for a whole batch; 0 for no CutMix."""
    mix_probability: float = 1.0
    """Probability that a batch is mixed at all."""
    mix_switch: float = 0.5
    """Probability of CutMix rather than mixup, where both are on."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all classes."""

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "augmentation.kind", self.kind, "'none', 'light' or 'deit'")
        for name in ("flip", "erasing", "mix_probability", "mix_switch", "label_smoothing"):
            value = getattr(self, name)
            require_finite(f"augmentation.{name}", value)
            require(0 <= value <= 1, f"augmentation.{name}", value, "in [0, 1]")
        require(self.label_smoothing < 1, "augmentation.label_smoothing", self.label_smoothing, "less than 1")
        for name in ("mixup", "cutmix"):
            value = getattr(self, name)
            require_finite(f"augmentation.{name}", value)
            require(value >= 0, f"augmentation.{name}", value, "0 or more")
        require_positive_int("augmentation.pad", self.pad)
        for name in ("crop_scale", "crop_ratio"):
            value = getattr(self, name)
            pair = isinstance(value, tuple | list) and len(value) == 2
            require(pair and 0 < value[0] <= value[1], f"augmentation.{name}", value, "two positive numbers, rising")
            object.__setattr__(self, name, tuple(float(bound) for bound in value))
        require(self.crop_scale[1] <= 1, "augmentation.crop_scale", self.crop_scale, "at most 1")
        words = isinstance(self.rand_augment, str) and self.rand_augment.startswith("rand-")
        require(
            words, "augmentation.rand_augment", self.rand_augment, "timm's words, such as 'rand-m9-n2-mstd0.5-inc1'"
        )

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed."""
        return self.mix_probability > 0 and (self.mixup > 0 or self.cutmix > 0)
