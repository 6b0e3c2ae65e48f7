"""What stands between the grouped products of a sparse method's experts, for those rows that have an expert.

Rows are laid out for as many assignments as there could be, because asking a GPU how many there are would make the host
wait. Those after the last group are never written and never read: a token of ReMoE pays for the experts that are open,
not for all. ``fused`` has the kernels, ``naive`` says what they compute; other backends run plain operations.
"""
