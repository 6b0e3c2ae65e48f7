"""Makes torchvision importable before any test file imports transformers."""

from intbmoe.foreign import import_torchvision

import_torchvision(required=False)
