"""How training images are augmented, as a recipe describes it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from intbmoe.settings import Checked, MustBe, NonNegative, Positive, PositiveInt, Probability, Share

Rising = Annotated[tuple[Positive, Positive], MustBe("two positive numbers, rising", lambda pair: pair[0] <= pair[1])]
RisingShares = Annotated[Rising, MustBe("two positive numbers, rising, at most 1", lambda bounds: bounds[1] <= 1)]


@dataclass(frozen=True, kw_only=True)
class Augmentation(Checked):
    """How training images are augmented; evaluation sees them unchanged. The defaults change nothing."""

    kind: Literal["none", "light", "deit"] = "none"
    """For each image: none; light, a shift and a flip; or deit, DeiT's crop, flip, RandAugment and erasing."""
    flip: Probability = 0.5
    """light, deit: probability of mirroring left and right."""
    pad: PositiveInt = 4
    """light: largest shift in pixels, in each direction; pixels from outside are black."""
    crop_scale: RisingShares = (0.08, 1.0)
    """deit: share of the image's area that the random crop keeps."""
    crop_ratio: Rising = (0.75, 1.33)
    """deit: width over height of the random crop."""
    rand_augment: Annotated[
        str, MustBe("timm's words, such as 'rand-m9-n2-mstd0.5-inc1'", lambda words: words.startswith("rand-"))
    ] = "rand-m9-n2-mstd0.5-inc1"
    """deit: RandAugment in timm's notation; m9 is the magnitude, n2 the operations per image, mstd0.5 the noise."""
    erasing: Probability = 0.25
    """deit: probability that one rectangle is replaced by noise."""
    mixup: NonNegative = 0.0
    """α of mixup's Beta(α, α), for a whole batch; 0 for no mixup."""
    cutmix: NonNegative = 0.0
    """α of CutMix's Beta(α, α), for a whole batch; 0 for no CutMix."""
    mix_probability: Probability = 1.0
    """Probability that a batch is mixed at all."""
    mix_switch: Probability = 0.5
    """Probability of CutMix instead of mixup, if both are on."""
    label_smoothing: Share = 0.0
    """Share of the target that is spread evenly over all classes."""

    @property
    def mixes(self) -> bool:
        return self.mix_probability > 0 and (self.mixup > 0 or self.cutmix > 0)
