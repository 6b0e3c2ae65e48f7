"""The operations between the grouped products of a sparse method's experts, on the rows that have an expert.

Rows are allocated for as many assignments as there could be, because asking a GPU how many there are would make the
host wait. Rows after the last group are never written and never read: a token of ReMoE pays for its open experts, not
for all. ``fused`` has the kernels, ``naive`` says what they compute; other backends run plain operations.
"""
