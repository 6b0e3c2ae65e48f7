"""A vLLM plug-in: with it, ``vllm serve FOLDER`` runs our decoder with vLLM's Transformers backend."""


def register() -> None:
    """Called by vLLM in each of its processes (the entry point in ``vllm.general_plugins``)."""
    import vllm

    import intbmoe.huggingface  # noqa: F401  # registers the Auto classes, with which the backend builds the model

    # vLLM looks for unknown architectures only inside transformers, or in code that comes with the folder.
    vllm.ModelRegistry.register_model(
        "IntBMoEForCausalLM", "vllm.model_executor.models.transformers:TransformersForCausalLM"
    )
