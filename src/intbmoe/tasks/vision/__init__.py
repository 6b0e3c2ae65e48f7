"""Image classification: one file for each source of images, and one for each kind of augmentation."""

from intbmoe.tasks.vision.task import VisionTask

__all__ = ["VisionTask"]
