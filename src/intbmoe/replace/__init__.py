"""Replace the FFNs of an existing model by mixtures: find them, replace them, measure the change, save and load."""

from intbmoe.replace.replacement import replace_ffn
from intbmoe.replace.report import ReplacedFFN, Report
from intbmoe.replace.saving import from_pretrained, save_pretrained

__all__ = ["ReplacedFFN", "Report", "from_pretrained", "replace_ffn", "save_pretrained"]
