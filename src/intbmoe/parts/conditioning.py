"""The vector that a call may pass with its tokens: a task or a scenario."""

from torch import Tensor

from intbmoe.checks import require
from intbmoe.precision import cast


def check_conditioning(vector: Tensor | None, width: int, like: Tensor, per_sequence: bool = False) -> Tensor | None:
    """Check the vector of ``layer(x, conditioning=vector)`` and cast it like ``like``; None if ``width`` is 0.

    It is one vector (width,) for the whole call or, with ``per_sequence``, also (B, width), where B is ``len(like)``.
    """
    if vector is None and width == 0:
        return None
    shapes = [(width,), (like.shape[0], width)] if per_sequence else [(width,)]  # no set: free sizes have no hash
    if vector is None or width == 0 or tuple(vector.shape) not in shapes:
        found = None if vector is None else f"a tensor of shape {tuple(vector.shape)}"
        many = ", one for the whole call or one per sequence" if per_sequence else ", one for the whole call"
        allowed = f"a vector of conditioning_dim={width} numbers{many}" if width else "None if conditioning_dim is 0"
        require(False, "conditioning", found, allowed)
    return cast(vector, like.dtype)
