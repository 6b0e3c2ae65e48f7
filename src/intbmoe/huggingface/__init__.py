"""transformers models with our mixtures; importing this module registers them with the Auto classes.

    import intbmoe.huggingface
    model = AutoModelForCausalLM.from_pretrained(folder)

Without the import, use ``from_pretrained(folder, trust_remote_code=True)``, which imports this package.
"""

from intbmoe.foreign import import_torchvision

import_torchvision(required=False)  # transformers imports it

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

from intbmoe.huggingface.callback import MixtureCallback
from intbmoe.huggingface.causal_lm import IntBMoEForCausalLM, IntBMoETextModel
from intbmoe.huggingface.configuration import IntBMoEImageConfig, IntBMoETextConfig
from intbmoe.huggingface.conversion import from_backbone, to_backbone
from intbmoe.huggingface.image_classification import IntBMoEForImageClassification

__all__ = [
    "IntBMoEForCausalLM",
    "IntBMoEForImageClassification",
    "IntBMoEImageConfig",
    "IntBMoETextConfig",
    "IntBMoETextModel",
    "MixtureCallback",
    "from_backbone",
    "to_backbone",
]

for config in (IntBMoETextConfig, IntBMoEImageConfig):
    AutoConfig.register(config.model_type, config, exist_ok=True)
AutoModel.register(IntBMoETextConfig, IntBMoETextModel, exist_ok=True)
AutoModelForCausalLM.register(IntBMoETextConfig, IntBMoEForCausalLM, exist_ok=True)
AutoModelForImageClassification.register(IntBMoEImageConfig, IntBMoEForImageClassification, exist_ok=True)
