"""Compares kernels in float32 with their specifications in float64: tensors, outputs and gradients."""

import torch


def pairs(device, *tensors):
    """The tensors in float32 on the device and in float64 on the CPU, both requiring gradients."""
    quick = [None if t is None else t.clone().to(device).requires_grad_() for t in tensors]
    exact = [None if t is None else t.double().requires_grad_() for t in tensors]
    return quick, exact


def near(found, expected, terms=1):
    """Within 1e-5 of the norm, plus the rounding of a sum of ``terms`` numbers, which can be larger than the sum."""
    assert found.shape == expected.shape
    assert not found.isnan().any()
    difference = (found.detach().cpu().double() - expected.detach()).norm()
    allowed = 1e-5 * (expected.detach().norm() + 0.02 * terms**0.5)
    assert difference <= allowed, f"{float(difference)} is more than {float(allowed)}"


def gradients_near(quick, exact, rows=None):
    """Compare all gradients; the first tensor's only on its first ``rows`` rows, which have a group."""
    terms = max(tensor.numel() for tensor in exact if tensor is not None)
    for index, (a, b) in enumerate(zip(quick, exact, strict=True)):
        if a is not None:
            expected = torch.zeros_like(b) if b.grad is None else b.grad
            part = slice(rows if index == 0 else None)
            near(a.grad[part], expected[part], terms)
