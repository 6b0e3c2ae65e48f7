"""transformers models with our mixtures; importing this registers them with the Auto classes.

    import intbmoe.huggingface
    model = AutoModelForCausalLM.from_pretrained(folder)

Without the import: ``from_pretrained(folder, trust_remote_code=True)``, which imports this package.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from intbmoe.huggingface.causal_lm import IntBMoEForCausalLM, IntBMoETextModel
from intbmoe.huggingface.configuration import IntBMoEImageConfig, IntBMoETextConfig

AutoConfig.register("intbmoe", IntBMoETextConfig, exist_ok=True)
AutoModel.register(IntBMoETextConfig, IntBMoETextModel, exist_ok=True)
AutoModelForCausalLM.register(IntBMoETextConfig, IntBMoEForCausalLM, exist_ok=True)
