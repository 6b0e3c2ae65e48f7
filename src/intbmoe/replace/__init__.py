"""Mixtures in place of the FFNs of somebody else's model: found, replaced, measured, saved and loaded again."""

from intbmoe.replace.replacement import replace_ffn
from intbmoe.replace.report import ReplacedFFN, Report
from intbmoe.replace.saving import from_pretrained, save_pretrained

__all__ = ["ReplacedFFN", "Report", "from_pretrained", "replace_ffn", "save_pretrained"]
