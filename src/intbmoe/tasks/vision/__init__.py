"""Image classification: one file per source of images, one per kind of change to them."""

from intbmoe.tasks.vision.task import VisionTask

__all__ = ["VisionTask"]
